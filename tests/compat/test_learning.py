from __future__ import annotations

import logging

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy

from aiorl.acting.policy_map import PolicyMap
from aiorl.compat import learning
from aiorl.compat.learning import check_sgd, minibatch_sgd, minibatches, standardized
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import ConfigError, UnknownPolicyError


def rows(count):
    return SampleBatch(rewards=np.ones(count, np.float32))


def policies(*names, train=None):
    return PolicyMap(
        {name: PlainPolicy(VECTOR, spaces.Discrete(2), {}) for name in names}, None, train
    )


def test_a_plain_batch_needs_a_default_policy():
    with pytest.raises(KeyError, match=DEFAULT):
        learning.compute_gradients(policies("a"), rows(1))
    with pytest.raises(KeyError, match=DEFAULT):
        learning.learn_on_batch(policies("a"), rows(1))


def test_rows_of_unknown_policies_are_skipped():
    """R42, R44."""
    samples = MultiAgentBatch({"a": rows(2), "gone": rows(3)}, 5)
    assert learning.compute_gradients(policies("a"), samples)[1] == {
        "a": {"rows": 2},
        "batch_count": 5,
    }
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
def test_gradients_by_policy_are_distinguished_from_the_default_policys_own(
    names, gradients, expected
):
    """R43: this holds whether a policy is trainable or not."""
    assert learning.apply_gradients(policies(*names, train=[]), gradients) == expected


def test_inputs_and_outputs_of_learning_are_logged_once(caplog):
    """SPEC 4.11."""
    known = policies(DEFAULT, "a")
    with caplog.at_level(logging.INFO, "aiorl"):
        for _ in range(2):
            learning.compute_gradients(known, rows(3))
            learning.apply_gradients(known, {"w": np.ones(1)})
            learning.learn_on_batch(known, rows(3))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 5
    assert "'w': array(float32, [1], min 3" in texts[1]
    assert "'rows': 3" in texts[4]


@pytest.mark.parametrize(
    ("names", "gradients", "unknown"),
    [
        ((DEFAULT, "a"), {"aa": {"w": np.ones(1)}}, "'aa'"),
        ((DEFAULT, "a"), {"aa": [np.ones(1)]}, "'aa'"),
        (("a",), {"w": np.ones(1)}, "'w'"),
        (("a",), {"a": {"w": np.ones(1)}, "unknown": {}}, "'unknown'"),
    ],
)
def test_gradients_of_unknown_policies_change_nothing(names, gradients, unknown):
    """R43: a mistyped policy id is not a weight of the default policy."""
    known = policies(*names)
    with pytest.raises(UnknownPolicyError, match=unknown):
        learning.apply_gradients(known, gradients)
    assert [policy.weight.tolist() for policy in known.values()] == [[0.0]] * len(names)


# --- minibatches ---


def numbered(*numbers, **more):
    return SampleBatch(rewards=np.array(numbers, np.float32), **more)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_minibatches_hold_every_row_once_in_random_order(rng):
    """R46."""
    found = [batch["rewards"].tolist() for batch in minibatches(numbered(*range(50)), 20, rng)]
    assert [len(numbers) for numbers in found] == [20, 20, 10]
    order = [number for numbers in found for number in numbers]
    assert sorted(order) == list(range(50)) != order
    batch = numbered(1, 2)
    assert list(minibatches(batch, 0, rng)) == [batch], "all rows in one minibatch, unshuffled"


def test_rows_of_recurrent_policies_stay_in_order_with_one_warning(rng, caplog):
    batch = numbered(*range(6), state_in_0=np.zeros((6, 1)))
    for _ in range(2):
        assert [part["rewards"].tolist() for part in minibatches(batch, 4, rng)] == [
            [0, 1, 2, 3],
            [4, 5],
        ]
    assert len(caplog.messages) == 1


def test_standardised_columns_have_mean_0_and_deviation_1():
    assert standardized(np.array([1, 3])).tolist() == [-1, 1]
    assert standardized(np.array([2.0, 2.0])).tolist() == [0, 0]


def test_every_policy_makes_the_requested_number_of_passes(rng):
    """R46: figures are means over the last pass; values that are not numbers are left out."""
    seen = []

    def learn(batch):
        ((policy_id, part),) = batch.policy_batches.items()
        seen.append((policy_id, batch.count, round(float(part["rewards"].sum()), 3)))
        stats = {"grad": {"norm": 10.0 * len(seen), "name": "x"}, "lr": np.float32(0.5)}
        return {policy_id: {"calls": len(seen), "name": "x", "shape": np.zeros(2), "stats": stats}}

    samples = MultiAgentBatch({"a": numbered(1, 1, 5), "b": numbered(7), "still": numbered(1)}, 3)
    given = {
        "num_sgd_iter": 2,
        "sgd_minibatch_size": 2,
        "standardize_fields": ["rewards"],
        "rng": rng,
    }
    info = minibatch_sgd(samples, ["a", "b", "absent"], learn, **given)
    assert [(name, count) for name, count, _ in seen] == [("a", 2), ("a", 1)] * 2 + [("b", 1)] * 2
    assert sum(total for name, _, total in seen if name == "a") == pytest.approx(0, abs=1e-2)
    assert info == {
        policy_id: {"calls": calls, "stats": {"grad": {"norm": 10 * calls}, "lr": 0.5}}
        for policy_id, calls in (("a", 3.5), ("b", 6.0))
    }
    assert samples.policy_batches["a"]["rewards"].tolist() == [1, 1, 5], "not modified"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_sgd_iter", 0),
        ("num_sgd_iter", "3"),
        ("sgd_minibatch_size", -4),
        ("sgd_minibatch_size", None),
        ("standardize_fields", "advantages"),
    ],
)
def test_arguments_without_any_learning_are_refused(name, value):
    """R46."""
    given = {"num_sgd_iter": 1, "sgd_minibatch_size": 0, "standardize_fields": []}
    check_sgd(**given)
    with pytest.raises(ConfigError) as caught:
        check_sgd(**{**given, name: value})
    assert caught.value.key == name
