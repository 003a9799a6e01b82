"""Priorities: which rows are drawn how often, and how much they then count.

Source: Schaul et al. 2016, https://arxiv.org/abs/1511.05952, the proportional variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_START = 10
"""Level that a search begins at: its sums are few enough to be added up each time, which replaces as many steps."""
_DENSE = 4
"""A level is made anew as a whole where more than one in so many of its sums changes."""


class SumTree:
    """Sums of priorities over ever larger runs of slots.

    Every sum is that of the two below it, added anew whenever one of them changes: errors don't build up, and the
    priorities alone give the same tree again.

    Attributes:
        priorities: [capacity] float64, what each slot is drawn in proportion to; 0 = never. Not to be written to.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with all priorities 0."""
        depth = max(capacity - 1, 0).bit_length()
        sums = np.zeros(self.num_sums(capacity))
        self._levels = [sums[1 << level : 2 << level] for level in range(depth + 1)]
        self.priorities: F64 = self._levels[-1][:capacity]

    @staticmethod
    def num_sums(capacity: int) -> int:
        """Numbers of 8 bytes that a tree of so many slots holds."""
        return int(2 << max(capacity - 1, 0).bit_length())

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[0][0])

    def set(self, slots: I64, priorities: F64) -> None:
        """Set priorities [B]; of a slot that is there several times, the last one counts."""
        if not len(slots):
            return
        self._levels[-1][slots] = priorities
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            slots = slots >> 1
            if len(slots) * _DENSE > len(parents):
                np.add(children[0::2], children[1::2], out=parents)
            else:
                left = slots << 1
                parents[slots] = children[left] + children[left + 1]

    def set_run(self, first: int, priorities: F64) -> None:
        """Set the priorities of consecutive slots."""
        if not len(priorities):
            return
        end = first + len(priorities)
        self._levels[-1][first:end] = priorities
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            first, end = first >> 1, (end + 1) >> 1
            np.add(children[2 * first : 2 * end : 2], children[2 * first + 1 : 2 * end : 2], out=parents[first:end])

    def find(self, values: F64) -> I64:
        """Return the slot [B] in which each value lies where all priorities are laid out end to end.

        A slot of priority 0 is never found, whatever rounding does.

        Args:
            values: [B], from 0 to the total, which must not be 0.
        """
        start = min(_START, len(self._levels) - 1)
        sums = self._levels[start]
        edges = np.cumsum(sums)
        slots = np.minimum(np.searchsorted(edges, values, side="right"), len(sums) - 1)
        rest = values - (edges - sums)[slots]
        for level in self._levels[start + 1 :]:
            slots <<= 1
            left = level.take(slots)
            is_right = rest >= left
            np.subtract(rest, left, out=rest, where=is_right)
            slots += is_right
        missed = np.flatnonzero(self._levels[-1].take(slots) <= 0)
        if len(missed):  # by rounding: the next one that may be drawn
            positive = np.flatnonzero(self._levels[-1])
            after = np.searchsorted(positive, slots[missed])
            slots[missed] = positive[np.minimum(after, len(positive) - 1)]
        return slots


F32 = NDArray[np.float32]
_LEAST = 1e-200
_MOST = 1e200
"""Bounds of a priority: neither 0, which is never drawn, nor so large that a sum of them overflows."""


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Rows are drawn in proportion to (|TD error| + epsilon) to the power of alpha.

    Attributes:
        alpha: 0 draws all alike, 1 in proportion to the errors themselves.
        epsilon: so that rows without an error are drawn too.
    """

    alpha: float = 0.6
    epsilon: float = 1e-6


class Priorities:
    """Priorities of the slots of a ring.

    Attributes:
        largest: the largest |TD error| that the learner has found so far, 1 at first. Rows get it that nobody has
            judged yet, and an error that somebody else found counts as no more.
        tree: (|TD error| + epsilon) ** alpha of each slot, 0 of those without a row.
    """

    def __init__(self, capacity: int, settings: Prioritised) -> None:
        """Begin without rows."""
        self.largest = 1.0
        self.tree = SumTree(capacity)
        self._settings = settings

    def set_run(self, first: int, errors: F64 | None, count: int) -> None:
        """Set the priorities of consecutive slots to those of first errors.

        Args:
            first: slot.
            errors: [count], at least 0, as whoever sampled the rows found them. They never change `largest`, and each
                counts at most as that: a sender whose numbers are too large has its rows drawn as rows without any
                are, until the learner has found their errors. None = the largest so far.
            count: of slots.
        """
        found = np.full(count, self.largest) if errors is None else np.minimum(errors, self.largest)
        self.tree.set_run(first, self._priorities(found))

    def update(self, slots: I64, errors: F64) -> None:
        """Set the priorities of slots [B] to those of errors that the learner found.

        Of a slot that is there twice, the last one counts.
        """
        if len(slots):
            self.largest = max(self.largest, float(errors.max()))
            self.tree.set(slots, self._priorities(errors))

    def draw(self, rng: np.random.Generator, num_batches: int, batch_size: int, beta: float) -> tuple[I64, F32]:
        """Draw slots in proportion to their priorities, one from each of `batch_size` equal shares of their sum.

        Returns: slots, and how much each counts: ``(N P)^-beta`` over the largest of its minibatch, so at most 1; both
            [num_batches, batch_size].
        """
        total = self.tree.total
        places = rng.random((num_batches, batch_size))
        places += np.arange(batch_size)
        places *= total / batch_size
        slots = self.tree.find(places.reshape(-1)).reshape(places.shape)
        priorities = self.tree.priorities.take(slots)
        weights = (priorities.min(axis=1, keepdims=True) / priorities) ** beta
        return slots, weights.astype(np.float32)

    def _priorities(self, errors: F64) -> F64:
        priorities: F64 = (errors + self._settings.epsilon) ** self._settings.alpha
        return np.clip(priorities, _LEAST, _MOST, out=priorities)
