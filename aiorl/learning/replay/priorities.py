"""Priorities: how often each row is drawn, and how much it then counts.

Source: Schaul et al. 2016, https://arxiv.org/abs/1511.05952, the proportional variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from aiorl.data.columns import F32, F64, I64

_START = 10
"""Level at which a search begins. Its sums are few enough to be added up in each search, which
replaces as many steps."""
_DENSE = 4
"""A level is computed as a whole if more than one in this many of its sums changes."""


class SumTree:
    """Sums of priorities over ever larger runs of slots.

    Every sum is that of the two below it and is computed again whenever one of them changes. So
    errors don't accumulate, and the priorities alone reproduce the tree.

    Attributes:
        priorities: [capacity] float64, proportional to the probability of each slot; 0 = never
            drawn. Read-only.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with all priorities 0."""
        depth = max(capacity - 1, 0).bit_length()
        sums = np.zeros(self.num_sums(capacity))
        self._levels = [sums[1 << level : 2 << level] for level in range(depth + 1)]
        self.priorities: F64 = self._levels[-1][:capacity]

    @staticmethod
    def num_sums(capacity: int) -> int:
        """Return the number of 8-byte numbers in a tree with this capacity."""
        return int(2 << max(capacity - 1, 0).bit_length())

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[0][0])

    def set(self, slots: I64, priorities: F64) -> None:
        """Set priorities [B]; for a repeated slot, the last one counts."""
        if not len(slots):
            return
        self._levels[-1][slots] = priorities
        for parents, children in self._upwards():
            slots = slots >> 1
            if len(slots) * _DENSE > len(parents):
                np.add(children[0::2], children[1::2], out=parents)
            else:
                first = slots << 1
                parents[slots] = children[first] + children[first + 1]

    def set_run(self, first: int, priorities: F64) -> None:
        """Set the priorities of consecutive slots."""
        if not len(priorities):
            return
        end = first + len(priorities)
        self._levels[-1][first:end] = priorities
        for parents, children in self._upwards():
            first = first >> 1
            end = (end + 1) >> 1
            changed = children[2 * first : 2 * end]
            np.add(changed[0::2], changed[1::2], out=parents[first:end])

    def find(self, values: F64) -> I64:
        """Return the slot [B] in which each value lies if all priorities are laid out end to end.

        A slot with priority 0 is never returned, despite rounding.

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
            of_first = level.take(slots)
            is_second = rest >= of_first
            np.subtract(rest, of_first, out=rest, where=is_second)
            slots += is_second
        missed = np.flatnonzero(self._levels[-1].take(slots) <= 0)
        if len(missed):  # because of rounding: use the next slot that can be drawn
            positive = np.flatnonzero(self._levels[-1])
            after = np.searchsorted(positive, slots[missed])
            slots[missed] = positive[np.minimum(after, len(positive) - 1)]
        return slots

    def _upwards(self) -> Iterator[tuple[F64, F64]]:
        """Return pairs of a level and the one below it, from the lowest pair on."""
        return zip(self._levels[-2::-1], self._levels[:0:-1], strict=True)


_LEAST = 1e-200
_MOST = 1e200
"""Bounds of a priority: not 0, which is never drawn, and not so large that a sum overflows."""


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Settings of priorities: (|TD error| + epsilon) to the power of alpha.

    Attributes:
        alpha: exponent; 0 draws all rows alike, 1 in proportion to the errors.
        epsilon: constant that lets rows without an error be drawn too.
    """

    alpha: float = 0.6
    epsilon: float = 1e-6


class Priorities:
    """Priorities of the slots of a ring.

    Attributes:
        largest: largest |TD error| that the learner has found so far, initially 1. New rows without
            an error get it, and errors from others count as at most this.
        tree: (|TD error| + epsilon) ** alpha of each slot, 0 for empty slots.
    """

    def __init__(self, capacity: int, settings: Prioritised) -> None:
        """Begin without rows."""
        self.largest = 1.0
        self.tree = SumTree(capacity)
        self._settings = settings

    def set_run(self, first: int, errors: F64 | None, count: int) -> None:
        """Set the priorities of consecutive slots from initial errors.

        Args:
            first: first slot.
            errors: [count], at least 0, found by the worker that sampled the rows. They never
                change `largest` and count as at most that: rows of a sender with excessive numbers
                are drawn like rows without errors, until the learner has found their errors. None =
                `largest` for all.
            count: number of slots.
        """
        bounded = np.full(count, self.largest)
        if errors is not None:
            np.minimum(errors, self.largest, out=bounded)
        self.tree.set_run(first, self._priorities(bounded))

    def update(self, slots: I64, errors: F64) -> None:
        """Set the priorities of slots [B] from errors that the learner found.

        For a repeated slot, the last one counts.
        """
        if len(slots):
            self.largest = max(self.largest, float(errors.max()))
            self.tree.set(slots, self._priorities(errors))

    def draw(
        self, rng: np.random.Generator, num_batches: int, batch_size: int, beta: float
    ) -> tuple[I64, F32]:
        """Draw slots in proportion to their priorities, one from each of `batch_size` equal shares
        of their sum.

        Returns:
            Slots, and the weight of each, ``(N P)^-beta`` divided by the largest of its minibatch,
            so at most 1; both [num_batches, batch_size].
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
