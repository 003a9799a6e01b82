"""Logs of several processes: each has its own file, which is appended to and kept small.

Logs are limited from outside: `rotate` copies the content of a file to another one and empties it.
So any number of processes can write to a log, with any library, as long as they append.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Size at which logs are rotated unless something else is configured."""
_CHUNK = 1 << 20
_LOOK_S = 0.5
_HOST = re.compile(r"[^0-9A-Za-z.-]+")
_held: list[int] = []
"""Descriptors of the logs that this process has to itself, until it ends."""


def rotate(path: Path, max_bytes: int) -> bool:
    """Move the newest `max_bytes` of a log to NAME.1 and empty it, if it is larger than that.

    Lines written during this call may be lost. If the disk has no space for NAME.1, its content is
    lost, too.

    Args:
        path: a log, which need not exist; all writers must open it in append mode.
        max_bytes: size above which the log is emptied.

    Returns:
        True if the log was emptied.

    Raises:
        OSError: the log cannot be read or emptied.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    aside = path.with_name(path.name + ".1")
    aside.unlink(missing_ok=True)
    try:
        with path.open("rb") as old, aside.open("xb") as new:
            old.seek(size - max_bytes)
            num_bytes = max_bytes - len(old.readline(_CHUNK))  # start at the beginning of a line
            while num_bytes > 0 and (chunk := old.read(min(num_bytes, _CHUNK))):
                new.write(chunk)
                num_bytes -= len(chunk)
    except OSError:
        aside.unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


class LogRotation:
    """Watcher that rotates logs when they have grown, until it is closed or the process ends."""

    def __init__(self, logs: Sequence[Path], max_bytes: int, *, look_s: float = _LOOK_S) -> None:
        """Start to watch, in a new thread.

        Args:
            logs: the files; missing ones are skipped.
            max_bytes: size above which a log is rotated. Together with NAME.1 it takes at most
                twice that, plus the data written between two checks.
            look_s: seconds between two checks.
        """
        # They stay valid if the working directory changes.
        self._paths = [path.absolute() for path in logs]
        self._max_bytes = max_bytes
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._look, args=(look_s,), name="log-rotation", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def _look(self, look_s: float) -> None:
        failing: set[Path] = set()
        while True:
            for path in self._paths:
                try:
                    if rotate(path, self._max_bytes):
                        logger.info("%s was full; its content was moved to %s.1", path, path.name)
                    failing.discard(path)
                except OSError as error:
                    if path not in failing:
                        failing.add(path)
                        logger.warning("%s can't be kept small: %s", path, error.strerror or error)
            if self._is_over.wait(look_s):
                return


def own_logs(directory: Path, count: int) -> list[Path]:
    """Return paths of logs that no other process uses until this one ends: worker-HOST-1.txt,
    worker-HOST-2.txt, ...

    Several processes of a host share the numbers. A process started later appends to the files of
    one that has ended.

    Raises:
        OSError: the directory or a log cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    host = _HOST.sub("_", os.uname().nodename)[:64]
    logs: list[Path] = []
    number = 0
    while len(logs) < count:
        number += 1
        path = (directory / f"worker-{host}-{number}.txt").absolute()
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:
            pass  # a file system without locks: several processes may share the log
        _held.append(descriptor)
        logs.append(path)
    return logs
