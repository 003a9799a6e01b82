"""Priorities: which rows are drawn how often, and how much they then count.

Source: Schaul et al. 2016, https://arxiv.org/abs/1511.05952, the proportional variant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiorl.learning.replay.spec import Prioritised
from aiorl.learning.replay.sum_tree import SumTree

__all__ = ["Priorities"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_LEAST = 1e-200
_MOST = 1e200
"""Bounds of a priority: neither 0, which is never drawn, nor so large that a sum of them overflows."""


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

    def clear_run(self, first: int, count: int) -> None:
        """Never draw these consecutive slots."""
        self.tree.set_run(first, np.zeros(count))

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
