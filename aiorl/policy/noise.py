"""Exploration by noise on actions that are numbers: of each step by itself, correlated in time, or of the state."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.policy.distributions import ActionDistribution, DiagGaussian
from aiorl.policy.exploration_kind import Exploration, Moment, Points

__all__ = ["GaussianNoise", "OrnsteinUhlenbeckNoise", "StateDependentNoise"]

F32 = NDArray[np.float32]


class GaussianNoise(Exploration):
    """The deterministic action plus normal noise, clipped to the bounds; at first perhaps uniform actions.

    Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477.
    """

    def __init__(
        self, distribution: ActionDistribution, *, stddev: float = 0.1, scale: Points = 1.0, random_timesteps: int = 0
    ) -> None:
        """Take the size of the noise.

        Args:
            distribution: over a Box.
            stddev: standard deviation, as a share of half the range of bounded components.
            scale: factor on it: a constant, or points [timestep, value].
            random_timesteps: timesteps during which actions are uniform.

        Raises:
            UnsupportedSpaceError: actions are not numbers.
            ConfigError: invalid points of a schedule.
        """
        space = distribution.action_space
        if not isinstance(space, spaces.Box):
            raise UnsupportedSpaceError(f"{type(self).__name__} exploration over", space, ["Box"])
        size = math.prod(space.shape)
        super().__init__(distribution, size, random_timesteps=random_timesteps, schedules={"scale": scale})
        self._low, self._high = space.low, space.high
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        half_range = np.where(bounded, 0.5 * (np.where(bounded, space.high, 0) - np.where(bounded, space.low, 0)), 1.0)
        self._stddev: F32 = (stddev * half_range).astype(np.float32)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return rng.standard_normal((*leading, self._own_noise), dtype=np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        unit = self._unit_noise(now).reshape(actions.shape)
        shift = self._schedules["scale"].value(now.timestep) * self._stddev * unit
        actions[...] = np.clip(self.distribution.deterministic(inputs) + shift, self._low, self._high)
        logp[...] = 0.0

    def _unit_noise(self, now: Moment) -> F32:
        """The noise [N, A] of this step, of unit size."""
        return now.own


class OrnsteinUhlenbeckNoise(GaussianNoise):
    """The deterministic action plus noise that is correlated in time, a process of its own for each row.

    ``x <- x - theta x + sigma N(0, 1)``, from 0; actions are shifted by ``scale * stddev * half range * x``. A row's
    process starts anew with its episode when rows are keyed by episode.

    Source: Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971.
    """

    has_memory: ClassVar[bool] = True

    def __init__(
        self,
        distribution: ActionDistribution,
        *,
        theta: float = 0.15,
        sigma: float = 0.2,
        stddev: float = 1.0,
        scale: Points = 1.0,
        random_timesteps: int = 0,
    ) -> None:
        """Take the process's pull to 0 and its noise; the rest as for GaussianNoise."""
        super().__init__(distribution, stddev=stddev, scale=scale, random_timesteps=random_timesteps)
        self._theta, self._sigma = theta, sigma
        self._processes: dict[Hashable, F32] = {}

    def _unit_noise(self, now: Moment) -> F32:
        normal = now.own
        keys = range(len(normal)) if now.keys is None else now.keys
        zeros = np.zeros(normal.shape[1], np.float32)
        current = np.array([self._processes.get(key, zeros) for key in keys], np.float32).reshape(normal.shape)
        following: F32 = (current * np.float32(1.0 - self._theta) + np.float32(self._sigma) * normal).astype(np.float32)
        self._processes.update(zip(keys, following, strict=True))
        return following

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Forget the processes of the episode's rows."""
        _forget(self._processes, episode)


class StateDependentNoise(Exploration):
    """Actions of a Gaussian whose noise is a function of the state, the same one for some steps (gSDE).

    Each row has a matrix [F, A] of standard normal numbers for `sample_freq` steps. It makes a step's noise of the
    features' shares in the deviations, which the network gives. The noise of any one state is standard normal, so
    log-probabilities are those of the distribution.

    Rows that stay the same have their matrices drawn ahead, as noise of several steps. A row with a key draws one at
    its first step, so a row keyed by its episode has a new one in each.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, section 3.
    """

    has_memory: ClassVar[bool] = True
    holds_noise: ClassVar[bool] = True

    distribution: DiagGaussian

    def __init__(self, distribution: ActionDistribution, *, sample_freq: int, random_timesteps: int = 0) -> None:
        """Take how long matrices last.

        Args:
            distribution: a Gaussian with features.
            sample_freq: steps of a row after which its matrix is drawn anew, 1 or more.
            random_timesteps: timesteps during which actions are uniform.

        Raises:
            ConfigError: the policy has no such distribution, or a matrix would last no step.
        """
        if sample_freq < 1:
            raise ConfigError(
                f"exploration.sample_freq is {sample_freq}, expected 1 or more steps.", key="exploration.sample_freq",
                value=sample_freq,
            )  # fmt: skip
        if not isinstance(distribution, DiagGaussian) or not distribution.num_features:
            raise ConfigError(
                "exploration StateDependentNoise needs deviations that the policy's features make up, which this one "
                "does not have.", key="exploration.type", value="StateDependentNoise", hint="Set use_sde: true.",
            )  # fmt: skip
        super().__init__(distribution, distribution.num_features * distribution.size, random_timesteps=random_timesteps)
        self._sample_freq = sample_freq
        self._ahead: F32 = np.empty((0, self._own_noise), np.float32)  # matrices of rows that stay the same
        self._steps_ahead = 0  # for which they are good
        self._held: dict[Hashable, tuple[F32, int]] = {}  # matrix, and steps that it is still good for

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        noise = np.empty((*leading, self._own_noise), np.float32)
        if len(leading) == 1:
            return rng.standard_normal(out=noise, dtype=np.float32)
        if self._ahead.shape != noise.shape[1:]:
            self._ahead, self._steps_ahead = np.empty(noise.shape[1:], np.float32), 0
        step = 0
        while step < len(noise):
            if not self._steps_ahead:
                rng.standard_normal(out=self._ahead, dtype=np.float32)
                self._steps_ahead = self._sample_freq
            following = min(step + self._steps_ahead, len(noise))
            noise[step:following] = self._ahead
            self._steps_ahead -= following - step
            step = following
        return noise

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        matrices = now.own if now.keys is None else self._matrices(now.keys, now.own)
        self.distribution.sample_into(inputs, self.distribution.noise_of_state(inputs, matrices), actions, logp)

    def _matrices(self, keys: Sequence[Hashable], drawn: F32) -> F32:
        """Matrices [N, F * A] of rows; where one is not or no longer good, the one drawn now is taken."""
        rows = []
        for key, own in zip(keys, drawn, strict=True):
            matrix, steps = self._held.get(key, (own, 0))
            if not steps:
                matrix, steps = own.copy(), self._sample_freq
            self._held[key] = matrix, steps - 1
            rows.append(matrix)
        return np.stack(rows) if rows else drawn

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Forget the matrices of the episode's rows."""
        _forget(self._held, episode)


def _forget(memory: dict[Hashable, Any], episode: Any) -> None:
    """Drop what is kept of an episode's rows."""
    ended = getattr(episode, "episode_id", None)
    if ended is not None:
        for key in [key for key in memory if isinstance(key, tuple) and key[0] == ended]:
            del memory[key]
