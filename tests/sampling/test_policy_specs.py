from __future__ import annotations

import pytest
from gymnasium import spaces
from plain_policies import VECTOR, PlainPolicy

from aiorl.env.kinds import facts_of
from aiorl.sampling.policy_specs import ENV_SPACE, policy_classes, policy_specs
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv
from aiorl.testing.scripted_env import ScriptedEnv

ACTIONS = spaces.Discrete(2)
GOOD = (PlainPolicy, VECTOR, ACTIONS, {})


def test_a_class_becomes_the_default_policy_with_the_environments_spaces():
    """R13."""
    assert policy_specs(PlainPolicy, VECTOR, ACTIONS) == {"default_policy": GOOD}


@pytest.mark.parametrize("position", [0, 1])
def test_a_class_needs_an_environment_with_spaces(position):
    """R13, R14."""
    given = [VECTOR, ACTIONS]
    given[position] = None
    with pytest.raises(ValueError, match="no space that it could have"):
        policy_specs(PlainPolicy, *given)


def test_a_dict_is_taken_in_the_order_of_ids_and_lists_will_do():
    """R14, R19."""
    found = policy_specs({"b": GOOD, "a": list(GOOD)}, None, None)
    assert list(found) == ["a", "b"]
    assert found["a"] == found["b"] == GOOD


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (object(), "a subclass of aiorl.Policy"),
        (CountingEnv, "a subclass of aiorl.Policy"),
        ({}, "at least one policy"),
        ({1: GOOD}, "ids that are strings"),
        ({"a": GOOD[:3]}, "a tuple"),
        ({"a": PlainPolicy}, "a tuple"),
        ({"a": (CountingEnv, *GOOD[1:])}, r"policy\['a'\]\[0\]"),
        ({"a": (PlainPolicy, (3,), ACTIONS, {})}, r"policy\['a'\]\[1\]"),
        ({"a": (PlainPolicy, VECTOR, None, {})}, r"policy\['a'\]\[2\]"),
        ({"a": (PlainPolicy, VECTOR, ACTIONS, None)}, r"policy\['a'\]\[3\]"),
    ],
)
def test_each_violation_is_refused(policy, message):
    """R14."""
    with pytest.raises(ValueError, match=message):
        policy_specs(policy, VECTOR, ACTIONS)


def test_a_tuple_may_ask_for_the_environments_spaces():
    found = policy_specs({"a": (PlainPolicy, ENV_SPACE, ENV_SPACE, {})}, VECTOR, ACTIONS)
    assert found["a"] == (PlainPolicy, VECTOR, ACTIONS, {})
    with pytest.raises(ValueError, match=r"policy\['a'\]\[1\] is None"):
        policy_specs({"a": (PlainPolicy, ENV_SPACE, ENV_SPACE, {})}, None, None)


def test_classes_are_found_in_any_argument():
    assert policy_classes(PlainPolicy) == [PlainPolicy]
    assert policy_classes({"a": GOOD, 1: (3,), "b": ()}) == [PlainPolicy]
    assert policy_classes(7) == []


def test_other_policies_than_the_default_one_need_several_agents():
    """R34."""
    with pytest.raises(ValueError, match="one agent"):
        facts_of(CountingEnv(), "env").check_policies({"a": GOOD}, "policy")
    with pytest.raises(ValueError, match="one agent"):
        facts_of(CountingEnv(), "env").check_policies({"a": GOOD, "default_policy": GOOD}, "policy")
    facts_of(CountingEnv(), "env").check_policies({"default_policy": GOOD}, "policy")
    facts_of(CountingMultiAgentEnv(), "env").check_policies({"a": GOOD}, "policy")
    facts_of(ScriptedEnv({}), "env").check_policies({"a": GOOD}, "policy")
