"""The key pair that a learner makes for its run, and how workers of its user come by it without being told.

A learner that was given no keys, and was not told to do without (``insecure``), makes some: one pair for itself, one
that all workers of its user on this host share. Its own workers get theirs in their environment, which other users
can't read; workers started by hand find it in a file that only this user can read, one for each port::

    $XDG_RUNTIME_DIR/aiorl/5557.key_secret    or /run/user/UID/aiorl/..., or /tmp/aiorl-UID/...

The file is written when the learner listens and goes with it. One that was left behind by a learner that was killed
opens nothing: the next learner on the port writes its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zmq

from aiorl.config.files import whose_else
from aiorl.errors import SecurityError
from aiorl.net.transport.security import LearnerKeys, WorkerKeys, parse_worker_keys, read_worker_file, unusable
from aiorl.process.children import KEYS_VARIABLE

logger = logging.getLogger(__name__)

_TEXT = """# Made for the run whose learner listens on port {port} of this host. PRIVATE: who has it can join the run.
curve
    public-key = "{public}"
    secret-key = "{secret}"
    learner-key = "{learner}"
"""


def make_learner_keys() -> LearnerKeys:
    """A key pair for one run; nobody is admitted but workers with the pair made for it."""
    return LearnerKeys(*zmq.curve_keypair(), admitted=None)


def make_worker_keys(learner: LearnerKeys) -> WorkerKeys:
    """A key pair for the workers of the learner's own user, for one run."""
    return WorkerKeys(*zmq.curve_keypair(), learner_key=learner.public_key, public_key_file="")


def to_variable(keys: WorkerKeys) -> str:
    """The value of `KEYS_VARIABLE`."""
    return b" ".join((keys.public_key, keys.secret_key, keys.learner_key)).decode()


def from_variable(text: str) -> WorkerKeys:
    """The keys in a value of `KEYS_VARIABLE`.

    Raises:
        SecurityError: it is no such value.
    """
    _, secret_key, learner_key = (*text.split(), "", "", "")[:3]
    text = f'secret-key = "{secret_key}"\nlearner-key = "{learner_key}"'
    return parse_worker_keys(text, Path(f"${KEYS_VARIABLE}"))


class RunKeyFile:
    """The file from which workers started by hand take the run's keys.

    Args:
        port: where the learner listens.
        keys: what workers prove.
    """

    def __init__(self, port: int, keys: WorkerKeys) -> None:
        self._port = port
        self._text = _TEXT.format(
            port=port,
            public=keys.public_key.decode(),
            secret=keys.secret_key.decode(),
            learner=keys.learner_key.decode(),
        )
        self._path: Path | None = None
        self._complained = False

    def keep(self) -> None:
        """Write it, if it isn't there (any more); a place that cannot be written is named in the log, once."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path, follow_symlinks=False)  # what cleans up old files shall leave it alone
                return
        problems = []
        for place in _places():
            try:
                self._path = _write(place, _name(self._port), self._text)
            except (OSError, SecurityError) as error:
                problems.append(str(error))
            else:
                logger.info("workers of this user on this host find the run's key in %s", self._path)
                return
        if not self._complained:
            self._complained = True
            logger.warning(
                "workers started by hand will not find the run's key, and need --keys DIR, as the learner then does, "
                "since no file could be written for them: %s",
                "; ".join(problems),
            )

    def remove(self) -> None:
        """Delete it."""
        forget_run_keys(self._port)


def find_run_keys(port: int) -> WorkerKeys | None:
    """Keys of the run whose learner, started by the same user, listens on a port of this host; None if there are none.

    Raises:
        SecurityError: there are none, but somebody else could have put some there; or they are malformed.
    """
    untrusted: SecurityError | None = None
    for place in _places():
        try:
            with _own_directory(place) as directory:
                return read_worker_file(place / _name(port), directory=directory)
        except FileNotFoundError:
            pass
        except SecurityError as error:
            untrusted = error
    if untrusted is not None:
        raise untrusted
    return None


def forget_run_keys(port: int) -> None:
    """Delete what this or a former learner of ours on this port has left for workers."""
    for place in _places():
        with contextlib.suppress(OSError, SecurityError), _own_directory(place) as directory:
            os.unlink(_name(port), dir_fd=directory)


def _name(port: int) -> str:
    return f"{port}.key_secret"


def _places() -> list[Path]:
    """Where the file may be, by preference; each process of a user on a host comes to share one of them."""
    user = os.geteuid()
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    return [session / "aiorl", Path(tempfile.gettempdir()) / f"aiorl-{user}"]


def _write(place: Path, name: str, text: str) -> Path:
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    partial = f".{name}.{secrets.token_hex(4)}"
    with _own_directory(place) as directory:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(partial, flags, 0o600, dir_fd=directory), "w", encoding="ascii") as file:
                file.write(text)
            os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=directory)
            raise
    return place / name


@contextlib.contextmanager
def _own_directory(place: Path) -> Iterator[int]:
    """Descriptor of a directory that only this user can read and write, however it is reached afterwards."""
    try:
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _untrusted(place, f"cannot be opened ({error.strerror})") from error
    try:
        if fault := whose_else(os.fstat(directory)):
            raise _untrusted(place, fault)
        yield directory
    finally:
        os.close(directory)


def _untrusted(place: Path, what: str) -> SecurityError:
    hint = "delete it or make it yours with mode 0700, or give learner and workers --keys DIR."
    return unusable(place, f", for keys of runs on this host, {what}:", hint)
