"""The steps before and after the network, said once for all formats.

A format has its own way to write an operation (`Operations`); tensors are whatever it calls them by. The first axis of
all is that of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.distributions import (
    MASKED_LOGIT,
    Bernoulli,
    Categorical,
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from aiorl.acting.observation.filters import Normalisation
from aiorl.errors import ExportError
from aiorl.run.export.form import ActionPart

__all__ = ["Operations", "choose_action", "normalise"]

_ONE = np.ones(1, np.float32)

T = TypeVar("T")
Array = NDArray[Any]


class Operations(Protocol[T]):
    """The operations that a format has to offer; T is a tensor."""

    def add(self, tensor: T, constant: Array) -> T:
        """Sum."""

    def subtract(self, tensor: T, constant: Array) -> T:
        """Difference."""

    def multiply(self, tensor: T, constant: Array) -> T:
        """Product."""

    def minimum(self, tensor: T, constant: Array) -> T:
        """The lesser of both, element-wise."""

    def maximum(self, tensor: T, constant: Array) -> T:
        """The greater of both, element-wise."""

    def tanh(self, tensor: T) -> T:
        """Hyperbolic tangent."""

    def is_positive(self, tensor: T) -> T:
        """Bool: greater than zero."""

    def argmax(self, tensor: T) -> T:
        """Int64: position of the greatest number along the last axis; of several the first."""

    def columns(self, tensor: T, start: int, stop: int) -> T:
        """Columns of a tensor [N, P]."""

    def take(self, tensor: T, columns: NDArray[np.int64], fill: float) -> T:
        """Columns of a tensor [N, P] by number, in any order; number P is a column of `fill`."""

    def reshape(self, tensor: T, shape: Sequence[int]) -> T:
        """The same numbers as [N, *shape]."""

    def cast(self, tensor: T, dtype: str) -> T:
        """The same numbers in another dtype."""


def normalise(ops: Operations[T], obs: T, own: Normalisation) -> T:
    """Filtered observations, float32."""
    centred = ops.subtract(ops.cast(obs, "float32"), own.centre)
    return ops.subtract(ops.multiply(centred, own.scale), own.shift)


def choose_action(ops: Operations[T], dist_inputs: T, part: ActionPart) -> T:
    """The most likely action [N, ...] as the environment takes it, for the inputs of the whole distribution [N, P].

    Raises: ExportError for a distribution of another kind.
    """
    inputs = ops.columns(dist_inputs, part.inputs.start, part.inputs.stop)
    return ops.cast(ops.reshape(_mode(ops, inputs, part), part.output.shape), part.output.dtype)


def _mode(ops: Operations[T], inputs: T, part: ActionPart) -> T:
    kind = part.distribution
    match kind:
        case Categorical():
            return _shifted(ops, ops.argmax(inputs), np.array(kind.start))
        case MultiCategorical():
            widest = int(kind.sizes.max())
            columns = np.full(len(kind.sizes) * widest, kind.num_inputs)
            columns[kind.positions] = np.arange(kind.num_inputs)
            padded = ops.take(inputs, columns, MASKED_LOGIT)
            return _shifted(ops, ops.argmax(ops.reshape(padded, [len(kind.sizes), widest])), kind.start)
        case Bernoulli():
            return ops.is_positive(inputs)
        case DiagGaussian():
            values = ops.columns(inputs, 0, kind.size)
            if isinstance(kind, SquashedGaussian):
                share = ops.multiply(ops.add(ops.tanh(values), _ONE), _ONE / 2)
                values = ops.minimum(ops.add(ops.multiply(share, kind.span), kind.low), kind.high)
            if part.bounds is not None:
                low, high = part.bounds
                values = ops.minimum(ops.maximum(values, low), high)
            return values
    raise ExportError(f"actions of a {kind.name} distribution can't be exported")


def _shifted(ops: Operations[T], index: T, start: NDArray[np.int64]) -> T:
    return ops.add(index, start.astype(np.int64)) if start.any() else index
