"""Algorithms whose policies may learn in one run, by the leases that they want."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from aiorl.algorithms.registry import config_class
from aiorl.env.kinds import KINDS, EnvFacts
from aiorl.errors import ConfigError
from aiorl.learner.policy_leases import check_leases
from aiorl.learner.policy_plan import plan_policies

KIND = next(kind for kind in KINDS if kind.name == "a MultiAgentEnv")
FACTS = EnvFacts(KIND, spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2))


def check(algo: str, other: str, train: list[str] | None = None) -> None:
    multiagent = {
        "policies": {"a": None, "b": other}, "policy_mapping_fn": "general_runs:side", "policies_to_train": train
    }  # fmt: skip
    config = config_class(algo)(env="E", multiagent=multiagent)
    check_leases(config, plan_policies(config, FACTS))


@pytest.mark.parametrize(
    ("algo", "other"),
    [("ppo", "a2c"), ("a2c", "pg"), ("impala", "appo"), ("impala", "a3c"), ("dqn", "sac"), ("sac", "apex")],
)
def test_algorithms_that_are_sampled_for_alike_may_learn_side_by_side(algo: str, other: str) -> None:
    check(algo, other)


@pytest.mark.parametrize(
    ("algo", "other", "said", "hint"),
    [
        ("ppo", "impala", "ppo wants exactly one train batch of each policy version, impala fragments as they come",
         "Beside ppo may learn: a2c, pg. "),
        ("dqn", "impala", "fragments under way at most: 128 for dqn, no limit for impala",
         "Beside dqn may learn: apex, sac. "),
    ],
)  # fmt: skip
def test_others_are_refused_with_the_difference_and_with_those_that_may(
    algo: str, other: str, said: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(algo, other)
    assert f"multiagent.policies.b.class is '{other}', which can't learn beside '{algo}'" in refused.value.message
    assert said in refused.value.message
    assert hint in refused.value.hint
    assert refused.value.key == "multiagent.policies.b.class"


def test_a_policy_that_only_acts_may_be_of_any_algorithm() -> None:
    check("ppo", "impala", ["a"])
