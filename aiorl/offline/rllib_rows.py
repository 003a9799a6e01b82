"""Newer JSON lines of RLlib's: each line is one row, an object without a type.

    {"eps_id": 3, "obs": [0.1, -0.2], "actions": 1, "rewards": 1.0, "new_obs": [...], "terminateds": false, ...}

Rows of one episode that follow each other become one batch. An episode may be named by text, which becomes a number;
other text, such as the ids of agents and modules, and objects are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import orjson

from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.errors import DataError
from aiorl.offline.files import open_unpacked
from aiorl.offline.formats import Share, Stored
from aiorl.offline.json_file import parsed, raw_lines, read_lines
from aiorl.offline.stored_columns import plain_column, to_batch

__all__ = ["read_batches_or_rows"]

_MAX_ROWS = 1000
_MAX_BYTES = 1 << 24
"""Of the lines of one batch, unless the first alone has more."""
_MAX_LINE = 1 << 20
"""Bytes of the first line of a file of rows."""


def read_batches_or_rows(
    path: str, share: Share, to_batch: Callable[[Mapping[str, Any]], Batch]
) -> Generator[Stored | DataError, None, None]:
    """Yield the batches of a file as `read_lines` does, also of a file that has a row in each line."""
    if not _has_rows(path):
        yield from read_lines(path, share, to_batch)
        return
    taken = 0
    for found in _joined(path):
        is_wanted = share.has(taken)
        if isinstance(found, DataError):  # reported by the one reader whose batch it is in
            if is_wanted:
                yield found
            continue
        if is_wanted:
            try:
                yield Stored(found[0], _batch(found[1]))
            except DataError as error:
                yield DataError(error.reason, path=path, place=found[0])
        taken += 1


def _has_rows(path: str) -> bool:
    """Return whether the first line of a file is a row."""
    with open_unpacked(path) as file:
        line = file.readline(_MAX_LINE)
        while line.isspace():
            line = file.readline(_MAX_LINE)
    if b'"aiorl"' in line or b'"type"' in line or not line.startswith(b"{"):
        return False
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return c.OBS in row and c.ACTIONS in row and isinstance(row.get(c.REWARDS), int | float)


def _joined(path: str) -> Generator[tuple[str, list[Mapping[str, Any]]] | DataError, None, None]:
    """Rows that follow each other in an episode, and the place of the first."""
    rows: list[Mapping[str, Any]] = []
    first, num_bytes = "", 0
    for place, line in raw_lines(path):
        try:
            row = parsed(line)
        except DataError as error:
            yield DataError(error.reason, path=path, place=place)
            continue
        num_bytes += len(line)
        is_full = len(rows) == _MAX_ROWS or num_bytes > _MAX_BYTES
        if rows and (is_full or row.get(c.EPS_ID) != rows[-1].get(c.EPS_ID)):
            yield first, rows
            rows = []
        if not rows:
            first, num_bytes = place, len(line)
        rows.append(row)
    if rows:
        yield first, rows


def _batch(rows: list[Mapping[str, Any]]) -> Batch:
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError("rows of one episode have different columns")
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == c.EPS_ID and isinstance(values[0], str):
            values = [_number(str(value)) for value in values]
        if not isinstance(values[0], str | dict | None):
            columns[name] = plain_column(name, values)
    return to_batch(columns)


def _number(text: str) -> int:
    """A number for an episode's name, the same for the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
