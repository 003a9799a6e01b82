"""SlotStore: what one policy's agents observed and did, as growing preallocated columns.

Each observation of an agent takes one slot; what the policy made of it (action, state, extra columns) is
written into the same slot, for all agents of a turn at once. Agents remember the numbers of their slots, and
a trajectory's columns are gathered by them. Slot 0 stands for "nothing yet": a zero action, the initial state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from aiorl.errors import BatchError

__all__ = ["SlotStore", "as_index"]

Array = NDArray[Any]
Index = slice | NDArray[np.int64]

_LEAST_CAPACITY = 256
_NUMBERS = "biufc"


class SlotStore:
    """Columns ``[slots, ...]`` that grow, and shrink to the slots still needed.

    Attributes:
        used: slots given out so far, slot 0 included.
    """

    def __init__(self) -> None:
        """Slot 0 only, no columns."""
        self.used = 1
        self._capacity = _LEAST_CAPACITY
        self._compact_at = _LEAST_CAPACITY
        self._columns: dict[str, Array] = {}

    @property
    def wants_compaction(self) -> bool:
        """Twice as many slots are given out as were needed when last looked."""
        return self.used >= self._compact_at

    def define(self, name: str, shape: Sequence[int], dtype: DTypeLike, nothing: ArrayLike = 0) -> None:
        """Add a column.

        Args:
            name: its name; defining one again does nothing.
            shape: shape of one entry.
            dtype: dtype.
            nothing: the entry of slot 0.
        """
        if name not in self._columns:
            column = np.zeros((self._capacity, *shape), dtype)
            column[0] = nothing
            self._columns[name] = column

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def reserve(self, count: int) -> int:
        """The first of ``count`` new slots, numbered one after the other."""
        first = self.used
        self.used += count
        if self.used > self._capacity:
            self._resize(max(self.used, 2 * self._capacity), first)
        return first

    def write(self, name: str, index: Index, values: Array) -> None:
        """Write entries; the column is made at its first use, and widened where they would lose their value in it.

        Raises:
            BatchError: entries of another shape than before, or of a kind that the column cannot hold.
        """
        column = self._columns.get(name)
        if column is None:
            self.define(name, values.shape[1:], values.dtype)
            column = self._columns[name]
        if values.shape[1:] != column.shape[1:]:
            raise BatchError(name, f"entries of shape {column.shape[1:]}", values.shape[1:])
        if values.dtype != column.dtype and (dtype := _widened(name, column.dtype, values.dtype)) != column.dtype:
            column = self._columns[name] = column.astype(dtype)
        column[index] = values

    def compact(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        """Forget all slots but those listed.

        Args:
            live: slots still needed, ascending, without doubles; slot 0 is always kept.
        Returns: old slot -> new slot, int64 [used]; slots that were forgotten map to 0.
        """
        kept = live[live > 0]
        moved = np.zeros(self.used, np.int64)
        moved[kept] = np.arange(1, len(kept) + 1)
        for column in self._columns.values():
            column[1 : len(kept) + 1] = column[kept]
        self.used = len(kept) + 1
        self._compact_at = max(_LEAST_CAPACITY, 2 * self.used)
        if self._capacity > 4 * self._compact_at:
            self._resize(self._compact_at, self.used)
        return moved

    def _resize(self, capacity: int, keep: int) -> None:
        for name, column in self._columns.items():
            larger = np.zeros((capacity, *column.shape[1:]), column.dtype)
            larger[:keep] = column[:keep]
            self._columns[name] = larger
        self._capacity = capacity


def _widened(name: str, kept: np.dtype[Any], given: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a column that held entries of one dtype and is to hold those of another as well.

    Real numbers are rounded to the floats that a column has, from float32 on; nothing else changes a value.
    """
    is_number = given.kind in _NUMBERS and kept.kind in _NUMBERS
    if kept.kind == "O" or (kept.kind == "f" and kept.itemsize >= 4 and is_number and given.kind != "c"):
        return kept
    if not is_number and given.kind != kept.kind:
        raise BatchError(name, f"entries of dtype {kept}, as before", given)
    return np.result_type(kept, given)


def as_index(slots: Sequence[int]) -> Index:
    """Slots as an index: a slice where they follow each other, which reads and writes without gathering."""
    count = len(slots)
    first = slots[0]
    if slots[-1] - first == count - 1 and (count < 3 or slots == list(range(first, first + count))):
        return slice(first, first + count)
    return np.array(slots, np.int64)
