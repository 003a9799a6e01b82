"""Files that somebody else may have made or damaged: read within bounds, or refused without waiting.

Whatever a run directory holds is read through here: a pipe would block, a link leads elsewhere, a file of holes or a
few kilobytes of empty lists fill memory, and a thousand brackets exhaust the stack.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from aiorl.process.available_memory import available_bytes

__all__ = [
    "check_depth",
    "check_regular",
    "check_written",
    "open_regular",
    "parse_json",
    "parsed_bytes",
    "read_regular",
    "whose_else",
]

_MAX_DEPTH = 32
_MAX_PARSED_BYTES = 1 << 30
_SMALL_BYTES = 64 << 20
"""A file of up to this size is read without a look at the memory there is."""
_MAX_HOLES = 16
"""Bytes of holes that a file may have for each byte that was written: file systems may make holes of zeros."""


def whose_else(found: os.stat_result) -> str:
    """Why a file or directory is not this user's alone, in plain words; "" where it is."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"can be read or written by others (mode {mode:04o})" if mode & 0o077 else ""


def read_regular(path: Path, *, max_bytes: int, follow: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file; its parents may be links.
        max_bytes: the size is checked against it before anything is read.
        follow: whether it may be a symbolic link itself.
    Raises: OSError, with a reason in plain words, if it is missing, unreadable, no regular file, too large, mostly
        holes, or larger than the memory that is left: twice its size, for what is made of it.
    """
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than the {max_bytes:,} that it may have", str(path)
            )
        check_written(file.fileno(), path)
        if size > _SMALL_BYTES and 2 * size > (left := available_bytes()):
            raise OSError(errno.ENOMEM, f"it has {size:,} bytes, and {left:,} bytes of memory are left", str(path))
        return file.read(size)


def open_regular(path: str | Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file to be read piece by piece.

    Args:
        path: of the file.
        follow: whether it may be a symbolic link.
    Raises: OSError, with a reason in plain words, if it is missing, unreadable or no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    try:
        check_regular(descriptor, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(descriptor: int, path: str | Path) -> None:
    """Raise OSError unless an open file is a regular one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def check_written(descriptor: int, path: str | Path) -> None:
    """Raise OSError if most of a file is holes: they cost nothing on disk, but a reader needs memory for each."""
    size = os.fstat(descriptor).st_size
    at = holes = 0
    with contextlib.suppress(OSError):  # the file system can't tell
        while at < size:
            try:
                data = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                data = size  # nothing but a hole is left
            holes += data - at
            at = os.lseek(descriptor, data, os.SEEK_HOLE) if data < size else size
    os.lseek(descriptor, 0, os.SEEK_SET)
    if holes > _SMALL_BYTES + _MAX_HOLES * (size - holes):
        raise OSError(errno.EFBIG, f"{holes:,} of its {size:,} bytes are holes that nobody wrote", str(path))


def parse_json(content: bytes, *, is_strict: bool = True) -> Any:  # Any: whatever JSON holds
    """What JSON in UTF-8 holds, of moderate depth and size.

    Args:
        content: the JSON.
        is_strict: whether numbers must be finite, and each name of an object must occur once.
    Raises: ValueError if it is anything else.
    """
    if parsed_bytes(content) > _MAX_PARSED_BYTES:
        raise ValueError("it holds too many values")
    strict: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite, "object_pairs_hook": _unique}
    try:
        value = json.loads(content.decode("utf-8"), **(strict if is_strict else {}))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value, _MAX_DEPTH)
    return value


def parsed_bytes(content: bytes) -> int:
    """Estimate from above how much memory the values of JSON take: `[[],[]]` takes 20 times its length."""
    costs = {b",": 32, b'"': 24, b":": 100, b"[": 72, b"{": 72}
    return len(content) + sum(cost * content.count(sign) for sign, cost in costs.items())


def check_depth(value: object, most: int) -> None:
    """Raise ValueError where dicts, lists and tuples are nested deeper than allowed."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is no finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found
