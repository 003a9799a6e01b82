from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy

from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import UnknownPolicyError
from aiorl.policy.policy_map import PolicyMap
from aiorl.rollout import learning


def rows(count):
    return SampleBatch(rewards=np.ones(count, np.float32))


def policies(*names, train=None):
    return PolicyMap({name: PlainPolicy(VECTOR, spaces.Discrete(2), {}) for name in names}, None, train)


def test_a_plain_batch_needs_a_default_policy():
    with pytest.raises(KeyError, match=DEFAULT):
        learning.compute_gradients(policies("a"), rows(1))
    with pytest.raises(KeyError, match=DEFAULT):
        learning.learn_on_batch(policies("a"), rows(1))


def test_rows_of_policies_unknown_here_are_passed_over():
    """R42, R44."""
    samples = MultiAgentBatch({"a": rows(2), "gone": rows(3)}, 5)
    assert learning.compute_gradients(policies("a"), samples)[1] == {"a": {"rows": 2}, "batch_count": 5}
    assert list(learning.learn_on_batch(policies("a"), samples)) == ["a"]


@pytest.mark.parametrize(
    ("names", "gradients", "expected"),
    [
        ((DEFAULT,), {"w": np.ones(1)}, {"applied": 1.0}),
        ((DEFAULT,), {DEFAULT: {"w": np.ones(1)}}, {DEFAULT: {"applied": 1.0}}),
        ((DEFAULT, "a"), {"w": np.ones(1)}, {"applied": 1.0}),
        ((DEFAULT, "a"), {"a": {"w": np.ones(1)}}, {"a": {"applied": 1.0}}),
        ((DEFAULT,), {}, {}),
        (("a",), {}, {}),
    ],
)
def test_gradients_by_policy_are_told_from_the_default_policys_own(names, gradients, expected):
    """R43."""
    assert learning.apply_gradients(policies(*names), gradients) == expected


def test_gradients_of_unknown_policies_change_nothing():
    """R43."""
    known = policies("a")
    with pytest.raises(UnknownPolicyError, match="'w'"):
        learning.apply_gradients(known, {"w": np.ones(1)})
    with pytest.raises(KeyError, match="nobody"):
        learning.apply_gradients(known, {"a": {"w": np.ones(1)}, "nobody": {}})
    assert known["a"].weight.tolist() == [0.0]


def test_policies_not_trained_are_left_out():
    """R42, R44."""
    known = policies("a", "b", train=["b"])
    samples = MultiAgentBatch({"a": rows(2), "b": rows(3)}, 3)
    assert list(learning.learn_by_policy(known, samples)) == ["b"]
    assert list(learning.compute_gradients(known, samples)[0]) == ["b"]
