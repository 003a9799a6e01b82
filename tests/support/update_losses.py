"""The loss that an update compiles, of a made-up fragment, for tests that work it out again in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm

__all__ = ["LossCase", "standardised"]

_LENGTH, _NUM_ENVS = 5, 4


class LossCase:
    """A fragment [5, 4] in which some rows are no transitions, and its loss."""

    def __init__(
        self, kind: type[CompiledAlgorithm[Any]], config: Any, model: Any, make_fragment: Callable[..., Any]
    ) -> None:
        """Make the fragment with the fixture of that name, and the loss as the algorithm does."""
        algorithm = kind(config, model)
        self._fragment = make_fragment(kind.sample_plan(config), model, _LENGTH, _NUM_ENVS, 3, invalid=True)
        self._buffers = algorithm.buffers
        self._loss = algorithm.update_spec().loss

    def of_rows(self, coefficients: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Loss and metrics of one minibatch of all rows."""
        batch = self._buffers.rows([self._fragment], _LENGTH * _NUM_ENVS)
        total, metrics = self._loss(_tensors(batch), _tensors(coefficients))
        return float(total), {name: float(value) for name, value in metrics.items()}

    def transitions(self) -> dict[str, NDArray[Any]]:
        """The rows that are any, by column."""
        keep = self._fragment[c.VALID].reshape(-1)
        return {name: column.reshape(len(keep), *column.shape[2:])[keep] for name, column in self._fragment.items()}

    def of_sequences(self, coefficients: Mapping[str, float], order: list[int], **others: list[int]) -> float:
        """Loss of the sequences in an order, but for columns whose own order is named."""
        batch = self._buffers.sequences([self._fragment], _NUM_ENVS, _LENGTH)
        ordered = {name: tf.gather(array, others.get(name, order)) for name, array in batch.items()}
        return float(self._loss(ordered, _tensors(coefficients))[0])


def standardised(x: NDArray[Any]) -> NDArray[Any]:
    """Of mean 0 and deviation 1."""
    result: NDArray[Any] = (x - np.mean(x)) / (np.std(x) + 1e-8)
    return result


def _tensors(arrays: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}
