"""Exploration: how a policy departs from what its network says.

A policy without an exploration object samples from its action distribution, which is the fast path. An object
replaces that step. Like sampling, it is a pure function of the network's outputs and of noise drawn ahead, so that
equal seeds give equal actions however rows are batched; only Ornstein-Uhlenbeck noise, which is a process in time,
keeps a state for each row.

Recorded log-probabilities are those of the behaviour actually followed, where it has any; noise added to a
deterministic policy has no useful density once it is clipped, and counts as 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import ActionLayout, leaf_spaces
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.policy.distributions import MASKED_LOGIT, ActionDistribution, Categorical
from aiorl.policy.schedules import Schedule

__all__ = [
    "EXPLORATIONS",
    "EpsilonGreedy",
    "Exploration",
    "GaussianNoise",
    "OrnsteinUhlenbeckNoise",
    "PerWorkerEpsilonGreedy",
    "RandomExploration",
    "StochasticSampling",
    "make_exploration",
    "worker_epsilon",
]

F32 = NDArray[np.float32]
Points = float | Sequence[Sequence[float]]

_APEX_BASE, _APEX_EXPONENT = 0.4, 7.0


class Exploration(ABC):
    """What all kinds offer. N rows, P inputs of the distribution and K numbers of noise a row.

    Attributes:
        distribution: the policy's action distribution.
        noise_size: K.
    """

    def __init__(self, distribution: ActionDistribution, noise_size: int) -> None:
        self.distribution = distribution
        self.noise_size = noise_size

    @abstractmethod
    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` (for instance T, N) choices: float32 [*leading, K]."""

    @abstractmethod
    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """Write actions and their log-probabilities.

        Args:
            inputs: [N, P] inputs of the distribution.
            noise: [N, K] of `draw_noise`.
            actions: [N, *action_shape], to be written.
            logp: [N], to be written.
            timestep: global timestep, for schedules.
            keys: what identifies each row from call to call; None = its position.
        """

    def on_episode_start(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode begins, before the callback `on_episode_start`."""
        return

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode has ended, before the callback `on_episode_end`."""
        return

    def figures(self, timestep: int) -> dict[str, float]:
        """What to report of it, such as the present epsilon."""
        return {}


class StochasticSampling(Exploration):
    """Samples from the distribution, at first perhaps uniformly; without such a start the same as no object."""

    def __init__(self, distribution: ActionDistribution, *, random_timesteps: int = 0) -> None:
        """Take the number of timesteps during which actions are uniform."""
        self._uniform = _UniformActions(distribution)
        self._random_timesteps = random_timesteps
        super().__init__(distribution, distribution.noise_size + self._uniform.noise_size)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """That of the distribution, then uniform numbers."""
        return np.concatenate(
            [self.distribution.draw_noise(rng, *leading), self._uniform.draw_noise(rng, *leading)], axis=-1
        )

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """See the base class."""
        cut = self.distribution.noise_size
        if timestep < self._random_timesteps:
            self._uniform.choose_into(noise[:, cut:], actions, logp)
        else:
            self.distribution.sample_into(inputs, noise[:, :cut], actions, logp)


class RandomExploration(Exploration):
    """Uniform over the action space; within unbounded components standard normal."""

    def __init__(self, distribution: ActionDistribution) -> None:
        """Nothing to set."""
        self._uniform = _UniformActions(distribution)
        super().__init__(distribution, self._uniform.noise_size)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Uniform numbers in [0, 1)."""
        return self._uniform.draw_noise(rng, *leading)

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """See the base class."""
        self._uniform.choose_into(noise, actions, logp)


class EpsilonGreedy(Exploration):
    """The best action, or with probability epsilon a uniform one.

    The inputs of the distribution are logits or action values; actions whose input is MASKED_LOGIT are never taken
    in a Discrete space.
    """

    def __init__(self, distribution: ActionDistribution, *, epsilon: Points = ((0, 1.0), (10_000, 0.02))) -> None:
        """Take epsilon: a constant, or points [timestep, value] joined by straight lines.

        Raises:
            UnsupportedSpaceError: actions are not choices.
            ConfigError: points that make no schedule, or a value that is no probability.
        """
        space = distribution.action_space
        if not all(isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) for leaf in leaf_spaces(space)):
            raise UnsupportedSpaceError("epsilon-greedy exploration over", space, ["Discrete", "MultiDiscrete"])
        self._uniform = _UniformActions(distribution)
        self._epsilon = Schedule(epsilon, key="exploration.epsilon")
        values = [epsilon] if isinstance(epsilon, int | float) else [value for _, value in epsilon]
        if not all(0 <= value <= 1 for value in values):
            raise ConfigError(
                f"exploration.epsilon must be probabilities, not {epsilon!r}.", key="exploration.epsilon", value=epsilon
            )
        super().__init__(distribution, 1 + self._uniform.noise_size)

    def epsilon(self, timestep: int) -> float:
        """Probability of a uniform action."""
        return self._epsilon.value(timestep)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Uniform numbers in [0, 1): whether to explore, then which action."""
        return rng.random((*leading, self.noise_size), dtype=np.float32)

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """See the base class."""
        epsilon = self.epsilon(timestep)
        greedy = self.distribution.deterministic(inputs)
        if isinstance(self.distribution, Categorical):
            allowed = inputs > 0.5 * MASKED_LOGIT
            counts = np.maximum(np.count_nonzero(allowed, axis=1), 1)
            # the number-th of the allowed actions, counted from 0
            number = np.minimum((noise[:, 1] * counts).astype(np.int64), counts - 1)
            index = (np.add.accumulate(allowed, axis=1) > number[:, None]).argmax(axis=1)
            uniform: NDArray[Any] = (index + self.distribution.start).astype(self.distribution.action_dtype)
            share = epsilon / counts
        else:
            uniform = np.empty_like(greedy)
            self._uniform.choose_into(noise[:, 1:], uniform, logp)
            share = epsilon * np.exp(logp.astype(np.float64))
        explores = noise[:, 0] < epsilon
        chosen = np.where(explores.reshape(-1, *[1] * (greedy.ndim - 1)), uniform, greedy)
        actions[...] = chosen
        is_greedy = (chosen == greedy).reshape(len(chosen), -1).all(axis=1)
        logp[...] = np.log(share + (1.0 - epsilon) * is_greedy)

    def figures(self, timestep: int) -> dict[str, float]:
        """Epsilon."""
        return {"epsilon": self.epsilon(timestep)}


class PerWorkerEpsilonGreedy(EpsilonGreedy):
    """Epsilon-greedy with a constant epsilon of each worker's own.

    Source: Horgan et al. 2018, https://arxiv.org/abs/1803.00933, section 4.1.
    """

    def __init__(self, distribution: ActionDistribution, *, worker_index: int = 0, num_workers: int = 0) -> None:
        """Take the worker's place among all; see `worker_epsilon`."""
        super().__init__(distribution, epsilon=worker_epsilon(worker_index, num_workers))


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
            ConfigError: points that make no schedule.
        """
        space = distribution.action_space
        if not isinstance(space, spaces.Box):
            raise UnsupportedSpaceError(f"{type(self).__name__} exploration over", space, ["Box"])
        self._uniform = _UniformActions(distribution)
        self._random_timesteps = random_timesteps
        self._scale = Schedule(scale, key="exploration.scale")
        self._low, self._high = space.low, space.high
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        half_range = np.where(bounded, 0.5 * (np.where(bounded, space.high, 0) - np.where(bounded, space.low, 0)), 1.0)
        self._stddev: F32 = (stddev * half_range).astype(np.float32)
        self._size = math.prod(space.shape)
        super().__init__(distribution, self._size + self._uniform.noise_size)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Standard normal numbers, then uniform ones."""
        normal = rng.standard_normal((*leading, self._size), dtype=np.float32)
        return np.concatenate([normal, self._uniform.draw_noise(rng, *leading)], axis=-1)

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """See the base class."""
        normal = self._noise_of(noise[:, : self._size], range(len(inputs)) if keys is None else keys)
        if timestep < self._random_timesteps:
            self._uniform.choose_into(noise[:, self._size :], actions, logp)
            return
        shift = self._scale.value(timestep) * self._stddev * normal.reshape(actions.shape)
        actions[...] = np.clip(self.distribution.deterministic(inputs) + shift, self._low, self._high)
        logp[...] = 0.0

    def _noise_of(self, normal: F32, keys: Sequence[Hashable]) -> F32:
        """The noise [N, A] of this step, of unit size."""
        return normal

    def figures(self, timestep: int) -> dict[str, float]:
        """The scale of the noise."""
        return {"scale": self._scale.value(timestep)}


class OrnsteinUhlenbeckNoise(GaussianNoise):
    """The deterministic action plus noise that is correlated in time, a process of its own for each row.

    ``x <- x - theta x + sigma N(0, 1)``, from 0; actions are shifted by ``scale * stddev * half range * x``. A row's
    process starts anew with its episode when rows are keyed by episode.

    Source: Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971.
    """

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

    def _noise_of(self, normal: F32, keys: Sequence[Hashable]) -> F32:
        zeros = np.zeros(self._size, np.float32)
        current = np.array([self._processes.get(key, zeros) for key in keys], np.float32).reshape(normal.shape)
        following: F32 = (current * np.float32(1.0 - self._theta) + np.float32(self._sigma) * normal).astype(np.float32)
        self._processes.update(zip(keys, following, strict=True))
        return following

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Forget the processes of the episode's rows."""
        ended = getattr(episode, "episode_id", None)
        if ended is not None:
            for key in [key for key in self._processes if isinstance(key, tuple) and key[0] == ended]:
                del self._processes[key]


def worker_epsilon(worker_index: int, num_workers: int) -> float:
    """Ape-X's epsilon of a worker: 0.4 for the first, 0.4^8 for the last; 0 for the learner's own.

    Args:
        worker_index: 0 for the learner's own worker, else from 1.
        num_workers: number of remote workers; an index beyond it, of a late joiner, counts from 1 again.
    """
    if worker_index < 1:
        return 0.0
    position = (worker_index - 1) % max(num_workers, 1)
    return float(_APEX_BASE ** (1.0 + _APEX_EXPONENT * position / max(num_workers - 1, 1)))


EXPLORATIONS: dict[str, Callable[..., Exploration]] = {
    "StochasticSampling": StochasticSampling,
    "EpsilonGreedy": EpsilonGreedy,
    "PerWorkerEpsilonGreedy": PerWorkerEpsilonGreedy,
    "GaussianNoise": GaussianNoise,
    "OrnsteinUhlenbeckNoise": OrnsteinUhlenbeckNoise,
    "Random": RandomExploration,
}
"""Kinds of exploration by name."""


def make_exploration(
    settings: str | Mapping[str, Any] | None,
    distribution: ActionDistribution,
    *,
    worker_index: int = 0,
    num_workers: int = 0,
) -> Exploration | None:
    """The exploration object that settings ask for.

    Args:
        settings: a name in EXPLORATIONS, or a mapping with the name under "type" and the kind's own settings; None or
            plain stochastic sampling needs no object.
        distribution: the policy's action distribution.
        worker_index: the worker's index, for kinds that differ between workers.
        num_workers: number of remote workers.

    Raises:
        ConfigError: an unknown kind or setting.
        UnsupportedSpaceError: a kind that doesn't go with the action space.
    """
    if settings is None:
        return None
    chosen = {"type": settings} if isinstance(settings, str) else dict(settings)
    name = chosen.pop("type", "StochasticSampling")
    if name not in EXPLORATIONS:
        raise ConfigError(
            f"exploration is {name!r}, expected one of {', '.join(EXPLORATIONS)}.",
            key="exploration.type",
            value=name,
            hint=nearest(str(name), EXPLORATIONS).strip(),
        )
    if name == "StochasticSampling" and not chosen.get("random_timesteps"):
        chosen.pop("random_timesteps", None)
        if not chosen:
            return None
    if name == "PerWorkerEpsilonGreedy":
        chosen = {"worker_index": worker_index, "num_workers": num_workers} | chosen
    try:
        return EXPLORATIONS[name](distribution, **chosen)
    except TypeError as error:
        raise ConfigError(f"exploration {name}: {error}.", key="exploration", value=settings) from error


class _UniformActions:
    """Uniform actions of any space from uniform numbers, one for each number of an action."""

    def __init__(self, distribution: ActionDistribution) -> None:
        layout = ActionLayout(distribution.action_space)
        lows, ends, wholes = zip(*(_ranges(leaf) for leaf in layout.leaves), strict=True)
        self._low, self._end = np.concatenate(lows), np.concatenate(ends)
        self._is_whole = np.concatenate(wholes)
        self._is_bounded = np.isfinite(self._low) & np.isfinite(self._end)
        self.noise_size = len(self._low)
        self._span = np.where(self._is_bounded, self._end - self._low, 1.0)
        self._start = np.where(self._is_bounded, self._low, 0.0)
        self._logp = -float(np.log(self._span[self._is_bounded]).sum())

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        noise = rng.random((*leading, self.noise_size), dtype=np.float32)
        if not self._is_bounded.all():
            free = ~self._is_bounded
            noise[..., free] = rng.standard_normal((*leading, int(free.sum())), dtype=np.float32)
        return noise

    def choose_into(self, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        values = self._start + self._span * noise
        whole = self._is_whole
        if whole.any():
            values[:, whole] = np.minimum(np.floor(values[:, whole]), self._end[whole] - 1)
        actions[...] = values.reshape(actions.shape)
        logp[...] = self._logp
        if not self._is_bounded.all():
            free = noise[:, ~self._is_bounded]
            logp += (-0.5 * free * free - 0.5 * math.log(2.0 * math.pi)).sum(axis=1)


def _ranges(leaf: spaces.Space[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Lower bound, upper end (exclusive for whole numbers) and whether whole, of each number of an action."""
    match leaf:
        case spaces.Discrete():
            low, end = np.array([leaf.start]), np.array([leaf.start + leaf.n])
        case spaces.MultiDiscrete():
            low, end = leaf.start.ravel(), (leaf.start + leaf.nvec).ravel()
        case spaces.MultiBinary():
            low, end = np.zeros(math.prod(leaf.shape)), np.full(math.prod(leaf.shape), 2)
        case spaces.Box():
            is_whole = leaf.dtype.kind != "f"
            low, end = leaf.low.ravel(), leaf.high.ravel().astype(np.float64) + is_whole
        case _:
            raise UnsupportedSpaceError("uniform exploration over", leaf, ["Discrete", "MultiDiscrete", "Box"])
    whole = np.full(len(low), not (isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"))
    return low.astype(np.float64), end.astype(np.float64), whole
