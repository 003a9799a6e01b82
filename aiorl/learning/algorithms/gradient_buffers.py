"""Gradients that workers computed, as the train batch of a `CompiledUpdate`: one row for each, weight after weight.

The step is taken with their mean, in which each counts by the transitions that it is of: that is the gradient of all of
these together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.data.finite import first_not_finite
from aiorl.data.gradient_columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS, num_rows
from aiorl.errors import BatchError
from aiorl.learning.algorithms.compiled_update import Tensors

__all__ = ["GradientBuffers"]

Array = NDArray[Any]

_GRADIENTS = "gradients"


class GradientBuffers:
    """Buffers in which the gradients of one train batch are put together; two of them take turns."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        metric_names: Sequence[str],
        columns: Sequence[str],
        num_fragments: int,
    ) -> None:
        """Lay them out.

        Args:
            shapes: weight name -> shape, in the order of the variables that are trained.
            metric_names: what a loss says, without the loss itself.
            columns: of the sample plan, which a worker names by their number.
            num_fragments: F, gradients in a train batch at most.
        """
        self._shapes = dict(shapes)
        self._metric_names = tuple(metric_names)
        self._columns = tuple(columns)
        self._width = 0
        self._places: list[slice] = []
        for shape in self._shapes.values():
            self._places.append(slice(self._width, self._width + prod(shape)))
            self._width += prod(shape)
        self._num_fragments = num_fragments
        self._sets = [self.zeros() for _ in range(2)]
        self._next = 0

    def zeros(self) -> dict[str, Array]:
        """A batch without any gradient, in arrays of its own."""
        return {
            _GRADIENTS: np.zeros((self._num_fragments, self._width), np.float32),
            METRICS: np.zeros((self._num_fragments, len(self._metric_names) + 1), np.float32),
            NUM_ROWS: np.zeros(self._num_fragments, np.float32),
            CULPRIT: np.zeros(self._num_fragments, np.int32),
        }

    def batch(self, fragments: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """The gradients of the fragments, in the order given; one that was not finite is NaN.

        Returns: arrays [F, ...], valid until two further calls.
        Raises: BatchError if there are more than F, or one does not fit.
        """
        if len(fragments) > self._num_fragments:
            raise BatchError(NUM_ROWS, f"at most {self._num_fragments} gradients in a train batch", len(fragments))
        batch = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        for array in batch.values():
            array[len(fragments) :] = 0
        for row, fragment in enumerate(fragments):
            self._check_form(fragment)
            batch[NUM_ROWS][row] = fragment[NUM_ROWS][0]
            if CULPRIT in fragment:
                batch[CULPRIT][row] = fragment[CULPRIT][0]
                batch[_GRADIENTS][row] = batch[METRICS][row] = np.nan
                continue
            batch[CULPRIT][row] = 0
            batch[METRICS][row] = fragment[METRICS]
            for name, place in zip(self._shapes, self._places, strict=True):
                batch[_GRADIENTS][row, place] = fragment[GRADIENT_OF + name].reshape(-1)
        return batch

    def check(self, fragment: Mapping[str, Array]) -> None:
        """Refuse what is no gradient of these weights. Safe in any thread.

        Raises: BatchError naming the column at fault.
        """
        self._check_form(fragment)
        if name := first_not_finite(fragment):
            raise BatchError(name, "finite numbers", "one that is not")

    def _check_form(self, fragment: Mapping[str, Array]) -> None:
        num_rows(fragment)
        if CULPRIT in fragment:
            found = fragment[CULPRIT]
            if found.shape != (1,) or found.dtype != np.int32 or not 0 <= found[0] <= len(self._columns):
                raise BatchError(CULPRIT, f"int32 [1], from 0 to {len(self._columns)}", f"{found!r:.100}")
            wanted: dict[str, tuple[int, ...]] = {}
        else:
            wanted = {METRICS: (len(self._metric_names) + 1,)}
            wanted |= {GRADIENT_OF + name: shape for name, shape in self._shapes.items()}
        known = {NUM_ROWS, *wanted, *fragment.keys() & {CULPRIT}}
        if unknown := sorted(fragment.keys() - known):
            raise BatchError("batches", f"no other columns than {', '.join(sorted(known))}", f"{unknown[0]!r:.100}")
        for name, shape in wanted.items():
            column = fragment.get(name)
            if column is None or column.shape != shape or column.dtype != np.float32:
                raise BatchError(
                    name, f"float32 {shape}", "none" if column is None else f"{column.dtype} {column.shape}"
                )

    def num_filled(self, batch: Mapping[str, Array]) -> int:
        """Gradients in a batch."""
        return int(np.count_nonzero(batch[NUM_ROWS]))

    def first_not_finite(self, batch: Mapping[str, Array]) -> str:
        """The first column of rows that a worker found at fault; "" if there is none."""
        found = batch[CULPRIT][batch[CULPRIT] > 0]
        return self._columns[found[0] - 1] if len(found) else ""

    def mean(self, minibatch: Tensors, coefficients: Tensors) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        """The mean gradient of a batch with its metrics, as a `CompiledUpdate` takes it."""
        weights = minibatch[NUM_ROWS] / tf.maximum(tf.reduce_sum(minibatch[NUM_ROWS]), 1.0)
        flat = tf.linalg.matvec(minibatch[_GRADIENTS], weights, transpose_a=True)
        *metrics, loss = tf.unstack(tf.linalg.matvec(minibatch[METRICS], weights, transpose_a=True))
        gradients = [
            tf.reshape(flat[place], shape) for place, shape in zip(self._places, self._shapes.values(), strict=True)
        ]
        return gradients, loss, dict(zip(self._metric_names, metrics, strict=True))
