"""The lock of a run directory: one learner at a time, of all hosts that share the disk."""

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
from aiorl.process.machine import is_still_at

_NAME = "lock"
_MAX_BYTES = 1 << 12
_HOST = re.compile(r"[0-9A-Za-z._:-]{1,255}")


class RunLock:
    """Advisory lock on the file ``lock``, which names its owner.

    Only its owner can open the file, because any user who can read a file can lock it, and so block
    every learner.

    The lock is free as soon as its process has ended, however it ended. On a file system without
    locks, the contents of the file decide instead: a process of this host is looked up, and one of
    another host is assumed to be alive.

    Attributes:
        path: the file, which can be removed together with its directory.
        descriptor: descriptor of the locked file; None once the lock is released.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Wrap a locked file; `acquire` locks one."""
        self.path = path
        self.descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, directory: Path) -> Self:
        """Lock a directory without waiting.

        Raises:
            ConfigError: when another process holds the lock; the message names it.
            OSError: when the file can't be made or written.
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
                raise _in_use(directory, lock_owner(directory)) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                owner = lock_owner(directory)
                if owner is not None and (
                    owner["host"] != socket.gethostname() or psutil.pid_exists(owner["pid"])
                ):
                    raise _in_use(directory, owner) from None
            if not is_still_at(descriptor, path):
                raise OSError(errno.ESTALE, "it was removed meanwhile", str(path))
            facts = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(facts).encode() + b"\n", 0)
        except BaseException:
            os.close(descriptor)
            raise
        return lock

    def release(self) -> None:
        """Release the lock; can be called again."""
        if self.descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close a forked child's copies of locks, which could outlive the parent's."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _close_to_others(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(descriptor, 0o600)


def lock_owner(directory: Path) -> dict[str, Any] | None:
    """Return host, pid and start time of the owner of a directory's lock, or None if the file does
    not name them.
    """
    try:
        facts = parse_json(read_regular(directory / _NAME, max_bytes=_MAX_BYTES))
        if (
            _HOST.fullmatch(facts["host"])
            and type(facts["pid"]) is int
            and 0 < facts["pid"] < 1 << 31
        ):
            return {
                "host": facts["host"],
                "pid": facts["pid"],
                "since": re.sub(r"[^\d :-]", "?", facts["since"])[:20],
            }
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _in_use(directory: Path, owner: dict[str, Any] | None) -> ConfigError:
    lock = directory / _NAME
    if owner is None:
        who = "another learner"
        hint = (
            f"End it first, or give another directory; if none runs, some process locks {lock}:"
            " remove it."
        )
    else:
        is_here = owner["host"] == socket.gethostname()
        host = f"this host, {owner['host']}" if is_here else f"host {owner['host']}"
        who = f"the learner with pid {owner['pid']} on {host}, since {owner['since']}"
        gone = f"if it is certain that it no longer runs, remove {lock}"
        hint = "End it first, or give another directory." if is_here else f"End it first; {gone}."
    return ConfigError(
        f"{directory} is in use by {who}.", key="run_dir", value=str(directory), hint=hint
    )
