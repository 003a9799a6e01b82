"""Rows of results: a frozen dataclass each, in CSV files with a header."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from aiorl.process.replaced_file import replaced

__all__ = ["add_row", "read_csv", "write_csv"]

RowT = TypeVar("RowT")


def read_csv(path: Path, kind: type[RowT]) -> list[RowT]:
    """Return the rows of a file; none if there is no file.

    Args:
        path: the file.
        kind: dataclass of a row with fields that are numbers and strings; fields with defaults may
            be missing.
    """
    if not path.exists():
        return []
    fields = get_type_hints(kind)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{name: of(row[name]) for name, of in fields.items() if name in row})
            for row in csv.DictReader(file)
        ]


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with the same keys and a header; replace the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_row(path: Path, row: RowT, key: Callable[[RowT], Any]) -> None:
    """Write a row to a file; replace a row with the same key and keep the rows sorted by key."""
    rows = {key(each): each for each in read_csv(path, type(row))} | {key(row): row}
    write_csv(path, [vars(rows[place]) for place in sorted(rows)])
