"""The interface of action distributions on NumPy, and what stands for a forbidden action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.errors import PolicyError

__all__ = ["MASKED_LOGIT", "ActionDistribution"]

F32 = NDArray[np.float32]

MASKED_LOGIT = -1e30
"""Logit of what is forbidden, and of what pads short components; gives probability 0, and 0 * logit is still 0."""


class ActionDistribution(ABC):
    """Base class of action distributions. N rows, P inputs and K numbers of noise per row.

    Attributes:
        name: key in DISTRIBUTIONS.
        action_space: single-environment action space.
        num_inputs: P.
        noise_size: K.
        action_shape: shape of one action.
        action_dtype: dtype of actions, that of the space.
        num_features: F, of what a network gives beside the inputs (see `DiagGaussian`); 0 for nothing.
        logp_is_apart: `choose_into` takes less than `sample_into`, and `logp` of what it chose is the same to the bit.
    """

    name: str
    logp_is_apart: ClassVar[bool] = False
    num_features: int = 0

    def __init__(self, action_space: spaces.Space[Any], num_inputs: int, noise_size: int) -> None:
        self.action_space = action_space
        self.num_inputs = num_inputs
        self.noise_size = noise_size
        self.action_shape: tuple[int, ...] = tuple(action_space.shape or ())
        self.action_dtype: np.dtype[Any] = np.dtype(action_space.dtype)

    @property
    def num_outputs(self) -> int:
        """Numbers of a row that a network gives for acting, the inputs first."""
        return self.num_inputs

    @property
    def choice_inputs(self) -> NDArray[np.int64]:
        """[M]: which inputs an action mask has an entry for, in the order of the entries; by default all."""
        return np.arange(self.num_inputs)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` (for instance T, N) samples: float32 [*leading, K], by default uniform in [0, 1)."""
        return rng.random((*leading, self.noise_size), dtype=np.float32)

    @abstractmethod
    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Write actions [N, *action_shape] and their log-probabilities [N] for inputs [N, P], noise [N, K]."""

    def choose_into(self, inputs: F32, noise: F32, actions: NDArray[Any]) -> None:
        """Write the actions that `sample_into` does."""
        self.sample_into(inputs, noise, actions, np.empty(len(inputs), np.float32))

    @abstractmethod
    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The mode (for the squashed Gaussian: the squashed mean), [N, *action_shape]."""

    @abstractmethod
    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """Log-probability (or log-density) of actions [N, *action_shape]: float32 [N]."""

    @abstractmethod
    def entropy(self, inputs: F32) -> F32:
        """Entropy in nats: float32 [N]."""

    @abstractmethod
    def kl(self, inputs: F32, other: F32) -> F32:
        """Kullback-Leibler divergence KL(inputs || other) in nats: float32 [N]."""

    def action_values(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """Values of actions, where the inputs are values of actions.

        Args:
            inputs: [..., P].
            actions: [..., *action_shape].
        Returns: float32 [...].
        Raises: PolicyError: they are not, as in most distributions.
        """
        raise PolicyError(f"a {self.name} distribution has no values of actions; that of a network of Q values has")

    def sample_with_logp(self, inputs: F32, noise: F32) -> tuple[NDArray[Any], F32]:
        """Actions [N, *action_shape] and their log-probabilities [N]; see `sample_into`."""
        rows = len(inputs)
        actions = np.empty((rows, *self.action_shape), self.action_dtype)
        logp = np.empty(rows, np.float32)
        self.sample_into(inputs, noise, actions, logp)
        return actions, logp

    def sample(self, inputs: F32, rng: np.random.Generator) -> NDArray[Any]:
        """Actions [N, *action_shape] with noise drawn now."""
        return self.sample_with_logp(inputs, self.draw_noise(rng, len(inputs)))[0]
