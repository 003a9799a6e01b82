"""Exploration: how actions depart from what the network prefers.

A policy without an exploration object samples from its action distribution, which is the fast path. An object
replaces that step. Like sampling, it is a pure function of the network's outputs and of noise drawn ahead, so that
equal seeds give equal actions however rows are batched; only Ornstein-Uhlenbeck noise, which is a process in time, and
noise of the state, which lasts some steps, keep something for each row.

Actions that the network's outputs forbid (`MASKED_LOGIT`) are never taken, at random neither.

Recorded log-probabilities are those of the behaviour actually followed, where it has any; noise added to a
deterministic policy has no useful density once it is clipped, and counts as 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import ActionDistribution
from aiorl.acting.exploration_kind import Exploration, Moment, Points
from aiorl.acting.noise import GaussianNoise, OrnsteinUhlenbeckNoise, StateDependentNoise
from aiorl.config.code import import_object, is_import_path, named_failures
from aiorl.data.actions import leaf_spaces
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest

__all__ = [
    "EXPLORATIONS",
    "EpsilonGreedy",
    "Exploration",
    "GaussianNoise",
    "Moment",
    "OrnsteinUhlenbeckNoise",
    "PerWorkerEpsilonGreedy",
    "RandomExploration",
    "StateDependentNoise",
    "StochasticSampling",
    "exploration_has_memory",
    "make_exploration",
    "worker_epsilon",
]

F32 = NDArray[np.float32]

_APEX_BASE, _APEX_EXPONENT = 0.4, 7.0
_SHARES_OF_ANY = 8
_PLAIN = "StochasticSampling"


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


def worker_epsilon(worker_index: int, num_workers: int) -> float:
    """Ape-X's epsilon of a worker: 0.4 for the first, 0.4^8 for the last; 0 for the learner's own.

    Args:
        worker_index: 0 for the learner's own worker, else from 1.
        num_workers: number of remote workers; an index beyond it, of a late joiner, counts from 1 again. 0: nobody
            knows how many join, and eight have the shares of eight.
    """
    if worker_index < 1:
        return 0.0
    num_shares = num_workers or _SHARES_OF_ANY
    position = (worker_index - 1) % num_shares
    return float(_APEX_BASE ** (1.0 + _APEX_EXPONENT * position / max(num_shares - 1, 1)))


EXPLORATIONS: dict[str, type[Exploration]] = {
    "StochasticSampling": StochasticSampling,
    "EpsilonGreedy": EpsilonGreedy,
    "PerWorkerEpsilonGreedy": PerWorkerEpsilonGreedy,
    "GaussianNoise": GaussianNoise,
    "OrnsteinUhlenbeckNoise": OrnsteinUhlenbeckNoise,
    "StateDependentNoise": StateDependentNoise,
    "Random": RandomExploration,
}
"""Kinds of exploration by name."""


def exploration_has_memory(settings: str | Mapping[str, Any] | None) -> bool:
    """Whether the exploration that settings ask for must be told which row is whose, even of the same rows in turn.

    False where there is none, or where noise that is drawn ahead for all steps holds what it remembers.
    """
    if settings is None:
        return False
    kind = _kind_of(settings if isinstance(settings, str) else settings.get("type", _PLAIN))
    return kind.has_memory and not kind.holds_noise


def _kind_of(name: Any) -> type[Exploration]:
    """Return the class that a name in EXPLORATIONS, or an import path, is of.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(name, str) and name in EXPLORATIONS:
        return EXPLORATIONS[name]
    if not isinstance(name, str) or not is_import_path(name):
        raise ConfigError(
            f"exploration is {name!r}, expected one of {', '.join(EXPLORATIONS)}, or the import path of an Exploration "
            "class, 'package.module:Name'.",
            key="exploration.type",
            value=name,
            hint=nearest(str(name), EXPLORATIONS).strip(),
        )
    kind = import_object(name, key="exploration.type")
    if not (isinstance(kind, type) and issubclass(kind, Exploration)):
        raise ConfigError(
            f"exploration is {name!r}, expected a subclass of aiorl.Exploration.", key="exploration.type", value=name
        )
    return kind


def make_exploration(
    settings: str | Mapping[str, Any] | None,
    distribution: ActionDistribution,
    *,
    worker_index: int = 0,
    num_workers: int = 0,
) -> Exploration | None:
    """The exploration object that settings ask for.

    Args:
        settings: a name in EXPLORATIONS, or the import path of a class, or a mapping with that under "type" and the
            kind's own settings; None or plain stochastic sampling needs no object.
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
    name = chosen.pop("type", _PLAIN)
    kind = _kind_of(name)
    if name == _PLAIN and not chosen.get("random_timesteps"):
        chosen.pop("random_timesteps", None)
        if not chosen:
            return None
    parameters = inspect.signature(kind).parameters
    place = {"worker_index": worker_index, "num_workers": num_workers}
    chosen = {name: value for name, value in place.items() if name in parameters} | chosen
    made: Exploration = named_failures(kind, f"exploration {name!r}", "exploration")(distribution, **chosen)
    if name not in EXPLORATIONS:
        for method in ("draw_noise", "choose_into"):
            setattr(
                made, method, named_failures(getattr(made, method), f"exploration {name!r}: {method}", "exploration")
            )
    return made
