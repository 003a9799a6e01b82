"""Which of stored experience is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.errors import BatchError

Array = NDArray[Any]


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
