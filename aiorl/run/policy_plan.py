"""Policies of a run: the entries of `multiagent.policies`, completed and checked before TensorFlow
is loaded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gymnasium import spaces

from aiorl.acting.distributions import DiagGaussian, make_distribution
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, mapping_by_table, mapping_parameters
from aiorl.acting.preprocessors import Preprocessor, make_preprocessor
from aiorl.config import deep_update, registry
from aiorl.config.code import check_takes, import_object, is_import_path
from aiorl.config.key import fact_of
from aiorl.config.layers import Layer
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import BATCH, ENVS, LENGTH
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.spaces import differ_in_order_only, space_from_dict, space_to_dict
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest
from aiorl.learning.algorithm import Algorithm, experience_of
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import algorithm_class, config_class
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
        name: the entry's ``class``: name of an algorithm, import path, or None for the run's
            algorithm.

    Raises:
        ConfigError: the class is neither an algorithm nor a policy, or cannot be imported.
    """
    if name is None or name.lower() == config.algo.lower():
        return type(config)
    key = f"{POLICIES}.{policy_id}.class"
    if is_import_path(name):
        imported = import_object(name, key=key)
        if inspect.isclass(imported) and issubclass(imported, Policy):
            return None
        if not (inspect.isclass(imported) and issubclass(imported, Algorithm)):
            raise ConfigError(
                f"{key} is {name!r}, which is neither a subclass of aiorl.Policy nor an algorithm.",
                key=key,
                value=name,
            )
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
    overrides = registry.translate_old_keys(overrides)
    key = f"{POLICIES}.{policy_id}.config"
    for place, values in ((key, overrides), (f"{POLICIES}.{policy_id}.defaults", defaults or {})):
        for name in values:
            if name in kind.model_fields and _is_of_run(kind, name):
                raise ConfigError(
                    f"{place}.{name} can't differ from the run's {name}.", key=f"{place}.{name}"
                )
    layers = [values for values in (defaults, overrides) if values]
    if kind is type(config) and not layers:
        return config
    try:
        if kind is type(config):
            return _with_sizes_of(config, config.updated(*layers))
        inherited = Layer(_common_settings(config, kind))
        return _with_sizes_of(config, kind.from_layers([inherited, *map(Layer, layers)]))
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
        needed_size = getattr(config, name)
        if needed_size != size and _is_of_run(type(config), name):
            raise ConfigError(
                f"the settings of this policy would need a {name} of {needed_size}, but the run has"
                f" {size}.",
                key=name,
                value=needed_size,
                hint=f"Set {name} for the run, or change the policy's settings.",
            )
    return config


def learning_settings(config: CommonConfig) -> dict[str, Any]:
    """Return the settings that concern learning, which can differ between policies."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if not _is_of_run(type(config), name)
    }


def _common_settings(config: CommonConfig, kind: type[CommonConfig]) -> dict[str, Any]:
    """Return the settings of a run's config that a policy of another algorithm inherits."""
    keys = kind.model_fields
    of_user = {name: value for name, value in config.users_values().items() if name in keys}
    of_run = {
        name: value
        for name, value in config.to_dict().items()
        if name in keys and _is_of_run(kind, name)
    }
    return {**of_user, **of_run, "algo": keys["algo"].default, "preset": None}


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
        agents: agents that act with it, as far as the environment names them and that is known.
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
    agents: Sequence[Any] = ()

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
        reordered = {"observation": self.observation_space, "action": self.action_space}
        reordered |= {name: space_from_dict(stored[name]) for name in names}
        return replace(
            self,
            observation_space=reordered["observation"],
            action_space=reordered["action"],
            preprocessor=make_preprocessor(
                reordered["observation"],
                action_space=reordered["action"],
                custom_preprocessor=_custom_preprocessor(self.settings),
            ),
            has_own_spaces=True,
        )


def plan_policies(config: CommonConfig, facts: EnvFacts) -> dict[str, PlannedPolicy]:
    """Return the run's policies, sorted by id; only the default policy if none are named.

    Raises:
        ConfigError: a policy is invalid, or the policies do not match the environment.
        UnsupportedSpaceError: no preprocessor supports a policy's observations.
    """
    entries = {policy_id: _entry(policy_id, raw) for policy_id, raw in _entries(config).items()}
    facts.check_policies(entries, POLICIES)
    if config.multiagent.observation_fn is not None:
        names = ("agent_obs", "worker", "base_env", "policies", "episode")
        _function(
            config.multiagent.observation_fn, "multiagent.observation_fn", **dict.fromkeys(names)
        )
    agents = _agents_by_policy(config, entries, facts)
    kinds = {
        policy_id: config_class_of(config, policy_id, entry["class"])
        for policy_id, entry in entries.items()
    }
    trained = _trained(config, entries, kinds)
    return {
        policy_id: _planned(
            config,
            policy_id,
            entries[policy_id],
            kind=kinds[policy_id],
            facts=facts,
            agents=agents[policy_id],
            is_trained=policy_id in trained,
        )
        for policy_id in sorted(entries)
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
        raise ConfigError(
            f"{POLICIES} is {word}, which already decides the mapping: {_MAPPING} cannot be set,"
            " too.",
            key=_MAPPING,
            value=mapping,
            hint="Leave it out, or name the policies.",
        )
    observations = facts.observation_spaces or {}
    actions = facts.action_spaces or {}
    agents = _named_agents(facts)
    if not agents:
        raise ConfigError(
            f"{POLICIES} is {word}, but the environment, {facts.kind.name}, does not name its"
            " agents in advance.",
            key=POLICIES,
            value=word,
            hint="Give it observation_spaces, a dict of spaces by agent id, or name the policies.",
        )
    policy_ids: dict[str, str] = {}
    for agent in agents:
        namesake = agent
        if word == "per_space":
            pair = (observations.get(agent), actions.get(agent))
            # the first agent with these spaces; spaces need not be hashable
            namesake = next(
                peer for peer in agents if (observations.get(peer), actions.get(peer)) == pair
            )
        policy_ids[agent_text(agent)] = agent_text(namesake)
    return config.updated(
        {
            "multiagent": {
                "policies": dict.fromkeys(policy_ids.values()),
                "policy_mapping_fn": policy_ids,
            }
        }
    )


def with_settings_said(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> CommonConfig:
    """Add the effective settings of policies of other algorithms to the run's config, as their
    ``defaults``.

    The stored config must leave nothing to defaults, so that a resumed run has the same settings
    unless the user overrides them.
    """
    entries = {
        policy_id: {
            **_entry(policy_id, _entries(config)[policy_id]),
            "class": policy.config.algo,
            "defaults": learning_settings(policy.config),
        }
        for policy_id, policy in planned.items()
        if policy.is_of_other_algorithm(config)
    }
    return config.updated({"multiagent": {"policies": entries}}) if entries else config


def _entries(config: CommonConfig) -> dict[str, Any]:
    """Return the config's entry for each policy; None for the default policy if no policies are
    named.
    """
    policies = config.multiagent.policies
    assert isinstance(policies, dict), "a word has been replaced"
    return policies or {DEFAULT_POLICY_ID: None}


def _named_agents(facts: EnvFacts) -> list[Any]:
    """Return the ids of the agents that the environment names in advance, in its order."""
    return list({**(facts.observation_spaces or {}), **(facts.action_spaces or {})})


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
    ids = ", ".join(sorted(policy_ids))
    function: Callable[..., Any] = lambda agent_id: DEFAULT_POLICY_ID  # noqa: E731
    parameters: dict[str, str] = {}
    if isinstance(path, Mapping):
        function = mapping_by_table(path)
    elif path is not None:
        parameters = mapping_parameters(import_object(path, key=key))
        function = _function(path, key, "an agent", **parameters)
    elif DEFAULT_POLICY_ID not in policy_ids:
        raise ConfigError(
            f"{key} is not set, so all agents would act with {DEFAULT_POLICY_ID!r}; the policies"
            f" are {ids}.",
            key=key,
            hint="Set it to a function: agent id -> policy id.",
        )
    agents: dict[str, list[Any]] = {policy_id: [] for policy_id in policy_ids}
    for agent_id in _named_agents(facts):
        try:
            policy_id = function(agent_id, **dict.fromkeys(parameters))
        except ConfigError:  # raised by a table
            raise
        except Exception as error:  # the user's function can raise anything
            if parameters:
                # there is no episode and no worker yet, which may be all that it lacks
                for policy_id in agents.keys() & _policies_at_start(function, agent_id, parameters):
                    agents[policy_id].append(agent_id)
                continue
            raise ConfigError(
                f"{key} {path!r} failed for agent {agent_id!r}: {error!r:.300}", key=key
            ) from error
        if policy_id not in agents:
            raise ConfigError(
                f"{key} {path!r} gives agent {agent_id!r} the policy {policy_id!r}; the policies"
                f" are {ids}.",
                key=key,
                value=path,
                hint=nearest(str(policy_id), policy_ids).strip(),
            )
        agents[policy_id].append(agent_id)
    return agents


def _policies_at_start(
    function: Callable[..., Any], agent_id: Any, parameters: Mapping[str, str]
) -> set[Any]:
    """Return the policies that a mapping function gives an agent at the start of episodes; empty if
    it needs more.

    Args:
        function: the user's mapping function.
        agent_id: id of the agent.
        parameters: see `mapping_parameters`.
    """
    policy_ids: set[Any] = set()
    for number in range(_EPISODES):
        episode = MultiAgentEpisode(
            0,
            number,
            lanes={},
            binding=PolicyMap({}).binding(),
            batch_builder=BatchBuilder(None),
            add_extra_batch=lambda batch: None,
        )
        context = {"episode": episode}  # there is no worker
        arguments = {name: context.get(meaning) for name, meaning in parameters.items()}
        # it may need the worker, or data that callbacks store in episodes
        with contextlib.suppress(Exception):
            policy_ids.add(function(agent_id, **arguments))
    return policy_ids


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


def check_policy_id(policy_id: Any) -> None:
    """Check the form of a policy's id, which is a part of names in results, checkpoints and on the
    wire.

    Raises:
        ConfigError: it is wrong.
    """
    is_text = isinstance(policy_id, str) and policy_id.isprintable()
    if not is_text or "/" in policy_id or not 1 <= len(policy_id) <= _MAX_ID:
        raise ConfigError(
            f"{policy_id!r:.120} is not a policy id: it must have 1 to {_MAX_ID} printable"
            " characters and no slash.",
            key=POLICIES,
            value=policy_id,
        )


def _entry(policy_id: str, raw: Any) -> dict[str, Any]:
    """Return a policy's entry by the names of its fields; fields left out are None."""
    key = f"{POLICIES}.{policy_id}"
    check_policy_id(policy_id)
    if isinstance(raw, str):
        raw = {"class": raw}
    if isinstance(raw, list | tuple) and len(raw) == len(_FIELDS) - 1:  # the short form
        raw = dict(zip(_FIELDS, raw, strict=False))
    if not isinstance(raw, Mapping | None):
        expected = f"null, a mapping of {', '.join(_FIELDS)}, or a list of the first four"
        raise ConfigError(f"{key} is {raw!r:.200}, expected {expected}.", key=key, value=raw)
    entry = {**dict.fromkeys(_FIELDS), **(raw or {})}
    for name, value in entry.items():
        key = f"{POLICIES}.{policy_id}.{name}"
        if name not in _FIELDS:
            raise ConfigError(
                f"There is no key {key}.", key=key, hint=nearest(name, _FIELDS).strip()
            )
        if value is not None and not isinstance(value, _FIELDS[name]):
            expected = "an import path" if name == "class" else "a mapping"
            raise ConfigError(
                f"{key} is {value!r:.200}, expected {expected}, or null.", key=key, value=value
            )
    return entry


def _trained(
    config: CommonConfig,
    entries: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, type[CommonConfig] | None],
) -> set[str]:
    """Return the ids of the policies that learn."""
    key = "multiagent.policies_to_train"
    trained = config.multiagent.policies_to_train or list(entries)
    for policy_id in trained:
        if policy_id not in entries:
            raise ConfigError(
                f"{key} names {policy_id!r}; the policies are {', '.join(sorted(entries))}.",
                key=key,
                value=policy_id,
                hint=nearest(policy_id, entries).strip(),
            )
    for policy_id in sorted(trained):
        if kinds[policy_id] is None:
            raise ConfigError(
                f"policy {policy_id!r} is to be trained, but its class is your own"
                f" {entries[policy_id]['class']!r}, which only acts.",
                key=key,
                value=policy_id,
                hint=f"List the policies that learn in {key}, without this one.",
            )
    return set(trained)


def _planned(
    config: CommonConfig,
    policy_id: str,
    entry: Mapping[str, Any],
    *,
    kind: type[CommonConfig] | None,
    facts: EnvFacts,
    agents: Sequence[Any],
    is_trained: bool,
) -> PlannedPolicy:
    """Return the plan of one policy.

    Args:
        config: the run's config.
        policy_id: id of the policy.
        entry: its entry, by the names of the fields.
        kind: class of its algorithm's config; None for a Policy class of the user's own.
        facts: properties of the environment.
        agents: the agents that act with it, as far as the environment names them.
        is_trained: True if it learns.
    """
    overrides = dict(entry["config"] or {})
    policy_config = config
    if kind is not None:
        policy_config = config_of(config, kind, policy_id, overrides, defaults=entry["defaults"])
    if policy_config.worker_overrides() != config.worker_overrides():
        raise ConfigError(
            f"{POLICIES}.{policy_id}.config: {policy_config.algo} prepares stored rows in another"
            f" way than {config.algo}, so the two can't read the same input.",
            key=f"{POLICIES}.{policy_id}.config",
            value=config.input,
            hint="Leave out input, or use one algorithm for all policies.",
        )
    observation_space = _space(
        policy_id, "observation_space", entry=entry, facts=facts, agents=agents
    )
    action_space = _space(policy_id, "action_space", entry=entry, facts=facts, agents=agents)
    settings = learning_settings(policy_config)
    if kind is None:
        settings = deep_update(deep_update(settings, entry["defaults"] or {}), overrides)
    else:
        _check_can_act(policy_config, action_space)
    return PlannedPolicy(
        policy_id=policy_id,
        policy_class=entry["class"] if kind is None else None,
        observation_space=observation_space,
        action_space=action_space,
        preprocessor=make_preprocessor(
            observation_space,
            action_space=action_space,
            custom_preprocessor=_custom_preprocessor(settings),
        ),
        config=policy_config,
        settings=settings,
        is_trained=is_trained,
        has_own_spaces=observation_space is not facts.observation_space
        or action_space is not facts.action_space,
        agents=agents,
    )


def _custom_preprocessor(settings: Mapping[str, Any]) -> Any:
    """Return the name or class of a policy's preprocessor of the user's own, or None."""
    return (settings.get("model") or {}).get("custom_preprocessor")


def _check_can_act(config: CommonConfig, action_space: spaces.Space[Any]) -> None:
    """Check that the algorithm, or at least some network, can choose such actions.

    Raises:
        UnsupportedSpaceError: it cannot; the error names the alternatives.
    """
    supported = config.action_spaces
    if supported is not None and not config.learns_actions_of(action_space):
        kinds = {name: config_class(name) for name in sorted(ALGORITHMS)}
        alternatives = [
            name
            for name, kind in kinds.items()
            if kind.is_offline == config.is_offline and kind.learns_actions_of(action_space)
        ]
        raise UnsupportedSpaceError(
            f"{config.algo} over the action space",
            action_space,
            supported,
            hint=f"These algorithms support these actions: {', '.join(alternatives)}.",
        )
    try:
        distribution = make_distribution(action_space)
    except UnsupportedSpaceError as error:
        error.hint = (
            "Wrap the environment in one with supported actions, or act with a Policy class of your"
            " own."
        )
        raise
    noises = {
        "use_sde": config.state_dependent_noise is not None,
        "model.free_log_std": config.model.free_log_std,
    }
    for key, is_set in noises.items():
        if is_set and not isinstance(distribution, DiagGaussian):
            raise ConfigError(
                f"{key} is for actions of a Box, not of {action_space}.",
                key=key,
                value=True,
                hint="Leave it out.",
            )


def _space(
    policy_id: str,
    name: str,
    *,
    entry: Mapping[str, Any],
    facts: EnvFacts,
    agents: Sequence[Any],
) -> spaces.Space[Any]:
    """Return the ``observation_space`` or ``action_space`` of a policy: that of its entry, of the
    environment, or of its agents.

    Raises:
        ConfigError: there is none, or its agents have different ones.
    """
    key = f"{POLICIES}.{policy_id}.{name}"
    if entry[name] is not None:
        try:
            return space_from_dict(entry[name])
        except ConfigError as error:
            raise ConfigError(f"{key}: {error.message}", key=key, value=entry[name]) from error
    common: spaces.Space[Any] | None = getattr(facts, name)
    if common is not None:
        return common
    by_agent: Mapping[Any, spaces.Space[Any]] = getattr(facts, f"{name}s") or {}
    candidates = [by_agent[agent_id] for agent_id in agents if agent_id in by_agent]
    differing = [space for space in candidates if space != candidates[0]]
    if candidates and not differing:
        return candidates[0]
    hint = (
        f"Give the environment an {name}, or set {key}, in the form that"
        " aiorl.data.spaces.space_to_dict returns."
    )
    if differing:
        reason = f"its agents have different ones: {candidates[0]} and {differing[0]}"
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
        policy_leases = experience_of(algorithm_class(algo), policy.config).lease_plan()
        do_not_train = (
            f"remove policy {policy.policy_id!r} from multiagent.policies_to_train, so that it only"
            " acts."
        )
        if policy_leases != leases:
            names = [field.name for field in fields(leases)]
            pairs = [(name, getattr(leases, name), getattr(policy_leases, name)) for name in names]
            differences = [
                f"{name} ({for_run} and {for_policy})"
                for name, for_run, for_policy in pairs
                if for_run != for_policy
            ]
            raise ConfigError(
                f"{key} is {algo!r}, which workers cannot sample for along with {config.algo!r}:"
                f" {', '.join(differences)} differ.",
                key=key,
                value=algo,
                hint=f"Use an algorithm with the same sampling, or {do_not_train}",
            )
        if kind.needs_whole_episodes and kind is not type(config) and config.is_truncating:
            raise ConfigError(
                f"{key} is {algo!r}, which needs whole episodes, but batch_mode:"
                f" {config.batch_mode} cuts them.",
                key=key,
                value=algo,
                hint="Set batch_mode: complete_episodes, which applies to all policies, or"
                f" {do_not_train}",
            )
