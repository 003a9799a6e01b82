"""Which policies are updated together, and which can't be."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces

from aiorl.data.spaces import space_to_dict
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import plan_learning
from aiorl.run.joint_policies import joint_policies

ALGO = "joint_algorithm:CentralCritic"


def joint(algo: str = ALGO, multiagent: Any = None, **settings: Any) -> dict[str, tuple[str, ...]]:
    """Return the policies of a run that are updated together, by name."""
    multiagent = {"policies": "per_agent", **(multiagent or {})}
    config = config_class(algo)(env="joint_world:Signals", multiagent=multiagent, **settings)
    return joint_policies(plan_learning(config).policies)


def entries(left: Any, right: Any, **others: Any) -> dict[str, Any]:
    mapping = {"left": "left", "right": "right"}
    return {"policies": {"left": left, "right": right, **others}, "policy_mapping_fn": mapping}


def test_all_policies_that_learn_by_a_joint_algorithm_are_updated_together() -> None:
    assert joint() == {"left+right": ("left", "right")}
    assert joint("ppo") == {}
    assert joint("a2c", entries({"class": ALGO}, {"class": ALGO})) == {
        "left+right": ("left", "right")
    }


@pytest.mark.parametrize(
    ("algo", "multiagent", "settings", "key", "fact"),
    [
        (ALGO, {"policies_to_train": ["left"]}, {}, "multiagent.policies", "'left'"),
        (
            ALGO,
            entries(None, {"config": {"lr": 0.5}}),
            {},
            "multiagent.policies.right.config",
            "lr",
        ),
        (ALGO, {}, {"gradients": "workers"}, "gradients", "workers"),
        (ALGO, {}, {"input": "rows/*.json"}, "input", "stored"),
        ("joint_algorithm:JointDQN", {}, {}, "algo", "on_policy"),
    ],
)
def test_policies_that_can_not_be_updated_together_are_refused(
    algo: str, multiagent: Any, settings: Any, key: str, fact: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        joint(algo, multiagent, **settings)
    assert refused.value.key == key
    assert fact in f"{refused.value.message} {refused.value.hint}"


def test_a_policy_that_has_the_name_of_a_learner_is_refused() -> None:
    space = space_to_dict(spaces.Discrete(2))
    plain = {
        "class": "plain_policies:PlainPolicy",
        "observation_space": space,
        "action_space": space,
    }
    other = {"left+right": plain}
    multiagent = entries(None, None, **other)
    with pytest.raises(ConfigError) as refused:
        joint(multiagent={**multiagent, "policies_to_train": ["left", "right"]})
    assert (refused.value.key, refused.value.value) == ("multiagent.policies", "left+right")


def test_learners_of_two_algorithms_can_not_have_the_same_name() -> None:
    space = space_to_dict(spaces.Discrete(2))
    both = {"observation_space": space, "action_space": space}
    other = "joint_algorithm:OtherCritic"
    policies = {
        "a": {"class": ALGO, **both},
        "b+c": {"class": ALGO, **both},
        "a+b": {"class": other, **both},
        "c": {"class": other, **both},
    }
    mapping = {"left": "a", "right": "b+c"}
    with pytest.raises(ConfigError) as refused:
        joint("a2c", {"policies": policies, "policy_mapping_fn": mapping})
    assert (refused.value.key, refused.value.value) == ("multiagent.policies", "a+b+c")
