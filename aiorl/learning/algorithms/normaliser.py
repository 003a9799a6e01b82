"""Normaliser: observations of minibatches are filtered within the compiled update."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from aiorl.acting.observation.filters import MeanStdFilter, Normalisation, ObservationFilter
from aiorl.data import columns as c
from aiorl.errors import InternalError
from aiorl.learning.algorithms.compiled_update import Tensors

__all__ = ["Normaliser"]

_OBSERVATIONS = (c.OBS, c.NEW_OBS)


class Normaliser:
    """Filters what was stored raw, by the statistics that it took last.

    The statistics are variables, so that new ones need no new compilation.
    """

    def __init__(self, obs_shape: Sequence[int]) -> None:
        """Begin with statistics that leave observations as they are.

        Args:
            obs_shape: shape of one observation.
        """
        self._centre, self._scale, self._shift = (
            tf.Variable(tf.fill(list(obs_shape), value), trainable=False) for value in (0.0, 1.0, 0.0)
        )

    def take(self, own: ObservationFilter) -> None:
        """Take up the statistics of a filter as they are now.

        Raises: InternalError if it has none.
        """
        if not isinstance(own, MeanStdFilter):
            raise InternalError(f"observations came raw, and the filter is a {type(own).__name__}")
        now = Normalisation.of(own)
        self._centre.assign(now.centre)
        self._scale.assign(now.scale)
        self._shift.assign(now.shift)

    def __call__(self, minibatch: Tensors) -> Tensors:
        """The columns of a minibatch, observations [..., *obs_shape] filtered."""
        filtered = {
            name: (minibatch[name] - self._centre) * self._scale - self._shift
            for name in _OBSERVATIONS
            if name in minibatch
        }
        return {**minibatch, **filtered}
