"""Environments of the old ``gym`` package, in any of its versions, and the names ``gym:ID``.

A single environment of gym is driven as it is: `gym_like` knows the forms of its results, and
`gymnasium_space` its spaces. A vector environment of gym gets a form that Gymnasium's have. Shimmy
converts environments, too, but classes that keep the form of gym 0.21 below gym 0.26 fail in it,
and it drops the first value of Discrete actions.

Nothing is imported from gym unless a name asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from aiorl.config.code import import_for
from aiorl.data.gym_spaces import gymnasium_space, is_of_gym
from aiorl.env.gym_like import ResetResult, StepResult, is_pair, layers_of
from aiorl.errors import EnvContractError, UnknownEnvError, nearest
from aiorl.process.imports import needed_by


def old_gym_creator(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that makes the environment of ``gym:ID`` or ``gym:module:ID``.

    Raises:
        UnknownEnvError: the package has no such environment.
        ConfigError: gym is not installed, or the import of the module fails.
    """
    gym = _gym(name)
    module_name, _, gym_id = name.removeprefix("gym:").rpartition(":")
    if module_name:
        import_for(f"environment {name!r}:", module_name, key="env", value=name)
    registry = gym.envs.registry
    ids = list(getattr(registry, "env_specs", registry))  # gym 0.21 has an object with a dict
    if gym_id not in ids:
        raise UnknownEnvError(
            f"unknown environment {name!r}.",
            key="env",
            value=name,
            hint=(
                nearest(gym_id, ids).strip()
                or "Use the id of an environment of the old gym package."
            ),
        )
    has_checker = "disable_env_checker" in inspect.signature(gym.make).parameters
    options = {"disable_env_checker": True} if has_checker else {}

    def create(context: Mapping[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old package warns that it is out of date
            return gym.make(gym_id, **options, **context)

    return create


def _gym(name: str) -> ModuleType:
    with (
        needed_by(f"environment {name!r}", "the old gym package", "gym", key="env", value=name),
        warnings.catch_warnings(),
        # The import prints a notice and warns about NumPy.
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return importlib.import_module("gym")


def adopted(env: Any) -> Any:
    """Return an environment of gym ready to be driven; any other object is returned unchanged.

    A vector environment gets the form of Gymnasium's. The checks that gym 0.26 puts around an
    environment are switched off: they need a NumPy before 2.0, and aiorl checks all values itself.
    """
    if not is_of_gym(env):
        return env
    if hasattr(env, "single_observation_space") and hasattr(env, "num_envs"):
        for copy in getattr(env, "envs", ()):
            adopted(copy)
        return OldVectorEnv(env)
    for layer in layers_of(env):
        if type(layer).__name__ == "PassiveEnvChecker":
            layer.checked_reset = layer.checked_step = layer.checked_render = True
    return env


class OldVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Vector environment of gym in Gymnasium's form; a copy is reset in the step that ends its
    episode.

    Attributes:
        original: the vector environment of gym.
    """

    def __init__(self, original: Any) -> None:
        """Take over a vector environment of gym; it is closed with this object."""
        self.original = original
        self.num_envs = int(original.num_envs)
        self.metadata = {
            **(getattr(original, "metadata", None) or {}),
            "autoreset_mode": AutoresetMode.SAME_STEP,
        }
        self.spec = None
        self.single_observation_space = gymnasium_space(original.single_observation_space)
        self.single_action_space = gymnasium_space(original.single_action_space)
        self.observation_space = gymnasium_space(original.observation_space)
        self.action_space = gymnasium_space(original.action_space)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Begin new episodes; options are ignored."""
        keywords: dict[str, Any] = {}
        if seed is not None:
            if "seed" in inspect.signature(self.original.reset).parameters:
                keywords = {"seed": seed}
            else:
                self.original.seed(seed)
        result = self.original.reset(**keywords)
        if is_pair(result) and isinstance(result[1], dict):
            result = result[0]
        return result, {}

    def step(self, actions: Any) -> StepResult:
        """Step all copies."""
        result = self.original.step(actions)
        if len(result) == 4:
            return _with_flags(*result)
        obs, rewards, terminateds, truncateds, infos = result
        return obs, rewards, terminateds, truncateds, _new_infos(infos)

    def close(self, **kwargs: Any) -> None:
        """Close the copies."""
        self.original.close(**kwargs)


def _with_flags(obs: Any, rewards: Any, dones: Any, infos: Any) -> StepResult:
    """Return the five values of a step in the form of gym 0.21, which has an info for each copy."""
    ended = np.asarray(dones, np.bool_)
    are_cut = [bool(info.get("TimeLimit.truncated")) for info in infos]
    cut = ended & np.array(are_cut)
    finals = np.full(len(ended), None, np.object_)
    final_infos: list[Mapping[str, Any]] = [{}] * len(ended)
    for index in np.flatnonzero(ended).tolist():
        if "terminal_observation" not in infos[index]:
            raise EnvContractError(
                "gym.vector",
                "it drops the last observation of an episode, as all vector environments of gym"
                " 0.21 do; make single environments and set num_envs_per_worker",
                vector_index=index,
                step=-1,
            )
        finals[index] = infos[index]["terminal_observation"]
        final_infos[index] = infos[index]
    joined = _joined(
        [{} if is_over else info for info, is_over in zip(infos, ended.tolist(), strict=True)]
    )
    if ended.any():
        joined |= {"final_obs": finals, "_final_obs": ended, "final_info": _joined(final_infos)}
    return obs, rewards, ended & ~cut, cut, joined


def _new_infos(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return the infos of gym 0.26 in the form of Gymnasium 1.0."""
    renamed = {
        name: value for name, value in infos.items() if name not in ("final_info", "_final_info")
    }
    if "final_observation" in infos:
        renamed["final_obs"] = renamed.pop("final_observation")
        renamed["_final_obs"] = renamed.pop("_final_observation", None)
    if "final_info" in infos:
        renamed["final_info"] = _joined([info or {} for info in infos["final_info"]])
    return renamed


def _joined(infos: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return infos of single copies as one dict: for each key the values of all copies, and which
    copies have it.
    """
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        joined[key] = [info.get(key) for info in infos]
        joined[f"_{key}"] = np.array([key in info for info in infos])
    return joined
