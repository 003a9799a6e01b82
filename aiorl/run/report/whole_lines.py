"""Lines of files that may be of any size, one in memory at a time.

A last line without its end is none: whoever wrote it was killed, or writes it now.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["MAX_LINE_BYTES", "TooLongLine", "last_lines", "sampled_lines", "whole_lines"]

MAX_LINE_BYTES = 16 << 20
"""A longer line is none of ours: the file is damaged, or not what it is taken for."""

_BLOCK = 64 << 10
_READ_WHOLE_BYTES = 32 << 20
_SAMPLES = 1000


class TooLongLine(OSError):
    """A line is longer than any may be."""


def whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from where a file stands: where each one ends, and its content, the newline included.

    Raises: TooLongLine where a line is longer than any may be.
    """
    at = file.tell()
    while line := file.readline(MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == MAX_LINE_BYTES:
                raise _too_long(at)
            return
        at += len(line)
        yield at, line


def last_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from the last to the first: where each one ends, and its content, the newline included.

    Raises: TooLongLine where a line is longer than any may be.
    """
    at = end = os.fstat(file.fileno()).st_size
    held, is_whole = b"", False
    while at:
        block = min(_BLOCK, at)
        at -= block
        file.seek(at)
        held, *lines = (file.read(block) + held).split(b"\n")
        for line in reversed(lines):
            if is_whole:
                yield end, line + b"\n"
                end -= 1
            end, is_whole = end - len(line), True
        if len(held) >= MAX_LINE_BYTES:
            raise _too_long(at)
    if is_whole:
        yield end, held + b"\n"


def sampled_lines(file: BinaryIO) -> Iterator[bytes]:
    """All lines of a file of moderate size; of a larger one a thousand, evenly spread, the first and the last included.

    Raises: TooLongLine where a line is longer than any may be.
    """
    size = os.fstat(file.fileno()).st_size
    if size <= _READ_WHOLE_BYTES:
        yield from (line for _, line in whole_lines(file))
        return
    read_to = 0
    for start in range(0, size, size // _SAMPLES):
        if start < read_to:
            continue
        file.seek(start)
        lines = whole_lines(file)
        if start:
            next(lines, None)  # the rest of one
        for end, line in itertools.islice(lines, 1):
            read_to = end
            yield line
    for end, line in itertools.islice(last_lines(file), 1):
        if end > read_to:
            yield line


def _too_long(at: int) -> TooLongLine:
    return TooLongLine(f"a line about byte {at:,} is longer than the {MAX_LINE_BYTES:,} bytes that one may have")
