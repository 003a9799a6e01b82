"""Files that somebody else may have made or damaged: read within bounds, or refused without waiting.

Whatever a run directory holds is read through here: a pipe would block, a link leads elsewhere, a sparse file fills
memory, and JSON of a thousand brackets exhausts the stack.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["check_regular", "open_regular", "parse_json", "read_regular", "whose_else"]

_MAX_DEPTH = 32


def whose_else(found: os.stat_result) -> str:
    """Why a file or directory is not this user's alone, in plain words; "" where it is."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"can be read or written by others (mode {mode:04o})" if mode & 0o077 else ""


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file.

    Args:
        path: not followed where it is a symbolic link; its parents may be links.
        max_bytes: the size is checked against it before anything is read.
    Raises: OSError, with a reason in plain words, if it is missing, unreadable, no regular file or too large.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than the {max_bytes:,} that it may have", str(path)
            )
        return file.read(size)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open to read from piece by piece; a symbolic link is not followed.

    Raises: OSError, with a reason in plain words, if it is missing, unreadable or no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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


def check_regular(descriptor: int, path: Path) -> None:
    """Raise OSError unless an open file is a regular one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def parse_json(content: bytes) -> Any:  # Any: whatever JSON holds
    """What strict JSON in UTF-8 holds: finite numbers, each name of an object once, moderate depth.

    Raises: ValueError if it is anything else.
    """
    try:
        value = json.loads(
            content.decode("utf-8"), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
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
