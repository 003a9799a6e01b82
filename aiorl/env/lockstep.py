"""LockstepEnv: N copies of one environment that all step at once, whatever is behind them.

Observations, rewards and flags come as whole arrays. How an episode's end is followed by a reset differs
between implementations, and a ``VectorStep`` says which happened:

* The copy was reset inside the same call: ``obs`` holds the new episode's first observation, and the true
  final one is listed in ``final_index`` and ``final_obs``.
* The copy is reset by the next call (Gymnasium's NEXT_STEP): ``obs`` holds the true final observation; the
  next call ignores that copy's action, returns its first observation and marks the row ``valid == False``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from aiorl.env.base_env import FinishedGame
from aiorl.errors import ConfigError

__all__ = ["SEED_STRIDE", "LockstepEnv", "TrainingDisabled", "VectorStep", "checked_horizon", "env_seeds"]

SEED_STRIDE = 1_000_000
"""Copy ``v`` of a worker's environment is seeded with ``worker_seed + SEED_STRIDE * v``."""


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """The seed of each copy, for a worker's seed."""
    return [seed + SEED_STRIDE * index for index in range(num_envs)]


def checked_horizon(horizon: int | None, limit: int | None) -> int | None:
    """Length at which episodes are cut: the horizon if given (0 counts as not given), else the limit.

    Raises:
        ConfigError: the horizon is negative or above the environment's own limit.
    """
    if not horizon:
        return limit
    if horizon < 0 or (limit is not None and horizon > limit):
        raise ConfigError(
            f"horizon is {horizon}, but the environment ends its episodes after {limit} steps."
            if horizon > 0
            else f"horizon is {horizon}, expected a number of steps > 0.",
            key="horizon",
            value=horizon,
            hint="Give a smaller horizon, or none to use the environment's own limit.",
        )
    return horizon


class TrainingDisabled(Exception):
    """A step's info has a ``training_enabled`` that is false: its row is to be left out, which lockstep cannot do.

    Attributes:
        env_id: name of the environment.
    """

    def __init__(self, env_id: str) -> None:
        """Name the environment."""
        super().__init__(f"a step of environment {env_id!r} is not to be trained on")
        self.env_id = env_id


@dataclass(slots=True)
class VectorStep:
    """What one step of all copies brought. The arrays may be reused by the next step: copy what must last.

    Attributes:
        obs: [N, ...] what to act on next.
        rewards: [N] float, raw.
        terminateds: [N] bool, ended in a terminal state.
        truncateds: [N] bool, cut by a time limit or horizon.
        final_index: [K] int64 copies that were reset inside this step, ascending; None when there are none.
        final_obs: [K, ...] their true final observations.
        valid: [N] bool, False where the row was only the reset of a copy; None when all are transitions.
        infos: what the copies said, all in one dict (see ``vector_infos``); None or empty where nothing is known.
    """

    obs: NDArray[Any]
    rewards: NDArray[Any]
    terminateds: NDArray[np.bool_]
    truncateds: NDArray[np.bool_]
    final_index: NDArray[np.int64] | None = None
    final_obs: NDArray[Any] | None = None
    valid: NDArray[np.bool_] | None = None
    infos: Mapping[str, Any] | None = None


class LockstepEnv(ABC):
    """N copies of an environment, stepped together.

    Attributes:
        env_id: the environment's name, for messages.
        num_envs: number of copies N.
        observation_space: space of one copy.
        action_space: space of one copy.
        max_episode_steps: length at which an episode is truncated, None = never as far as is known.
        first_seeds: seeds of a first ``reset`` that is given none; None for none.
        can_begin: some copies can step while the actions of others are not known yet, see ``begin``.
    """

    env_id: str
    num_envs: int
    observation_space: Space[Any]
    action_space: Space[Any]
    max_episode_steps: int | None
    first_seeds: Sequence[int] | None = None
    can_begin: bool = False

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations [N, ...] of new episodes in all copies.

        Args:
            seeds: one seed per copy; None lets each go on with its random state.

        Raises:
            EnvError: the environment raised, or returned what does not fit its space.
        """

    @abstractmethod
    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy once.

        Args:
            actions: [N, ...] one action per copy.

        Raises:
            EnvError: the environment raised, or returned what does not fit (BadObservationError,
                BadRewardError).
        """

    def begin(self, copies: slice, actions: NDArray[Any]) -> None:
        """Begin the step of some copies; the ``step`` that follows is given all actions and waits for it.

        Args:
            copies: which ones.
            actions: [K, ...] one action for each of them.

        Raises:
            NotImplementedError: there is no ``can_begin``.
        """
        raise NotImplementedError(f"{type(self).__name__} steps all copies at once")

    def seed(self, seed: int) -> None:
        """Seed the first ``reset`` that is given no seeds with a worker's seed."""
        self.first_seeds = env_seeds(seed, self.num_envs)

    def limit_episodes(self, horizon: int | None) -> None:
        """Cut episodes at this many steps; before the first reset.

        Args:
            horizon: steps; None or 0 = the environment's own limit.

        Raises:
            ConfigError: a horizon above the environment's own limit, or other than that where it cannot cut.
        """
        if checked_horizon(horizon, self.max_episode_steps) != self.max_episode_steps:
            raise ConfigError(
                f"horizon is {horizon}, but {self.env_id!r} cannot cut its episodes there.",
                key="horizon",
                value=horizon,
                hint="Leave horizon out, or use vectorize: serial.",
            )

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called more than once."""

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Real games that ended since the last call; None when not every copy keeps count of them."""
        return None

    @property
    def unwrapped(self) -> list[Any]:
        """The environment objects behind the copies, where they live in this process; else empty."""
        return []
