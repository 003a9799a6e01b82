"""Distributions over numbers: Boxes of floats, unbounded or squashed into their bounds."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.action_distribution import ActionDistribution
from aiorl.errors import ConfigError, UnsupportedSpaceError

__all__ = [
    "EDGE",
    "LOGISTIC_DEVIATIONS",
    "LOGISTIC_WEIGHTS",
    "LOG_STD_MAX",
    "LOG_STD_MIN",
    "DiagGaussian",
    "SquashedGaussian",
]

F32 = NDArray[np.float32]

LOG_STD_MIN = -20.0
LOG_STD_MAX = 2.0
EDGE = 2.0**-24
"""Least distance of a squashed action from its bounds, as a share of their range, at which logp is taken."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_erf = np.frompyfunc(math.erf, 1, 1)
LOGISTIC_WEIGHTS: F32 = np.array([0.1494167, 0.50135265, 0.31260429, 0.03662636], np.float32)
"""[4]: weights of a mixture of four normal variables, close to the logistic variable Z of density sech(z)^2 / 2."""
LOGISTIC_DEVIATIONS: F32 = np.array([0.51077307, 0.75951436, 1.12349673, 1.64972240], np.float32)
"""[4]: the standard deviations of the four.

log(2 cosh(u)) is the mean of |u + Z|. So the mean of it over a normal u is a sum of means of folded normals, with an
error below 5e-6 whatever the deviation of u. Source of such mixtures: Monahan, Stefanski 1992.
"""


def _has_bounds(space: spaces.Box) -> bool:
    """Whether actions can be squashed into the bounds: float32's own, which some take for none, are too far apart."""
    with np.errstate(over="ignore"):
        return space.is_bounded("both") and bool(np.isfinite(2.0 * (space.high - space.low).astype(np.float32)).all())


class DiagGaussian(ActionDistribution):
    """Independent normal components of a Box, unbounded: clipping is left to whoever steps the environment.

    Attributes:
        size: A, numbers in an action.
        num_features: F, where noise is a function of the state (see `noise_of_state`); 0 where it is of each step by
            itself.
    """

    name = "diag_gaussian"

    def __init__(self, action_space: spaces.Space[Any], num_features: int = 0) -> None:
        if not isinstance(action_space, spaces.Box) or action_space.dtype.kind != "f":
            raise UnsupportedSpaceError("a Gaussian distribution over", action_space, ["Box of floats"])
        self.size = math.prod(action_space.shape)
        self.num_features = num_features
        super().__init__(action_space, num_inputs=2 * self.size, noise_size=self.size)

    def with_features(self, num_features: int) -> Self:
        """The same with features."""
        return type(self)(self.action_space, num_features)

    @property
    def num_outputs(self) -> int:
        """See the base class; behind the inputs come the features' shares in the deviations, F by A."""
        return self.num_inputs + self.num_features * self.size

    @property
    def choice_inputs(self) -> NDArray[np.int64]:
        """None: these are numbers, not choices."""
        return np.zeros(0, np.int64)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Standard normal numbers, one per component."""
        return rng.standard_normal((*leading, self.noise_size), dtype=np.float32)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Mean plus standard deviation times noise."""
        mean, log_std = self._parameters(inputs)
        actions[...] = (mean + np.exp(log_std) * noise).reshape(actions.shape)
        density = noise * noise
        density *= -0.5
        density -= log_std
        np.add.reduce(density, axis=1, out=logp)
        logp -= np.float32(self.size * _HALF_LOG_2PI)

    def noise_of_state(self, outputs: F32, matrices: F32) -> F32:
        """Noise [N, A] for `sample_into` that is linear in the features: the same at the same state.

        Args:
            outputs: [N, P + F * A] of the network; those behind the inputs are the features' shares in the deviations.
            matrices: [N, F * A] standard normal; then so is the noise, as the squares of the shares sum to 1.
        Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, eq. 7 to 9, over the deviation.
        """
        shape = (-1, self.num_features, self.size)
        noise: F32 = np.einsum("nfa,nfa->na", outputs[:, self.num_inputs :].reshape(shape), matrices.reshape(shape))
        return noise

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The mean."""
        return inputs[:, : self.size].astype(self.action_dtype).reshape(-1, *self.action_shape)

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        return self._normal_logp(inputs, actions.reshape(len(inputs), -1).astype(np.float32))

    def entropy(self, inputs: F32) -> F32:
        """See the base class."""
        total: F32 = (self._parameters(inputs)[1] + np.float32(_HALF_LOG_2PI + 0.5)).sum(axis=1)
        return total

    def kl(self, inputs: F32, other: F32) -> F32:
        """See the base class."""
        mean, log_std = self._parameters(inputs)
        other_mean, other_log_std = self._parameters(other)
        shift = (mean - other_mean) * np.exp(-other_log_std)
        spread = np.exp(2.0 * (log_std - other_log_std))
        total: F32 = (other_log_std - log_std + 0.5 * (spread + shift * shift - 1.0)).sum(axis=1)
        return total

    def _parameters(self, inputs: F32) -> tuple[F32, F32]:
        log_std: F32 = np.maximum(inputs[:, self.size : 2 * self.size], np.float32(LOG_STD_MIN))
        np.minimum(log_std, np.float32(LOG_STD_MAX), out=log_std)
        return inputs[:, : self.size], log_std

    def _normal_logp(self, inputs: F32, values: F32) -> F32:
        mean, log_std = self._parameters(inputs)
        distance = (values - mean) * np.exp(-log_std)
        total: F32 = (-0.5 * distance * distance - log_std - np.float32(_HALF_LOG_2PI)).sum(axis=1)
        return total


class SquashedGaussian(DiagGaussian):
    """A normal variable u mapped into the bounds of a Box: low + (high - low) * (tanh(u) + 1) / 2.

    The log-density is taken from the action as it is stored, by inverting the map, and not from u: so a
    learner that sees only the action computes the same number. With p and q the distances from the lower and
    the upper bound as shares of the range (each exact near its own bound, and held at or above EDGE),
    u = (log p - log q) / 2 and log |da/du| = log(2 (high - low)) + log p + log q.
    """

    name = "squashed_gaussian"

    def __init__(self, action_space: spaces.Space[Any], num_features: int = 0) -> None:
        super().__init__(action_space, num_features)
        if not isinstance(action_space, spaces.Box) or not _has_bounds(action_space):
            raise UnsupportedSpaceError(
                "a squashed Gaussian over",
                action_space,
                ["Box of floats bounded on both sides, and not as far as float32 goes"],
                "Bound the space or use the unsquashed distribution.",
            )
        self.low: F32 = action_space.low.astype(np.float32).ravel()
        self.high: F32 = action_space.high.astype(np.float32).ravel()
        self.span: F32 = self.high - self.low
        if not (self.span > 0).all():
            raise ConfigError(f"the action space {action_space} has a component without room.", value=action_space)
        self._log_2span: F32 = np.log(2.0 * self.span)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """The squashed sample; its log-density as `logp` gives it."""
        mean, log_std = self._parameters(inputs)
        squashed = self._squash(mean + np.exp(log_std) * noise)
        actions[...] = squashed.reshape(actions.shape)
        logp[...] = self._squashed_logp(inputs, squashed)

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The squashed mean."""
        squashed = self._squash(inputs[:, : self.size])
        return squashed.astype(self.action_dtype).reshape(-1, *self.action_shape)

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class; actions beyond the bounds count as on them."""
        return self._squashed_logp(inputs, actions.reshape(len(inputs), -1).astype(np.float32))

    def entropy(self, inputs: F32) -> F32:
        """Entropy of the normal variable plus the mean of log |da/du|, see LOGISTIC_DEVIATIONS."""
        mean, log_std = self._parameters(inputs)
        mean, spread = mean[:, :, None], np.sqrt(np.exp(2.0 * log_std)[:, :, None] + LOGISTIC_DEVIATIONS**2)
        ratio = mean / (math.sqrt(2.0) * spread)
        folded = spread * math.sqrt(2.0 / math.pi) * np.exp(-ratio * ratio) + mean * _erf(ratio).astype(np.float32)
        # log(1 - tanh(u)^2) = 2 log 2 - 2 log(2 cosh(u))
        slope = 2.0 * np.float32(math.log(2.0)) - 2.0 * (folded @ LOGISTIC_WEIGHTS)
        total: F32 = super().entropy(inputs) + (slope + np.log(0.5 * self.span)).sum(axis=1)
        return total

    def _squash(self, values: NDArray[Any]) -> F32:
        squashed = self.low + self.span * (0.5 * (np.tanh(values) + 1.0))
        bounded: F32 = np.minimum(squashed, self.high)
        return bounded

    def _squashed_logp(self, inputs: F32, squashed: F32) -> F32:
        log_p = np.log(np.maximum((squashed - self.low) / self.span, np.float32(EDGE)))
        log_q = np.log(np.maximum((self.high - squashed) / self.span, np.float32(EDGE)))
        slope = (log_p + log_q + self._log_2span).sum(axis=1)
        density: F32 = self._normal_logp(inputs, 0.5 * (log_p - log_q)) - slope
        return density
