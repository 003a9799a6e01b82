"""Unix sockets for workers of the learner's own user on its own host.

Only this user can enter their directory, so these connections need no keys. A learner has two
sockets, named after its port::

    $XDG_RUNTIME_DIR/aiorl/5557   or /run/user/UID/aiorl/..., or /tmp/aiorl-UID/...
    $XDG_RUNTIME_DIR/aiorl/5557.broadcast

The learner deletes them when it ends. Those of a killed learner stay, without an answer, until the
next learner on the port replaces them.
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

from aiorl.config.files import others_may_write, whose_else
from aiorl.errors import ConfigError, SecurityError

_SUFFIXES = ("", ".broadcast")
_MAX_PATH_BYTES = 103
"""Smallest limit of any system for the path of a Unix socket."""


def urls_of(path: Path | str) -> tuple[str, str]:
    """Return the addresses of the two sockets; ``path`` is the first."""
    first, second = (f"ipc://{path}{suffix}" for suffix in _SUFFIXES)
    return first, second


def bind_local(sockets: Sequence[zmq.Socket[bytes]], name: int | str) -> Path:
    """Bind the two sockets of the learner on a port, or the one of a relay, and return the path of
    the first.

    Without sockets, return the path that a process of this user on this host binds, or will bind,
    to this name.

    Raises:
        SecurityError: when there is no directory that only this user can enter.
    """
    problems = []
    for place in _places():
        path = place / str(name)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
            with _own_directory(place):
                if len(os.fsencode(f"{path}{_SUFFIXES[-1]}")) > _MAX_PATH_BYTES:
                    raise _unusable(place, "has too long a path")
                # workers look for the first, so it comes last
                for listener, url in reversed([*zip(sockets, urls_of(path), strict=False)]):
                    listener.bind(url)
        except (OSError, SecurityError, zmq.ZMQError) as error:
            problems.append(str(error))
        else:
            return path
    raise SecurityError(
        "there is no place for the sockets that workers of this user on this host use:"
        f" {'; '.join(problems)}",
        key="bind",
        hint="repair one of these directories, or set XDG_RUNTIME_DIR to one that is yours alone.",
    )


def find_local(port: int) -> Path | None:
    """Return the first socket of this user's learner on a port of this host, or None if there is
    none.

    Raises:
        SecurityError: when there is none, but another user could have put one there.
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
    """Delete the sockets of an ended learner of this user on this port.

    Raises:
        ConfigError: when that learner still runs: it uses the port on another address.
    """
    for place in _places():
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            # for a datagram, this is the answer of a stream socket that is listening
            if probe.connect_ex(str(place / str(port))) == errno.EPROTOTYPE:
                raise ConfigError(
                    f"port {port} is in use by one of your learners;",
                    key="bind",
                    hint="choose another with --bind.",
                )
    forget_local(port)


def forget_local(name: int | str) -> None:
    """Delete the sockets of a port or relay."""
    for place in _places():
        with contextlib.suppress(OSError, SecurityError), _own_directory(place) as directory:
            for suffix in _SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{name}{suffix}", dir_fd=directory)


def _places() -> list[Path]:
    """Return possible directories of the sockets, best first; all processes of a user on a host end
    up with one.
    """
    user = os.geteuid()
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    return [session / "aiorl", Path(tempfile.gettempdir()) / f"aiorl-{user}"]


@contextlib.contextmanager
def _own_directory(place: Path) -> Iterator[int]:
    """Open a directory that only this user can read and write, and no one else can replace; yield
    its descriptor.
    """
    try:
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(place, f"cannot be opened ({error.strerror})") from error
    try:
        fault = whose_else(os.fstat(directory))
        if fault:
            raise _unusable(place, fault)
        above = os.stat("..", dir_fd=directory)
        if above.st_uid not in (0, os.geteuid()) or others_may_write(above):
            raise _unusable(place, "can be replaced by others")
        yield directory
    finally:
        os.close(directory)


def _unusable(place: Path, what: str) -> SecurityError:
    hint = "delete it or make it yours with mode 0700, or give learner and workers --keys DIR."
    return SecurityError(
        f"{place}, for sockets of runs on this host, {what}:",
        key="bind",
        value=str(place),
        hint=hint,
    )
