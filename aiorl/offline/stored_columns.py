"""From what a file holds to a batch: every column checked, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.files import check_depth
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, DataError
from aiorl.offline.pickled_array import MAX_DIMS
from aiorl.text import is_label, one_line

Array = NDArray[Any]

MAX_BATCH_BYTES = 1 << 30
"""Bytes that the columns of one stored batch may have, those of all its policies together."""
_MAX_POLICIES = 1000
_MAX_COLUMNS = 1000
_MAX_DEPTH = 32
NUMBER_KINDS = "biuf"
_NUMBERS = {bool, int, float, type(None)}


class Room:
    """The memory that a stored batch may still take.

    Attributes:
        left: bytes.
    """

    def __init__(self) -> None:
        """Begin with all of it."""
        self.left = MAX_BATCH_BYTES

    def take(self, num_bytes: int) -> None:
        """Take bytes, before they are made where their number is known.

        Raises:
            DataError: there are not as many left.
        """
        self.left -= num_bytes
        if self.left < 0:
            raise DataError(f"a batch of more than {MAX_BATCH_BYTES:,} bytes; write smaller ones")


def to_batch(columns: Mapping[str, Array]) -> SampleBatch:
    """A batch of columns that a file held, with the flags of an episode's end that follow from those there are.

    Raises:
        DataError: columns of different lengths, without rows or with impossible names.
    """
    if not columns or len(columns) > _MAX_COLUMNS:
        raise DataError(f"{len(columns)} columns; a batch has 1 to {_MAX_COLUMNS}")
    for name in columns:
        if not name or not is_label(name):
            raise DataError(f"a column is called {one_line(name, 80)!r}, which is no name")
    try:
        # what lies in a file's buffer can't be written to, which callbacks and postprocessing may do
        batch = SampleBatch({name: x if x.flags.writeable else x.copy() for name, x in columns.items()})
    except BatchError as error:
        raise DataError(str(error)) from error
    if not batch.count:
        raise DataError("a batch without rows")
    _check_known(batch)
    _add_flags(batch)
    return batch


def check_policies(policies: object) -> dict[str, Any]:
    """Policy ids and what stands for their rows.

    Raises:
        DataError: it is no mapping of names, or one of too many.
    """
    if not isinstance(policies, dict) or not 0 < len(policies) <= _MAX_POLICIES:
        raise DataError(f"a batch of several policies has 1 to {_MAX_POLICIES} of them by their ids")
    for policy_id in policies:
        if not policy_id or not is_label(policy_id):
            raise DataError(f"a policy is called {one_line(policy_id, 80)!r}, which is no name")
    return policies


def plain_column(name: str, value: object) -> Array:
    """A column from nested lists of numbers; null is NaN, lists of mappings are kept as they are.

    Raises:
        DataError: rows of different shapes, or of something else.
    """
    if not isinstance(value, list):
        raise DataError(f"column {name!r} is a {_kind(value)}, not a list with a value for each row")
    if value and isinstance(value[0], dict):
        return object_column(value)
    try:
        column = numbers_of(value)
        if column.dtype.kind == "O" or column.dtype == np.float64:
            with np.errstate(over="ignore"):  # what float32 can't hold is infinite
                column = column.astype(np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"column {name!r} has rows that differ in shape or are no numbers") from error
    return column


def numbers_of(rows: list[Any]) -> Array:
    """An array of nested lists of numbers; of objects where null is among them.

    Raises:
        ValueError: the lists differ in length, are nested too deeply, or hold something else. Of text, NumPy would
            make rows that are all as long as the longest.
    """
    level = [rows]
    for _ in range(MAX_DIMS):
        if _are_numbers(level):
            return np.asarray(rows)
        if set(map(type, chain.from_iterable(level))) != {list}:
            raise ValueError("no numbers, or numbers beside lists")
        level = list(chain.from_iterable(level))
    raise ValueError("nested too deeply")


def _are_numbers(rows: list[list[Any]]) -> bool:
    try:
        sum(chain.from_iterable(rows))  # adding up takes a quarter of the time of a look at each
    except (TypeError, OverflowError):
        return set(map(type, chain.from_iterable(rows))) <= _NUMBERS
    return True


def object_column(values: Sequence[object]) -> Array:
    """A column of any objects, such as infos.

    Raises:
        DataError: they are nested too deeply.
    """
    try:
        check_depth(values, _MAX_DEPTH)
    except ValueError as error:
        raise DataError("objects that are nested too deeply") from error
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _check_known(batch: SampleBatch) -> None:
    """Refuse columns that are known by their names and hold something else."""
    for name in (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS):
        if name in batch and batch[name].dtype == object:
            raise DataError(f"column {name!r} holds no numbers")
    if c.REWARDS in batch and batch[c.REWARDS].ndim != 1:
        raise DataError(f"column {c.REWARDS!r} has rows of shape {batch[c.REWARDS].shape[1:]}, not a number each")
    for name in (c.EPS_ID, c.AGENT_INDEX, c.T):
        if name in batch:
            column = batch[name]
            if column.dtype.kind == "f" and (abs(column) < 2**24).all() and (column == np.floor(column)).all():
                batch[name] = column = column.astype(np.int64)
            if column.ndim != 1 or column.dtype.kind not in "iu":
                raise DataError(f"column {name!r} holds no whole number for each row")


def _add_flags(batch: SampleBatch) -> None:
    """Fill in ``dones``, or ``terminateds`` and ``truncateds`` of files that know only ``dones``."""
    for name in (c.DONES, c.TERMINATEDS, c.TRUNCATEDS):
        if name in batch:
            if batch[name].ndim != 1 or batch[name].dtype.kind not in "biu":
                raise DataError(f"column {name!r} is no column of flags")
            batch[name] = batch[name].astype(bool, copy=False)
    if c.TERMINATEDS in batch and c.TRUNCATEDS in batch:
        if c.DONES not in batch:
            batch[c.DONES] = batch[c.TERMINATEDS] | batch[c.TRUNCATEDS]
    elif c.DONES in batch and c.TERMINATEDS not in batch and c.TRUNCATEDS not in batch:
        batch[c.TERMINATEDS] = batch[c.DONES].copy()
        batch[c.TRUNCATEDS] = np.zeros(batch.count, bool)


def _kind(value: object) -> str:
    return {str: "text", dict: "mapping", list: "list", type(None): "null"}.get(type(value), "number")
