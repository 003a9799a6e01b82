"""Algorithms whose policies may learn in one run, by the leases that they want."""

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


def check(algo: str, other: str, train: list[str] | None = None, first: str | None = None, **settings: Any) -> None:
    multiagent = {
        "policies": {"a": first, "b": other}, "policy_mapping_fn": "general_runs:side", "policies_to_train": train
    }  # fmt: skip
    config = config_class(algo)(env="E", multiagent=multiagent, **settings)
    check_leases(config, plan_policies(config, FACTS))


@pytest.mark.parametrize(
    ("algo", "other"),
    [("ppo", "a2c"), ("pg", "a2c"), ("impala", "appo"), ("impala", "a3c"), ("dqn", "sac"), ("sac", "apex")],
)
def test_algorithms_that_are_sampled_for_alike_may_learn_side_by_side(algo: str, other: str) -> None:
    check(algo, other)


@pytest.mark.parametrize(
    ("algo", "other", "said", "hint"),
    [
        ("ppo", "impala", "ppo wants exactly one train batch of each policy version, impala fragments as they come",
         "Beside ppo may learn: a2c. "),
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


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_policy_that_needs_whole_episodes_is_refused_in_a_run_that_cuts_them(algo: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(algo, "pg")
    said = refused.value.message
    assert "multiagent.policies.b.class is 'pg', which needs whole episodes" in said
    assert f"workers sample for policy 'b' as for policy 'a', which learns by '{algo}'" in said
    assert "batch_mode is truncate_episodes" in said
    assert "Set batch_mode: complete_episodes" in refused.value.hint
    assert refused.value.key == "multiagent.policies.b.class"


def test_the_runs_algorithm_is_named_where_no_policy_learns_by_it() -> None:
    with pytest.raises(ConfigError, match="as for all policies of a run of 'ppo'"):
        check("ppo", "pg", first="a2c")


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_it_may_learn_beside_others_where_the_run_gives_whole_episodes(algo: str) -> None:
    check(algo, "pg", batch_mode="complete_episodes")


def test_it_may_act_in_a_run_that_cuts_episodes() -> None:
    check("ppo", "pg", ["a"])


def test_what_can_learn_only_from_whole_episodes_is_offered_where_the_run_gives_them() -> None:
    with pytest.raises(ConfigError) as refused:
        check("ppo", "impala", batch_mode="complete_episodes")
    assert "Beside ppo may learn: a2c, pg. " in refused.value.hint
