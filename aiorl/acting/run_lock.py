"""One learner at a time writes to a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
import weakref
from pathlib import Path
from typing import Any, Self

import psutil

from aiorl.config.files import check_regular, parse_json, read_regular
from aiorl.errors import ConfigError

__all__ = ["RunLock"]

_NAME = "lock"
_MAX_BYTES = 1 << 12
_HOST = re.compile(r"[0-9A-Za-z._:-]{1,255}")


class RunLock:
    """An advisory lock on the file ``lock``, which says who has it.

    Only its owner can open it: whoever may read a file may lock it, and keep every learner from it.

    It is free as soon as its process has ended, however it ended. Where the file system has no locks, the file's word
    is taken instead: a process of this host is looked for, one of another host is believed to live.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over a locked file; `acquire` locks one."""
        self._path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, directory: Path) -> Self:
        """Lock a directory without waiting.

        Raises:
            ConfigError: another has it; the message says who.
            OSError: the file can't be made or written.
        """
        path = directory / _NAME
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        lock = cls(path, descriptor)
        try:
            check_regular(descriptor, path)
            _close_to_others(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(directory, _owner(path)) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                owner = _owner(path)
                if owner is not None and (owner["host"] != socket.gethostname() or psutil.pid_exists(owner["pid"])):
                    raise _in_use(directory, owner) from None
            if not lock.is_held:
                raise OSError(errno.ESTALE, "it was removed meanwhile", str(path))
            facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode() + b"\n", 0)
        except BaseException:
            os.close(descriptor)
            raise
        return lock

    @property
    def is_held(self) -> bool:
        """Whether the file is still the one that was locked: it may have been removed, with all around it."""
        if self._descriptor is None:
            return False
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        return False

    def release(self) -> None:
        """Let another have it; may be repeated."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close a forked child's copies of locks, which would outlive the parent's."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _close_to_others(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        with contextlib.suppress(OSError):  # where the file system has no modes
            os.fchmod(descriptor, 0o600)


def _owner(path: Path) -> dict[str, Any] | None:
    """Host, pid and start of who has the lock; None where the file does not tell."""
    try:
        facts = parse_json(read_regular(path, max_bytes=_MAX_BYTES))
        if _HOST.fullmatch(facts["host"]) and type(facts["pid"]) is int and 0 < facts["pid"] < 1 << 31:
            return {"host": facts["host"], "pid": facts["pid"], "since": re.sub(r"[^\d :-]", "?", facts["since"])[:20]}
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _in_use(directory: Path, owner: dict[str, Any] | None) -> ConfigError:
    if owner is None:
        who = "another learner"
        hint = (
            f"End it first, or give another directory; if none runs, some process locks {directory / _NAME}: remove it."
        )
    elif owner["host"] == socket.gethostname():
        who = f"the learner with pid {owner['pid']} on this host, {owner['host']}, since {owner['since']}"
        hint = "End it first, or give another directory."
    else:
        who = f"the learner with pid {owner['pid']} on host {owner['host']}, since {owner['since']}"
        hint = f"End it first; if it is certain that it no longer runs, remove {directory / _NAME}."
    return ConfigError(f"{directory} is in use by {who}.", key="run_dir", value=str(directory), hint=hint)
