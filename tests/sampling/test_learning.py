from __future__ import annotations

import logging

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy

from aiorl.acting.policy_map import PolicyMap
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import UnknownPolicyError
from aiorl.sampling import learning


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
        ((DEFAULT, "a"), {"v": np.ones(1), "w": np.ones(1)}, {"applied": 1.0}),
        (("a",), {}, {}),
    ],
)
def test_gradients_by_policy_are_told_from_the_default_policys_own(names, gradients, expected):
    """R43."""
    assert learning.apply_gradients(policies(*names), gradients) == expected


def test_a_mistyped_policy_is_no_weight_of_the_default_one():
    """R43."""
    known = policies(DEFAULT, "a")
    for gradients in ({"w": np.ones(1)}, [np.ones(1)]):
        with pytest.raises(UnknownPolicyError, match="'aa'"):
            learning.apply_gradients(known, {"aa": gradients})
    assert known[DEFAULT].weight.tolist() == [0.0]


def test_what_goes_into_learning_and_what_comes_out_is_reported_once(caplog):
    """SPEC 4.11."""
    known = policies(DEFAULT, "a")
    with caplog.at_level(logging.INFO, "aiorl"):
        for _ in range(2):
            learning.compute_gradients(known, rows(3))
            learning.apply_gradients(known, {"w": np.ones(1)})
            learning.learn_on_batch(known, rows(3))
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(": ")[0] for text in texts] == [
        "Gradients are computed on",
        "Gradients computed",
        "Gradients are applied",
        "Policies learn on",
        "Learning gave",
    ]
    assert "'w': array(float32, [1], min 3" in texts[1]
    assert "'rows': 3" in texts[4]


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
    assert list(learning.learn_on_batch(known, samples)) == ["b"]
    assert list(learning.compute_gradients(known, samples)[0]) == ["b"]
