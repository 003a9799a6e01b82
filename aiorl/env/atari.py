"""Atari games preprocessed as in DeepMind's papers, with Gymnasium's own wrappers.

From the inside out: a game starts with up to 30 no-ops. A step is four frames; an observation is
the maximum of the last two, in grey, 84 x 84 pixels (Gymnasium's AtariPreprocessing). Whole games
are counted. A lost life ends an episode, but not the game. FIRE is pressed when a game waits for
it. Four frames are stacked as channels. The sampler clips the rewards. Source: Mnih et al. 2015,
https://doi.org/10.1038/nature14236.

``AtariCopies`` plays many games at the same time with ale-py's vector environment, which is written
in C++. Each game is an ``AtariVectorEnv`` of size one, because a new life and the FIRE at its start
are steps of a single game. ale-py only skips frames, converts them to grey, resizes them and plays
the no-ops. The wrappers here do the rest, so rows are equal to those of ``wrap_deepmind``, except
for random numbers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import AtariPreprocessing, OrderEnforcing
from numpy.typing import NDArray

from aiorl.data.obs_layout import LaidOutBox, ObsLayout
from aiorl.env.gym_like import GymnasiumEnv, RealGames, ResetResult
from aiorl.env.vector_env import Copies
from aiorl.errors import ConfigError
from aiorl.process.imports import needed_by

Pixels = NDArray[np.uint8]
AtariStep = tuple[Any, float, bool, bool, dict[str, Any]]
_STACK = 4
_FRAME_SKIP = 4


def is_atari(env: Any) -> bool:
    """Return True if an environment is an Atari game that shows its screen (not its memory).

    Such an environment has an emulator inside, and its observations have more than two dimensions
    or are preprocessed.
    """
    shape = getattr(getattr(env, "observation_space", None), "shape", None)
    game = getattr(env, "unwrapped", env)
    shows_screen = shape is not None and (len(shape) > 2 or getattr(game, "is_preprocessed", False))
    return shows_screen and hasattr(game, "ale")


def wrap_deepmind(
    env: GymnasiumEnv,
    dim: int = 84,
    framestack: bool = True,
    *,
    noop_max: int = 30,
) -> GymnasiumEnv:
    """Wrap an Atari game in the DeepMind preprocessing.

    Args:
        env: the game; frames are skipped here unless the game itself skips them.
        dim: side of the square frames, pixels.
        framestack: observations are the last four frames, uint8 [dim, dim, 4]; else one, uint8
            [dim, dim, 1].
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
    with needed_by("DeepMind's Atari preprocessing", "OpenCV", "atari", key="preprocessor_pref"):
        # A frame is too small to share between threads, and a worker has one core.
        importlib.import_module("cv2").setNumThreads(1)
    if skip > 1 and _is_bare_game(env):
        env = UndrawnFrames(env)
    game = AtariPreprocessing(env, noop_max=noop_max, frame_skip=skip, screen_size=dim)
    return wrap_lives(game, framestack)


def wrap_lives(env: GymnasiumEnv, framestack: bool = True) -> GymnasiumEnv:
    """Wrap a game with grey frames [H, W]: one episode per life, FIRE pressed at its start, frames
    stacked.
    """
    env = EpisodicLife(RealGames(env))
    meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
    if len(meanings) > 2 and meanings[1] == "FIRE":
        env = FireAtReset(env)
    return StackFrames(env, _STACK if framestack else 1)


def _is_bare_game(env: GymnasiumEnv) -> bool:
    """Return True for ale-py's own environment without a wrapper that changes a step."""
    game: Any = env.env if isinstance(env, OrderEnforcing) else env
    ale_env = sys.modules.get("ale_py.env")  # not imported just for this check
    return (
        ale_env is not None
        and type(game) is ale_env.AtariEnv
        and not game.continuous
        and not game.sound_obs
    )


class UndrawnFrames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that plays one frame per step without drawing it: observations of steps are all
    zeros.

    AtariPreprocessing reads two of every four screens from the emulator itself and ignores the
    observations.
    """

    def __init__(self, env: GymnasiumEnv) -> None:
        """Wrap a game that draws each frame."""
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
        return (
            self._undrawn,
            reward,
            ale.game_over(with_truncation=False),
            ale.game_truncated(),
            info,
        )


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that ends an episode with each life; ``reset`` continues the game while lives are
    left.
    """

    def __init__(self, env: GymnasiumEnv) -> None:
        """Wrap a game; the first ``reset`` begins it."""
        super().__init__(env)
        self._lives = 0
        self._is_over = True

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin a game or continue with the next life; a seed always begins a game."""
        if self._is_over or seed is not None:
            obs, info = self.env.reset(seed=seed, options=options)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)  # a no-op
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        self._is_over = False
        self._lives = self._lives_left()
        return obs, info

    def step(self, action: Any) -> AtariStep:
        """Step once; the loss of a life is a terminal state."""
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
    """Wrapper that presses FIRE after each reset, for games that wait for it."""

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin an episode and press FIRE."""
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(1)
        if terminated or truncated:
            return self.env.reset(options=options)
        return obs, info


class StackFrames(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Wrapper that shows the last frames as channels, oldest first; a reset fills all of them with
    the first frame.
    """

    def __init__(self, env: GymnasiumEnv, count: int) -> None:
        """Stack ``count`` frames of shape [H, W]."""
        super().__init__(env)
        shape = (*(env.observation_space.shape or ()), count)
        self.observation_space = LaidOutBox(0, 255, ObsLayout(shape, num_frames=count), np.uint8)
        self._stack: Pixels = np.zeros(shape, np.uint8)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin an episode."""
        frame, info = self.env.reset(seed=seed, options=options)
        self._stack = np.repeat(frame[..., None], self._stack.shape[-1], axis=-1)
        return self._stack, info

    def observation(self, observation: Pixels) -> Pixels:
        """Return the last frames, with this newest one."""
        stack = np.empty_like(self._stack)
        stack.reshape(-1)[:-1] = self._stack.reshape(-1)[1:]  # a pixel's frames are adjacent bytes
        stack[..., -1] = observation
        self._stack = stack
        return stack


_KNOWN = frozenset(
    {"game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"}
)
_MAX_SEED = (1 << 31) - 1


def why_not_atari_vector(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a game with these settings needs Gymnasium's wrappers; None if ale-py
    can preprocess it.

    Args:
        settings: keyword arguments of ale-py's environment; frameskip is 1 if the preprocessing
            skips frames.
    """
    has_ale = importlib.util.find_spec("ale_py") is not None
    if not has_ale or importlib.util.find_spec("ale_py.vector_env") is None:
        return "the installed ale-py has no vector environment"
    for name, value in settings.items():
        if name == "frameskip" and value != 1:
            return f"frameskip is {value!r}"
        is_default = value is None or value is False or value == "rgb"
        if name not in _KNOWN | {"frameskip"} and not is_default:
            return f"it does not know the setting {name}: {value!r}"
    return None


class PreprocessedGame(gymnasium.Env[Any, Any]):
    """Game with a step that can be begun by ``send`` before ``step`` waits for its result.

    Observations are grey frames [dim, dim], the maximum of the last two of four.
    """

    is_preprocessed = True

    def __init__(
        self,
        settings: Mapping[str, Any],
        dim: int,
        noop_max: int = 30,
        *,
        spec: EnvSpec | None = None,
    ) -> None:
        """Load the game.

        Args:
            settings: see ``why_not_atari_vector``.
            dim: side of the frames, pixels.
            noop_max: most no-ops at the start of a game; 0 for none.
            spec: Gymnasium's registry entry of the game.
        """
        self.spec = spec
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
        """Return the number of lives left; the emulator has a method of this name."""
        return self._lives

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions; the emulator has a method of this name."""
        return [action.name for action in self._vector.ale.get_action_set()]

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin a game."""
        super().reset(seed=seed)
        seeds = None if seed is None else np.array([seed & _MAX_SEED])
        if self._is_under_way:
            self.step(None)
        obs, info = self._vector.reset(seed=seeds)
        self._lives = int(info["lives"][0])
        return obs[0, 0], {}

    def send(self, action: int) -> None:
        """Begin a step unless one is under way; the next ``step`` ignores its own action and waits
        for this one.
        """
        if self._is_under_way:
            return
        self._vector.send(np.array([action], np.int64))
        self._is_under_way = True

    def step(self, action: Any) -> AtariStep:
        """Play four frames, or wait for those that ``send`` began."""
        self.send(action)
        self._is_under_way = False
        obs, rewards, terminateds, truncateds, info = self._vector.recv()
        self._lives = int(info["lives"][0])
        return (
            obs[0, 0],
            float(rewards[0]),
            bool(terminateds[0]),
            bool(truncateds[0]),
            {"lives": self._lives},
        )

    def close(self) -> None:
        """Stop the game's thread."""
        self._vector = None


class AtariCopies(Copies):
    """N games, each emulated in its own thread; the games are read in turn."""

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
            spec: Gymnasium's registry entry of the game.
            dim: side of the square frames, pixels.
            framestack: observations are the last four frames, uint8 [dim, dim, 4]; else one, uint8
                [dim, dim, 1].
            noop_max: most no-ops at the start of a game; 0 for none.
            seed: see Copies.
        """
        self.senders = [
            PreprocessedGame(settings, dim, noop_max, spec=spec) for _ in range(num_envs)
        ]
        envs = [wrap_lives(game, framestack) for game in self.senders]
        super().__init__(envs, env_id=env_id, seed=seed)
