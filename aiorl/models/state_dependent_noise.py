"""Deviations of actions that the features of a policy make up, for noise that is a function of the state (gSDE)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from aiorl.config.parts import SDESettings
from aiorl.errors import ConfigError
from aiorl.policy.distributions import ActionDistribution, DiagGaussian

__all__ = ["StateDependentDeviations", "deviations", "with_features"]

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
        """See `deviations`; features learn from them only where they are to."""
        return deviations(features if self._learns_features else ops.stop_gradient(features), self.log_std)


def deviations(features: Any, log_std: Any) -> Any:
    """Inputs of a Gaussian with features, all behind its means: [B, A + F * A].

    Logarithms of the deviations ``sqrt(sum_f phi_f^2 sigma_fa^2)``, then the shares ``phi_f sigma_fa`` over these.
    Only acting reads the shares: no gradient flows through them.

    Args:
        features: [B, F] float32, phi.
        log_std: [F, A] float32, log sigma.
    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, eq. 8 and 9.
    """
    num_features, size = log_std.shape
    sigma = ops.exp(log_std)
    log_deviations = 0.5 * ops.log(ops.matmul(ops.square(features), ops.square(sigma)) + _EPSILON)
    shares = ops.expand_dims(features, 2) * sigma * ops.exp(-ops.expand_dims(log_deviations, 1))
    flat = ops.reshape(ops.stop_gradient(shares), [-1, num_features * size])
    return ops.concatenate([log_deviations, flat], axis=-1)


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
