"""Which policies a run has: what `multiagent.policies` says, completed and checked, before TensorFlow is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, mapping_by_table, wanted_of_mapping
from aiorl.acting.preprocessors import Preprocessor, make_preprocessor
from aiorl.compat.old_keys import translate_old_keys
from aiorl.config import deep_update
from aiorl.config.code import check_takes, import_object, is_import_path
from aiorl.config.key import fact_of
from aiorl.config.layers import Layer
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.spaces import space_from_dict, space_to_dict
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.algorithm import Algorithm
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.algorithms.shared_config import BATCH, ENVS, LENGTH
from aiorl.sampling.builder import BatchBuilder
from aiorl.sampling.episode import MultiAgentEpisode

POLICIES = "multiagent.policies"
"""The key that policies are named by."""

# A policy's own settings are those of its learning; everything else is the run's
_RUN_GROUPS = frozenset(["Run", "Sampling", "Workers and hosts", "Resources", "Reports", "Offline data"])
_RUN_KEYS = frozenset([
    "min_iter_time_s", "timesteps_per_iteration", "max_policy_lag", "outstanding_fragments_per_worker",
    "fragments_per_update", "max_env_steps_ahead", "broadcast_updates", "broadcast_interval_ms", "gradients",
])  # fmt: skip


def config_class_of(config: CommonConfig, policy_id: str, name: str | None) -> type[CommonConfig] | None:
    """The config class of the algorithm that a policy's network is of; None for a Policy class of the user's own.

    Args:
        config: the run's.
        policy_id: of the policy.
        name: what is given as its class.

    Raises:
        ConfigError: it is neither an algorithm nor a policy, or can't be imported.
    """
    if name is None or name.lower() == config.algo.lower():
        return type(config)
    key = f"{POLICIES}.{policy_id}.class"
    if is_import_path(name):
        found = import_object(name, key=key)
        if inspect.isclass(found) and issubclass(found, Policy):
            return None
        if not (inspect.isclass(found) and issubclass(found, Algorithm)):
            said = f"{key} is {name!r}, which is no subclass of aiorl.Policy, and no algorithm."
            raise ConfigError(said, key=key, value=name)
    try:
        return config_class(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", key=key, value=name, hint=error.hint) from error


def config_of(
    config: CommonConfig,
    kind: type[CommonConfig],
    policy_id: str,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> CommonConfig:
    """The config by which a policy's network learns: the run's, with its own settings on top.

    Of an algorithm that is not the run's, what is said for the run as a whole holds, and what a user has set of the
    keys that both have; the rest are the algorithm's defaults. A preset is of the run's algorithm alone.

    Args:
        config: the run's.
        kind: the class of the policy's.
        policy_id: of the policy.
        overrides: its own settings.
        defaults: what a run's config says of its other settings; they go before the run's.

    Raises:
        ConfigError: one of them is the run's, or they make no config.
    """
    own = translate_old_keys(overrides)
    key = f"{POLICIES}.{policy_id}.config"
    for place, values in ((key, own), (f"{POLICIES}.{policy_id}.defaults", defaults or {})):
        for name in values:
            if name in kind.model_fields and _is_of_run(kind, name):
                raise ConfigError(f"{place}.{name} can't differ from the run's {name}.", key=f"{place}.{name}")
    layers = [values for values in (defaults, own) if values]
    if kind is type(config) and not layers:
        return config
    try:
        if kind is type(config):
            return _with_sizes_of(config, config.updated(*layers))
        return _with_sizes_of(config, kind.from_layers([Layer(_common_settings(config, kind)), *map(Layer, layers)]))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", key=f"{key}.{error.key}", hint=error.hint) from error


def _with_sizes_of(run: CommonConfig, config: CommonConfig) -> CommonConfig:
    """Return a policy's config, unless sizes that belong to the run were derived otherwise for it.

    Raises:
        ConfigError: they were.
    """
    for name in (LENGTH, ENVS, BATCH):
        size, wanted = getattr(run, name), getattr(config, name)
        if wanted != size and _is_of_run(type(config), name):
            said = f"the settings of this policy would need a {name} of {wanted}, and the run has {size}."
            hint = f"Set {name} for the run, or other settings for the policy."
            raise ConfigError(said, key=name, value=wanted, hint=hint)
    return config


def learning_settings(config: CommonConfig) -> dict[str, Any]:
    """The settings that concern learning, which each policy may have of its own."""
    kind = type(config)
    return {name: value for name, value in config.to_dict().items() if not _is_of_run(kind, name)}


def _common_settings(config: CommonConfig, kind: type[CommonConfig]) -> dict[str, Any]:
    """What a run's config says for a policy of another algorithm."""
    of_run = {name: value for name, value in config.to_dict().items() if name in kind.model_fields}
    of_run = {name: value for name, value in of_run.items() if _is_of_run(kind, name)}
    given = {name: value for name, value in config.users_values().items() if name in kind.model_fields}
    return {**given, **of_run, "algo": kind.model_fields["algo"].default, "preset": None}


def _is_of_run(kind: type[CommonConfig], name: str) -> bool:
    """Whether a key of a config class is the same for all policies of a run."""
    if name == "train_batch_size":
        return kind.trains_on_what_comes
    return name in _RUN_KEYS or fact_of(kind.model_fields[name], "group") in _RUN_GROUPS


_FIELDS = {
    "class": str, "observation_space": Mapping, "action_space": Mapping, "config": Mapping, "defaults": Mapping,
}  # fmt: skip
_OF_A_RUN = "defaults"
_MAX_ID = 100
_MAPPING = "multiagent.policy_mapping_fn"
_EPISODES = 16
"""A mapping function that needs an episode is asked about so many, with ids from 0."""


@dataclass(frozen=True, slots=True)
class PlannedPolicy:
    """One policy of the run.

    Attributes:
        policy_id: its id.
        policy_class: import path of a Policy class of the user's own, which only acts; None = a network of the learner.
        observation_space: of what environments show its agents.
        action_space: of its agents' actions.
        preprocessor: from observations to what it takes.
        config: of its algorithm, with the run's settings and its own, by which it learns.
        settings: what the policy is told of them when it is made.
        is_trained: it learns.
        has_own_spaces: its spaces are not the ones that all agents of the environment have.
    """

    policy_id: str
    policy_class: str | None
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    preprocessor: Preprocessor
    config: CommonConfig
    settings: Mapping[str, Any]
    is_trained: bool = True
    has_own_spaces: bool = False

    def is_of_other_algorithm(self, config: CommonConfig) -> bool:
        """Whether its network is not of the run's algorithm."""
        return self.policy_class is None and self.config.algo != config.algo

    def described_spaces(self) -> dict[str, Any]:
        """Both spaces as plain data."""
        return {"observation": _described(self.observation_space), "action": _described(self.action_space)}


def plan_policies(config: CommonConfig, facts: EnvFacts) -> dict[str, PlannedPolicy]:
    """The run's policies in the order of their ids; the default one alone where none are named.

    Raises:
        ConfigError: a policy that cannot be, or policies and environment that don't go together.
        UnsupportedSpaceError: observations that no preprocessor makes an array of.
    """
    entries = _entries(config)
    given = {policy_id: _entry(policy_id, entry) for policy_id, entry in entries.items()}
    facts.check_policies(given, POLICIES)
    if config.multiagent.observation_fn is not None:
        names = ("agent_obs", "worker", "base_env", "policies", "episode")
        _function(config.multiagent.observation_fn, "multiagent.observation_fn", **dict.fromkeys(names))
    agents = _agents_by_policy(config, given, facts)
    kinds = {policy_id: config_class_of(config, policy_id, own["class"]) for policy_id, own in given.items()}
    trained = _trained(config, given, kinds)
    return {
        policy_id: _planned(
            config, kinds[policy_id], policy_id, given[policy_id], facts, agents[policy_id], policy_id in trained
        )
        for policy_id in sorted(given)
    }


def with_policies_named(config: CommonConfig, facts: EnvFacts) -> CommonConfig:
    """The config with the policies that ``per_agent`` or ``per_space`` stands for, and the mapping that goes with them.

    Raises:
        ConfigError: the environment doesn't name its agents, or another mapping is given.
    """
    word, mapping = config.multiagent.policies, config.multiagent.policy_mapping_fn
    if not isinstance(word, str):
        return config
    if mapping is not None:
        said = f"{POLICIES} is {word}, which decides who acts with which: {_MAPPING} is not for it."
        raise ConfigError(said, key=_MAPPING, value=mapping, hint="Leave it out, or name the policies.")
    found, actions = facts.observation_spaces or {}, facts.action_spaces or {}
    agents = list(dict.fromkeys([*found, *actions]))
    if not agents:
        said = f"{POLICIES} is {word}, but the environment, {facts.kind.name}, names no agents before an episode."
        hint = "Give it observation_spaces, a dict of spaces by agent id; or name the policies."
        raise ConfigError(said, key=POLICIES, value=word, hint=hint)
    chosen: dict[str, str] = {}
    for agent in agents:
        own = (found.get(agent), actions.get(agent))
        alike = [other for other in agents if (found.get(other), actions.get(other)) == own]
        chosen[str(agent)] = str(agent if word == "per_agent" else alike[0])
    named = {"policies": dict.fromkeys(chosen.values()), "policy_mapping_fn": chosen}
    return config.updated({"multiagent": named})


def with_settings_said(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> CommonConfig:
    """The run's config in which policies of other algorithms have all their settings, as defaults beside their own.

    So whoever goes on with the run by its config, in which nothing is left to defaults, has the same, but for what is
    set on top of it.
    """
    said = {
        policy_id: {"class": policy.config.algo, "defaults": learning_settings(policy.config)}
        for policy_id, policy in planned.items()
        if policy.is_of_other_algorithm(config)
    }
    if not said:
        return config
    entries = {policy_id: _entry(policy_id, _entries(config)[policy_id]) | own for policy_id, own in said.items()}
    return config.updated({"multiagent": {"policies": entries}})


def _entries(config: CommonConfig) -> dict[str, Any]:
    """What is given for each policy; of the default one nothing, where none is named."""
    given = config.multiagent.policies
    assert isinstance(given, dict), "a word has been replaced"
    return given or {DEFAULT_POLICY_ID: None}


def _agents_by_policy(config: CommonConfig, policy_ids: Mapping[str, Any], facts: EnvFacts) -> dict[str, list[Any]]:
    """Return policy id -> the agents known to act with it, of those that the environment names before any episode.

    Raises:
        ConfigError: the function cannot be imported or fails, is needed and missing, or gives an unknown id.
    """
    key, path = _MAPPING, config.multiagent.policy_mapping_fn
    known = ", ".join(sorted(policy_ids))
    function: Callable[..., Any] = lambda agent_id: DEFAULT_POLICY_ID  # noqa: E731
    wanted: dict[str, str] = {}
    if isinstance(path, Mapping):
        function = mapping_by_table(path)
    elif path is not None:
        wanted = wanted_of_mapping(import_object(path, key=key))
        function = _function(path, key, "an agent", **wanted)
    elif DEFAULT_POLICY_ID not in policy_ids:
        said = f"{key} is not set, so all agents would act with {DEFAULT_POLICY_ID!r}; the policies are {known}."
        raise ConfigError(said, key=key, hint="Set it to a function: agent id -> policy id.")
    agents: dict[str, list[Any]] = {policy_id: [] for policy_id in policy_ids}
    for agent_id in {**(facts.observation_spaces or {}), **(facts.action_spaces or {})}:
        try:
            policy_id = function(agent_id, **dict.fromkeys(wanted))
        except ConfigError:  # of a table
            raise
        except Exception as error:
            if wanted:
                for policy_id in agents.keys() & _at_first(function, agent_id, wanted):
                    agents[policy_id].append(agent_id)
                continue
            # whatever a user's function raises
            raise ConfigError(f"{key} {path!r} failed for agent {agent_id!r}: {error!r:.300}", key=key) from error
        if policy_id not in agents:
            said = f"{key} {path!r} gives agent {agent_id!r} the policy {policy_id!r}; the policies are {known}."
            raise ConfigError(said, key=key, value=path, hint=nearest(str(policy_id), policy_ids).strip())
        agents[policy_id].append(agent_id)
    return agents


def _at_first(function: Callable[..., Any], agent_id: Any, wanted: Mapping[str, str]) -> set[Any]:
    """Return what a mapping function gives an agent at the beginning of episodes; nothing where it needs more.

    Args:
        function: the user's.
        agent_id: the agent.
        wanted: see `wanted_of_mapping`.
    """
    found: set[Any] = set()
    for number in range(_EPISODES):
        episode = MultiAgentEpisode(0, number, {}, PolicyMap({}).binding(), BatchBuilder(None), lambda batch: None)
        with contextlib.suppress(Exception):  # it may need the worker, or data that callbacks put into episodes
            found.add(function(agent_id, **{name: {"episode": episode}.get(what) for name, what in wanted.items()}))
    return found


def _function(path: str, key: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A function of the user's that takes such arguments.

    Raises:
        ConfigError: it cannot be imported, is none or takes others.
    """
    function: Callable[..., Any] = import_object(path, key=key)
    if not callable(function):
        raise ConfigError(f"{key} is {path!r}, which is no function.", key=key, value=path)
    check_takes(function, f"{key} {path!r}", key, *args, **kwargs)
    return function


def _entry(policy_id: str, entry: Any) -> dict[str, Any]:
    """What was given for a policy, by the names of the fields; those left out are None."""
    key = f"{POLICIES}.{policy_id}"
    # ids are parts of names in results, checkpoints and on the wire
    if not policy_id or "/" in policy_id or not policy_id.isprintable() or len(policy_id) > _MAX_ID:
        said = f"{policy_id!r:.120} is no policy id: it must have 1 to {_MAX_ID} printable characters and no slash."
        raise ConfigError(said, key=POLICIES, value=policy_id)
    if isinstance(entry, str):
        entry = {"class": entry}
    if isinstance(entry, list | tuple) and len(entry) == len(_FIELDS) - 1:  # as a user gives it
        entry = dict(zip(_FIELDS, entry, strict=False))
    if not isinstance(entry, Mapping | None):
        expected = f"null, a mapping of {', '.join(_FIELDS)}, or a list of the first four"
        raise ConfigError(f"{key} is {entry!r:.200}, expected {expected}.", key=key, value=entry)
    given = {**dict.fromkeys(_FIELDS), **(entry or {})}
    for name, value in given.items():
        key = f"{POLICIES}.{policy_id}.{name}"
        if name not in _FIELDS:
            raise ConfigError(f"There is no key {key}.", key=key, hint=nearest(name, _FIELDS).strip())
        if value is not None and not isinstance(value, _FIELDS[name]):
            wanted = "an import path" if name == "class" else "a mapping"
            raise ConfigError(f"{key} is {value!r:.200}, expected {wanted}, or null.", key=key, value=value)
    return given


def _trained(
    config: CommonConfig, given: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, type[CommonConfig] | None]
) -> set[str]:
    key = "multiagent.policies_to_train"
    named = config.multiagent.policies_to_train
    for policy_id in named or []:
        if policy_id not in given:
            said = f"{key} names {policy_id!r}; the policies are {', '.join(sorted(given))}."
            raise ConfigError(said, key=key, value=policy_id, hint=nearest(policy_id, given).strip())
    trained = set(named or given)
    for policy_id in sorted(trained):
        if kinds[policy_id] is None:
            path = given[policy_id]["class"]
            said = f"policy {policy_id!r} is to be trained, but it is of your own class {path!r}, which only acts."
            hint = f"Name the policies that learn in {key}, without this one."
            raise ConfigError(said, key=key, value=policy_id, hint=hint)
    return trained


def _planned(
    config: CommonConfig,
    kind: type[CommonConfig] | None,
    policy_id: str,
    given: Mapping[str, Any],
    facts: EnvFacts,
    agents: Sequence[Any],
    is_trained: bool,
) -> PlannedPolicy:
    """A policy of the run; `kind` is the class of its algorithm's config, None for a Policy class of the user's own."""
    overrides = dict(given["config"] or {})
    own_config = config if kind is None else config_of(config, kind, policy_id, overrides, given[_OF_A_RUN])
    observation_space = _space(policy_id, "observation_space", given, facts, agents)
    action_space = _space(policy_id, "action_space", given, facts, agents)
    settings = learning_settings(own_config)
    custom = own_config.model.custom_preprocessor
    if kind is None:
        settings = deep_update(deep_update(settings, given[_OF_A_RUN] or {}), overrides)
        custom = (settings.get("model") or {}).get("custom_preprocessor")
    else:
        _check_can_act(own_config, action_space)
    return PlannedPolicy(
        policy_id,
        given["class"] if kind is None else None,
        observation_space,
        action_space,
        make_preprocessor(observation_space, action_space=action_space, custom_preprocessor=custom),
        own_config,
        settings,
        is_trained,
        observation_space is not facts.observation_space or action_space is not facts.action_space,
    )


def _check_can_act(config: CommonConfig, action_space: spaces.Space[Any]) -> None:
    """Raise UnsupportedSpaceError, with the way out, for actions that the algorithm, or any network, can't choose."""
    known = config.action_spaces
    if known is not None and not config.learns_actions_of(action_space):
        kinds = [(name, config_class(name)) for name in sorted(ALGORITHMS)]
        alike = [(name, kind) for name, kind in kinds if kind.is_offline == config.is_offline]
        able = ", ".join(name for name, kind in alike if kind.learns_actions_of(action_space))
        hint = f"These algorithms learn such actions: {able}."
        raise UnsupportedSpaceError(f"{config.algo} over the action space", action_space, known, hint)
    try:
        make_distribution(action_space)
    except UnsupportedSpaceError as error:
        error.hint = "Wrap the environment in one with such actions, or let a Policy class of your own act."
        raise


def _space(
    policy_id: str, name: str, given: Mapping[str, Any], facts: EnvFacts, agents: Sequence[Any]
) -> spaces.Space[Any]:
    key = f"{POLICIES}.{policy_id}.{name}"
    if given[name] is not None:
        try:
            return space_from_dict(given[name])
        except ConfigError as error:
            raise ConfigError(f"{key}: {error.message}", key=key, value=given[name]) from error
    common: spaces.Space[Any] | None = getattr(facts, name)
    if common is not None:
        return common
    by_agent: Mapping[Any, spaces.Space[Any]] = getattr(facts, f"{name}s") or {}
    own = [by_agent[agent_id] for agent_id in agents if agent_id in by_agent]
    other = next((space for space in own if space != own[0]), None)
    if own and other is None:
        return own[0]
    hint = f"Give the environment an {name}, or set {key}, as aiorl.data.spaces.space_to_dict says it."
    if other is not None:
        reason = f"its agents have different ones: {own[0]} and {other}"
        hint = f"Have each kind of agent act with a policy of its own, or set {key}."
    elif by_agent:
        names = ", ".join(map(str, by_agent))
        reason = f"none of the agents that the environment names ({names}) is known to act with it"
    else:
        reason = "the environment names none"
    raise ConfigError(f"policy {policy_id!r} has no {name.replace('_', ' ')}: {reason}.", key=key, hint=hint)


def _described(space: spaces.Space[Any]) -> dict[str, Any]:
    try:
        return space_to_dict(space)
    except UnsupportedSpaceError:  # a user's own preprocessor may take spaces of any kind
        return {"kind": type(space).__name__, "text": str(space)}


def check_leases(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> None:
    """Refuse policies that would be sampled for in different ways: a worker samples for all its policies at once.

    Raises:
        ConfigError: the algorithm of a policy that learns wants other leases than the run's; or it needs whole
            episodes, and the run cuts them.
    """
    leases = algorithm_class(config.algo).lease_plan(config)
    for policy in planned.values():
        if not policy.is_trained:
            continue
        key, algo, kind = f"{POLICIES}.{policy.policy_id}.class", policy.config.algo, type(policy.config)
        wanted = algorithm_class(algo).lease_plan(policy.config)
        left_out = f"leave policy {policy.policy_id!r} out of multiagent.policies_to_train, so that it only acts."
        if wanted != leases:
            names = [field.name for field in dataclasses.fields(leases)]
            pairs = [(name, getattr(leases, name), getattr(wanted, name)) for name in names]
            differences = ", ".join(f"{name} ({run} and {own})" for name, run, own in pairs if run != own)
            said = (
                f"{key} is {algo!r}, which workers can't sample for along with {config.algo!r}: {differences} differ."
            )
            hint = f"Take an algorithm that is sampled for alike, or {left_out}"
            raise ConfigError(said, key=key, value=algo, hint=hint)
        if kind.needs_whole_episodes and kind is not type(config) and config.is_truncating:
            said = f"{key} is {algo!r}, which needs whole episodes, and batch_mode: {config.batch_mode} cuts them."
            hint = f"Set batch_mode: complete_episodes, which is then for all policies, or {left_out}"
            raise ConfigError(said, key=key, value=algo, hint=hint)
