"""Batches from stored columns of any format, all checked, within one memory limit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from aiorl.config.files import check_depth
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, DataError
from aiorl.offline.column_names import with_known_names
from aiorl.text import MAX_LABEL, is_label, one_line

MAX_BATCH_BYTES = 1 << 30
"""Limit of the bytes in one stored batch, over the columns of all its policies."""
MAX_DIMS = 8
_MAX_SIZE = 1 << 28
_MAX_POLICIES = 1000
_MAX_COLUMNS = 1000
_MAX_DEPTH = 32
FLAGS = (c.DONES, c.TERMINATEDS, c.TRUNCATEDS)
WHOLE_NUMBERS = (c.EPS_ID, c.AGENT_INDEX, c.T)
"""Columns that name a row's episode, agent and step."""
KNOWN = frozenset({c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS, *FLAGS, *WHOLE_NUMBERS})
"""Columns that always hold numbers."""
_NUMBERS = {bool, int, float, type(None)}


class Room:
    """Memory left for a stored batch.

    Attributes:
        left: bytes.
    """

    def __init__(self) -> None:
        """Start with the limit."""
        self.left = MAX_BATCH_BYTES

    def take(self, num_bytes: int) -> None:
        """Count bytes as used, before they are allocated if their number is known.

        Raises:
            DataError: fewer are left.
        """
        self.left -= num_bytes
        if self.left < 0:
            raise DataError(f"a batch of more than {MAX_BATCH_BYTES:,} bytes; write smaller ones")


def read_batch(
    columns: object,
    read: Callable[[str, Any, Room], Array],
    room: Room,
) -> SampleBatch:
    """Return a batch of stored columns, read one by one.

    Args:
        columns: stored columns by name.
        read: function that returns a stored column, given by its name, as an array, within the
            memory left.
        room: memory left for all policies of the batch.

    Raises:
        DataError: a column, which the message names, can't be read or takes too much memory; or as
            `to_batch`.
    """
    if not isinstance(columns, dict):
        raise DataError("columns must be an object from names to columns")
    arrays: dict[str, Array] = {}
    for name, stored in columns.items():
        try:
            arrays[name] = read(name, stored, room)
            room.take(arrays[name].nbytes)
        except DataError as error:
            raise DataError(f"column {one_line(name, 200)!r}: {error.reason}") from error
    return to_batch(arrays)


def to_batch(columns: Mapping[str, Array]) -> SampleBatch:
    """Return a batch of stored columns under their names here, with the flags of an episode's end
    that follow.

    Rows without a value, NaN in columns of whole numbers or flags, are left as they are: see
    `complete`.

    Raises:
        DataError: columns have different lengths, no rows or invalid names.
    """
    if not columns or len(columns) > _MAX_COLUMNS:
        raise DataError(f"{len(columns)} columns; a batch has 1 to {_MAX_COLUMNS}")
    check_names(columns)
    writable = with_known_names(columns)
    for name, column in writable.items():
        # arrays in a file's buffer are read-only, but callbacks and postprocessing can write to a
        # batch
        if not column.flags.writeable:
            writable[name] = column.copy()
    try:
        batch = SampleBatch(writable)
    except BatchError as error:
        raise DataError(str(error)) from error
    if not batch.count:
        raise DataError("a batch without rows")
    complete(batch)
    return batch


def check_names(
    names: Iterable[str],
    kind: str = "column",
    path: str = "",
) -> None:
    """Refuse names that no reader accepts.

    Args:
        names: names of columns or policies.
        kind: the kind of thing that they name.
        path: the file, if it is known.

    Raises:
        DataError: a name is empty, longer than 256 characters or not printable.
    """
    for name in names:
        if not name or not is_label(name):
            raise DataError(
                f"a {kind} is called {one_line(name, 80)!r}, which is not a valid name; names have"
                f" 1 to {MAX_LABEL} printable characters",
                path=path,
            )


def complete(batch: SampleBatch) -> None:
    """Check the columns with known names, give whole numbers and flags their dtypes, and add flags
    that follow.

    Columns of whole numbers or flags in which a value is missing (NaN) are not changed.

    Raises:
        DataError: a column has other contents than its name says.
    """
    _check_known(batch)
    _add_flags(batch)


def check_policies(policies: object) -> dict[str, Any]:
    """Return policy ids with their stored rows.

    Raises:
        DataError: it is not a mapping, or has too many policies or invalid names.
    """
    if not isinstance(policies, dict) or not 0 < len(policies) <= _MAX_POLICIES:
        raise DataError(
            f"a batch of several policies has 1 to {_MAX_POLICIES} of them by their ids"
        )
    check_names(policies, "policy")
    return policies


def numbers_of(rows: object, dtype: np.dtype[Any] | None = None) -> Array:
    """Return an array of nested lists of numbers.

    Args:
        rows: list with an item for each row.
        dtype: dtype of the array. None = that of the numbers, with NaN for null.

    Raises:
        DataError: the lists differ in length, are nested too deeply, or hold other values (NumPy
            would pad all texts to the longest), or numbers that don't fit the dtype.
    """
    if not isinstance(rows, list):
        raise DataError(f"a {type(rows).__name__}, not a list with a value for each row")
    try:
        numbers = _array_of(_without_null_rows(rows))
        if numbers.dtype == object and dtype is None:  # nulls, or integers beyond int64
            numbers = numbers.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"rows that differ in shape or are not numbers ({one_line(str(error), 100)})"
        ) from error
    return numbers if dtype is None else in_dtype(numbers, dtype)


def in_dtype(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers in a dtype; those too large for a dtype of floats become infinite.

    Raises:
        DataError: some are objects, or a dtype of whole numbers or booleans doesn't have them.
    """
    fits = numbers.dtype != object
    if fits and numbers.dtype != dtype:
        with np.errstate(all="ignore"):
            converted = numbers.astype(dtype)
        fits = dtype.kind == "f" or np.array_equal(converted, numbers)
        numbers = converted
    if not fits:
        raise DataError(f"numbers that don't fit {dtype}, the dtype that the file gives")
    return numbers


def _without_null_rows(rows: list[Any]) -> list[Any]:
    """Return rows of which those that are null next to lists of numbers are lists of null."""
    if None not in rows or not any(isinstance(row, list) for row in rows):
        return rows
    first_list = next(row for row in rows if isinstance(row, list))
    nulls = _nulls_like(first_list)
    return [nulls if row is None else row for row in rows]


def _nulls_like(row: Any, depth: int = 0) -> Any:
    if not isinstance(row, list) or depth > MAX_DIMS:
        return None
    return [_nulls_like(item, depth + 1) for item in row]


def _array_of(rows: list[Any]) -> Array:
    level = [rows]
    for _ in range(MAX_DIMS):
        if _are_numbers(level):
            return np.asarray(rows)
        if set(map(type, chain.from_iterable(level))) != {list}:
            raise ValueError("values other than numbers, or numbers next to lists")
        level = list(chain.from_iterable(level))
    raise ValueError("nested too deeply")


def _are_numbers(rows: list[list[Any]]) -> bool:
    try:
        # adding up takes a quarter of the time of checking each value
        sum(chain.from_iterable(rows))
    except (TypeError, OverflowError):
        return set(map(type, chain.from_iterable(rows))) <= _NUMBERS
    return True


def from_bytes(
    raw: object,
    dtype: np.dtype[Any],
    shape: Sequence[object],
    order: Literal["C", "F"] = "C",
) -> Array:
    """Return bytes as an array [*shape] in native byte order, which can share their memory.

    Raises:
        DataError: the shape is impossible, the number of bytes differs, or booleans are other than
            0 and 1.
    """
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _MAX_SIZE]
    are_sizes = len(sizes) == len(shape) <= MAX_DIMS
    if not are_sizes or math.prod(filter(None, sizes)) > 2**48:
        raise DataError("an impossible shape")
    size = math.prod(sizes) * dtype.itemsize
    if not isinstance(raw, bytes | bytearray) or len(raw) != size:
        raise DataError(f"the number of bytes is not {size:,}, as its shape needs")
    array: Array = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
    check_booleans(array)
    native = array.astype(dtype.newbyteorder("="), copy=False)
    return native.reshape(sizes, order=order)


def check_booleans(array: Array) -> None:
    """Refuse booleans [N] that are stored as other numbers than 0 and 1."""
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise DataError("booleans other than 0 and 1")


def episode_numbers(names: Sequence[object]) -> Array:
    """Return a number for each name of an episode, the same in every process; NaN for null.

    Raises:
        DataError: a name is not text.
    """
    for name in names:  # before they are put into a set: lists can't be
        if name is not None and not isinstance(name, str):
            raise DataError(f"text next to a {type(name).__name__} as names of episodes")
    numbers = {name: _number_of(name) for name in set(names)}
    dtype = np.float64 if None in numbers else np.int64
    return np.array([numbers[name] for name in names], dtype)


def _number_of(name: Any) -> float:
    if name is None:
        return math.nan
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=6).digest(),
        "big",
    )


def object_column(values: Sequence[object]) -> Array:
    """Return a column of any objects, such as infos.

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
    """Refuse columns with known names and wrong contents."""
    for name in (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS):
        if name in batch and batch[name].dtype == object:
            raise DataError(f"column {name!r} does not hold numbers")
    if c.REWARDS in batch and batch[c.REWARDS].ndim != 1:
        shape = batch[c.REWARDS].shape[1:]
        raise DataError(f"column {c.REWARDS!r} has rows of shape {shape}, not a number each")
    for name in WHOLE_NUMBERS:
        if name in batch:
            batch[name] = _whole_numbers(name, batch[name])


def _whole_numbers(name: str, column: Array) -> Array:
    """Return numbers [N] as integers, unless one of them is missing.

    Raises:
        DataError: there are others than whole numbers.
    """
    if column.ndim == 1 and column.dtype.kind in "iu":
        return column
    # larger floats are not exact: several numbers become one
    limit = 2**53 if column.dtype == np.float64 else 2**24
    fits = _converted(
        column,
        np.int64,
        lambda numbers: (abs(numbers) < limit) & (numbers == np.floor(numbers)),
    )
    if fits is None:
        raise DataError(
            f"column {name!r} does not hold a whole number for each row; as floats, or next to rows"
            f" without one, they must be less than {limit:,}"
        )
    return fits


def _converted(
    column: Array,
    dtype: type[np.generic],
    is_valid: Callable[[Array], Array],
) -> Array | None:
    """Return numbers [N] in a dtype, or as they are if one is missing; None if one is invalid, or
    all are missing.
    """
    if column.ndim != 1 or column.dtype.kind not in "iuf":
        return None
    is_missing = np.isnan(column)
    present = column[~is_missing]
    if not present.size or not is_valid(present).all():
        return None
    return column if is_missing.any() else column.astype(dtype)


def _add_flags(batch: SampleBatch) -> None:
    """Fill in ``dones``, or ``terminateds`` and ``truncateds`` if some of them are missing."""
    names = [name for name in FLAGS if name in batch]
    for name in names:
        batch[name] = _flags(name, batch[name])
    if any(batch[name].dtype != np.bool_ for name in names):
        return
    dones = batch.get(c.DONES)
    terminateds = batch.get(c.TERMINATEDS)
    truncateds = batch.get(c.TRUNCATEDS)
    if terminateds is not None and truncateds is not None:
        if dones is None:
            batch[c.DONES] = terminateds | truncateds
    elif terminateds is not None:
        if dones is None:
            dones = terminateds
        batch[c.TRUNCATEDS] = dones & ~terminateds
        batch[c.DONES] = dones.copy()
    elif truncateds is not None and dones is not None:
        batch[c.TERMINATEDS] = dones & ~truncateds
    elif dones is not None:
        batch[c.TERMINATEDS] = dones.copy()
        batch[c.TRUNCATEDS] = np.zeros(batch.count, bool)


def _flags(name: str, column: Array) -> Array:
    """Return flags [N] as booleans, unless one of them is missing.

    Raises:
        DataError: there is something other than booleans, 0 and 1.
    """
    if column.ndim == 1 and column.dtype == np.bool_:
        return column
    fits = _converted(
        column,
        np.bool_,
        lambda numbers: np.isin(numbers, (0.0, 1.0)),
    )
    if fits is None:
        raise DataError(f"column {name!r} does not hold flags, 0 or 1 for each row")
    return fits


Form = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of a row of each column."""


def form_of(rows: SampleBatch) -> Form:
    """Return the dtype of each column of rows [B, ...], and the shape of a row in it."""
    return {name: (column.dtype, column.shape[1:]) for name, column in rows.items()}
