"""Admission of clients: key files, and the list of admitted keys.

Key files are ZeroMQ certificates, as made by `aiorl keys`::

    DIR/learner.key_secret   the learner's private key, mode 0600
    DIR/learner.key          its public key; every worker needs a copy
    DIR/worker.key_secret    a worker's private key, mode 0600
    DIR/worker.key           its public key
    DIR/admitted/worker.key  a public key that the learner admits; the file name is the worker's name

Anyone who can write there could admit themselves, or impersonate the learner. All of these files
must therefore belong to this user or to root, and no one else may write to them.

The learner answers each handshake with a listening socket through ZeroMQ's authentication protocol
(ZAP, RFC 27). With keys, only clients with a public key in the admitted directory pass, and that
key, in Z85, becomes their user id. Without keys (--insecure), and over the Unix sockets that only
this user can reach, every ZeroMQ 4 peer passes. ZAP is used even then because it makes libzmq
refuse peers that do not speak ZeroMQ 4.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from aiorl.config.files import others_may_write, user_name
from aiorl.errors import SecurityError
from aiorl.net.transport.sockets import SocketPump

logger = logging.getLogger(__name__)

ADMITTED = "admitted"
_MAX_KEY_FILE_BYTES = 16 << 10
_LOOK_EVERY_S = 0.2
_ZAP_DOMAIN = b"aiorl"
_LOCAL_ZAP_DOMAIN = b"local"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_MECHANISM_MISMATCH = 0x11000002
_CRYPTOGRAPHIC = 0x11000001


@dataclass(frozen=True, slots=True)
class LearnerKeys:
    """Keys with which the learner admits workers.

    Attributes:
        public_key: Z85, 40 bytes.
        secret_key: Z85, 40 bytes.
        admitted: directory of admitted public keys, read again whenever it changes.
    """

    public_key: bytes
    secret_key: bytes = field(repr=False)
    admitted: Path


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """Keys with which a worker is admitted, and recognizes the learner.

    Attributes:
        public_key: Z85, 40 bytes.
        secret_key: Z85, 40 bytes.
        learner_key: the learner's public key, Z85, 40 bytes.
        public_key_file: file that an administrator must copy to the learner's admitted directory.
    """

    public_key: bytes
    secret_key: bytes = field(repr=False)
    learner_key: bytes
    public_key_file: str


def load_learner_keys(directory: Path | str) -> LearnerKeys:
    """Load the learner's keys from a directory made by `aiorl keys`.

    Raises:
        SecurityError: when a file is missing, unreadable, malformed or readable by others, or when
            others could change the list of admitted keys.
    """
    directory = Path(directory)
    _check_directory(directory)
    secret_file = directory / "learner.key_secret"
    public_key, secret_key = read_secret_key(secret_file)
    admitted = directory / ADMITTED
    if not admitted.is_dir():
        hint = f"create it and copy each worker's .key file there, or run `aiorl keys {directory}`."
        raise _unusable(
            admitted, " is missing: it holds the public keys of the workers to admit;", hint
        )
    _check_trusted(directory, secret_file, admitted)
    return LearnerKeys(public_key, secret_key, admitted)


def load_worker_keys(path: Path | str) -> WorkerKeys:
    """Load a worker's own key pair and the learner's public key.

    Args:
        path: a directory with ``learner.key`` and one worker's ``.key_secret`` (if there are
            several, ``worker.key_secret`` is used), or a ``.key_secret`` file with ``learner.key``
            next to it.

    Raises:
        SecurityError: when a file is missing, unreadable, malformed or readable by others, the
            choice is ambiguous, or others could put another learner's key there.
    """
    path = Path(path)
    if path.suffix == ".key_secret":
        secret_file = path
        directory = path.parent
    else:
        directory = path
        _check_directory(directory)
        secret_file = _own_secret_file(directory)
    public_key, secret_key = read_secret_key(secret_file)
    learner_file = directory / "learner.key"
    keys = WorkerKeys(
        public_key, secret_key, read_public_key(learner_file), str(secret_file.with_suffix(".key"))
    )
    _check_trusted(directory, secret_file, learner_file)
    return keys


def read_public_key(path: Path) -> bytes:
    """Return the public key in a certificate, or in a file with only the 40 characters.

    Raises:
        SecurityError: when the file is missing, unreadable or malformed.
    """
    public_key = _parse(_read(path), path).get("public-key")
    if public_key is None:
        raise _malformed(path, "public")
    return public_key


def read_secret_key(path: Path) -> tuple[bytes, bytes]:
    """Return public and secret key of a private certificate.

    Raises:
        SecurityError: when the file is missing, unreadable, malformed or readable by anyone but its
            owner.
    """
    secret_key = _parse(_read(path, private=True), path).get("secret-key")
    if secret_key is None:
        raise _malformed(path, "secret")
    return bytes(zmq.curve_public(secret_key)), secret_key


def _unusable(path: Path, why: str, hint: str) -> SecurityError:
    """Return the error for an unusable file or directory of keys; ``why`` follows its name."""
    return SecurityError(f"{path}{why}", key="keys", value=str(path), hint=hint)


class AdmittedKeys:
    """Public keys in a directory; each file is read again when it changes.

    A file that is no key, or that others could have written, is ignored and named in the log. If
    the directory is gone, no key is admitted. If others can write to it now, no further key is
    admitted. If it cannot be read for another reason (no free descriptors, an unreachable file
    server), the admitted keys stay as they are.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the directory.

        Args:
            directory: each file NAME.key in it is the public key of a worker.
            clock: returns the time in seconds.
        """
        self._directory = directory
        self._owners = _trusted_owners(directory)
        self._clock = clock
        self._looked = -_LOOK_EVERY_S
        self._readable = True
        # file name -> stamp that detects changes, key
        self._files: dict[str, tuple[object, bytes | None]] = {}
        self._names: Mapping[bytes, str] = {}
        self.refresh()

    def refresh(self) -> Mapping[bytes, str]:
        """Read the directory, and return the names by admitted key (Z85) as a mapping that never
        changes later.
        """
        self._looked = self._clock()
        files = self._look(self._directory)
        if files != self._files:
            self._files = files
            names: dict[bytes, str] = {}
            for file_name, (_, public_key) in sorted(files.items()):
                if public_key is not None:
                    names.setdefault(public_key, file_name.removesuffix(".key"))
            self._names = names
            logger.info(
                "%d keys are admitted by %s: %s",
                len(names),
                self._directory,
                ", ".join(names.values()),
            )
        return self._names

    def name_of(self, public_key: bytes) -> str | None:
        """Return the name of a key (Z85), or None if not admitted, from a state at most 0.2 s
        old.
        """
        # frequent handshakes must not keep us reading directories
        if self._clock() - self._looked >= _LOOK_EVERY_S:
            self.refresh()
        return self._names.get(public_key)

    def _look(self, directory: Path) -> dict[str, tuple[object, bytes | None]]:
        try:
            _check_owner_and_mode(directory, os.stat(directory), self._owners)
            with os.scandir(directory) as entries:
                files = {
                    entry.name: self._look_at(entry)
                    for entry in entries
                    if entry.name.endswith(".key")
                }
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            if self._readable:
                logger.warning(
                    "%s cannot be read (%s): admitted keys stay as they are", directory, error
                )
            self._readable = False
            return self._files
        except SecurityError as error:
            if self._readable:
                logger.warning("no further keys are admitted: %s", error)
            self._readable = False
            return {
                name: entry for name, entry in self._files.items() if (directory / name).exists()
            }
        self._readable = True
        return files

    def _look_at(self, entry: os.DirEntry[str]) -> tuple[object, bytes | None]:
        before = self._files.get(entry.name, (None, None))
        try:
            status = entry.stat()
        except FileNotFoundError:  # deleted meanwhile, or a dangling link
            return None, None
        except OSError:
            return before
        stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        if stamp == before[0]:
            return before
        try:
            _check_owner_and_mode(Path(entry.path), status, self._owners)
            return stamp, read_public_key(Path(entry.path))
        except SecurityError as error:
            logger.warning("left out of the admitted keys: %s", error)
            return stamp, None


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise _unusable(
            directory, " is not a directory of keys:", f"make one with `aiorl keys {directory}`."
        )


def _check_trusted(directory: Path, *within: Path) -> None:
    """Refuse a directory of keys, or files in it, that another user could change.

    Raises:
        SecurityError: when one of them belongs to another user, or can be written by others.
    """
    owners = _trusted_owners(directory)
    for path in (directory, *within):
        _check_owner_and_mode(path, path.stat(), owners)


def _trusted_owners(directory: Path) -> frozenset[int]:
    """Return the user ids that may own keys: this user's and root's.

    Root can also use another owner's keys, for example from a directory of the host in a container.
    """
    user = os.geteuid()
    owner = user
    if user == 0:
        with contextlib.suppress(OSError):
            owner = directory.stat().st_uid
    return frozenset({0, user, owner})


def _check_owner_and_mode(path: Path, status: os.stat_result, owners: Collection[int]) -> None:
    mode = stat.S_IMODE(status.st_mode)
    facts = f"owner {user_name(status.st_uid)}, mode {mode:04o}"
    if status.st_uid not in owners:
        hint = (
            f"run `sudo chown -R {user_name(os.geteuid())} {path}` if it should be yours, or use"
            " your own keys."
        )
        raise _unusable(
            path, f" belongs to someone else ({facts}), who could put other keys there:", hint
        )
    if others_may_write(status):
        hint = f"run `chmod go-w {path}`; first check its contents."
        raise _unusable(
            path, f" can be written by others ({facts}), who could put other keys there:", hint
        )


def _own_secret_file(directory: Path) -> Path:
    preferred = directory / "worker.key_secret"
    if preferred.exists():
        return preferred
    files = sorted(
        path for path in directory.glob("*.key_secret") if path.name != "learner.key_secret"
    )
    if not files:
        hint = "copy one there from where you ran `aiorl keys`, along with learner.key."
        raise _unusable(directory, " holds no worker's private key (NAME.key_secret):", hint)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        hint = f"name the one to use, for example --keys {files[0]}."
        raise _unusable(directory, f" holds several private keys ({names}):", hint)
    return files[0]


def _read(path: Path, *, private: bool = False) -> str:
    # non-blocking: opening a pipe would wait for a writer
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_KEY_FILE_BYTES:
                raise _malformed(path, "ZeroMQ")
            mode = stat.S_IMODE(status.st_mode)
            if private and mode & 0o077:
                hint = f"run `chmod 600 {path}`; make new keys if others could have read it."
                raise _unusable(path, f" can be read or written by others (mode {mode:04o}):", hint)
            data = file.read(_MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        hint = "copy it from where you ran `aiorl keys`, or run that to make keys."
        raise _unusable(path, " is missing:", hint) from None
    except OSError as error:
        raise _unusable(
            path, f" cannot be read ({error.strerror}):", "check its owner and mode."
        ) from error
    return data.decode("utf-8", errors="replace")


def _parse(text: str, path: Path) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for line in text.splitlines():
        line = line.strip()
        name, equals, value = line.partition("=")
        name = name.strip()
        value = value.strip()
        if equals and name in ("public-key", "secret-key") and value[:1] == value[-1:] == '"':
            keys[name] = _check_key(value[1:-1], path)
    bare = text.strip()
    if not keys and len(bare) == 40:
        return {"public-key": _check_key(bare, path)}
    return keys


def _check_key(text: str, path: Path) -> bytes:
    key = text.encode("utf-8")
    if len(key) != 40:
        raise _malformed(path, "Z85")
    try:
        zmq.utils.z85.decode(key)
    except Exception as error:
        raise _malformed(path, "Z85") from error
    return key


def _malformed(path: Path, what: str) -> SecurityError:
    hint = "use a file made by `aiorl keys`, or copy it again."
    return _unusable(path, f" holds no {what} key:", hint)


class Authenticator:
    """Answers the handshakes of one context's listening sockets.

    Args:
        context: its sockets are answered for, see `serve` and `serve_local`.
        admitted: the admitted keys, None if no keys are in use.
        on_refused: called with (ip address, reason) for each refused client.

    Attributes:
        pump: reads the requests.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admitted: AdmittedKeys | None,
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._admitted = admitted
        self._on_refused = on_refused
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.bind(_ADDRESS)
        self.pump = SocketPump(self._socket, self._receive)

    def close(self) -> None:
        """Stop answering."""
        self.pump.close()
        self._socket.close(0)

    def _receive(self) -> None:
        # from libzmq: no one else can reach an inproc address
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        asker, _, _, request_id, domain, address, _identity, mechanism, *credentials = frames
        user_id, reason = self._judge(domain, mechanism, credentials)
        status = b"400" if reason else b"200"
        reply = [asker, b"", _VERSION, request_id, status, reason.encode(), user_id.encode(), b""]
        self._socket.send_multipart(reply, zmq.DONTWAIT)
        self.pump.schedule()
        if reason:
            self._on_refused(address.decode("ascii", errors="replace"), reason)

    def _judge(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> tuple[str, str]:
        if self._admitted is None or domain == _LOCAL_ZAP_DOMAIN:
            return "", "" if mechanism == b"NULL" else "this learner uses no keys"
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return "", "it came without a key"
        public_key = zmq.utils.z85.encode(credentials[0])
        if self._admitted.name_of(public_key) is None:
            return (
                "",
                (
                    f"its public key {public_key.decode()} is not admitted: copy its .key file to"
                    " 'admitted'"
                ),
            )
        return public_key.decode(), ""


def serve(socket: zmq.Socket[bytes], keys: LearnerKeys | None) -> None:
    """Let the authenticator answer for the socket's next bind, with CURVE if there are keys."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    if keys is not None:
        socket.curve_publickey = keys.public_key
        socket.curve_secretkey = keys.secret_key
        socket.curve_server = True


def serve_local(socket: zmq.Socket[bytes]) -> None:
    """Let the socket's next bind accept everyone who can reach it, which only this user can."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _LOCAL_ZAP_DOMAIN)
    socket.curve_server = False


def present(socket: zmq.Socket[bytes], keys: WorkerKeys | None) -> None:
    """Make a connecting socket prove its own key, and check the learner's."""
    if keys is not None:
        socket.curve_publickey = keys.public_key
        socket.curve_secretkey = keys.secret_key
        socket.curve_serverkey = keys.learner_key


NO_HANDSHAKE = (
    "it took our connection but made no ZeroMQ handshake in time: is it a learner, and too busy?"
)
_ONE_HAS_KEYS = (
    "only one side has keys: start the learner and its workers with --keys DIR, or none of them"
)


def reason_seen_by_learner(event: int, code: int) -> str:
    """Return the cause of a failed handshake, for the learner's user."""
    match _fault(event, code):
        case "silent":
            return (
                "it left or fell silent in the middle of the handshake: is it a worker? Or"
                f" {_ONE_HAS_KEYS}"
            )
        case "mismatch":
            return _ONE_HAS_KEYS
        case "crypto":
            return (
                "it has another learner's public key, so it cannot be decrypted: give it this"
                " learner's learner.key"
            )
        case _:
            return (
                f"it broke the ZeroMQ handshake (protocol error {code:#x}): is it something other"
                " than a worker?"
            )


def reason_seen_by_worker(event: int, code: int, keys: WorkerKeys | None, *, is_late: bool) -> str:
    """Return the cause of a failed handshake, for the worker's user; ``is_late`` if its time was
    over.
    """
    match _fault(event, code):
        case "silent" if is_late:  # keys that do not match end it at once
            return NO_HANDSHAKE
        case "silent" if code == errno.ECONNRESET:
            return "it cut our connection off in the handshake: the learner's log says why"
        case "auth" if keys is not None:
            file = keys.public_key_file
            return (
                f"the learner refused our key: add {file} to its 'admitted' directory (no restart"
                " is needed)"
            )
        case "silent" if keys is not None:
            return (
                "the other side ended the handshake: server key mismatch (learner.key)? Or"
                f" {_ONE_HAS_KEYS}"
            )
        case "auth" | "silent":
            return (
                "the other side refused us: it may require keys (--keys DIR), or it is not a"
                " learner"
            )
        case "mismatch":
            return _ONE_HAS_KEYS
        case "crypto":
            return (
                "the learner's answer could not be decrypted: does our learner.key belong to this"
                " learner?"
            )
        case _:
            return (
                f"the other side broke the ZeroMQ handshake (protocol error {code:#x}): is it a"
                " learner?"
            )


def _fault(event: int, code: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "auth"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "silent"
    return {_CRYPTOGRAPHIC: "crypto", _MECHANISM_MISMATCH: "mismatch"}.get(code, "broken")
