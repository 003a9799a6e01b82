"""Columns compressed with LZ4 in memory: row by row, or as a whole.

Not the wire's compression, which packs whole messages and is invisible: this one is what a user asks for, to hold
more observations in memory. Rows can be picked and joined without being decompressed; a whole column is smaller,
but must be decompressed for everything.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import lz4.block
import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedBulk", "PackedColumn", "PackedRows"]

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 26  # a block holds at most about 2 GB; smaller ones bound the memory a step takes


class PackedColumn(ABC):
    """A column ``[B, ...]`` in compressed form.

    Attributes:
        dtype: of the array.
        shape: of the array.
        blobs: compressed blocks; none for an array without bytes.
    """

    __slots__ = ("blobs", "dtype", "shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], blobs: Sequence[bytes]) -> None:
        """Take the compressed form as it is."""
        self.dtype = dtype
        self.shape = shape
        self.blobs = tuple(blobs)

    @property
    def nbytes(self) -> int:
        """Size of the compressed form."""
        return sum(map(len, self.blobs))

    def __len__(self) -> int:
        return self.shape[0]

    def unpack(self) -> Array:
        """The array, newly allocated."""
        out = np.empty(self.shape, self.dtype)
        raw = out.reshape(-1).view(np.uint8).data if out.size else memoryview(b"")
        for (start, end), blob in zip(self._extents(len(raw)), self.blobs, strict=True):
            raw[start:end] = lz4.block.decompress(blob, uncompressed_size=end - start)
        return out

    @abstractmethod
    def _extents(self, size: int) -> list[tuple[int, int]]:
        """First and last byte of what each blob holds."""


class PackedRows(PackedColumn):
    """Each row compressed on its own."""

    __slots__ = ()

    @classmethod
    def pack(cls, column: Array) -> PackedRows:
        """Compress ``[B, ...]``."""
        rows = np.ascontiguousarray(column)
        blobs = [lz4.block.compress(row.tobytes(), store_size=False) for row in rows] if rows[:1].size else []
        return cls(rows.dtype, rows.shape, blobs)

    def take(self, index: Any) -> PackedRows:
        """Rows by slice, mask or integer positions, as they are."""
        positions = np.arange(len(self))[index]
        shape = (len(positions), *self.shape[1:])
        return PackedRows(self.dtype, shape, [self.blobs[at] for at in positions] if self.blobs else [])

    @staticmethod
    def concat(columns: Sequence[PackedRows]) -> PackedRows:
        """Rows of columns with equal dtype and row shape, one after the other."""
        first = columns[0]
        blobs = list(itertools.chain.from_iterable(column.blobs for column in columns))
        return PackedRows(first.dtype, (sum(map(len, columns)), *first.shape[1:]), blobs)

    def fits(self, other: PackedColumn) -> bool:
        """Whether `concat` can join the two."""
        return isinstance(other, PackedRows) and self.dtype == other.dtype and self.shape[1:] == other.shape[1:]

    def _extents(self, size: int) -> list[tuple[int, int]]:
        step = size // len(self.blobs) if self.blobs else 0
        return [(at * step, (at + 1) * step) for at in range(len(self.blobs))]


class PackedBulk(PackedColumn):
    """The whole column as one."""

    __slots__ = ()

    @classmethod
    def pack(cls, column: Array) -> PackedBulk:
        """Compress ``[B, ...]``."""
        array = np.ascontiguousarray(column)
        raw = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        blobs = [
            lz4.block.compress(raw[at : at + _BLOCK_BYTES], store_size=False) for at in range(0, len(raw), _BLOCK_BYTES)
        ]
        return cls(array.dtype, array.shape, blobs)

    def _extents(self, size: int) -> list[tuple[int, int]]:
        return [(at, min(at + _BLOCK_BYTES, size)) for at in range(0, size, _BLOCK_BYTES)]
