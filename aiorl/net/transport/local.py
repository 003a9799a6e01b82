"""Unix sockets by which workers of the learner's own user, on its own host, reach it.

Only this user can enter the directory they are in, so these connections need no keys. A learner has two of them, named
after its port::

    $XDG_RUNTIME_DIR/aiorl/5557   or /run/user/UID/aiorl/..., or /tmp/aiorl-UID/...
    $XDG_RUNTIME_DIR/aiorl/5557.broadcast

They go with the learner. Those of a killed one answer nobody until the next learner on the port puts its own there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from aiorl.config.files import whose_else
from aiorl.errors import ConfigError, SecurityError
from aiorl.net.transport.security import others_may_write

_SUFFIXES = ("", ".broadcast")
_MAX_PATH_BYTES = 103
"""The least that systems take as the path of a Unix socket."""


def urls_of(path: Path | str) -> tuple[str, str]:
    """Return the addresses of the two sockets of which ``path`` is the first."""
    first, second = (f"ipc://{path}{suffix}" for suffix in _SUFFIXES)
    return first, second


def bind_local(sockets: Sequence[zmq.Socket[bytes]], port: int) -> Path:
    """Bind the two sockets of the learner that has a port; returns the path of the first.

    Raises: SecurityError if there is no place that only this user can enter.
    """
    problems = []
    for place in _places():
        path = place / str(port)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
            with _own_directory(place):
                if len(os.fsencode(f"{path}{_SUFFIXES[-1]}")) > _MAX_PATH_BYTES:
                    raise _unusable(place, "has too long a path")
                for each, url in reversed([*zip(sockets, urls_of(path), strict=True)]):  # workers look for the first
                    each.bind(url)
        except (OSError, SecurityError, zmq.ZMQError) as error:
            problems.append(str(error))
        else:
            return path
    raise SecurityError(
        f"there is no place for the sockets by which workers of this user on this host join: {'; '.join(problems)}",
        key="bind",
        hint="mend one of these directories, or set XDG_RUNTIME_DIR to one that is yours alone.",
    )


def find_local(port: int) -> Path | None:
    """Return the first socket of this user's learner that has a port of this host; None if there is none.

    Raises: SecurityError if there is none, but somebody else could have put one there.
    """
    untrusted: SecurityError | None = None
    for place in _places():
        try:
            with _own_directory(place) as directory:
                os.stat(str(port), dir_fd=directory)
            return place / str(port)
        except FileNotFoundError:
            pass
        except SecurityError as error:
            untrusted = error
    if untrusted is not None:
        raise untrusted
    return None


def clear_local(port: int) -> None:
    """Delete what a learner of this user on this port has left that is no more.

    Raises: ConfigError if it is still there: it has the port on another address.
    """
    for place in _places():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            if probe.connect_ex(str(place / str(port))) == errno.EPROTOTYPE:  # somebody listens, to streams
                raise ConfigError(
                    f"port {port} is in use by a learner of yours;", key="bind", hint="choose another one with --bind."
                )
    forget_local(port)


def forget_local(port: int) -> None:
    """Delete the sockets of this port."""
    for place in _places():
        with contextlib.suppress(OSError, SecurityError), _own_directory(place) as directory:
            for suffix in _SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{port}{suffix}", dir_fd=directory)


def _places() -> list[Path]:
    """Return where the sockets may be, by preference; all processes of a user on a host come to share one."""
    user = os.geteuid()
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    return [session / "aiorl", Path(tempfile.gettempdir()) / f"aiorl-{user}"]


@contextlib.contextmanager
def _own_directory(place: Path) -> Iterator[int]:
    """Give the descriptor of a directory that only this user can read and write, and nobody else can replace."""
    try:
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(place, f"cannot be opened ({error.strerror})") from error
    try:
        if fault := whose_else(os.fstat(directory)):
            raise _unusable(place, fault)
        above = os.stat("..", dir_fd=directory)
        if above.st_uid not in (0, os.geteuid()) or others_may_write(above):
            raise _unusable(place, "can be replaced by others")
        yield directory
    finally:
        os.close(directory)


def _unusable(place: Path, what: str) -> SecurityError:
    hint = "delete it or make it yours with mode 0700, or give learner and workers --keys DIR."
    return SecurityError(f"{place}, for sockets of runs on this host, {what}:", key="bind", value=str(place), hint=hint)
