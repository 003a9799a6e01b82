from __future__ import annotations

import random

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, mapping_by_table, mapping_parameters
from aiorl.config.layers import dump_yaml
from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ConfigError, UnknownPolicyError
from aiorl.learning.algorithms.ppo import PPOConfig


class Idle(Policy):
    def compute_actions(self, obs, *_, explore=True, **__):
        return np.zeros(len(obs), np.int64), [], {}


def idle():
    return Idle(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), {})


def policies(*ids):
    return {policy_id: idle() for policy_id in ids}


def test_r17_the_mapping_function_is_asked_once_per_agent_and_episode_even_when_random():
    agent_ids = []

    def choose(agent_id):
        agent_ids.append(agent_id)
        return random.choice(["a", "b"])

    policy_map = PolicyMap(policies("a", "b"), choose)
    for episode in range(5):
        binding = policy_map.binding()
        first = [binding.policy_for(agent) for agent in ("x", "y", 3)]
        for _ in range(20):
            assert [binding.policy_for(agent) for agent in ("x", "y", 3)] == first
        assert agent_ids == ["x", "y", 3] * (episode + 1)


@pytest.mark.parametrize("builtin", [ValueError, KeyError])
def test_r113_an_agent_mapped_to_an_unknown_policy_names_it_and_the_known_ones(builtin):
    answers = iter(["absent", "a"])
    binding = PolicyMap(policies("a", "b"), lambda _: next(answers)).binding()
    with pytest.raises(builtin) as caught:
        binding.policy_for("x")
    assert (caught.value.policy_id, caught.value.known) == ("absent", ("a", "b"))
    assert binding.policy_for("x") == "a", "a failed attempt binds nothing"


@pytest.mark.parametrize(
    ("to_train", "trainable"),
    [(None, ("a", "b")), ([], ("a", "b")), (["b"], ("b",)), ({"a", "b"}, ("a", "b"))],
)
def test_r15_none_and_no_ids_both_mean_all(to_train, trainable):
    assert PolicyMap(policies("b", "a"), policies_to_train=to_train).trainable_ids == trainable


@pytest.mark.parametrize("settings", [{"mapping_fn": "a"}, {"policies_to_train": ["c"]}])
def test_r15_r16_what_is_no_mapping_function_or_names_no_policy_is_refused(settings):
    with pytest.raises(ConfigError) as caught:
        PolicyMap(policies("b", "a"), **settings)
    assert caught.value.key in ("multiagent.policy_mapping_fn", "multiagent.policies_to_train")


def test_r34_multi_agent_means_other_ids_than_exactly_the_default_one():
    assert not PolicyMap(policies(DEFAULT_POLICY_ID)).is_multi_agent
    assert PolicyMap(policies("d")).is_multi_agent  # a letter of the default id
    assert PolicyMap(policies(DEFAULT_POLICY_ID, "other")).is_multi_agent


def test_r19_it_is_a_mapping_in_the_order_of_ids_that_names_the_known_ids_of_a_missing_one():
    assert list(PolicyMap(policies("c", "a", "b"))) == ["a", "b", "c"]
    assert (
        PolicyMap(policies(DEFAULT_POLICY_ID)).binding().policy_for("anyone") == DEFAULT_POLICY_ID
    )
    chosen = policies("a")
    policy_map = PolicyMap(chosen)
    assert policy_map["a"] is chosen["a"]
    assert policy_map.get("b") is None
    assert "b" not in policy_map
    assert len(policy_map) == 1
    with pytest.raises(UnknownPolicyError, match="'a'"):
        policy_map["b"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda agent: agent, {}),
        (lambda agent, prefix="a": prefix, {}),
        (lambda agent, episode: episode, {"episode": "episode"}),
        (lambda agent, *, worker: worker, {"worker": "worker"}),
        (lambda agent, ep, **_: ep, {"ep": "episode", "worker": "worker"}),
        (lambda agent, episode, worker, **_: episode, {"episode": "episode", "worker": "worker"}),
        (lambda agent, *_, **__: agent, {"episode": "episode", "worker": "worker"}),
    ],
)
def test_a_mapping_function_gets_the_episode_and_the_worker_if_it_takes_them(function, expected):
    assert mapping_parameters(function) == expected


def test_policies_are_chosen_by_episode():
    policy_map = PolicyMap(
        policies("a", "b"), lambda agent, episode, worker: worker if episode % 2 else "b"
    )
    assert policy_map.maps_by_episode
    assert [policy_map.binding(lambda: "a").policy_for("x", number) for number in (0, 1)] == [
        "b",
        "a",
    ]


TABLES = {
    "numbers": {0: "a", 1: "b"},
    "tuples": {(0, 1): "a", ("x", 2): "b"},
    "texts": {"left": "a", "right": "b"},
    "numbers of NumPy": {np.int64(0): "a", (np.int32(1), "x"): "b"},
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_of_agents_finds_each_agent_whatever_its_id_is(table):
    settings = {
        "env": "E",
        "multiagent": {"policies": {"a": None, "b": None}, "policy_mapping_fn": table},
    }
    first = PPOConfig.from_mapping(settings)
    for config in (
        first,
        first.updated({"lr": 0.5}),
        PPOConfig.from_mapping(yaml.safe_load(dump_yaml(first))),
    ):
        choose = mapping_by_table(WorkerPart.of(config).multiagent.policy_mapping_fn)
        assert {agent: choose(agent) for agent in table} == table
    some = next(iter(table))
    changed = first.updated(
        {"multiagent": {"policy_mapping_fn": {some: "b"}}}
    ).multiagent.policy_mapping_fn
    assert mapping_by_table(changed)(some) == "b"
    assert len(changed) == len(table)
    with pytest.raises(ConfigError) as caught:
        mapping_by_table(changed)("unknown")
    assert (caught.value.key, caught.value.value) == ("multiagent.policy_mapping_fn", "unknown")


def test_numbers_of_numpy_name_the_same_agents_as_pythons():
    choose = mapping_by_table({"0": "a", "(0, 1)": "b", "(np.int64(5), 1)": "c"})
    agents = (0, np.int64(0), np.uint8(0), (0, 1), (np.int64(0), 1), (np.int64(5), 1))
    assert "".join(map(choose, agents)) == "aaabbc"


@pytest.mark.parametrize("table", [{0: "a", "0": "b"}, {0: 1}, {0: None}])
def test_tables_that_say_nothing_clear_are_refused(table):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(multiagent={"policies": {"a": None}, "policy_mapping_fn": table})
    assert caught.value.key == "multiagent.policy_mapping_fn"
