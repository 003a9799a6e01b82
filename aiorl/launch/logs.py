"""Text of logs and of other programs on this terminal: bounded, printable, and only from regular
files.

What stands in a log was written by environments, other hosts, and the owner of the directory. It
passes through `aiorl.text` line by line, so it can neither move the cursor nor fake a line of this
program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from aiorl.config.files import open_regular
from aiorl.text import one_line

MAX_LINE = 1 << 14
"""Bytes of one line; the rest of a longer one becomes the next line."""
_TAIL_BYTES = 1 << 18
_POLL_S = 0.5


def printable(line: bytes) -> str:
    """Return a line of any bytes as printable text without a line break."""
    return one_line(line.decode("utf-8", errors="replace").rstrip(), MAX_LINE)


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, in parts of bounded length."""
    return iter(lambda: stream.readline(MAX_LINE), b"")


def show_ends(files: Sequence[Path], count: int, *, follow: bool = False) -> int:
    """Show the last lines of files.

    Args:
        files: the files; those that are not regular are named.
        count: lines of each.
        follow: True to continue with appended lines, until Ctrl-C.

    Returns:
        The exit status: 0, or 1 if there is no file that can be read.
    """
    ends: dict[Path, tuple[int, int]] = {}
    for path in files:
        lines = _appended(path, ends, is_first=True)
        if lines is not None:
            _show(path, lines[-count:])
    while follow and ends:
        time.sleep(_POLL_S)
        for path in files:
            lines = _appended(path, ends)
            if lines:
                _show(path, lines)
    return 0 if ends else 1


def _show(path: Path, lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join([f"==> {one_line(str(path), MAX_LINE)} <==", *lines]) + "\n")
    sys.stdout.flush()


def _appended(
    path: Path, ends: dict[Path, tuple[int, int]], *, is_first: bool = False
) -> list[str] | None:
    """Return the whole lines of a file that are new since the last call; None if it can't be read.

    Args:
        path: the file.
        ends: path -> inode and position of the end of the shown part; it is changed.
        is_first: True to begin near the end, and to say why a file can't be read.
    """
    try:
        with open_regular(path) as file:
            stats = os.fstat(file.fileno())
            inode, start = ends.get(path, (stats.st_ino, 0))
            if inode != stats.st_ino or start > stats.st_size:  # the log began again
                start = 0
            start = max(start, stats.st_size - _TAIL_BYTES)
            file.seek(start)
            content = file.read(_TAIL_BYTES)
    except OSError as error:
        if is_first:
            _show(path, [f"(can't be shown: {error.strerror})"])
        return None
    if not is_first:  # the last line, if it has no end yet, is shown with its end
        content = content[: content.rfind(b"\n") + 1]
    ends[path] = (stats.st_ino, start + len(content))
    return [printable(line) for line in content.splitlines()]


def run_shown(command: Sequence[str]) -> int:
    """Run a command whose output comes from elsewhere, show it as printable text, and return its
    exit status.

    Raises:
        OSError: the command can't be started.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        faults = threading.Thread(target=_pass_on, args=(process.stderr, sys.stderr), daemon=True)
        faults.start()
        _pass_on(process.stdout, sys.stdout)
        faults.join()
    return process.returncode


def _pass_on(stream: IO[bytes], terminal: IO[str]) -> None:
    for line in lines_of(stream):
        terminal.write(printable(line) + "\n")
        terminal.flush()
