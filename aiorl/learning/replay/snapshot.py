"""Snapshot: a replay as it was at some moment, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.column_spec import Piece
from aiorl.learning.replay.ring import RingSnapshot

__all__ = ["MAX_PIECE_BYTES", "Snapshot"]

Array = NDArray[Any]

MAX_PIECE_BYTES = 16 << 20


class Snapshot:
    """All that a replay must get back to go on as if nothing had happened.

    Attributes:
        values: counters, random state and settings, as JSON can hold them.
    """

    def __init__(self, values: dict[str, Any], rings: Mapping[str, RingSnapshot], arrays: Mapping[str, Array]) -> None:
        """For `Replay.snapshot`."""
        self.values = values
        self._rings = rings
        self._arrays = arrays

    def pieces(self, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[Piece]:
        """Yield name, number of the first row, and rows of each piece, those of one name in order; in any thread, once.

        Rows of records are uint8 [B, bytes of a record].

        Args:
            max_bytes: of a piece; priorities, of 8 bytes a row, are one piece.

        Raises:
            CheckpointError: training wrote over too much before it was read, or another snapshot was begun.
        """
        for name, array in self._arrays.items():
            yield name, 0, array
        for name, ring in self._rings.items():
            for first, rows in ring.pieces(max_bytes):
                yield name, first, rows.view(np.uint8).reshape(len(rows), -1)

    def close(self) -> None:
        """Keep nothing for it any longer, whether it was read or not."""
        for ring in self._rings.values():
            ring.close()
