"""Exploration by noise on actions that are numbers: of each step by itself, correlated in time, or of the state."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import ActionDistribution, DiagGaussian
from aiorl.acting.exploration_kind import Exploration, Moment, Points
from aiorl.errors import ConfigError, UnsupportedSpaceError

__all__ = ["GaussianNoise", "OrnsteinUhlenbeckNoise", "StateDependentNoise"]

F32 = NDArray[np.float32]

_SEED_SIZE = 2
_SEED_BITS = 24


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

    What is drawn is the seed of each row's matrix. A row's matrix is made when its seed is first met, and held until
    there is another. Rows that stay the same have their seeds drawn ahead: each step's noise names the matrix in force.
    A row with a key takes the seed of its first step, so a row keyed by its episode has a new matrix in each.

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
                "does not have.", key="exploration.type", value="StateDependentNoise",
                hint="Set use_sde: true, which goes with built-in networks, or explore otherwise.",
            )  # fmt: skip
        super().__init__(distribution, _SEED_SIZE, random_timesteps=random_timesteps)
        self._sample_freq = sample_freq
        self._matrix_size = distribution.num_features * distribution.size
        self._rng: np.random.Generator | None = None  # of seeds that are drawn ahead
        self._ahead = _no_seeds(0)  # of rows that stay the same
        self._steps_ahead = 0  # for which they are good
        self._seeds = _no_seeds(0)  # those of `_matrices`
        self._matrices: F32 = np.empty((0, self._matrix_size), np.float32)  # of rows that stay the same
        self._held: dict[Hashable, tuple[F32, int]] = {}  # matrix, and steps that it is still good for

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        if len(leading) == 1:
            return _draw_seeds(rng, *leading)
        steps, rows = leading
        if self._rng is None or len(self._ahead) != rows:
            # a generator of their own: how many steps are drawn at a time makes no difference
            self._rng = np.random.default_rng(rng.integers(np.iinfo(np.int64).max))
            self._ahead, self._steps_ahead = _no_seeds(rows), 0
        noise = np.empty((steps, rows, _SEED_SIZE), np.float32)
        step = 0
        while step < steps:
            if not self._steps_ahead:
                self._ahead = _draw_seeds(self._rng, rows)
                self._steps_ahead = self._sample_freq
            following = min(step + self._steps_ahead, steps)
            noise[step:following] = self._ahead
            self._steps_ahead -= following - step
            step = following
        return noise

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        kind = self.distribution
        if now.keys is None:
            noise = kind.noise_of_state(inputs, self._matrices_of(now.own))
        else:
            noise = np.empty((len(inputs), kind.size), np.float32)
            for row, (key, seed) in enumerate(zip(now.keys, now.own, strict=True)):
                noise[row] = kind.noise_of_state(inputs[row : row + 1], self._matrix_of(key, seed))[0]
        kind.sample_into(inputs, noise, actions, logp)

    def _matrices_of(self, seeds: F32) -> F32:
        """Matrices [N, F * A] of seeds [N, 2]; made only where a row's seed is not that of the call before."""
        if len(seeds) != len(self._seeds):
            self._seeds = _no_seeds(len(seeds))
            self._matrices = np.empty((len(seeds), self._matrix_size), np.float32)
        for row in np.flatnonzero((seeds != self._seeds).any(axis=1)):
            _make_matrix(seeds[row], self._matrices[row])
        self._seeds[...] = seeds
        return self._matrices

    def _matrix_of(self, key: Hashable, seed: F32) -> F32:
        """The matrix [F * A] that a row holds; where it is not or no longer good, that of the seed drawn now."""
        matrix, steps = self._held.get(key, (None, 0))
        if matrix is None or not steps:
            matrix, steps = np.empty(self._matrix_size, np.float32), self._sample_freq
            _make_matrix(seed, matrix)
        self._held[key] = matrix, steps - 1
        return matrix

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Forget the matrices of the episode's rows."""
        _forget(self._held, episode)


def _draw_seeds(rng: np.random.Generator, rows: int) -> F32:
    """Seeds [N, 2] of matrices: whole numbers that float32 holds."""
    return rng.integers(1 << _SEED_BITS, size=(rows, _SEED_SIZE)).astype(np.float32)


def _no_seeds(rows: int) -> F32:
    """Seeds [N, 2] that are equal to none."""
    return np.full((rows, _SEED_SIZE), np.nan, np.float32)


def _make_matrix(seed: F32, matrix: F32) -> None:
    """Fill a matrix with the standard normal numbers of its seed."""
    np.random.default_rng(seed.astype(np.int64)).standard_normal(out=matrix, dtype=np.float32)


def _forget(memory: dict[Hashable, Any], episode: Any) -> None:
    """Drop what is kept of an episode's rows."""
    ended = getattr(episode, "episode_id", None)
    if ended is not None:
        for key in [key for key in memory if isinstance(key, tuple) and key[0] == ended]:
            del memory[key]
