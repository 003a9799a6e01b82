"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Another path beside a file's; what the block writes there takes the file's place at its end, unless it fails."""
    temporary = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write plain data as a file of JSON.

    Raises:
        OSError: it can't be written.
    """
    try:
        with replaced(path) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} can't be written: {error.strerror or error}") from error


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Another directory beside one, empty; with what the block writes there it takes its place, unless the block fails.

    Directories above it are made.
    """
    temporary, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
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
    """Remove what is left; a directory that was moved aside for one that did not come is put back."""
    if old.exists() and not path.exists():
        old.rename(path)
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)
