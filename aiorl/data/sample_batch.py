"""SampleBatch: rows of experience as named columns ``[B, ...]``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aiorl.data import columns as c
from aiorl.errors import BatchError

__all__ = ["SampleBatch"]

Array = NDArray[Any]


class SampleBatch(MutableMapping[str, Array]):
    """Columns of equal length, by name; column order is kept.

    Attributes:
        count: number of rows B (agent steps; for a single agent also environment steps).
    """

    def __init__(self, columns: Mapping[str, ArrayLike] | None = None, **more: ArrayLike) -> None:
        """Wrap the columns given; arrays are not copied.

        Raises:
            BatchError: columns of different length, or a column without rows dimension.
        """
        self._columns: dict[str, Array] = {}
        self.count = 0
        for name, column in {**(columns or {}), **more}.items():
            self[name] = np.asarray(column)

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __setitem__(self, name: str, column: ArrayLike) -> None:
        array = np.asarray(column)
        if array.ndim == 0:
            raise BatchError(name, "an array with one row per step", "a scalar")
        others = any(other != name for other in self._columns)
        if others and len(array) != self.count:
            raise BatchError(name, f"{self.count} rows", f"{len(array)} rows")
        self._columns[name] = array
        self.count = len(array)

    def __delitem__(self, name: str) -> None:
        del self._columns[name]
        if not self._columns:
            self.count = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns, as a mapping has it; rows are ``count``."""
        return len(self._columns)

    def total(self) -> int:
        """Agent steps: the number of rows."""
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self._columns.values())

    @staticmethod
    def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Rows of all batches in the order given.

        Raises:
            BatchError: batches whose columns differ.
        """
        filled = [batch for batch in batches if len(batch)]
        if not filled:
            return SampleBatch()
        names = list(filled[0])
        for batch in filled[1:]:
            if set(batch) != set(names):
                odd = sorted(set(batch) ^ set(names))
                raise BatchError(odd[0], f"columns {sorted(names)} in every batch", sorted(batch))
        return SampleBatch({name: np.concatenate([batch[name] for batch in filled]) for name in names})

    def slice(self, start: int, end: int) -> SampleBatch:
        """Rows ``start`` to ``end`` (exclusive) as views."""
        return SampleBatch({name: column[start:end] for name, column in self.items()})

    def take(self, index: NDArray[Any]) -> SampleBatch:
        """Rows at the integer positions (or boolean mask) given, copied."""
        return SampleBatch({name: column[index] for name, column in self.items()})

    def shuffled(self, rng: np.random.Generator) -> SampleBatch:
        """The same rows in random order."""
        return self.take(rng.permutation(self.count))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One mapping column -> value per row, in order."""
        for index in range(self.count):
            yield {name: column[index] for name, column in self.items()}

    def split_by_episode(self) -> list[SampleBatch]:
        """One batch (of views) per run of equal ``eps_id``, in order of appearance.

        Raises:
            BatchError: there is no ``eps_id`` column.
        """
        if c.EPS_ID not in self:
            raise BatchError(c.EPS_ID, "the column to be there", sorted(self))
        episode_ids = self[c.EPS_ID]
        if not self.count:
            return []
        cuts = np.flatnonzero(episode_ids[1:] != episode_ids[:-1]) + 1
        edges = [0, *cuts.tolist(), self.count]
        return [self.slice(start, end) for start, end in itertools.pairwise(edges)]

    def copy(self) -> SampleBatch:
        """A batch with its own copy of every column."""
        return SampleBatch({name: column.copy() for name, column in self.items()})

    def __repr__(self) -> str:
        return f"SampleBatch({self.count} rows: {', '.join(self._columns)})"
