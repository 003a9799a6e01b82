"""Files and directories that are replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to a file; its content replaces the file at the end, unless the
    block fails.
    """
    temporary = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write plain data to a JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with replaced(path) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} can't be written: {error.strerror or error}") from error


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory next to a directory, which it replaces at the end unless
    the block fails.

    Parent directories are created.
    """
    temporary = path.with_name(f".{path.name}.new")
    old = path.with_name(f".{path.name}.old")
    try:
        _tidy(path, temporary, old)
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    finally:
        _tidy(path, temporary, old)


def _tidy(path: Path, temporary: Path, old: Path) -> None:
    """Remove leftovers; if the old directory was moved aside but not replaced, move it back."""
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
