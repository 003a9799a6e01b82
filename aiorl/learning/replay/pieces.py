"""Pieces of stored experience that the replay already has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.errors import BatchError

Array = NDArray[Any]


_MAX_KNOWN = 1 << 20
"""Maximum number of known pieces, which fits into the meta.json of a checkpoint; further pieces
always count as new."""


class Pieces:
    """Known pieces of stored experience, by number.

    Workers that come and go read stored experience over and over; the numbers identify the pieces
    stored before.
    """

    def __init__(self) -> None:
        """Begin without known pieces."""
        self._known: dict[int, None] = {}  # in order of arrival
        self._numbers: tuple[int, ...] | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the known pieces, in order of arrival."""
        if self._numbers is None:
            self._numbers = tuple(self._known)
        return self._numbers

    @property
    def is_full(self) -> bool:
        """True if there can be stored pieces that are not known."""
        return len(self._known) >= _MAX_KNOWN

    def take(self, numbers: Sequence[int]) -> None:
        """Replace the known pieces by those with these numbers."""
        self._known = dict.fromkeys(numbers)
        self._numbers = None

    @staticmethod
    def check(arrays: Mapping[str, Array]) -> None:
        """Check the shape and dtype of a fragment's piece numbers, if it has any.

        Raises:
            BatchError: they are wrong.
        """
        found = arrays.get(c.PIECE)
        shape = arrays[c.ACTIONS].shape[:2]
        if found is not None and (found.shape != shape or found.dtype != np.int64):
            raise BatchError(c.PIECE, f"int64 {shape}", f"{found.dtype} {found.shape}")

    def new_rows(
        self, arrays: Mapping[str, Array], *, is_whole: bool
    ) -> Mapping[str, Array] | None:
        """Return a fragment without the rows of known pieces, and remember its new pieces.

        Args:
            arrays: arrays of the fragment by name.
            is_whole: True if the replay still has all rows it ever stored; otherwise everything is
                new.

        Returns:
            The fragment, with known rows not `aiorl.data.columns.VALID`; None if all rows are
            known.
        """
        if c.PIECE not in arrays:
            return arrays
        if not is_whole:
            self.take(())
            return arrays
        column = arrays[c.PIECE]
        transitions = arrays.get(c.VALID)
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
