"""Algorithms that can be combined in one run, by the leases that they need."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces

from aiorl.env.kinds import KINDS, EnvFacts
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.policy_plan import check_leases, plan_policies

KIND = next(kind for kind in KINDS if kind.name == "a MultiAgentEnv")
FACTS = EnvFacts(KIND, spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2))


def check(
    algo: str, other: str, train: list[str] | None = None, first: str | None = None, **settings: Any
) -> None:
    multiagent = {
        "policies": {"a": first, "b": other},
        "policy_mapping_fn": "general_runs:side",
        "policies_to_train": train,
    }
    config = config_class(algo)(env="E", multiagent=multiagent, **settings)
    check_leases(config, plan_policies(config, FACTS))


@pytest.mark.parametrize(
    ("algo", "other"),
    [
        ("ppo", "a2c"),
        ("pg", "a2c"),
        ("impala", "appo"),
        ("impala", "a3c"),
        ("dqn", "sac"),
        ("sac", "apex"),
    ],
)
def test_algorithms_with_equal_leases_can_learn_in_one_run(algo: str, other: str) -> None:
    check(algo, other)


@pytest.mark.parametrize(
    ("algo", "other", "said"),
    [
        ("ppo", "impala", "mode (on_policy and streaming)"),
        ("dqn", "impala", "max_under_way (128 and None)"),
    ],
)
def test_algorithms_with_different_leases_are_refused_with_the_difference(
    algo: str, other: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(algo, other)
    assert (refused.value.key, refused.value.value) == ("multiagent.policies.b.class", other)
    assert said in refused.value.message


def test_a_policy_that_only_acts_can_have_any_algorithm() -> None:
    check("ppo", "impala", ["a"])


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_policy_that_needs_whole_episodes_is_refused_in_a_run_that_truncates_them(
    algo: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(algo, "pg")
    assert refused.value.key == "multiagent.policies.b.class"


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_it_can_learn_with_others_in_a_run_of_whole_episodes(algo: str) -> None:
    check(algo, "pg", batch_mode="complete_episodes")
