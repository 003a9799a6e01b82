"""From `multiagent.policies` to the policies of a run, and all errors in it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import PlainPolicy

from aiorl.config.key import changed
from aiorl.config.layers import load_config, save_config
from aiorl.data.spaces import space_to_dict
from aiorl.env.kinds import KINDS, EnvFacts
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.learning.algorithms.a2c import A2CConfig
from aiorl.learning.algorithms.dqn import DQNConfig
from aiorl.learning.algorithms.ppo import PPO, PPOConfig
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.policy_plan import (
    PlannedPolicy,
    learning_settings,
    plan_policies,
    with_policies_named,
    with_settings_said,
)

KIND = {kind.name: kind for kind in KINDS}
BOX, DICT = (
    spaces.Box(-1.0, 1.0, (3,)),
    spaces.Dict({"a": spaces.Discrete(4), "b": spaces.Box(0.0, 1.0, (2,))}),
)
TWO = spaces.Discrete(2)
SINGLE = EnvFacts(KIND["a gymnasium.Env"], BOX, TWO)
MANY = EnvFacts(KIND["a MultiAgentEnv"], BOX, TWO)
CATS_AND_DOGS = {"cat1": BOX, "cat2": BOX, "dog": DICT}
DIFFERENT = EnvFacts(
    KIND["a MultiAgentEnv"], None, TWO, CATS_AND_DOGS, dict.fromkeys(CATS_AND_DOGS, TWO)
)
AB = {"policies": {"a": "a2c", "b": None}, "policy_mapping_fn": "users_own:all_b"}
UNKNOWN = EnvFacts(KIND["a BaseEnv"], None, TWO)


class MineConfig(PPOConfig):
    algo: str = changed(PPOConfig, "algo", "users_own:Mine")
    lr: float = changed(PPOConfig, "lr", 0.25)


class Mine(PPO):
    """User's own algorithm, of which only the config is needed."""

    config_class = MineConfig


@pytest.fixture(autouse=True)
def users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(
        Plain=PlainPolicy,
        NoPolicy=dict,
        kind=lambda agent_id: agent_id[:3],
        all_a=lambda agent_id: "a",
        all_b=lambda agent_id: "b",
        fail=lambda agent_id: {}[agent_id],
        number=3,
        two=lambda agent_id, episode, worker, more: "b",
        no_episode=lambda *, agent_obs, worker, base_env, policies: agent_obs,
    )
    monkeypatch.setitem(sys.modules, "users_own", module)  # type: ignore[arg-type]


def plan(
    facts: EnvFacts = MANY, fn: Any = "users_own:all_b", **settings: Any
) -> dict[str, PlannedPolicy]:
    policies, train = settings.pop("policies", {}), settings.pop("train", None)
    more = settings.pop("multiagent", {})
    config = PPOConfig.from_mapping(
        {
            "env": "E",
            "multiagent": {
                "policies": policies,
                "policy_mapping_fn": fn,
                "policies_to_train": train,
                **more,
            },
            **settings,
        }
    )
    return plan_policies(config, facts)


def test_the_default_policy_has_the_environments_spaces() -> None:
    (policy,) = plan(SINGLE, None).values()
    assert policy.policy_id == "default_policy"
    assert (policy.observation_space, policy.action_space) == (BOX, TWO)
    assert policy.is_trained
    assert not policy.has_own_spaces
    assert policy.described_spaces() == {
        "observation": space_to_dict(BOX),
        "action": space_to_dict(TWO),
    }


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        "ppo",
        "PPO",
        {"class": None},
        {"class": "ppo", "config": {}},
        [None, None, None, {}],
    ],
)
def test_entries_for_a_network_of_the_learner_have_many_forms(entry: Any) -> None:
    policies = plan(policies={"b": entry, "a": None})
    assert list(policies) == ["a", "b"]
    assert policies["b"].policy_class is None
    assert policies["b"].is_trained


def test_a_policys_own_settings_override_the_runs() -> None:
    own = {
        "lr": 0.25,
        "model": {"fcnet_hiddens": [8]},
        "lambda": 0.5,
        "exploration": {"type": "Random"},
    }
    policies = plan(policies={"a": {"config": own}, "b": None}, lr=0.5, gamma=0.75)
    learned = policies["a"].config
    assert isinstance(learned, PPOConfig)
    assert (learned.lr, learned.lambda_, learned.gamma) == (0.25, 0.5, 0.75)
    assert learned.model.fcnet_hiddens == (8,)
    assert policies["a"].settings["exploration"] == {"type": "Random"}
    assert policies["a"].settings["lr"] == 0.25
    assert policies["b"].config.lr == policies["b"].settings["lr"] == 0.5
    assert "seed" not in policies["b"].settings  # differs between workers


def test_a_policy_of_another_algorithm_inherits_sampling_and_user_settings_only() -> None:
    own = {"entropy_coeff": 0.125, "exploration": {"type": "Random"}}
    policies = plan(
        policies={"a": {"class": "A2C", "config": own}, "b": None},
        gamma=0.75,
        model={"fcnet_hiddens": [8]},
        clip_param=0.1,
    )
    learned = policies["a"].config
    assert type(learned) is A2CConfig
    assert (learned.gamma, learned.model.fcnet_hiddens) == (0.75, (8,)), "as set for the run"
    assert (learned.lr, learned.lambda_) == (7e-4, 1.0), "A2C's defaults; PPO's are 3e-4 and 0.95"
    assert learned.entropy_coeff == 0.125
    assert (learned.train_batch_size, learned.num_envs_per_worker) == (
        2048,
        4,
    ), "the run's, of PPO; A2C's: 256, 8"
    assert policies["a"].settings["exploration"] == {"type": "Random"}
    assert policies["a"].policy_class is None
    assert policies["b"].config.lr == 3e-4
    assert plan(policies={"a": "a2c"}, fn="users_own:all_a", lr=5e-4)["a"].config.lr == 5e-4, (
        "set, if to the default"
    )


def test_a_preset_applies_only_to_the_runs_algorithm() -> None:
    config = PPOConfig(env="CartPole-v1", preset="auto", multiagent=AB)
    policies = plan_policies(config, MANY)
    assert (policies["b"].config.gamma, policies["a"].config.gamma) == (0.98, 0.99)
    assert policies["a"].config.num_envs_per_worker == config.num_envs_per_worker == 4, "A2C's: 8"


def test_a_users_own_algorithm_is_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["users_own"], "Mine", Mine, raising=False)
    policy = plan(policies={"a": "users_own:Mine", "b": None}, gamma=0.5)["a"]
    assert type(policy.config) is MineConfig
    assert (policy.config.lr, policy.config.gamma, policy.policy_class) == (0.25, 0.5, None)


def test_each_policy_has_its_own_size_of_replay_batches() -> None:
    multiagent = {**AB, "policies": {"a": "sac", "b": {"config": {"train_batch_size": 64}}}}
    policies = plan_policies(DQNConfig(env="E", multiagent=multiagent), MANY)
    assert [policy.config.train_batch_size for policy in policies.values()] == [256, 64]  # type: ignore[attr-defined]
    assert policies["a"].config.broadcast_updates == 10  # type: ignore[attr-defined]  # the run's; SAC's is 1


def test_the_stored_config_contains_all_settings_of_other_algorithms() -> None:
    policies = {"a": {"class": "a2c", "config": {"grad_clip": 2.0}}, "b": None}
    config = PPOConfig(env="E", gamma=0.9, multiagent={**AB, "policies": policies})
    first = plan_policies(config, MANY)
    complete = with_settings_said(config, first)
    assert complete.multiagent.policies["a"]["config"] == {"grad_clip": 2.0}
    assert complete.multiagent.policies["a"]["defaults"]["lr"] == 7e-4
    again = PPOConfig.from_mapping(complete.to_dict())  # every key in it counts as set
    second = plan_policies(again, MANY)
    assert second["a"].config.to_dict() | {"multiagent": None} == first["a"].config.to_dict() | {
        "multiagent": None
    }
    assert second["a"].settings == first["a"].settings
    assert with_settings_said(again, second).to_dict() == again.to_dict()
    alike = PPOConfig(env="E", multiagent={**AB, "policies": {"a": None, "b": None}})
    assert with_settings_said(alike, plan_policies(alike, MANY)) is alike


OF_ALL: dict[str, Any] = {"lr": 0.125, "gamma": 0.5, "model": {"fcnet_hiddens": [7]}, "xla": "off"}
"""Return values for the keys of all algorithms that differ from the defaults."""


def set_by_user(
    folder: Path, algo: str, other: str, own: dict[str, Any], way: str, **settings: Any
) -> PlannedPolicy:
    """Return a policy of another algorithm in a run with these settings, or in a resumed run that
    had none of them.
    """
    multiagent = {
        "policies": {"a": {"class": other, "config": own}, "b": None},
        "policy_mapping_fn": "users_own:all_b",
    }
    begun = {"env": "E", "algo": algo, "multiagent": multiagent}
    if way == "command line":
        return plan_policies(load_config(config_class, overrides=begun | settings), MANY)["a"]
    config = load_config(config_class, overrides=begun)
    complete = with_settings_said(config, plan_policies(config, MANY))
    saved = save_config(complete, folder)
    if way == "updated":
        return plan_policies(complete.updated(settings), MANY)["a"]
    return plan_policies(
        load_config(config_class, overrides={"resume": str(saved.parent), **settings}), MANY
    )["a"]


@pytest.mark.parametrize(
    ("way", "algo", "other"),
    [
        ("command line", "ppo", "a2c"),
        ("resumed", "dqn", "sac"),
        ("updated", "dqn", "sac"),
    ],
)
def test_settings_of_a_run_reach_policies_of_other_algorithms(
    tmp_path: Path, way: str, algo: str, other: str
) -> None:
    drawn = {"train_batch_size": 48} if algo == "dqn" else {}
    own = {"gamma": 0.75, "model": {"fcnet_activation": "relu"}}
    policy = set_by_user(tmp_path, algo, other, own, way, **OF_ALL, **drawn)
    plain = config_class(other)()
    learned = policy.config.to_dict()
    expected = OF_ALL | drawn | {"gamma": 0.75, "model": learned["model"]}
    assert {name: learned[name] for name in expected} == expected, (
        "its own gamma, all else as set for the run"
    )
    assert (learned["model"]["fcnet_hiddens"], learned["model"]["fcnet_activation"]) == (
        [7],
        "relu",
    )
    assert policy.settings["lr"] == 0.125, "as workers hear"
    rest = {name: value for name, value in learning_settings(plain).items() if name not in expected}
    assert {name: learned[name] for name in rest} == rest, (
        "keys not set have the algorithm's defaults"
    )


def test_a_policy_with_a_new_algorithm_keeps_no_defaults_of_the_old_one(tmp_path: Path) -> None:
    changes = {"multiagent": {"policies": {"a": {"class": "apex"}}}}
    policy = set_by_user(tmp_path, "dqn", "sac", {}, "updated", **changes)
    assert (policy.config.algo, policy.config.lr) == ("apex", 1e-4), "its own; SAC's is 3e-4"
    assert "initial_alpha" not in policy.settings, "a key of SAC alone"


def test_spaces_come_from_the_entry_or_from_the_policys_agents() -> None:
    policies = plan(DIFFERENT, "users_own:kind", policies={"cat": None, "dog": None})
    assert policies["cat"].observation_space == BOX
    assert policies["dog"].observation_space == DICT
    assert policies["dog"].preprocessor.shape == (6,)
    assert policies["dog"].has_own_spaces
    given = plan(policies={"a": {"action_space": space_to_dict(spaces.Discrete(7))}, "b": None})
    assert given["a"].action_space == spaces.Discrete(7)
    assert given["a"].has_own_spaces
    assert not given["b"].has_own_spaces


def test_a_users_own_policy_only_acts_and_gets_all_its_settings() -> None:
    policies = plan(
        policies={"a": {"class": "users_own:Plain", "config": {"speed": 3}}, "b": None},
        train=["b"],
        gamma=0.5,
    )
    assert policies["a"].policy_class == "users_own:Plain"
    assert not policies["a"].is_trained
    assert policies["a"].settings["speed"] == 3
    assert policies["a"].settings["gamma"] == 0.5


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        ("policies_to_train", {"policies": {"a": None, "b": None}, "train": ["c"]}),
        ("'users_own:Plain'", {"policies": {"a": "users_own:Plain", "b": None}, "train": ["a"]}),
        ("'default_policy'", {"policies": {"a": None, "b": None}, "facts": SINGLE}),
        ("'cat1'", {"policies": {"a": None}, "facts": DIFFERENT}),
        ("'users_own:fail'", {"policies": {"b": None}, "facts": DIFFERENT, "fn": "users_own:fail"}),
        ("'gone'", {"policies": {"b": None}, "fn": "users_own:gone"}),
        (str(DICT), {"policies": {"b": None}, "facts": DIFFERENT}),
        ("cat1, cat2, dog", {"policies": {"b": None, "a": {}}, "facts": DIFFERENT}),
        ("b.observation_space", {"policies": {"b": None}, "facts": UNKNOWN}),
        ("policies.b", {"policies": {"b": 3}}),
        ("policies.b.clas", {"policies": {"b": {"clas": 3}}}),
        ("b.action_space", {"policies": {"b": {"action_space": {"kind": "Ball"}}}}),
        ("'impalla'", {"policies": {"b": "impalla"}}),
        ("b.config: dqn", {"policies": {"b": "dqn"}, "input": "data.json"}),
        ("'users_own:NoPolicy'", {"policies": {"b": "users_own:NoPolicy"}}),
        ("config.train_batch_size", {"policies": {"b": {"config": {"train_batch_size": 3}}}}),
        ("learning", {"policies": {"b": {"config": {"learning": 3}}}}),
        ("b.config: lr", {"policies": {"b": {"config": {"lr": "much"}}}}),
        ("'a/b'", {"policies": {"a/b": None}}),
        ("a.defaults", {"policies": {"a": {"class": "a2c", "defaults": 3}}}),
        (
            "defaults.num_workers",
            {"policies": {"b": {"class": "a2c", "defaults": {"num_workers": 4}}}},
        ),
        ("'users_own:two'", {"policies": {"b": None}, "fn": "users_own:two"}),
        (
            "'users_own:no_episode'",
            {"fn": None, "multiagent": {"observation_fn": "users_own:no_episode"}},
        ),
        ("'users_own:number'", {"fn": None, "multiagent": {"observation_fn": "users_own:number"}}),
        ("'cat2'", {"policies": {"b": None}, "facts": DIFFERENT, "fn": {"cat1": "b"}}),
    ],
)
def test_invalid_policies_are_refused_with_one_sentence(
    value: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**settings)
    assert value in str(caught.value)
    assert caught.value.key.startswith("multiagent.")
    assert "\n" not in str(caught.value)


class Moves(spaces.Discrete):
    """User's own space."""


class Steering(spaces.Box):
    """Another space of a user's own."""


@pytest.mark.parametrize(
    ("algo", "action_space", "is_taken"),
    [
        ("dqn", Moves(3), True),
        ("sac", Moves(3), True),
        ("td3", Moves(3), False),
        ("td3", Steering(-1.0, 1.0), True),
        ("dqn", Steering(-1.0, 1.0), False),
        ("sac", spaces.Box(-np.inf, np.inf, (2,)), False),
        ("ppo", spaces.Box(-np.inf, np.inf, (2,)), True),
    ],
)
def test_an_algorithm_accepts_subclasses_of_its_spaces_and_refuses_others_before_the_start(
    algo: str, action_space: spaces.Space[Any], is_taken: bool
) -> None:
    config = config_class(algo)(env="E-v1")
    facts = EnvFacts(KIND["a gymnasium.Env"], BOX, action_space)
    if is_taken:
        (policy,) = plan_policies(config, facts).values()
        assert policy.action_space is action_space
    else:
        with pytest.raises(UnsupportedSpaceError) as caught:
            plan_policies(config, facts)
        assert caught.value.space == str(action_space)


@pytest.mark.parametrize(
    ("word", "table"),
    [
        ("per_agent", {"cat1": "cat1", "cat2": "cat2", "dog": "dog"}),
        ("per_space", {"cat1": "cat1", "cat2": "cat1", "dog": "dog"}),
    ],
)
def test_a_word_makes_policies_of_agents_or_spaces_and_their_mapping(
    word: str, table: dict[str, str]
) -> None:
    config = with_policies_named(PPOConfig(multiagent={"policies": word}), DIFFERENT)
    assert config.multiagent.policy_mapping_fn == table
    planned = plan_policies(config, DIFFERENT)
    assert {policy_id: policy.observation_space for policy_id, policy in planned.items()} == {
        policy_id: CATS_AND_DOGS[policy_id] for policy_id in set(table.values())
    }


def test_a_word_for_policies_is_refused_without_agents_and_with_another_mapping() -> None:
    for facts, more, key in (
        (UNKNOWN, {}, "policies"),
        (DIFFERENT, {"policy_mapping_fn": {}}, "policy_mapping_fn"),
    ):
        with pytest.raises(ConfigError) as caught:
            with_policies_named(PPOConfig(multiagent={"policies": "per_agent", **more}), facts)
        assert caught.value.key == f"multiagent.{key}"


def test_a_mapping_that_needs_an_episode_is_probed_with_new_episodes() -> None:
    """Each policy gets the spaces of its own agents, even of one that acts only in every other
    episode.
    """
    policies = dict.fromkeys(["cat", "dog-0", "dog-1"])
    planned = plan_policies(
        PPOConfig(multiagent={"policies": policies, "policy_mapping_fn": by_id}), DIFFERENT
    )
    assert {policy_id: policy.observation_space for policy_id, policy in planned.items()} == {
        "cat": BOX,
        "dog-0": DICT,
        "dog-1": DICT,
    }


def by_id(agent_id: str, episode: Any, **_: Any) -> str:
    number = episode.episode_id % 2
    return "cat" if agent_id.startswith("cat") else f"dog-{number}"


def test_agents_count_for_no_policy_if_the_mapping_needs_more_than_an_episode() -> None:
    config = PPOConfig(
        multiagent={"policies": {"a": None, "b": None}, "policy_mapping_fn": by_worker}
    )
    assert set(plan_policies(config, MANY)) == {"a", "b"}
    with pytest.raises(ConfigError) as caught:
        plan_policies(config, DIFFERENT)
    assert caught.value.key == "multiagent.policies.a.observation_space"


def by_worker(agent_id: str, episode: Any, worker: Any) -> str:
    return worker.policy_config[agent_id] if episode.length else worker.policy_config["b"]
