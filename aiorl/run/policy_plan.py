"""Policies of a run: the entries of `multiagent.policies`, completed and checked before TensorFlow
is loaded.
"""

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
from aiorl.acting.policy_map import PolicyMap, mapping_by_table, mapping_parameters
from aiorl.acting.preprocessors import Preprocessor, make_preprocessor
from aiorl.config import deep_update, registry
from aiorl.config.code import check_takes, import_object, is_import_path
from aiorl.config.key import fact_of
from aiorl.config.layers import Layer
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.spaces import differ_in_order_only, space_from_dict, space_to_dict
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.learning.algorithm import Algorithm, experience_of
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.algorithms.shared_config import BATCH, ENVS, LENGTH
from aiorl.sampling.builder import BatchBuilder
from aiorl.sampling.episode import MultiAgentEpisode
from aiorl.text import agent_text

POLICIES = "multiagent.policies"
"""Config key that lists the policies."""

# A policy can have its own settings for learning; all others belong to the run
_RUN_GROUPS = frozenset(
    ["Run", "Sampling", "Workers and hosts", "Resources", "Reports", "Offline data"]
)
_RUN_KEYS = frozenset(
    [
        "min_iter_time_s",
        "timesteps_per_iteration",
        "max_policy_lag",
        "outstanding_fragments_per_worker",
        "fragments_per_update",
        "max_env_steps_ahead",
        "broadcast_updates",
        "broadcast_interval_ms",
        "gradients",
    ]
)


def config_class_of(
    config: CommonConfig, policy_id: str, name: str | None
) -> type[CommonConfig] | None:
    """Return the config class of a policy's algorithm; None for a Policy class of the user's own.

    Args:
        config: the run's config.
        policy_id: id of the policy.
        name: the given ``class``: name of an algorithm, import path, or None for the run's
            algorithm.

    Raises:
        ConfigError: the class is neither an algorithm nor a policy, or cannot be imported.
    """
    if name is None or name.lower() == config.algo.lower():
        return type(config)
    key = f"{POLICIES}.{policy_id}.class"
    if is_import_path(name):
        found = import_object(name, key=key)
        if inspect.isclass(found) and issubclass(found, Policy):
            return None
        if not (inspect.isclass(found) and issubclass(found, Algorithm)):
            said = (
                f"{key} is {name!r}, which is neither a subclass of aiorl.Policy nor an algorithm."
            )
            raise ConfigError(said, key=key, value=name)
    try:
        return config_class(name)
    except ConfigError as error:
        raise ConfigError(
            f"{key}: {error.message}", key=key, value=name, hint=error.hint
        ) from error


def config_of(
    config: CommonConfig,
    kind: type[CommonConfig],
    policy_id: str,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> CommonConfig:
    """Return the config that a policy learns with: the run's, with the policy's own settings on
    top.

    If the policy has another algorithm than the run, it inherits the settings of the run as a
    whole, and keys of both algorithms that the user has set. All others are the algorithm's
    defaults. A preset applies only to the run's algorithm.

    Args:
        config: the run's config.
        kind: class of the policy's config.
        policy_id: id of the policy.
        overrides: the policy's own settings.
        defaults: the policy's ``defaults`` entry in the run's config; these take precedence over
            the run's settings.

    Raises:
        ConfigError: a setting can only be set for the run, or the settings make no valid config.
    """
    own = registry.translate_old_keys(overrides)
    key = f"{POLICIES}.{policy_id}.config"
    for place, values in ((key, own), (f"{POLICIES}.{policy_id}.defaults", defaults or {})):
        for name in values:
            if name in kind.model_fields and _is_of_run(kind, name):
                raise ConfigError(
                    f"{place}.{name} can't differ from the run's {name}.", key=f"{place}.{name}"
                )
    layers = [values for values in (defaults, own) if values]
    if kind is type(config) and not layers:
        return config
    try:
        if kind is type(config):
            return _with_sizes_of(config, config.updated(*layers))
        return _with_sizes_of(
            config, kind.from_layers([Layer(_common_settings(config, kind)), *map(Layer, layers)])
        )
    except ConfigError as error:
        raise ConfigError(
            f"{key}: {error.message}", key=f"{key}.{error.key}", hint=error.hint
        ) from error


def _with_sizes_of(run: CommonConfig, config: CommonConfig) -> CommonConfig:
    """Return a policy's config after checking that sizes shared by all policies match the run's.

    Raises:
        ConfigError: a size differs.
    """
    for name in (LENGTH, ENVS, BATCH):
        size = getattr(run, name)
        wanted = getattr(config, name)
        if wanted != size and _is_of_run(type(config), name):
            said = (
                f"the settings of this policy would need a {name} of {wanted}, but the run has"
                f" {size}."
            )
            hint = f"Set {name} for the run, or change the policy's settings."
            raise ConfigError(said, key=name, value=wanted, hint=hint)
    return config


def learning_settings(config: CommonConfig) -> dict[str, Any]:
    """Return the settings that concern learning, which can differ between policies."""
    kind = type(config)
    return {name: value for name, value in config.to_dict().items() if not _is_of_run(kind, name)}


def _common_settings(config: CommonConfig, kind: type[CommonConfig]) -> dict[str, Any]:
    """Return the settings of a run's config that a policy of another algorithm inherits."""
    of_run = {name: value for name, value in config.to_dict().items() if name in kind.model_fields}
    of_run = {name: value for name, value in of_run.items() if _is_of_run(kind, name)}
    given = {
        name: value for name, value in config.users_values().items() if name in kind.model_fields
    }
    return {**given, **of_run, "algo": kind.model_fields["algo"].default, "preset": None}


def _is_of_run(kind: type[CommonConfig], name: str) -> bool:
    """Return True if a key of a config class has the same value for all policies of a run."""
    if name == "train_batch_size":
        return kind.trains_on_what_comes
    return name in _RUN_KEYS or fact_of(kind.model_fields[name], "group") in _RUN_GROUPS


_FIELDS = {
    "class": str,
    "observation_space": Mapping,
    "action_space": Mapping,
    "config": Mapping,
    "defaults": Mapping,
}
_OF_A_RUN = "defaults"
_MAX_ID = 100
_MAPPING = "multiagent.policy_mapping_fn"
_EPISODES = 16
"""Number of episodes, with ids from 0, that a mapping function is probed with if it needs an
episode."""


@dataclass(frozen=True, slots=True)
class PlannedPolicy:
    """One policy of the run.

    Attributes:
        policy_id: its id.
        policy_class: import path of the user's own Policy class, which only acts; None for a
            network of the learner.
        observation_space: space of its agents' observations, as the environment returns them.
        action_space: space of its agents' actions.
        preprocessor: converts observations into the policy's input.
        config: config of its algorithm, from the run's settings and its own.
        settings: settings passed to the policy when it is made.
        is_trained: True if it learns.
        has_own_spaces: True if its spaces differ from the environment's common ones.
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
        """Return True if it has a network of another algorithm than the run's."""
        return self.policy_class is None and self.config.algo != config.algo

    def described_spaces(self) -> dict[str, Any]:
        """Return both spaces as plain data."""
        return {
            "observation": _described(self.observation_space),
            "action": _described(self.action_space),
        }

    def in_order_of(self, stored: Mapping[str, Any]) -> PlannedPolicy:
        """Return the policy with the parts of its Dict spaces in the order of stored ones, if only
        that differs.

        Args:
            stored: result of `described_spaces` of a policy whose weights this one takes over.
        """
        described = self.described_spaces()
        names = [name for name in described if differ_in_order_only(described[name], stored[name])]
        if not names:
            return self
        observation_space = self.observation_space
        action_space = self.action_space
        if "observation" in names:
            observation_space = space_from_dict(stored["observation"])
        if "action" in names:
            action_space = space_from_dict(stored["action"])
        custom = (self.settings.get("model") or {}).get("custom_preprocessor")
        return dataclasses.replace(
            self,
            observation_space=observation_space,
            action_space=action_space,
            preprocessor=make_preprocessor(
                observation_space, action_space=action_space, custom_preprocessor=custom
            ),
            has_own_spaces=True,
        )


def plan_policies(config: CommonConfig, facts: EnvFacts) -> dict[str, PlannedPolicy]:
    """Return the run's policies, sorted by id; only the default policy if none are named.

    Raises:
        ConfigError: a policy is invalid, or the policies do not match the environment.
        UnsupportedSpaceError: no preprocessor supports a policy's observations.
    """
    entries = _entries(config)
    given = {policy_id: _entry(policy_id, entry) for policy_id, entry in entries.items()}
    facts.check_policies(given, POLICIES)
    if config.multiagent.observation_fn is not None:
        names = ("agent_obs", "worker", "base_env", "policies", "episode")
        _function(
            config.multiagent.observation_fn, "multiagent.observation_fn", **dict.fromkeys(names)
        )
    agents = _agents_by_policy(config, given, facts)
    kinds = {
        policy_id: config_class_of(config, policy_id, own["class"])
        for policy_id, own in given.items()
    }
    trained = _trained(config, given, kinds)
    return {
        policy_id: _planned(
            config,
            kinds[policy_id],
            policy_id,
            given[policy_id],
            facts,
            agents[policy_id],
            policy_id in trained,
        )
        for policy_id in sorted(given)
    }


def with_policies_named(config: CommonConfig, facts: EnvFacts) -> CommonConfig:
    """Replace ``per_agent`` or ``per_space`` by the policies that it stands for and their mapping.

    Raises:
        ConfigError: the environment does not name its agents, or another mapping is given.
    """
    word = config.multiagent.policies
    mapping = config.multiagent.policy_mapping_fn
    if not isinstance(word, str):
        return config
    if mapping is not None:
        said = (
            f"{POLICIES} is {word}, which already decides the mapping: {_MAPPING} cannot be set,"
            " too."
        )
        raise ConfigError(
            said, key=_MAPPING, value=mapping, hint="Leave it out, or name the policies."
        )
    found = facts.observation_spaces or {}
    actions = facts.action_spaces or {}
    agents = list(dict.fromkeys([*found, *actions]))
    if not agents:
        said = (
            f"{POLICIES} is {word}, but the environment, {facts.kind.name}, does not name its"
            " agents in advance."
        )
        hint = "Give it observation_spaces, a dict of spaces by agent id, or name the policies."
        raise ConfigError(said, key=POLICIES, value=word, hint=hint)
    chosen: dict[str, str] = {}
    for agent in agents:
        own = (found.get(agent), actions.get(agent))
        alike = [other for other in agents if (found.get(other), actions.get(other)) == own]
        chosen[agent_text(agent)] = agent_text(agent if word == "per_agent" else alike[0])
    named = {"policies": dict.fromkeys(chosen.values()), "policy_mapping_fn": chosen}
    return config.updated({"multiagent": named})


def with_settings_said(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> CommonConfig:
    """Add the effective settings of policies of other algorithms to the run's config, as their
    ``defaults``.

    The stored config must leave nothing to defaults, so that a resumed run has the same settings
    unless the user overrides them.
    """
    said = {
        policy_id: {"class": policy.config.algo, "defaults": learning_settings(policy.config)}
        for policy_id, policy in planned.items()
        if policy.is_of_other_algorithm(config)
    }
    if not said:
        return config
    entries = {
        policy_id: _entry(policy_id, _entries(config)[policy_id]) | own
        for policy_id, own in said.items()
    }
    return config.updated({"multiagent": {"policies": entries}})


def _entries(config: CommonConfig) -> dict[str, Any]:
    """Return the config's entry for each policy; None for the default policy if no policies are
    named.
    """
    given = config.multiagent.policies
    assert isinstance(given, dict), "a word has been replaced"
    return given or {DEFAULT_POLICY_ID: None}


def _agents_by_policy(
    config: CommonConfig, policy_ids: Mapping[str, Any], facts: EnvFacts
) -> dict[str, list[Any]]:
    """Return policy id -> agents known to act with it, among those that the environment names in
    advance.

    Raises:
        ConfigError: the mapping function cannot be imported, fails, is missing or returns an
            unknown id.
    """
    key = _MAPPING
    path = config.multiagent.policy_mapping_fn
    known = ", ".join(sorted(policy_ids))
    function: Callable[..., Any] = lambda agent_id: DEFAULT_POLICY_ID  # noqa: E731
    wanted: dict[str, str] = {}
    if isinstance(path, Mapping):
        function = mapping_by_table(path)
    elif path is not None:
        wanted = mapping_parameters(import_object(path, key=key))
        function = _function(path, key, "an agent", **wanted)
    elif DEFAULT_POLICY_ID not in policy_ids:
        said = (
            f"{key} is not set, so all agents would act with {DEFAULT_POLICY_ID!r}; the policies"
            f" are {known}."
        )
        raise ConfigError(said, key=key, hint="Set it to a function: agent id -> policy id.")
    agents: dict[str, list[Any]] = {policy_id: [] for policy_id in policy_ids}
    for agent_id in {**(facts.observation_spaces or {}), **(facts.action_spaces or {})}:
        try:
            policy_id = function(agent_id, **dict.fromkeys(wanted))
        except ConfigError:  # raised by a table
            raise
        except Exception as error:
            if wanted:
                for policy_id in agents.keys() & _at_first(function, agent_id, wanted):
                    agents[policy_id].append(agent_id)
                continue
            # the user's function can raise anything
            raise ConfigError(
                f"{key} {path!r} failed for agent {agent_id!r}: {error!r:.300}", key=key
            ) from error
        if policy_id not in agents:
            said = (
                f"{key} {path!r} gives agent {agent_id!r} the policy {policy_id!r}; the policies"
                f" are {known}."
            )
            raise ConfigError(
                said, key=key, value=path, hint=nearest(str(policy_id), policy_ids).strip()
            )
        agents[policy_id].append(agent_id)
    return agents


def _at_first(function: Callable[..., Any], agent_id: Any, wanted: Mapping[str, str]) -> set[Any]:
    """Return the policies that a mapping function gives an agent at the start of episodes; empty if
    it needs more.

    Args:
        function: the user's mapping function.
        agent_id: id of the agent.
        wanted: see `mapping_parameters`.
    """
    found: set[Any] = set()
    for number in range(_EPISODES):
        episode = MultiAgentEpisode(
            0, number, {}, PolicyMap({}).binding(), BatchBuilder(None), lambda batch: None
        )
        with contextlib.suppress(
            Exception
        ):  # it may need the worker, or data that callbacks store in episodes
            found.add(
                function(
                    agent_id,
                    **{name: {"episode": episode}.get(what) for name, what in wanted.items()},
                )
            )
    return found


def _function(path: str, key: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Import a user's function and check that it accepts these arguments.

    Raises:
        ConfigError: it cannot be imported, is not a function or does not accept the arguments.
    """
    function: Callable[..., Any] = import_object(path, key=key)
    if not callable(function):
        raise ConfigError(f"{key} is {path!r}, which is not a function.", key=key, value=path)
    check_takes(function, f"{key} {path!r}", key, *args, **kwargs)
    return function


def _entry(policy_id: str, entry: Any) -> dict[str, Any]:
    """Return a policy's entry by the names of its fields; fields left out are None."""
    key = f"{POLICIES}.{policy_id}"
    # ids are parts of names in results, checkpoints and on the wire
    if not policy_id or "/" in policy_id or not policy_id.isprintable() or len(policy_id) > _MAX_ID:
        said = (
            f"{policy_id!r:.120} is not a policy id: it must have 1 to {_MAX_ID} printable"
            " characters and no slash."
        )
        raise ConfigError(said, key=POLICIES, value=policy_id)
    if isinstance(entry, str):
        entry = {"class": entry}
    if isinstance(entry, list | tuple) and len(entry) == len(_FIELDS) - 1:  # the short form
        entry = dict(zip(_FIELDS, entry, strict=False))
    if not isinstance(entry, Mapping | None):
        expected = f"null, a mapping of {', '.join(_FIELDS)}, or a list of the first four"
        raise ConfigError(f"{key} is {entry!r:.200}, expected {expected}.", key=key, value=entry)
    given = {**dict.fromkeys(_FIELDS), **(entry or {})}
    for name, value in given.items():
        key = f"{POLICIES}.{policy_id}.{name}"
        if name not in _FIELDS:
            raise ConfigError(
                f"There is no key {key}.", key=key, hint=nearest(name, _FIELDS).strip()
            )
        if value is not None and not isinstance(value, _FIELDS[name]):
            wanted = "an import path" if name == "class" else "a mapping"
            raise ConfigError(
                f"{key} is {value!r:.200}, expected {wanted}, or null.", key=key, value=value
            )
    return given


def _trained(
    config: CommonConfig,
    given: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, type[CommonConfig] | None],
) -> set[str]:
    key = "multiagent.policies_to_train"
    named = config.multiagent.policies_to_train
    for policy_id in named or []:
        if policy_id not in given:
            said = f"{key} names {policy_id!r}; the policies are {', '.join(sorted(given))}."
            raise ConfigError(
                said, key=key, value=policy_id, hint=nearest(policy_id, given).strip()
            )
    trained = set(named or given)
    for policy_id in sorted(trained):
        if kinds[policy_id] is None:
            path = given[policy_id]["class"]
            said = (
                f"policy {policy_id!r} is to be trained, but its class is your own {path!r}, which"
                " only acts."
            )
            hint = f"List the policies that learn in {key}, without this one."
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
    """Plan one policy; `kind` is the class of its algorithm's config, or None for a Policy class of
    the user's own.
    """
    overrides = dict(given["config"] or {})
    own_config = (
        config if kind is None else config_of(config, kind, policy_id, overrides, given[_OF_A_RUN])
    )
    if own_config.worker_overrides() != config.worker_overrides():
        raise ConfigError(
            f"{POLICIES}.{policy_id}.config: {own_config.algo} prepares stored rows in another way"
            f" than {config.algo}, so the two can't read the same input.",
            key=f"{POLICIES}.{policy_id}.config",
            value=config.input,
            hint="Leave out input, or use one algorithm for all policies.",
        )
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
    """Check that the algorithm, or at least some network, can choose such actions.

    Raises:
        UnsupportedSpaceError: it cannot; the error names the alternatives.
    """
    known = config.action_spaces
    if known is not None and not config.learns_actions_of(action_space):
        kinds = [(name, config_class(name)) for name in sorted(ALGORITHMS)]
        alike = [(name, kind) for name, kind in kinds if kind.is_offline == config.is_offline]
        able = ", ".join(name for name, kind in alike if kind.learns_actions_of(action_space))
        hint = f"These algorithms support these actions: {able}."
        raise UnsupportedSpaceError(
            f"{config.algo} over the action space", action_space, known, hint
        )
    try:
        make_distribution(action_space)
    except UnsupportedSpaceError as error:
        error.hint = (
            "Wrap the environment in one with supported actions, or act with a Policy class of your"
            " own."
        )
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
    hint = (
        f"Give the environment an {name}, or set {key}, in the form that"
        " aiorl.data.spaces.space_to_dict returns."
    )
    if other is not None:
        reason = f"its agents have different ones: {own[0]} and {other}"
        hint = f"Give each kind of agent its own policy, or set {key}."
    elif by_agent:
        names = ", ".join(map(str, by_agent))
        reason = f"none of the agents that the environment names ({names}) acts with it"
    elif name in facts.odd_spaces:
        reason = (
            f"the environment's is {facts.odd_spaces[name]!r:.200}, which is no space of Gymnasium"
        )
    else:
        reason = "the environment declares none"
    raise ConfigError(
        f"policy {policy_id!r} has no {name.replace('_', ' ')}: {reason}.", key=key, hint=hint
    )


def _described(space: spaces.Space[Any]) -> dict[str, Any]:
    try:
        return space_to_dict(space)
    except UnsupportedSpaceError:  # a user's own preprocessor can support any kind of space
        return {"kind": type(space).__name__, "text": str(space)}


def check_leases(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> None:
    """Check that all policies can be sampled together, since a worker samples for all of them in
    one go.

    Raises:
        ConfigError: the algorithm of a trained policy needs other leases than the run's algorithm,
            or it needs whole episodes while the run truncates them.
    """
    leases = experience_of(algorithm_class(config.algo), config).lease_plan()
    for policy in planned.values():
        if not policy.is_trained:
            continue
        key = f"{POLICIES}.{policy.policy_id}.class"
        algo = policy.config.algo
        kind = type(policy.config)
        wanted = experience_of(algorithm_class(algo), policy.config).lease_plan()
        left_out = (
            f"remove policy {policy.policy_id!r} from multiagent.policies_to_train, so that it only"
            " acts."
        )
        if wanted != leases:
            names = [field.name for field in dataclasses.fields(leases)]
            pairs = [(name, getattr(leases, name), getattr(wanted, name)) for name in names]
            differences = ", ".join(
                f"{name} ({run} and {own})" for name, run, own in pairs if run != own
            )
            said = (
                f"{key} is {algo!r}, which workers cannot sample for along with {config.algo!r}:"
                f" {differences} differ."
            )
            hint = f"Use an algorithm with the same sampling, or {left_out}"
            raise ConfigError(said, key=key, value=algo, hint=hint)
        if kind.needs_whole_episodes and kind is not type(config) and config.is_truncating:
            said = (
                f"{key} is {algo!r}, which needs whole episodes, but batch_mode:"
                f" {config.batch_mode} cuts them."
            )
            hint = (
                f"Set batch_mode: complete_episodes, which applies to all policies, or {left_out}"
            )
            raise ConfigError(said, key=key, value=algo, hint=hint)
