"""The gradient of a loss over a whole batch as one compiled function, for whoever sends it to the one that learns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.learning.algorithms.compiled_function import CompiledFunction, Mode
from aiorl.learning.algorithms.compiled_update import Tensors, UpdateSpec, gradients_of

__all__ = ["CompiledGradient"]

F32 = NDArray[np.float32]


class CompiledGradient:
    """Computes gradients of the variables as they are; changes nothing."""

    def __init__(self, spec: UpdateSpec, variables: Mapping[str, Any], xla: Mode) -> None:
        """Prepare it; it is compiled at its first call, and once for each size of batches.

        Args:
            spec: the loss and its names.
            variables: by name, to compute gradients of.
            xla: see `CompiledFunction`.
        """
        self._spec = spec
        self._names = tuple(variables)
        self._gradients = gradients_of(spec.loss, list(variables.values()))
        self._function = CompiledFunction(self._run, list(variables.values()), xla, "gradient")

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return self._function.traces

    def warm_up(self, batch: Mapping[str, NDArray[Any]]) -> float:
        """Compile for batches of this shape.

        Returns: seconds it took.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        return self._function.warm_up(partial(self, batch, coefficients))

    def __call__(
        self, batch: Mapping[str, NDArray[Any]], coefficients: Mapping[str, float]
    ) -> tuple[dict[str, F32], F32]:
        """Compute it.

        Args:
            batch: arrays with the same first dimension, all of whose rows are one minibatch.
            coefficients: by the names of the spec.
        Returns: weight name -> gradient; and the metrics in the order of the spec with the loss as the last, float32.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        values = np.array([coefficients[name] for name in self._spec.coefficient_names], np.float32)
        metrics, *gradients = self._function(
            len(next(iter(batch.values()))),
            {name: tf.convert_to_tensor(array) for name, array in batch.items()},
            tf.convert_to_tensor(values),
        )
        assert metrics is not None
        return {name: np.asarray(found) for name, found in zip(self._names, gradients, strict=True)}, metrics

    def _run(self, batch: Tensors, values: tf.Tensor) -> list[tf.Tensor]:
        coefficients = {name: values[index] for index, name in enumerate(self._spec.coefficient_names)}
        if self._spec.begin is not None:
            batch = self._spec.begin(batch, coefficients)
        gradients, loss, found = self._gradients(batch, coefficients)
        return [
            tf.stack([*(found[name] for name in self._spec.metric_names), loss]),
            *map(tf.convert_to_tensor, gradients),
        ]
