"""ColumnSpec: one column of the rows that are trained on, as the update gets it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import BatchError

__all__ = ["ColumnSpec", "Dtype", "Piece"]

Array = NDArray[Any]
Dtype = Literal["float32", "int32", "uint8"]
Piece = tuple[str, int, Array]
"""Name of an array, number of its first row in this piece of it, and these rows."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of the train batch.

    Attributes:
        name: as in the fragment.
        shape: of one row.
        dtype: as the update gets it; int64 and bool of the fragment become int32 and float32.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: Dtype = "float32"

    @property
    def is_packed(self) -> bool:
        """Return whether it lies in the packed array of `aiorl.learning.algorithms.batch_buffers`."""
        return len(self.shape) <= 1 and self.dtype in ("float32", "int32")

    @property
    def width(self) -> int:
        """Elements of one row."""
        return prod(self.shape)

    def check(self, array: Array, leading: tuple[int, ...]) -> None:
        """Raise BatchError unless an array ``[*leading, *shape]`` can be taken for this column."""
        if array.shape != (*leading, *self.shape):
            raise BatchError(self.name, f"shape {(*leading, *self.shape)}", array.shape)
        if not self._converts(array.dtype):
            raise BatchError(self.name, f"what fits {self.dtype}", array.dtype)

    def _converts(self, given: np.dtype[Any]) -> bool:
        if self.dtype == "float32":
            return given.kind in "fb"
        if self.dtype == "int32":
            return given.kind in "iu"
        return given == np.uint8
