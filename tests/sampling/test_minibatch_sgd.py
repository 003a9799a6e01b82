from __future__ import annotations

import itertools

import numpy as np
import pytest

from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.sampling.minibatch_sgd import check_sgd, minibatch_sgd, minibatches, standardized


def rows(*numbers, **more):
    return SampleBatch(rewards=np.array(numbers, np.float32), **more)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_minibatches_hold_every_row_once_in_random_order(rng):
    """R46."""
    found = [batch["rewards"].tolist() for batch in minibatches(rows(*range(50)), 20, rng)]
    assert [len(numbers) for numbers in found] == [20, 20, 10]
    order = [number for numbers in found for number in numbers]
    assert sorted(order) == list(range(50)) != order


def test_a_size_of_zero_takes_all_rows_as_they_are(rng):
    batch = rows(1, 2)
    assert list(minibatches(batch, 0, rng)) == [batch]


def test_rows_of_recurrent_policies_stay_in_order_with_one_warning(rng, caplog):
    batch = rows(*range(6), state_in_0=np.zeros((6, 1)))
    for _ in range(2):
        assert [part["rewards"].tolist() for part in minibatches(batch, 4, rng)] == [[0, 1, 2, 3], [4, 5]]
    assert caplog.text.count("not shuffled") == 1


def test_standardised_columns_have_mean_0_and_deviation_1():
    assert standardized(np.array([1, 3])).tolist() == [-1, 1]
    assert standardized(np.array([2.0, 2.0])).tolist() == [0, 0]


def test_every_policy_passes_over_its_rows_as_often_as_asked(rng):
    """R46: figures are means over the last pass; what is not a number is left out."""
    seen = []

    def learn(batch):
        ((policy_id, part),) = batch.policy_batches.items()
        seen.append((policy_id, batch.count, round(float(part["rewards"].sum()), 3)))
        return {policy_id: {"calls": len(seen), "name": "x", "shape": np.zeros(2)}}

    samples = MultiAgentBatch({"a": rows(1, 1, 5), "b": rows(7), "still": rows(1)}, 3)
    info = minibatch_sgd(
        samples,
        ["a", "b", "absent"],
        learn,
        num_sgd_iter=2,
        sgd_minibatch_size=2,
        standardize_fields=["rewards"],
        rng=rng,
    )
    assert [(name, count) for name, count, _ in seen] == [("a", 2), ("a", 1)] * 2 + [("b", 1)] * 2
    assert sum(total for name, _, total in seen if name == "a") == pytest.approx(0, abs=1e-2)
    assert info == {"a": {"calls": 3.5}, "b": {"calls": 6.0}}
    assert samples.policy_batches["a"]["rewards"].tolist() == [1, 1, 5], "not modified"


@pytest.mark.parametrize("whitelist", [["default_policy"], ["other"]])
def test_a_plain_batch_is_the_default_policys_whatever_the_whitelist_says(rng, whitelist):
    """R45, R46."""
    info = minibatch_sgd(
        rows(1, 2),
        whitelist,
        lambda batch: {"rows": batch.count},
        num_sgd_iter=1,
        sgd_minibatch_size=0,
        standardize_fields=[],
        rng=rng,
    )
    assert info == {"default_policy": {"rows": 2.0}}


def test_figures_in_dicts_are_averaged_too(rng):
    """R46."""
    calls = itertools.count(1)

    def learn(batch):
        number = next(calls)
        return {"loss": number, "stats": {"grad": {"norm": 10.0 * number, "name": "x"}, "lr": np.float32(0.5)}}

    info = minibatch_sgd(
        rows(*range(4)),
        ["default_policy"],
        learn,
        num_sgd_iter=1,
        sgd_minibatch_size=2,
        standardize_fields=[],
        rng=rng,
    )
    assert info == {"default_policy": {"loss": 1.5, "stats": {"grad": {"norm": 15.0}, "lr": 0.5}}}


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
def test_arguments_with_which_nothing_would_be_learned_are_refused(name, value):
    """R46."""
    given = {"num_sgd_iter": 1, "sgd_minibatch_size": 0, "standardize_fields": []}
    check_sgd(**given)
    with pytest.raises(ConfigError, match=f"{name} is "):
        check_sgd(**{**given, name: value})
