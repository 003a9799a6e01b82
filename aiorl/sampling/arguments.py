"""WorkerArguments: the constructor's arguments as one object, checked where that needs nothing else."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pydantic import ValidationError

from aiorl.acting.policy_map import PolicyMappingFn
from aiorl.config.check import plain_error
from aiorl.config.worker import WorkerConfig
from aiorl.data.sample_plan import SamplePlan
from aiorl.env.registry import EnvContext
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, nearest
from aiorl.offline.estimators import ESTIMATORS
from aiorl.offline.io import InputCreator, OutputCreator, noop_output, sampler_input
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.setup import ObservationFn

__all__ = ["DEFAULTS", "SIMULATION", "EnvSource", "WorkerArguments"]

DEFAULTS = WorkerConfig()
"""The settings of a worker that is told nothing else."""

SIMULATION = "simulation"
"""Input evaluation by playing on in the environment."""

_ENVIRONS = "extra_python_environs_for_worker"
_OTHER_NAMES = {
    "num_envs": "num_envs_per_worker",
    "episode_horizon": "horizon",
    "extra_python_environs": _ENVIRONS,
    "model_config": "model",
}
"""Arguments of RolloutWorker that are called otherwise in the config."""

_LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")

EnvSource = str | type[Any] | Callable[[EnvContext], Any]


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """What a RolloutWorker is made from: settings, and what only a program can give.

    Attributes:
        settings: those of the config that a worker obeys; see docs/config.md.
        env_creator: makes an environment, given an EnvContext; also a name, see ``aiorl.env.registry``.
        policy: a Policy class; or policy id -> (class, observation space, action space, config).
        policy_mapping_fn: agent id -> policy id, asked once per agent and episode; None = the default policy.
        policies_to_train: ids of the policies that learn; None or empty = all.
        observation_fn: rewrites each environment's observations, see ``aiorl.sampling.setup``.
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
        tf_session_creator: always None; TensorFlow 2 has no sessions.
        sample_plan: all that is wanted of the default policy's rows, where nobody is to see more of them; the
            environments are then stepped in lockstep if that can be. None = whole rows are wanted.
    """

    settings: WorkerConfig
    env_creator: EnvSource
    policy: Any
    policy_mapping_fn: PolicyMappingFn | None = None
    policies_to_train: Collection[str] | None = None
    observation_fn: ObservationFn | None = None
    policy_config: Mapping[str, Any] | None = None
    worker_index: int = 0
    num_workers: int = 0
    monitor_path: str | None = None
    log_dir: str | None = None
    log_level: str | None = None
    callbacks: type[DefaultCallbacks] | None = None
    input_creator: InputCreator = sampler_input
    input_evaluation: Collection[str] = frozenset()
    output_creator: OutputCreator = noop_output
    tf_session_creator: Callable[[], Any] | None = None
    sample_plan: SamplePlan | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The arguments of RolloutWorker's constructor, by name.

        Raises:
            ConfigError: an argument that cannot be honoured (also a ValueError).
        """
        own = {name: value for name, value in given.items() if name in cls.__dataclass_fields__}
        settings = {name: value for name, value in given.items() if name not in own}
        return cls(settings=_settings(settings), **own)

    def __post_init__(self) -> None:
        """Check what needs neither environment nor policies.

        Raises:
            ConfigError: an argument that cannot be honoured (also a ValueError).
        """
        if self.log_level is not None:
            _check_choice("log_level", self.log_level, _LOG_LEVELS)
        self._check_places()
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

    def _check_places(self) -> None:
        for name in ("worker_index", "num_workers"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
                raise _refused(name, value, "a whole number of at least 0")
            object.__setattr__(self, name, int(value))

    def _check_containers(self) -> None:
        if not (self.policy_config is None or isinstance(self.policy_config, Mapping)):
            raise _refused("policy_config", self.policy_config, "a dict, or None")
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
    def wants_simulation(self) -> bool:
        """The environment is played for metrics only."""
        return SIMULATION in self.input_evaluation

    @property
    def wrapping(self) -> Wrapping:
        """The wrappers that single gym-like environments get."""
        return Wrapping.of(self.settings, None if self.monitor_path is None else os.fspath(self.monitor_path))


def _settings(given: Mapping[str, Any]) -> WorkerConfig:
    """The settings among RolloutWorker's arguments, checked by their declarations.

    Raises:
        ConfigError: naming the argument at fault.
    """
    values = {_OTHER_NAMES.get(name, name): _plain(value) for name, value in given.items()}
    if values["horizon"] in (0, math.inf):
        values["horizon"] = None
    if values["compress_observations"] != "bulk":
        values["compress_observations"] = bool(values["compress_observations"])
    for name in ("env_config", "model", _ENVIRONS):
        values[name] = {} if values[name] is None else values[name]
    if isinstance(values[_ENVIRONS], dict):
        values[_ENVIRONS] = {name: str(value) for name, value in values[_ENVIRONS].items()}
    try:
        return WorkerConfig.model_validate(values, strict=True)
    except ValidationError as error:
        fault = plain_error(WorkerConfig, error)
        name, dot, rest = fault.key.partition(".")
        argument = {of: ours for ours, of in _OTHER_NAMES.items()}.get(name, name)
        fault.key, fault.message = f"{argument}{dot}{rest}", argument + fault.message.removeprefix(name)
        raise fault from None


def _plain(value: Any) -> Any:
    """The value without NumPy's and other kinds of what the config has plain kinds for."""
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else value


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
