"""Atari games on ale-py's own vector environment: emulated and preprocessed in C++, all games at the same time.

Each game is an ``AtariVectorEnv`` of one, since a new life and the FIRE at its start are steps of one game alone. Only
skipping, grey frames, their size and the no-ops at a game's start are left to it; lives, FIRE, frame stacks and the
count of whole games are the wrappers of ``atari``, so that rows are those of ``wrap_deepmind``, but for random numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping, MutableSequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from aiorl.env.atari import AtariStep, wrap_lives
from aiorl.env.serial_env import Copies

__all__ = ["AtariCopies", "PreprocessedGame", "why_not_atari_vector"]

_KNOWN = frozenset({"game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"})
_PLAIN = {
    "obs_type": "rgb",
    "render_mode": None,
    "continuous": False,
    "sound_obs": False,
    "mode": None,
    "difficulty": None,
}
_FRAME_SKIP = 4
_MAX_SEED = (1 << 31) - 1


def why_not_atari_vector(settings: Mapping[str, Any]) -> str | None:
    """Why a game with these settings needs Gymnasium's wrappers; None if ale-py's preprocessing is the one asked for.

    Args:
        settings: keyword arguments of ale-py's environment; its frame skip is 1 where the preprocessing skips.
    """
    if importlib.util.find_spec("ale_py") is None or importlib.util.find_spec("ale_py.vector_env") is None:
        return "the installed ale-py has no vector environment"
    for name, value in settings.items():
        if name == "frameskip" and value != 1:
            return f"frameskip is {value!r}"
        if name not in _KNOWN | {"frameskip"} and (name not in _PLAIN or value != _PLAIN[name]):
            return f"it does not know the setting {name}: {value!r}"
    return None


class PreprocessedGame(gymnasium.Env[Any, Any]):
    """One game whose step can be begun by ``send``, before ``step`` waits for its result.

    Observations are grey frames [dim, dim], the maximum of the last two of four.
    """

    is_preprocessed = True

    def __init__(self, settings: Mapping[str, Any], dim: int, noop_max: int = 30) -> None:
        """Load the game.

        Args:
            settings: see ``why_not_atari_vector``.
            dim: side of the frames, pixels.
            noop_max: most no-ops at the start of a game; 0 for none.
        """
        vector_env = importlib.import_module("ale_py.vector_env")
        self._vector: Any = vector_env.AtariVectorEnv(
            num_envs=1,
            num_threads=1,
            img_height=dim,
            img_width=dim,
            stack_num=1,
            frameskip=_FRAME_SKIP,
            noop_max=noop_max,
            reward_clipping=False,
            use_fire_reset=False,
            **{name: value for name, value in settings.items() if name in _KNOWN},
        )
        self.ale = self
        self.observation_space = spaces.Box(0, 255, (dim, dim), np.uint8)
        self.action_space = self._vector.single_action_space
        self._lives = 0
        self._is_under_way = False

    def lives(self) -> int:
        """Lives left; the emulator's own name for it."""
        return self._lives

    def get_action_meanings(self) -> list[str]:
        """Names of the actions; the emulator's own name for it."""
        return [action.name for action in self._vector.ale.get_action_set()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        seeds = None if seed is None else np.array([seed & _MAX_SEED])
        if self._is_under_way:
            self.step(None)
        obs, info = self._vector.reset(seed=seeds)
        self._lives = int(info["lives"][0])
        return obs[0, 0], {}

    def send(self, action: int) -> None:
        """Begin a step, if none is under way; the next ``step`` waits for it and ignores its own action."""
        if self._is_under_way:
            return
        self._vector.send(np.array([action], np.int64))
        self._is_under_way = True

    def step(self, action: Any) -> AtariStep:
        """Play four frames, or take those that were begun by ``send``."""
        self.send(action)
        self._is_under_way = False
        obs, rewards, terminateds, truncateds, info = self._vector.recv()
        self._lives = int(info["lives"][0])
        return obs[0, 0], float(rewards[0]), bool(terminateds[0]), bool(truncateds[0]), {"lives": self._lives}

    def close(self) -> None:
        """End the game's thread."""
        self._vector = None


class AtariCopies(Copies):
    """N games, each emulated in a thread of its own; they are looked at in turn."""

    can_begin = True

    def __init__(
        self,
        settings: Mapping[str, Any],
        num_envs: int,
        *,
        env_id: str,
        spec: EnvSpec | None = None,
        dim: int = 84,
        framestack: bool = True,
        noop_max: int = 30,
        seed: int | None = None,
    ) -> None:
        """Load the games.

        Args:
            settings: see ``why_not_atari_vector``.
            num_envs: number of games N.
            env_id: name for messages.
            spec: Gymnasium's entry of the game.
            dim: side of the square frames, pixels.
            framestack: observations are the last four frames, uint8 [dim, dim, 4]; else one, uint8 [dim, dim, 1].
            noop_max: most no-ops at the start of a game; 0 for none.
            seed: see Copies.
        """
        self._games_under_way = [PreprocessedGame(settings, dim, noop_max) for _ in range(num_envs)]
        for game in self._games_under_way:
            game.spec = spec
        games = [wrap_lives(game, framestack) for game in self._games_under_way]
        super().__init__(games, env_id=env_id, seed=seed)

    def begin(self, copies: slice, actions: Iterable[Any]) -> None:
        """Let some games emulate their next step; see Copies."""
        for game, action in zip(self._games_under_way[copies], actions, strict=True):
            game.send(action)

    def step_into(self, rows: MutableSequence[Any] | NDArray[Any], actions: Iterable[Any]) -> bool:
        """Step every game at the same time; see Copies."""
        actions = list(actions)
        self.begin(slice(None), actions)
        return super().step_into(rows, actions)
