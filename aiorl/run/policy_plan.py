"""Which policies a run has: what `multiagent.policies` says, completed and checked, before TensorFlow is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.acting.observation.preprocessors import Preprocessor, make_preprocessor
from aiorl.acting.policy_map import PolicyMap, mapping_by_table, wanted_of_mapping
from aiorl.config.code import check_takes, import_object
from aiorl.config.merge import deep_update
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.spaces import space_from_dict, space_to_dict
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.learning.algorithms.registry import ALGORITHMS, config_class
from aiorl.run.policy_config import POLICIES, config_class_of, config_of, learning_settings
from aiorl.sampling.builder import BatchBuilder
from aiorl.sampling.episode import MultiAgentEpisode

__all__ = ["PlannedPolicy", "plan_policies", "with_policies_named", "with_settings_said"]

_FIELDS = ("class", "observation_space", "action_space", "config")
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
        raise ConfigError(
            f"{POLICIES} is {word}, which decides who acts with which: {_MAPPING} is not for it.",
            key=_MAPPING, value=mapping, hint="Leave it out, or name the policies.",
        )  # fmt: skip
    found, actions = facts.observation_spaces or {}, facts.action_spaces or {}
    agents = list(dict.fromkeys([*found, *actions]))
    if not agents:
        raise ConfigError(
            f"{POLICIES} is {word}, but the environment, {facts.kind.name}, names no agents before an episode.",
            key=POLICIES, value=word,
            hint="Give it observation_spaces, a dict of spaces by agent id; or name the policies.",
        )  # fmt: skip
    spaces_of = {agent: (found.get(agent), actions.get(agent)) for agent in agents}
    chosen = {
        str(agent): str(
            agent if word == "per_agent" else next(own for own in agents if spaces_of[own] == spaces_of[agent])
        )
        for agent in agents
    }
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
        raise ConfigError(
            f"{key} is not set, so all agents would act with {DEFAULT_POLICY_ID!r}; the policies are {known}.",
            key=key,
            hint="Set it to a function: agent id -> policy id.",
        )
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
            raise ConfigError(
                f"{key} {path!r} gives agent {agent_id!r} the policy {policy_id!r}; the policies are {known}.",
                key=key,
                value=path,
                hint=nearest(str(policy_id), policy_ids).strip(),
            )
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
        raise ConfigError(
            f"{policy_id!r:.120} is no policy id: it must have 1 to {_MAX_ID} printable characters and no slash.",
            key=POLICIES,
            value=policy_id,
        )
    if isinstance(entry, str):
        entry = {"class": entry}
    if isinstance(entry, list | tuple) and len(entry) == len(_FIELDS):
        entry = dict(zip(_FIELDS, entry, strict=True))
    if entry is not None and not isinstance(entry, Mapping):
        raise ConfigError(
            f"{key} is {entry!r:.200}, expected null, a mapping of {', '.join(_FIELDS)}, or a list of the four.",
            key=key,
            value=entry,
        )
    given = dict(entry or {})
    unknown = [name for name in given if name not in (*_FIELDS, _OF_A_RUN)]
    if unknown:
        raise ConfigError(
            f"There is no key {key}.{unknown[0]}.", key=f"{key}.{unknown[0]}", hint=nearest(unknown[0], _FIELDS).strip()
        )
    for name, kind, wanted in (
        ("class", str, "an import path"),
        ("observation_space", Mapping, "a space as plain data"),
        ("action_space", Mapping, "a space as plain data"),
        ("config", Mapping, "a mapping of settings"),
        (_OF_A_RUN, Mapping, "a mapping of settings"),
    ):
        value = given.setdefault(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{key}.{name} is {value!r:.200}, expected {wanted}, or null.", key=f"{key}.{name}", value=value
            )
    return given


def _trained(
    config: CommonConfig, given: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, type[CommonConfig] | None]
) -> set[str]:
    key = "multiagent.policies_to_train"
    named = config.multiagent.policies_to_train
    for policy_id in named or []:
        if policy_id not in given:
            raise ConfigError(
                f"{key} names {policy_id!r}; the policies are {', '.join(sorted(given))}.",
                key=key,
                value=policy_id,
                hint=nearest(policy_id, given).strip(),
            )
    trained = set(named or given)
    for policy_id in sorted(trained):
        if kinds[policy_id] is None:
            path = given[policy_id]["class"]
            said = "" if named else " (all do where it is left out)"
            raise ConfigError(
                f"policy {policy_id!r} is to be trained{said}, but it is of your own class {path!r}, which only "
                "acts: in a run the learner trains networks of its own.",
                key=key,
                value=policy_id,
                hint=f"Name the policies that learn in {key}, without this one.",
            )
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
    if kind is not None:
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
        able = [(name, kind) for name, kind in kinds if kind.learns_actions_of(action_space)]
        play = ", ".join(name for name, kind in able if not kind.is_offline)
        stored = ", ".join(name for name, kind in able if kind.is_offline)
        hint = f"These algorithms learn such actions: {play}; from stored experience: {stored}."
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
    what = name.replace("_", " ")
    if own and all(space == own[0] for space in own):
        return own[0]
    if own:
        reason = f"its agents have different ones: {own[0]} and {next(s for s in own if s != own[0])}"
    elif by_agent:
        names = ", ".join(map(str, by_agent))
        reason = f"none of the agents that the environment names ({names}) is known to act with it"
    else:
        reason = "the environment names none"
    raise ConfigError(
        f"policy {policy_id!r} has no {what}: {reason}.",
        key=key,
        hint=f"Give the environment an {name}, or set {key}, as aiorl.data.spaces.space_to_dict says it."
        if not own
        else f"Have each kind of agent act with a policy of its own, or set {key}.",
    )


def _described(space: spaces.Space[Any]) -> dict[str, Any]:
    try:
        return space_to_dict(space)
    except UnsupportedSpaceError:  # a user's own preprocessor may take spaces of any kind
        return {"kind": type(space).__name__, "text": str(space)}
