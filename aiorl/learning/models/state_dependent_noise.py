"""Deviations of actions that the features of a policy make up, for noise that is a function of the state (gSDE)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from aiorl.acting.distributions import ActionDistribution, DiagGaussian
from aiorl.config.schema import SDESettings
from aiorl.errors import ConfigError

__all__ = ["StateDependentDeviations", "log_deviations", "with_features"]

_EPSILON = 1e-6
"""What variances are at least, where all features are 0."""


class StateDependentDeviations:
    """Weights by which features become deviations.

    Attributes:
        log_std: Keras variable [F, A].
    """

    def __init__(self, distribution: DiagGaussian, settings: SDESettings) -> None:
        """Make the weights for a distribution with features."""
        shape = distribution.num_features, distribution.size
        self.log_std = keras.Variable(np.full(shape, settings.initial_log_std, np.float32))
        self._learns_features = settings.learns_features

    def __call__(self, features: Any) -> Any:
        """See `log_deviations`; features learn from them only where they are to."""
        return log_deviations(features if self._learns_features else ops.stop_gradient(features), self.log_std)

    def shares(self, features: Any) -> Any:
        """Of features [B, F] in the deviations, ``phi_f sigma_fa / sqrt(v_a)``: [B, F * A]; only acting reads them."""
        num_features, size = self.log_std.shape
        inverse = ops.exp(-log_deviations(features, self.log_std))
        shares = ops.expand_dims(features, 2) * ops.exp(self.log_std) * ops.expand_dims(inverse, 1)
        return ops.reshape(shares, [-1, num_features * size])


def log_deviations(features: Any, log_std: Any) -> Any:
    """Logarithms of the deviations of a Gaussian with features, ``sqrt(sum_f phi_f^2 sigma_fa^2)``: [B, A].

    Args:
        features: [B, F] float32, phi.
        log_std: [F, A] float32, log sigma.
    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, eq. 8 and 9.
    """
    variances = ops.matmul(ops.square(features), ops.square(ops.exp(log_std)))
    return 0.5 * ops.log(variances + _EPSILON)


def with_features(distribution: ActionDistribution, num_features: int) -> DiagGaussian:
    """The distribution of a policy with so many features.

    Raises: ConfigError if actions are not numbers of one Box.
    """
    if not isinstance(distribution, DiagGaussian):
        raise ConfigError(
            f"use_sde is for actions of a Box; this policy's are of {distribution.action_space}.",
            key="use_sde", value=True, hint="Leave use_sde out.",
        )  # fmt: skip
    return distribution.with_features(num_features)
