"""Small environments with known trajectories, and one that fails on purpose.

Use them by import path, for example ``aiorl.testing.envs:RecallEnv``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aiorl.data.columns import F32

__all__ = ["CountingEnv", "CountingVectorEnv", "FaultyEnv", "RecallEnv", "counting_obs"]

Info = dict[str, Any]
Reset = tuple[F32, Info]
Step = tuple[Any, float, bool, bool, Info]


def counting_obs(episode: int, step: int, index: int = 0) -> F32:
    """Return the observation of CountingEnv and CountingVectorEnv at a step of an episode.

    Args:
        episode: number of the episode, from 0.
        step: step of the episode, from 0.
        index: number of the copy.

    Returns:
        Three numbers: episode, step, index; float32 of shape (3,).
    """
    return np.array([episode, step, index], np.float32)


def counting_space() -> gymnasium.Space[F32]:
    """Return a space of the observations of `counting_obs`."""
    return spaces.Box(-np.inf, np.inf, (3,), np.float32)


class CountingEnv(gymnasium.Env[F32, np.int64]):
    """Environment that shows episode number, step number and its index; rewards are the step
    numbers (1, 2, ...).

    Actions have no effect. The first episode has the number 0.

    Attributes:
        observation_space: Box of three numbers.
        action_space: Discrete space.
        last_actions: actions received, oldest first.
        seeds: seeds passed to ``reset``; None for calls without one.
    """

    def __init__(
        self,
        length: int = 5,
        end: str = "terminate",
        index: int = 0,
        actions: int = 2,
    ) -> None:
        """Make one copy.

        Args:
            length: steps per episode.
            end: ``"terminate"``, ``"truncate"`` or ``"never"``.
            index: number shown as the last entry of each observation.
            actions: size of the Discrete action space.
        """
        self.observation_space = counting_space()
        self.action_space = spaces.Discrete(actions)
        self.last_actions: list[int] = []
        self.seeds: list[int | None] = []
        self._length = length
        self._end = end
        self._index = index
        self._episode = -1
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Reset:
        """Begin the next episode, and return its first observation, of shape (3,), and an empty
        info.

        Args:
            seed: seed, which is recorded and has no other effect.
            options: ignored.
        """
        super().reset(seed=seed)
        self.seeds.append(seed)
        self._episode += 1
        self._step = 0
        return counting_obs(self._episode, 0, self._index), {}

    def step(self, action: np.int64 | int) -> Step:
        """Record the action, and return the results of the step."""
        self.last_actions.append(int(action))
        self._step += 1
        is_over = self._step >= self._length
        terminated = is_over and self._end == "terminate"
        truncated = is_over and self._end == "truncate"
        obs = counting_obs(self._episode, self._step, self._index)
        return obs, float(self._step), terminated, truncated, {}


class FaultyEnv(CountingEnv):
    """CountingEnv that fails at one step of its first episode.

    Faults: ``"reset"`` and ``"step"`` raise RuntimeError, ``"nan_obs"`` makes the observation NaN,
    ``"nan_reward"`` the reward, ``"exit"`` raises SystemExit, ``"constructor"`` makes the
    constructor raise RuntimeError.
    """

    def __init__(self, fault: str = "step", at_step: int = 3, length: int = 100) -> None:
        """Make one copy.

        Args:
            fault: the fault; see the class.
            at_step: step of the first episode that fails; ignored for ``"reset"`` and
                ``"constructor"``.
            length: steps per episode.

        Raises:
            RuntimeError: the fault is ``"constructor"``.
        """
        if fault == "constructor":
            raise RuntimeError("this environment cannot be made")
        super().__init__(length)
        self._fault = fault
        self._at_step = at_step

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Reset:
        """Begin the next episode, or raise; see `CountingEnv.reset`."""
        if self._fault == "reset":
            raise RuntimeError("reset failed on purpose")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64 | int) -> Step:
        """Return the results of an action, or fail; see `CountingEnv.step`."""
        obs, reward, terminated, truncated, info = super().step(action)
        if self._step == self._at_step and self._episode == 0:
            match self._fault:
                case "step":
                    raise RuntimeError("step failed on purpose")
                case "exit":
                    raise SystemExit(3)
                case "nan_obs":
                    obs = obs * np.nan
                case "nan_reward":
                    reward = math.nan
        return obs, reward, terminated, truncated, info


class RecallEnv(gymnasium.Env[F32, np.int64]):
    """Memory task: a symbol is shown once, and ``delay`` steps later the action must name it.

    Step 0 shows one of S symbols, drawn uniformly, as a one-hot vector with a trailing 0. The
    following observations are all zeros, except that the last one before the answer has a trailing
    1. The action taken there earns 1 if it is the symbol's number, otherwise 0, and ends the
    episode. All other actions earn 0.

    A policy with memory can always earn 1. A policy that uses only the current observation earns
    1/S in expectation. The observation at which it answers is the same for every symbol, so its
    answer A is independent of the symbol X, and P(A = X) = sum_x P(A = x) P(X = x) = 1/S.

    Attributes:
        observation_space: Box of S + 1 numbers.
        action_space: Discrete space of S actions.
        best_memoryless_return: best expected return without memory, 1/S.
    """

    def __init__(self, delay: int = 3, symbols: int = 2) -> None:
        """Make one copy.

        Args:
            delay: steps between the symbol and the answer, at least 1.
            symbols: number of symbols S, at least 2.
        """
        self.observation_space = spaces.Box(0.0, 1.0, (symbols + 1,), np.float32)
        self.action_space = spaces.Discrete(symbols)
        self.best_memoryless_return = 1.0 / symbols
        self._delay = delay
        self._symbols = symbols
        self._symbol = 0
        self._step = 0

    def _obs(self) -> F32:
        obs = np.zeros(self._symbols + 1, np.float32)
        if self._step == 0:
            obs[self._symbol] = 1.0
        elif self._step == self._delay:
            obs[-1] = 1.0
        return obs

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Reset:
        """Draw a symbol, and return an observation that shows it, of shape (symbols + 1,), and an
        empty info.

        Args:
            seed: seed of the random numbers; None continues with the random state.
            options: ignored.
        """
        super().reset(seed=seed)
        self._symbol = int(self.np_random.integers(self._symbols))
        self._step = 0
        return self._obs(), {}

    def step(self, action: np.int64 | int) -> Step:
        """Wait, or take the action as the answer; return the results of the step."""
        is_answer = self._step == self._delay
        reward = float(is_answer and int(action) == self._symbol)
        self._step += 1
        return self._obs(), reward, is_answer, False, {}


class CartPoleWithoutVelocities(gymnasium.ObservationWrapper[F32, np.int64, F32]):
    """CartPole-v1 that shows only positions: the cart's (track units) and the pole's angle
    (radians).

    A single observation does not show the direction of motion, so a policy must remember earlier
    ones.
    """

    def __init__(self) -> None:
        """Make one copy."""
        super().__init__(gymnasium.make("CartPole-v1"))
        full = self.env.observation_space
        assert isinstance(full, spaces.Box)
        # each position is followed by its velocity
        self.observation_space = spaces.Box(full.low[::2], full.high[::2], dtype=np.float32)

    def observation(self, observation: F32) -> F32:
        """Return an observation without velocities, of shape (2,)."""
        return observation[::2]


class CountingVectorEnv(SyncVectorEnv):
    """Vector environment of CountingEnv's trajectories, in any autoreset mode; copy i has length
    ``lengths[i]``.
    """

    def __init__(
        self,
        num_envs: int = 2,
        lengths: Sequence[int] = (3, 5),
        end: str = "terminate",
        mode: str = "NextStep",
    ) -> None:
        """Make the copies.

        Args:
            num_envs: number of copies N.
            lengths: steps per episode of each copy, repeated as needed.
            end: see CountingEnv.
            mode: value of gymnasium's AutoresetMode: ``"NextStep"``, ``"SameStep"`` or
                ``"Disabled"``.
        """
        copies = [
            partial(CountingEnv, length=lengths[index % len(lengths)], end=end, index=index)
            for index in range(num_envs)
        ]
        super().__init__(copies, autoreset_mode=AutoresetMode(mode))
