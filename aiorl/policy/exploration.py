"""Exploration: how actions depart from what the network prefers.

A policy without an exploration object samples from its action distribution, which is the fast path. An object
replaces that step. Like sampling, it is a pure function of the network's outputs and of noise drawn ahead, so that
equal seeds give equal actions however rows are batched; only Ornstein-Uhlenbeck noise, which is a process in time,
keeps a state for each row.

Actions that the network's outputs forbid (`MASKED_LOGIT`) are never taken, at random neither.

Recorded log-probabilities are those of the behaviour actually followed, where it has any; noise added to a
deterministic policy has no useful density once it is clipped, and counts as 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import leaf_spaces
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.policy.distributions import ActionDistribution
from aiorl.policy.schedules import Schedule
from aiorl.policy.uniform_actions import UniformActions

__all__ = [
    "EXPLORATIONS",
    "EpsilonGreedy",
    "Exploration",
    "GaussianNoise",
    "Moment",
    "OrnsteinUhlenbeckNoise",
    "PerWorkerEpsilonGreedy",
    "RandomExploration",
    "StochasticSampling",
    "exploration_has_memory",
    "make_exploration",
    "worker_epsilon",
]

F32 = NDArray[np.float32]
Points = float | Sequence[Sequence[float]]

_APEX_BASE, _APEX_EXPONENT = 0.4, 7.0


class Exploration(ABC):
    """Base class of explorations. N rows, P inputs of the distribution and K numbers of noise per row.

    A kind has noise of its own, and for a start of uniform actions, which each kind may have, theirs.

    Attributes:
        distribution: the policy's action distribution.
        noise_size: K.
        has_memory: what it does depends on what it did before, so it must be told which row is whose.
    """

    has_memory: ClassVar[bool] = False

    def __init__(
        self,
        distribution: ActionDistribution,
        own_noise: int,
        *,
        random_timesteps: int = 0,
        schedules: Mapping[str, Points] | None = None,
    ) -> None:
        """Prepare noise, schedules and the uniform start.

        Args:
            distribution: the policy's action distribution.
            own_noise: numbers of noise a row that the kind takes itself.
            random_timesteps: timesteps during which actions are uniform.
            schedules: setting -> a constant, or points [timestep, value] joined by straight lines.

        Raises:
            ConfigError: invalid points of a schedule.
        """
        self.distribution = distribution
        self.uniform = UniformActions(distribution.action_space)
        self.noise_size = own_noise + self.uniform.noise_size
        self._own_noise = own_noise
        self._random_timesteps = random_timesteps
        self._schedules = {
            name: Schedule(points, key=f"exploration.{name}") for name, points in (schedules or {}).items()
        }

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` (for instance T, N) choices: float32 [*leading, K]."""
        return np.concatenate([self._draw(rng, *leading), self.uniform.draw_noise(rng, *leading)], axis=-1)

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
            keys: what identifies each row from call to call, such as (episode id, agent id); None = its position.
        """
        own, uniform = noise[:, : self._own_noise], noise[:, self._own_noise :]
        if timestep < self._random_timesteps:
            self.uniform.choose_into(uniform, actions, logp, inputs)
        else:
            self._choose(inputs, Moment(own, uniform, timestep, keys), actions, logp)

    def figures(self, timestep: int) -> dict[str, float]:
        """Return the figures to report, such as the current epsilon."""
        return {name: schedule.value(timestep) for name, schedule in self._schedules.items()}

    def on_episode_start(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode begins, before the callback `on_episode_start`."""
        return

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode has ended, before the callback `on_episode_end`."""
        return

    @abstractmethod
    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        """The kind's own noise: float32 [*leading, own_noise]."""

    @abstractmethod
    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        """Write actions and their log-probabilities, once the uniform start is over."""


class Moment(NamedTuple):
    """Inputs of a choice other than the outputs of the network.

    Attributes:
        own: [N, own_noise] noise of the kind.
        uniform: noise of uniform actions.
        timestep: global timestep.
        keys: what identifies each row; None = its position.
    """

    own: F32
    uniform: F32
    timestep: int
    keys: Sequence[Hashable] | None


class StochasticSampling(Exploration):
    """Samples from the distribution, at first perhaps uniformly; without such a start the same as no object."""

    def __init__(self, distribution: ActionDistribution, *, random_timesteps: int = 0) -> None:
        """Take the number of timesteps during which actions are uniform."""
        super().__init__(distribution, distribution.noise_size, random_timesteps=random_timesteps)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return self.distribution.draw_noise(rng, *leading)

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        self.distribution.sample_into(inputs, now.own, actions, logp)


class RandomExploration(Exploration):
    """Uniform over the action space; within unbounded components standard normal."""

    def __init__(self, distribution: ActionDistribution) -> None:
        """Take the distribution; there are no settings."""
        super().__init__(distribution, 0)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return np.empty((*leading, 0), np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        self.uniform.choose_into(now.uniform, actions, logp, inputs)


class EpsilonGreedy(Exploration):
    """The best action, or with probability epsilon a uniform one.

    The inputs of the distribution are logits or action values.
    """

    def __init__(self, distribution: ActionDistribution, *, epsilon: Points = ((0, 1.0), (10_000, 0.02))) -> None:
        """Take epsilon: a constant, or points [timestep, value] joined by straight lines.

        Raises:
            UnsupportedSpaceError: actions are not choices.
            ConfigError: invalid points of a schedule, or a value outside of [0, 1].
        """
        space = distribution.action_space
        kinds = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        if not all(isinstance(leaf, kinds) for leaf in leaf_spaces(space)):
            raise UnsupportedSpaceError("epsilon-greedy exploration over", space, [kind.__name__ for kind in kinds])
        super().__init__(distribution, 1, schedules={"epsilon": epsilon})
        values = [epsilon] if isinstance(epsilon, int | float) else [value for _, value in epsilon]
        if not all(0 <= value <= 1 for value in values):
            raise ConfigError(
                f"exploration.epsilon must be probabilities, not {epsilon!r}.", key="exploration.epsilon", value=epsilon
            )

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return rng.random((*leading, 1), dtype=np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        epsilon = self._schedules["epsilon"].value(now.timestep)
        greedy = self.distribution.deterministic(inputs)
        uniform = np.empty_like(greedy)
        self.uniform.choose_into(now.uniform, uniform, logp, inputs)
        share = epsilon * np.exp(logp.astype(np.float64))
        explores = now.own[:, 0] < epsilon
        chosen = np.where(explores.reshape(-1, *[1] * (greedy.ndim - 1)), uniform, greedy)
        actions[...] = chosen
        is_greedy = (chosen == greedy).reshape(len(chosen), -1).all(axis=1)
        logp[...] = np.log(share + (1.0 - epsilon) * is_greedy)


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


EXPLORATIONS: dict[str, type[Exploration]] = {
    "StochasticSampling": StochasticSampling,
    "EpsilonGreedy": EpsilonGreedy,
    "PerWorkerEpsilonGreedy": PerWorkerEpsilonGreedy,
    "GaussianNoise": GaussianNoise,
    "OrnsteinUhlenbeckNoise": OrnsteinUhlenbeckNoise,
    "Random": RandomExploration,
}
"""Kinds of exploration by name."""


def exploration_has_memory(settings: str | Mapping[str, Any] | None) -> bool:
    """Whether the exploration that settings ask for must be told which row is whose; False where there is none."""
    name = settings if isinstance(settings, str) or settings is None else settings.get("type")
    return name in EXPLORATIONS and EXPLORATIONS[name].has_memory


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
