"""Policies of a worker: their recipes and their construction.

This module does not import TensorFlow unless a policy needs it. A class needs TensorFlow if it
derives from ``aiorl.learning.models.tf_policy.TFPolicy``, or has ``framework = "tf"``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import random
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from aiorl.acting.filters import make_filter
from aiorl.acting.graph_policy import learned_policy_class
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import mapping_by_table, policy_seed
from aiorl.acting.preprocessors import Preprocessor, make_preprocessor
from aiorl.config import deep_update
from aiorl.config.code import import_object, named_failures
from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import PolicyGraph
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.data.spaces import space_from_dict
from aiorl.errors import ConfigError, PolicyError
from aiorl.process.imports import install_command
from aiorl.sampling.settings import WorkerSettings

logger = logging.getLogger(__name__)

ENV_SPACE: Any = object()
"""Placeholder in a policy's 4-tuple for the environment's own space."""

_FORM = "a tuple (class, observation_space, action_space, config)"
_FOR_LEARNING = {
    "algo",
    "rollout_fragment_length",
    "num_envs_per_worker",
    "batch_mode",
    "num_cpus_per_worker",
}
_ATTRIBUTES = ("observation_space", "action_space", "global_timestep")
_OWN_TF_POLICY = ("aiorl.learning.models.tf_policy", "TFPolicy")


class PolicySpec(NamedTuple):
    """Recipe of one policy.

    Attributes:
        policy_class: its class.
        observation_space: space of its agents' observations, before preprocessing.
        action_space: space of their actions.
        config: its differences from the base config.
    """

    policy_class: type[Policy]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    config: Mapping[str, Any]


def policy_classes(policy: Any) -> list[type[Policy]]:
    """Return the classes in the setting ``policy`` without raising; empty if it is malformed."""
    values = policy.values() if isinstance(policy, Mapping) else [(policy,)]
    candidates = [value[0] for value in values if isinstance(value, tuple | list) and value]
    return [candidate for candidate in candidates if _is_policy_class(candidate)]


def policy_specs(policy: Any, observation_space: Any, action_space: Any) -> dict[str, PolicySpec]:
    """Check the setting ``policy`` and return it in its full form, sorted by id.

    Args:
        policy: a Policy class, which becomes the default policy, or policy id -> 4-tuple.
        observation_space: the environment's space, for a policy given as a class or with ENV_SPACE
            as its space.
        action_space: likewise.

    Raises:
        ConfigError: the setting has another form (also a ValueError).
    """
    if _is_policy_class(policy):
        policy = {DEFAULT_POLICY_ID: (policy, ENV_SPACE, ENV_SPACE, {})}
    if not isinstance(policy, Mapping) or not policy:
        raise _refused(
            "policy",
            policy,
            "a subclass of aiorl.Policy, or a non-empty dict: policy id -> " + _FORM,
        )
    for policy_id in policy:
        if not isinstance(policy_id, str):
            raise _refused("policy", policy_id, "ids that are strings")
    specs = {}
    for policy_id in sorted(policy):
        key = f"policy[{policy_id!r}]"
        value = policy[policy_id]
        if not isinstance(value, tuple | list) or len(value) != len(PolicySpec._fields):
            raise _refused(key, value, _FORM)
        spec = PolicySpec(
            policy_class=value[0],
            observation_space=_policy_space(
                f"{key}[1]", "observation_space", value[1], observation_space
            ),
            action_space=_policy_space(f"{key}[2]", "action_space", value[2], action_space),
            config=value[3],
        )
        if not _is_policy_class(spec.policy_class):
            raise _refused(f"{key}[0]", spec.policy_class, "a subclass of aiorl.Policy")
        for position in (1, 2):
            if not isinstance(spec[position], spaces.Space):
                expected = "a gymnasium space, or one of the environment"
                raise _refused(f"{key}[{position}]", spec[position], expected)
        if not isinstance(spec.config, dict):
            raise _refused(f"{key}[3]", spec.config, "a dict of settings")
        specs[policy_id] = spec
    return specs


def _policy_space(key: str, name: str, space: Any, of_env: Any) -> Any:
    """Return a policy's own space in Gymnasium's form, or the environment's if it has none.

    Raises:
        ConfigError: neither of them declares a space.
    """
    if space is not ENV_SPACE:
        return gymnasium_space(space)
    if of_env is None:
        raise ConfigError(
            f"{key} is left to the environment, which declares no {name} that holds for all its"
            " agents.",
            key=key,
            hint=f"Give the environment an {name}, or the policy in the form {_FORM}.",
        )
    return of_env


def _is_policy_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Policy)


def _refused(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}, expected {expected}.", key=key, value=value)


def learned_policies(
    part: WorkerPart, graphs: Mapping[str, PolicyGraph], *, explore: bool = True
) -> dict[str, tuple[type[Policy], Any, Any, dict[str, Any]]]:
    """Return the setting ``policy`` for a learner's policies; networks have no weights yet.

    Args:
        part: the workers' part of the learner's configuration.
        graphs: policy id -> acting graph, of policies without a user's own class.
        explore: False makes networks take their most likely actions.

    Raises:
        PolicyError: a policy has no graph or a damaged one.
        ConfigError: the import of a user's policy class failed.
    """
    entries = {}
    for policy_id, policy in part.policies.items():
        config = policy.config if explore else {**policy.config, "explore": False}
        plan = policy.sample_plan
        if policy.policy_class is not None:
            kind = import_object(policy.policy_class, key=f"multiagent.policies.{policy_id}")
        elif policy_id not in graphs:
            raise PolicyError(f"the learner sent no graph for policy {policy_id!r}")
        else:
            graph = graphs[policy_id]
            kind = learned_policy_class(
                graph["graph"],
                graph["spec"],
                threads=part.num_cpus_per_worker,
                runs_per_weights=part.cut_length,
            )
            learning = {**part.model_dump(include=_FOR_LEARNING), "algo": policy.algo or part.algo}
            config = {**config, **plan.policy_settings(), "learning": learning}
        entries[policy_id] = (
            kind,
            _space(policy.observation_space),
            _space(policy.action_space),
            config,
        )
    return entries


def named_function(path: str | Mapping[str, str] | None, key: str) -> Any:
    """Return the function that a setting names, with errors that name the setting; for a table, its
    mapping function.

    Raises:
        ConfigError: the import failed.
    """
    if isinstance(path, Mapping):
        return mapping_by_table(path)
    if path is None:
        return None
    return named_failures(import_object(path, key=key), f"{key} {path!r}", key)


def _space(data: dict[str, Any] | None) -> Any:
    return ENV_SPACE if data is None else space_from_dict(data)


def make_policies(
    specs: Mapping[str, PolicySpec], settings: WorkerSettings, *, preprocess: bool
) -> tuple[dict[str, Policy], dict[str, Preprocessor]]:
    """Make policies and preprocessors by policy id, in the order of the ids.

    Args:
        specs: result of `policy_specs`.
        settings: the worker's settings.
        preprocess: False if the environment's wrappers preprocess observations.

    Raises:
        UnsupportedSpaceError: there is no preprocessor for the observations (also a ValueError).
        ConfigError: a policy has no eager variant in eager mode, or has no spaces (also a
            ValueError).
        ImportError: a policy needs TensorFlow, which is not installed.
        RuntimeError: GPUs are granted, but TensorFlow does not see them.
    """
    policies: dict[str, Policy] = {}
    preprocessors: dict[str, Preprocessor] = {}
    run_seed = settings.config.seed
    for position, policy_id in enumerate(sorted(specs)):
        seed = None if run_seed is None else policy_seed(run_seed, position)
        policies[policy_id], preprocessors[policy_id] = make_policy(
            policy_id, specs[policy_id], settings, preprocess=preprocess, seed=seed
        )
    return policies, preprocessors


def make_policy(
    policy_id: str,
    spec: PolicySpec,
    settings: WorkerSettings,
    *,
    preprocess: bool,
    seed: int | None,
) -> tuple[Policy, Preprocessor]:
    """Make one policy and its preprocessor; see `make_policies`.

    Args:
        policy_id: id of the policy.
        spec: its recipe.
        settings: the worker's settings.
        preprocess: False if the environment's wrappers preprocess observations.
        seed: seed of the policy and its action space; None for none.
    """
    base_config = settings.policy_config
    worker_config = settings.config
    config = deep_update(base_config, spec.config)
    config |= {"num_workers": settings.num_workers, "worker_index": settings.worker_index}
    if seed is not None:
        config.setdefault("seed", seed)
        spec.action_space.seed(seed)  # for policies that sample actions from it
    custom = (config.get("model") or {}).get(
        "custom_preprocessor"
    ) or worker_config.model.custom_preprocessor
    if custom and not preprocess:
        logger.warning(
            "policy %r: its custom_preprocessor is not used, because DeepMind's wrappers"
            " preprocess observations; set it in model_config, or preprocessor_pref='rllib', to"
            " disable these wrappers",
            policy_id,
        )
        custom = None
    preprocessor = make_preprocessor(
        spec.observation_space,
        action_space=spec.action_space,
        custom_preprocessor=custom,
        is_enabled=preprocess,
    )
    check_tensorflow(spec.policy_class, granted_gpus(base_config, settings.worker_index))
    policy_class = policy_class_for(spec.policy_class, base_config)
    filtered = make_filter(
        worker_config.observation_filter, preprocessor.shape, preprocessor.layout.num_mask
    )
    space = filtered.output_space(preprocessor.observation_space)
    policy = policy_class(space, spec.action_space, config)
    _check_initialised(policy_id, policy)
    return policy, preprocessor


def _check_initialised(policy_id: str, policy: Policy) -> None:
    """Raise an error if a policy lacks attributes that samplers and learners read."""
    missing = [name for name in _ATTRIBUTES if not hasattr(policy, name)]
    if missing:
        raise ConfigError(
            f"policy {policy_id!r}, a {type(policy).__name__}, has no {', '.join(missing)}.",
            key="policy",
            hint=(
                "Its __init__ must call super().__init__(observation_space, action_space, config)."
            ),
        )


# --- TensorFlow ---


def is_tf_policy(policy_class: type[Policy]) -> bool:
    """Return True if policies of this class need TensorFlow."""
    return getattr(policy_class, "framework", None) == "tf" or _is_own_tf_policy(policy_class)


def _is_own_tf_policy(policy_class: type[Policy]) -> bool:
    return any((base.__module__, base.__name__) == _OWN_TF_POLICY for base in policy_class.__mro__)


def granted_gpus(policy_config: Mapping[str, Any], worker_index: int) -> float:
    """Return the number of GPUs for this process, from the policies' base config."""
    return float(policy_config.get("num_gpus_per_worker" if worker_index else "num_gpus", 0) or 0)


def check_tensorflow(policy_class: type[Policy], gpus: float) -> None:
    """Check that a policy of this class can run.

    Raises:
        ImportError: it needs TensorFlow, which is not installed.
        RuntimeError: GPUs are granted, but TensorFlow sees none.
    """
    if not is_tf_policy(policy_class):
        return
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"policy {policy_class.__name__} needs TensorFlow, which is not installed;"
            f" {install_command('learner')}"
        )
    if gpus > 0 and not _tensorflow().config.list_physical_devices("GPU"):
        raise RuntimeError(
            f"{gpus:g} GPUs are granted to this process, but TensorFlow sees none; install"
            " aiorl[learner-gpu] on a host with CUDA, or grant none"
        )


def wants_eager(policy_config: Mapping[str, Any]) -> bool:
    """Return True if policies must run eagerly on workers."""
    return bool(policy_config.get("eager")) and not policy_config.get("no_eager_on_workers")


def enable_eager(
    policy_config: Mapping[str, Any], policy_classes: Collection[type[Policy]]
) -> None:
    """Make TensorFlow run functions eagerly in this process, if the config says so and a policy
    needs it.

    With ``eager_tracing``, functions stay traced, since that is how TensorFlow 2 traces an eager
    policy.
    """
    if not wants_eager(policy_config) or policy_config.get("eager_tracing"):
        return
    if any(is_tf_policy(policy_class) for policy_class in policy_classes):
        config = _tensorflow().config
        if not config.functions_run_eagerly():
            config.run_functions_eagerly(True)


def policy_class_for(policy_class: type[Policy], policy_config: Mapping[str, Any]) -> type[Policy]:
    """Return the class itself, or in eager mode its eager variant.

    A class provides the variant with a class method ``as_eager``, and a traced form of it with
    ``with_tracing``. A TFPolicy of aiorl is its own eager variant.

    Raises:
        ConfigError: a class that needs TensorFlow has no eager variant (also a ValueError).
    """
    if not wants_eager(policy_config):
        return policy_class
    make_eager = getattr(policy_class, "as_eager", None)
    if make_eager is None:
        if not is_tf_policy(policy_class) or _is_own_tf_policy(policy_class):
            return policy_class
        raise ConfigError(
            f"policy {policy_class.__name__} cannot run eagerly: it has no method as_eager.",
            key="eager",
            hint="Set eager: false, or no_eager_on_workers: true.",
        )
    eager: type[Policy] = make_eager()
    make_traced = getattr(eager, "with_tracing", None)
    if policy_config.get("eager_tracing") and make_traced is not None:
        eager = make_traced()
    return eager


def seed_generators(seed: int, policy_classes: Collection[type[Policy]]) -> None:
    """Seed the random generators of this process: Python's, NumPy's, and those of frameworks in
    use.

    torch is not imported for this. It is seeded if it was already imported, for example by a
    policy's module. A policy that imports it later, for example in its constructor, must seed it
    itself.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    if "tensorflow" in sys.modules or any(
        is_tf_policy(policy_class) for policy_class in policy_classes
    ):
        _tensorflow().random.set_seed(seed)


def _tensorflow() -> Any:
    # Imported by name to keep TensorFlow, which few policies need, out of the import graph of
    # workers.
    return importlib.import_module("tensorflow")
