"""WorkerArguments: the constructor's arguments as one object, checked where that needs nothing else."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.callbacks import DefaultCallbacks
from aiorl.env.registry import EnvContext
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, nearest
from aiorl.offline.estimators import ESTIMATORS
from aiorl.offline.io import InputCreator, OutputCreator
from aiorl.policy.policy_map import PolicyMappingFn
from aiorl.sampler.setup import ObservationFn

__all__ = ["BATCH_MODES", "SIMULATION", "EnvSource", "WorkerArguments"]

BATCH_MODES = ("truncate_episodes", "complete_episodes")
SIMULATION = "simulation"
"""Input evaluation by playing on in the environment."""

_PREPROCESSOR_PREFS = ("deepmind", "rllib")
_WHOLE = ("rollout_fragment_length", "num_envs", "worker_index", "num_workers", "episode_horizon", "seed")
_MAX_SEED = 2**32 - 1
"""What NumPy's global generator takes."""

_LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")

EnvSource = str | type[Any] | Callable[[EnvContext], Any]


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """Arguments of RolloutWorker; its constructor has the defaults.

    Attributes:
        env_creator: makes an environment, given an EnvContext; also a name, see ``aiorl.env.registry``.
        policy: a Policy class; or policy id -> (class, observation space, action space, config).
        policy_mapping_fn: agent id -> policy id, asked once per agent and episode; None = the default policy.
        policies_to_train: ids of the policies that learn; None or empty = all.
        tf_session_creator: always None; TensorFlow 2 has no sessions.
        rollout_fragment_length: steps per environment in a batch, F.
        batch_mode: ``"truncate_episodes"``: batches of F steps per environment; ``"complete_episodes"``: whole
            episodes, until there are as many steps.
        episode_horizon: steps after which episodes end; None or 0 = the environment's own limit.
        preprocessor_pref: ``"deepmind"``: Atari games get DeepMind's preprocessing; ``"rllib"``: they do not.
        sample_async: sample continuously in the background; batches may lag behind the weights.
        compress_observations: ``"bulk"``: compress whole columns; True, or anything else that is not false: each row
            on its own.
        num_envs: environments that are evaluated together.
        observation_fn: rewrites each environment's observations, see ``aiorl.sampler.setup``.
        observation_filter: name of the filter that each policy's observations go through.
        clip_rewards: limit rewards of rows to [-1, 1] (True), or to a range (a number); None = only where
            DeepMind's preprocessing is applied.
        clip_actions: limit what environments get to their action spaces.
        env_config: the environment's own settings; None = empty.
        model_config: options of models; read here: custom_preprocessor, dim, framestack. None = empty.
        policy_config: base config of every policy, over which its own config wins; None = empty.
        worker_index: 0 = local.
        num_workers: number of remote workers.
        monitor_path: directory for episode statistics and videos.
        log_dir: the run's directory, for output.
        log_level: level of the ``aiorl`` logger; None leaves it.
        callbacks: a subclass of DefaultCallbacks; None = no hooks.
        input_creator: makes the InputReader, given an IOContext; by default the sampler is read.
        input_evaluation: any of ``"is"``, ``"wis"`` and ``"simulation"``: how stored input is judged.
        output_creator: makes the OutputWriter, given an IOContext; by default nothing is written.
        remote_worker_envs: put each environment in a process of its own.
        remote_env_batch_wait_ms: how long a poll of such waits for more, once one is ready.
        soft_horizon: at the horizon the episode restarts, but the environment is not reset.
        no_done_at_end: rows never are done.
        seed: of this process's generators, the environments and the policies; None = left to themselves.
        extra_python_environs: environment variables, set before anything else is built.
        fake_sampler: give the first batch for ever.
    """

    env_creator: EnvSource
    policy: Any
    policy_mapping_fn: PolicyMappingFn | None
    policies_to_train: Collection[str] | None
    tf_session_creator: Callable[[], Any] | None
    rollout_fragment_length: int
    batch_mode: str
    episode_horizon: int | None
    preprocessor_pref: str
    sample_async: bool
    compress_observations: bool | str
    num_envs: int
    observation_fn: ObservationFn | None
    observation_filter: str
    clip_rewards: bool | float | None
    clip_actions: bool
    env_config: Mapping[str, Any] | None
    model_config: Mapping[str, Any] | None
    policy_config: Mapping[str, Any] | None
    worker_index: int
    num_workers: int
    monitor_path: str | None
    log_dir: str | None
    log_level: str | None
    callbacks: type[DefaultCallbacks] | None
    input_creator: InputCreator
    input_evaluation: Collection[str]
    output_creator: OutputCreator
    remote_worker_envs: bool
    remote_env_batch_wait_ms: float
    soft_horizon: bool
    no_done_at_end: bool
    seed: int | None
    extra_python_environs: Mapping[str, Any] | None
    fake_sampler: bool

    def __post_init__(self) -> None:
        """Check what needs neither environment nor policies.

        Raises:
            ConfigError: an argument that cannot be honoured (also a ValueError).
        """
        for name, choices in (("batch_mode", BATCH_MODES), ("preprocessor_pref", _PREPROCESSOR_PREFS)):
            _check_choice(name, getattr(self, name), choices)
        if self.log_level is not None:
            _check_choice("log_level", self.log_level, _LOG_LEVELS)
        self._check_numbers()
        self._check_containers()
        for name in ("policy_mapping_fn", "observation_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise _refused(name, function, "a function, or None")
        for name in ("input_creator", "output_creator"):
            if not callable(getattr(self, name)):
                raise _refused(name, getattr(self, name), "a function that takes an IOContext")
        if self.callbacks is not None and not (
            inspect.isclass(self.callbacks) and issubclass(self.callbacks, DefaultCallbacks)
        ):
            raise _refused("callbacks", self.callbacks, "a subclass of aiorl.DefaultCallbacks, not an object of it")
        if self.tf_session_creator is not None:
            raise _refused(
                "tf_session_creator", self.tf_session_creator, "None: TensorFlow 2 has no sessions; see tf_session_args"
            )

    def _check_numbers(self) -> None:
        for name in ("rollout_fragment_length", "num_envs"):
            if not _is_whole(getattr(self, name), 1):
                raise _refused(name, getattr(self, name), "a whole number of at least 1")
        for name in ("worker_index", "num_workers"):
            if not _is_whole(getattr(self, name), 0):
                raise _refused(name, getattr(self, name), "a whole number of at least 0")
        horizon, limit, wait = self.episode_horizon, self.clip_rewards, self.remote_env_batch_wait_ms
        if not (horizon is None or horizon == math.inf or _is_whole(horizon, 0)):
            raise _refused("episode_horizon", horizon, "a whole number of steps, or None for the environment's limit")
        if not (limit is None or isinstance(limit, int | float | np.bool_ | np.number)):
            raise _refused("clip_rewards", limit, "True, False, None or a number > 0")
        if not (isinstance(wait, int | float | np.number) and 0 <= float(wait) < math.inf):
            raise _refused("remote_env_batch_wait_ms", wait, "a number of milliseconds, at least 0")
        if not (self.seed is None or (_is_whole(self.seed, 0) and self.seed <= _MAX_SEED)):
            raise _refused("seed", self.seed, f"a whole number from 0 to {_MAX_SEED}, or None")
        for name in _WHOLE:
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))  # what Gymnasium and Python's generators ask for

    def _check_containers(self) -> None:
        for name in ("env_config", "model_config", "policy_config", "extra_python_environs"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, Mapping)):
                raise _refused(name, value, "a dict, or None")
        model = (self.policy_config or {}).get("model")
        if not (model is None or isinstance(model, Mapping)):
            raise _refused("policy_config['model']", model, "a dict, or None")
        for name in ("monitor_path", "log_dir"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str | os.PathLike)):
                raise _refused(name, value, "a directory's path, or None")
        evaluations = [*ESTIMATORS, SIMULATION]
        for name, expected in (
            ("policies_to_train", "a list of policy ids, or None for all"),
            ("input_evaluation", f"a collection of {', '.join(evaluations)}; an empty one for none"),
        ):
            value = getattr(self, name)
            is_left_out = value is None and name == "policies_to_train"
            # a string is a collection too, of its letters
            if not is_left_out and (isinstance(value, str | bytes) or not isinstance(value, Collection)):
                raise _refused(name, value, expected)
        for name in self.input_evaluation:
            _check_choice("input_evaluation", name, evaluations)

    @property
    def is_truncating(self) -> bool:
        """Batches are cut at a number of steps, not at the ends of episodes."""
        return self.batch_mode == "truncate_episodes"

    @property
    def target_env_steps(self) -> int:
        """T, steps that one ``sample()`` aims at."""
        return self.rollout_fragment_length * self.num_envs

    @property
    def wants_simulation(self) -> bool:
        """The environment is played for metrics only."""
        return SIMULATION in self.input_evaluation

    @property
    def custom_preprocessor(self) -> Any:
        """A preprocessor of the user's own, or None."""
        return (self.model_config or {}).get("custom_preprocessor")

    @property
    def wrapping(self) -> Wrapping:
        """The wrappers that single gym-like environments get."""
        model_config = self.model_config or {}
        return Wrapping(
            deepmind=self.preprocessor_pref == "deepmind" and not self.custom_preprocessor,
            dim=int(model_config.get("dim", 84)),
            framestack=bool(model_config.get("framestack", True)),
            monitor_path=None if self.monitor_path is None else os.fspath(self.monitor_path),
        )


def _is_whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= smallest


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}, expected one of {', '.join(choices)}.",
            key=name,
            value=value,
            hint=nearest(str(value), choices).strip(),
        )


def _refused(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}, expected {expected}.", key=name, value=value)
