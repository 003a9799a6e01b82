"""Standard output and error that no full disk, closed terminal or ended reader turns into an exception."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from pathlib import Path

__all__ = ["has_reader", "keep_output_from_failing", "keep_output_in"]

_LOOK_S = 1.0
_without_reader: set[int] = set()


def keep_output_from_failing() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that drop what can't be written, and pass on each line at once.

    Without this a ``print`` of an environment or a callback fails when the log it goes to has no room, and ends what
    called it.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:  # else it was closed from the start
            raw = _Lossy(descriptor, "wb", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
            )
            setattr(sys, name, text)


def has_reader() -> bool:
    """Return whether anybody reads standard output, as far as what was written to it has shown."""
    return 1 not in _without_reader


def keep_output_in(path: Path, *, look_s: float = _LOOK_S) -> threading.Thread:
    """Have standard output and error go to the file of this name, also when the one they go to was removed or renamed.

    Whatever writes to them goes on in the new file, C libraries included. The directory is left for others to make, and
    what somebody sends elsewhere on purpose stays there.

    Args:
        path: the file to which both go already.
        look_s: time between two looks at it.
    Returns: the thread that looks, started.
    """

    def look() -> None:
        ours = os.fstat(1)
        while True:
            with contextlib.suppress(OSError):
                if not _is_at(ours, path):
                    ours = _send_on_to(path, ours)
            time.sleep(look_s)

    thread = threading.Thread(target=look, name="log-watch", daemon=True)
    thread.start()
    return thread


def _is_at(file: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(file, path.stat())
    except FileNotFoundError:
        return False


def _send_on_to(path: Path, former: os.stat_result) -> os.stat_result:
    """Send what goes to the former file to the one that the path names, made if there is none."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        for descriptor in (1, 2):
            if os.path.samestat(os.fstat(descriptor), former):
                os.dup2(file, descriptor)
        return os.fstat(file)
    finally:
        os.close(file)


class _Lossy(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]  # whatever has bytes
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                _without_reader.add(self.fileno())
            return memoryview(data).nbytes  # type: ignore[arg-type]
