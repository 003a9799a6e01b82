"""Atari games the way DeepMind's papers play them, on Gymnasium's own wrappers.

From the inside out: up to 30 no-ops at the start, four frames per step with the last two maximised, grey frames of
84 x 84 (Gymnasium's AtariPreprocessing); whole games are counted; a lost life ends an episode, not the game; FIRE is
pressed where a game waits for it; four frames are stacked as channels. Rewards are clipped by the sampler.

Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, OrderEnforcing
from numpy.typing import NDArray

from aiorl.data.obs_layout import LaidOutBox, ObsLayout
from aiorl.env.base_env import FinishedGame
from aiorl.errors import ConfigError
from aiorl.process.imports import install_command

__all__ = [
    "EpisodicLife",
    "FireAtReset",
    "RealGames",
    "StackFrames",
    "UndrawnFrames",
    "finished_games",
    "game_counters",
    "is_atari",
    "wrap_deepmind",
    "wrap_lives",
]

Pixels = NDArray[np.uint8]
AtariStep = tuple[Any, float, bool, bool, dict[str, Any]]
_STACK = 4
_FRAME_SKIP = 4


def is_atari(env: Any) -> bool:
    """Whether an environment is an Atari game that shows its screen (not its memory).

    Its unwrapped form has an emulator, and an observation has more than two dimensions, or is preprocessed by it.
    """
    shape = getattr(getattr(env, "observation_space", None), "shape", None)
    game = getattr(env, "unwrapped", env)
    shows_screen = shape is not None and (len(shape) > 2 or getattr(game, "is_preprocessed", False))
    return shows_screen and hasattr(game, "ale")


def wrap_deepmind(
    env: gymnasium.Env[Any, Any], dim: int = 84, framestack: bool = True, *, noop_max: int = 30
) -> gymnasium.Env[Any, Any]:
    """An Atari game with the DeepMind preprocessing.

    Args:
        env: the game; frames are skipped here unless the game already does so itself.
        dim: side of the square frames, pixels.
        framestack: observations are the last four frames, uint8 [dim, dim, 4]; else one, uint8 [dim, dim, 1].
        noop_max: most no-ops at the start of a game; 0 for none.

    Raises:
        ConfigError: OpenCV is not installed, or the game's actions are not discrete.
    """
    if not isinstance(env.action_space, spaces.Discrete):
        raise ConfigError(
            f"DeepMind's Atari preprocessing needs discrete actions, not {env.action_space}.",
            key="preprocessor_pref",
            value="deepmind",
            hint="Leave out the game's setting 'continuous', or set preprocessor_pref: rllib.",
        )
    skip = _FRAME_SKIP if getattr(env.unwrapped, "_frameskip", 1) == 1 else 1
    try:
        env = AtariPreprocessing(
            UndrawnFrames(env) if skip > 1 and _is_bare_game(env) else env,
            noop_max=noop_max,
            frame_skip=skip,
            screen_size=dim,
        )
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"Atari preprocessing needs more packages: {error}.",
            key="preprocessor_pref",
            hint=f"Install them with: {install_command('atari')}",
        ) from error
    importlib.import_module("cv2").setNumThreads(1)  # a frame is too small to share; a worker has one core
    return wrap_lives(env, framestack)


def wrap_lives(env: gymnasium.Env[Any, Any], framestack: bool = True) -> gymnasium.Env[Any, Any]:
    """A game that shows grey frames [H, W], with an episode for each life, FIRE pressed and its frames stacked."""
    env = EpisodicLife(RealGames(env))
    meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
    if len(meanings) > 2 and meanings[1] == "FIRE":
        env = FireAtReset(env)
    return StackFrames(env, _STACK if framestack else 1)


def _is_bare_game(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether it is ale-py's own environment, with no wrapper that does anything to a step."""
    game: Any = env.env if isinstance(env, OrderEnforcing) else env
    ale_env = sys.modules.get("ale_py.env")  # it is not imported for this
    return ale_env is not None and type(game) is ale_env.AtariEnv and not game.continuous and not game.sound_obs


class UndrawnFrames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps ale-py's environment by one frame without taking a picture of it; observations of steps are all zeros.

    AtariPreprocessing looks at the screen itself, at two frames of four, and at no observation.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Take a game that shows each frame."""
        super().__init__(env)
        game: Any = env.unwrapped
        actions = importlib.import_module("ale_py").Action
        self._ale = game.ale
        self._actions = [actions.__members__[meaning] for meaning in game.get_action_meanings()]
        self._undrawn = np.zeros(game.observation_space.shape, np.uint8)

    def step(self, action: Any) -> AtariStep:
        """Play one frame."""
        ale = self._ale
        reward = float(ale.act(self._actions[action]))
        info = {
            "lives": ale.lives(),
            "episode_frame_number": ale.getEpisodeFrameNumber(),
            "frame_number": ale.getFrameNumber(),
        }
        return self._undrawn, reward, ale.game_over(with_truncation=False), ale.game_truncated(), info


class RealGames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Counts reward and steps of whole games, however episodes are cut outside of it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Begin with no games."""
        super().__init__(env)
        self._finished: list[FinishedGame] = []
        self._reward = 0.0
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game; one that is going on is forgotten."""
        self._reward = 0.0
        self._length = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> AtariStep:
        """Play on."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._reward += float(reward)
        self._length += 1
        if terminated or truncated:
            self._finished.append(FinishedGame(self._reward, self._length))
            self._reward = 0.0
            self._length = 0
        return obs, float(reward), terminated, truncated, info

    def take_finished(self) -> list[FinishedGame]:
        """Games that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished


def game_counters(envs: Sequence[Any]) -> list[RealGames] | None:
    """The RealGames wrapper of each environment; None unless all have one."""
    counters = [_find_counter(env) for env in envs]
    found = [counter for counter in counters if counter is not None]
    return found if found and len(found) == len(counters) else None


def finished_games(counters: Sequence[RealGames] | None) -> list[FinishedGame] | None:
    """Games of ``game_counters`` that ended since the last call; None where there are no counters."""
    return None if counters is None else [game for counter in counters for game in counter.take_finished()]


def _find_counter(env: Any) -> RealGames | None:
    while not isinstance(env, RealGames):
        if not isinstance(env, gymnasium.Wrapper):
            return None
        env = env.env
    return env


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life; ``reset`` goes on with the game while there are lives left."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Begin with no game."""
        super().__init__(env)
        self._lives = 0
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game, or go on with the next life; a seed always begins a game."""
        if self._is_over or seed is not None:
            obs, info = self.env.reset(seed=seed, options=options)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        self._is_over = False
        self._lives = self._lives_left()
        return obs, info

    def step(self, action: Any) -> AtariStep:
        """Play on; losing a life is a terminal state."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = terminated or truncated
        lives = self._lives_left()
        # Some games show 0 lives for a while before they end.
        if 0 < lives < self._lives:
            terminated = True
        self._lives = lives
        return obs, float(reward), terminated, truncated, info

    def _lives_left(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]


class FireAtReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE after each reset, for games that wait for it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode and press FIRE."""
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(1)
        if terminated or truncated:
            return self.env.reset(options=options)
        return obs, info


class StackFrames(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the last frames as channels, oldest first; at a reset the first frame fills them all."""

    def __init__(self, env: gymnasium.Env[Any, Any], count: int) -> None:
        """Stack ``count`` frames of shape [H, W]."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 2:
            raise ConfigError(f"frames of shape [height, width] are stacked, not {space}.")
        layout = ObsLayout((*space.shape, count), num_frames=count)
        self.observation_space = LaidOutBox(0, 255, layout, np.uint8)
        self._stack: Pixels = np.zeros((*space.shape, count), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        frame, info = self.env.reset(seed=seed, options=options)
        self._stack = np.repeat(frame[..., None], self._stack.shape[-1], axis=-1)
        return self._stack, info

    def observation(self, observation: Pixels) -> Pixels:
        """Add the newest frame."""
        stack = np.empty_like(self._stack)
        stack.reshape(-1)[:-1] = self._stack.reshape(-1)[1:]  # the next frame of a pixel is its next byte
        stack[..., -1] = observation
        self._stack = stack
        return stack
