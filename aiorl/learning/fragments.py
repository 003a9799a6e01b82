"""Fragments, checked before a batch or a replay takes them, and which of stored experience is there already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.postprocess import check_n_steps
from aiorl.data import columns as c
from aiorl.data.arrays import all_finite
from aiorl.data.columns import ColumnSpec
from aiorl.data.fragment import check_new_obs
from aiorl.errors import BatchError

Array = NDArray[Any]


def check_fragment(
    columns: Iterable[ColumnSpec], arrays: Mapping[str, Array], *, is_finite: bool = True
) -> tuple[int, int]:
    """Refuse a fragment whose rows can't be used. Safe in any thread.

    Args:
        columns: of a row, or by their names of a sequence; others of the fragment are not looked at.
        arrays: of the fragment by name.
        is_finite: refuse numbers that are not finite or too large.
    Returns: T and N.

    Raises:
        BatchError: a column is missing, of another shape or dtype, or holds numbers that are refused.
    """
    columns = [column for column in columns if column.name != c.VALID]
    first = next((arrays[column.name] for column in columns if column.name in arrays), None)
    if first is None or first.ndim < 2 or not all(first.shape[:2]):
        found = "none" if first is None else f"shape {first.shape}"
        raise BatchError(columns[0].name, "a column [T, N, ...] of at least one row", found)
    shape = first.shape[:2]
    for column in columns:
        parts = [column]
        if column.name == c.NEW_OBS and c.NEW_OBS not in arrays:
            check_new_obs(arrays)  # it is made once it is needed
            names = [name for name in (c.OBS, c.LAST_OBS, c.FINAL_OBS) if name in arrays]
            parts = [ColumnSpec(name, column.shape, column.dtype) for name in names]
            column = parts[0]
        if column.name not in arrays:
            raise BatchError(column.name, "in every fragment", f"only {sorted(arrays)!r:.500}")
        column.check(arrays[column.name], shape[1:] if c.is_of_sequences(column.name) else shape)
        if is_finite:
            for part in parts:
                check_numbers(part, arrays[part.name])
    valid = arrays.get(c.VALID)
    if valid is not None and (valid.shape != shape or valid.dtype != np.bool_):
        raise BatchError(c.VALID, f"bool {shape}", f"{valid.dtype} {valid.shape}")
    if c.N_STEPS in arrays:
        check_n_steps(arrays[c.N_STEPS], shape)
    return shape[0], shape[1]


def refuse_others(arrays: Mapping[str, Array], names: Iterable[str]) -> None:
    """Refuse a fragment with other columns than these, and those that say which rows count and what follows them.

    Raises:
        BatchError: there are such.
    """
    known = {*names, c.VALID, c.LAST_OBS, c.FINAL_INDEX, c.FINAL_OBS}
    if unknown := sorted(arrays.keys() - known):
        raise BatchError("batches", f"no other columns than {', '.join(sorted(known))}", f"{unknown[0]!r:.100}")


def newest_steps(columns: tuple[ColumnSpec, ...], arrays: Mapping[str, Array], cut: int) -> dict[str, Array]:
    """Return what a fragment that is checked has of its rows, without its first steps.

    Args:
        columns: of a row.
        arrays: of the fragment by name.
        cut: steps to leave out.
    """
    of_steps = {column.name for column in columns} | {c.VALID, c.N_STEPS, c.PRIORITIES}
    newest = {name: array[cut:] if name in of_steps else array for name, array in arrays.items()}
    if c.FINAL_INDEX in arrays:
        is_left = arrays[c.FINAL_INDEX][:, 0] >= cut
        newest[c.FINAL_INDEX] = arrays[c.FINAL_INDEX][is_left] - np.array([cut, 0], np.int32)
        newest[c.FINAL_OBS] = arrays[c.FINAL_OBS][is_left]
    return newest


def check_numbers(column: ColumnSpec, array: Array) -> None:
    """Refuse numbers that are not finite, or too large for a column.

    Raises:
        BatchError: there are such.
    """
    if array.dtype.kind == "f":
        if not all_finite(array):
            raise BatchError(column.name, "finite numbers", "a NaN or an infinity")
        if array.dtype.itemsize > 4 and (np.abs(array) > np.finfo(np.float32).max).any():
            raise BatchError(column.name, "numbers of float32", "larger ones")
    elif column.dtype == "int32" and array.size and array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise BatchError(column.name, "numbers of int32", f"{array.min()} to {array.max()}")


_MAX_KNOWN = 1 << 20
"""So many fit into the meta.json of a checkpoint; what comes beyond them is new each time."""


class Pieces:
    """Stored experience is read over and over, by workers that come and go: its numbers tell what is there already."""

    def __init__(self) -> None:
        """Nothing is there yet."""
        self._known: dict[int, None] = {}  # in the order in which they came
        self._numbers: tuple[int, ...] | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the pieces that are there, in the order in which they came."""
        if self._numbers is None:
            self._numbers = tuple(self._known)
        return self._numbers

    @property
    def is_full(self) -> bool:
        """There may be known pieces that are not told from new ones."""
        return len(self._known) >= _MAX_KNOWN

    def take(self, numbers: Sequence[int]) -> None:
        """Go on where another one was."""
        self._known, self._numbers = dict.fromkeys(numbers), None

    @staticmethod
    def check(arrays: Mapping[str, Array]) -> None:
        """Refuse a fragment whose numbers are of another shape or dtype; there may be none.

        Raises:
            BatchError: they are.
        """
        found, shape = arrays.get(c.PIECE), arrays[c.ACTIONS].shape[:2]
        if found is not None and (found.shape != shape or found.dtype != np.int64):
            raise BatchError(c.PIECE, f"int64 {shape}", f"{found.dtype} {found.shape}")

    def new_rows(self, arrays: Mapping[str, Array], *, is_whole: bool) -> Mapping[str, Array] | None:
        """A fragment without the rows of pieces that are known; from now on its pieces are.

        Args:
            arrays: of the fragment by name.
            is_whole: the replay has all that it was ever given; where old rows had to go, everything is new.
        Returns: the fragment, of which rows that are known are not `aiorl.data.columns.VALID`; None if all are.
        """
        if c.PIECE not in arrays:
            return arrays
        if not is_whole:
            self.take(())
            return arrays
        column, transitions = arrays[c.PIECE], arrays.get(c.VALID)
        found = np.unique(column if transitions is None else column[transitions]).tolist()
        again = [number for number in found if number in self._known]
        new = [number for number in found if number and number not in self._known]
        if new and len(self._known) + len(new) <= _MAX_KNOWN:
            self._known.update(dict.fromkeys(new))
            self._numbers = None
        if not again:
            return arrays
        valid = ~np.isin(column, again)
        if transitions is not None:
            valid &= transitions
        return {**arrays, c.VALID: valid} if valid.any() else None
