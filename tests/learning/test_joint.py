"""One update of several policies: rows that belong together, and fragments that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import Case

from aiorl.algorithms import Learner, Networks, Update, chain, of_policy
from aiorl.data import columns as c
from aiorl.errors import BatchError
from aiorl.learning.algorithms.pg import PG
from aiorl.learning.algorithms.ppo import PPO

LSTM = {"use_lstm": True, "lstm_cell_size": 4}
NO_PENALTY = {"kl_coeff": 0.0}
SHORT = {"rollout_fragment_length": 2, "train_batch_size": 16, "sgd_minibatch_size": 8}


def separate_steps(kind: Any, config: Any, networks: Networks) -> Update:
    """Return one update that makes the step of an algorithm for each policy by itself."""
    updates = {
        policy_id: kind.update(config, Networks.of(model))
        for policy_id, model in networks.by_policy.items()
    }
    steps = [of_policy(policy_id, update.loop.step) for policy_id, update in updates.items()]
    update = next(iter(updates.values()))
    loop = dataclasses.replace(update.loop, step=chain(*steps))
    return dataclasses.replace(update, loop=loop, adaptations=())


class JointPG(PG):
    """PG of several policies, in one update."""

    is_joint = True

    @staticmethod
    def update(config: Any, networks: Networks) -> Update:
        return separate_steps(PG, config, networks)


class JointPPO(PPO):
    """PPO of several policies, in one update."""

    is_joint = True

    @staticmethod
    def update(config: Any, networks: Networks) -> Update:
        return separate_steps(PPO, config, networks)


class Compared(PG):
    """Update that changes nothing, and compares the advantages of two policies."""

    is_joint = True

    @staticmethod
    def update(config: Any, networks: Networks) -> Update:
        def compare(minibatch: Any) -> Any:
            left, right = minibatch["left"], minibatch["right"]
            both = left[c.VALID] * right[c.VALID]
            differences = both * tf.square(left[c.ADVANTAGES] - right[c.ADVANTAGES])
            return tf.reduce_sum(differences), {
                "both": tf.reduce_sum(both),
                "left": tf.reduce_sum(left[c.VALID]),
                "right": tf.reduce_sum(right[c.VALID]),
                "of_invalid": tf.reduce_sum(
                    (1 - left[c.VALID]) * tf.reduce_sum(tf.abs(left[c.OBS]), axis=1)
                ),
            }

        update = PG.update(config, Networks.of(networks.by_policy["left"]))
        step = dataclasses.replace(
            update.loop.step,
            gradients=lambda minibatch, knobs: (
                [tf.zeros_like(item) for item in update.loop.step.variables],
                *compare(minibatch),
            ),
        )
        return dataclasses.replace(update, loop=dataclasses.replace(update.loop, step=step))


class Pair:
    """Two policies, "left" and "right", and a learner that updates them together."""

    def __init__(self, kind: Any, name: str, **settings: Any) -> None:
        self.cases = {
            policy_id: Case(name, net_seed=number, **settings)
            for number, policy_id in enumerate(("left", "right"))
        }
        models = {policy_id: case.model for policy_id, case in self.cases.items()}
        self.learner = Learner(kind, self.cases["left"].config, Networks(models))

    def fragment(self, seed: int = 0) -> dict[str, dict[str, Any]]:
        """Return a fragment in which both policies have rows of the same steps."""
        fragment = {}
        for number, (policy_id, case) in enumerate(self.cases.items()):
            columns = case.fragment(2 * seed + number)
            steps, num_envs = columns[c.OBS].shape[:2]
            episodes = (1 << 60) + np.arange(num_envs, dtype=np.int64) + 100 * seed
            columns[c.EPS_ID] = np.broadcast_to(episodes, (steps, num_envs))
            columns[c.T] = np.broadcast_to(
                np.arange(steps, dtype=np.int32)[:, None], (steps, num_envs)
            )
            fragment[policy_id] = columns
        return fragment

    def metrics(self, *fragments: Any) -> dict[str, float]:
        for fragment in fragments:
            self.learner.check_fragment(fragment)
        result = self.learner.update(self.learner.make_batch(fragments), 0)
        assert not result.skipped
        return result.metrics


def rows_of(columns: Any, chosen: Any) -> dict[str, Any]:
    """Return chosen rows of a fragment, [B, 1, ...]."""
    return {
        name: column.reshape(-1, *column.shape[2:])[chosen][:, None]
        for name, column in columns.items()
    }


def without_steps(columns: Any) -> dict[str, Any]:
    return {name: column for name, column in columns.items() if name not in (c.EPS_ID, c.T)}


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        (JointPPO, "ppo", NO_PENALTY),
        (JointPPO, "ppo", {**NO_PENALTY, **SHORT, "model": LSTM}),
    ],
)
def test_an_update_of_both_makes_the_same_steps_as_one_of_each(
    kind: Any, name: str, settings: Any
) -> None:
    pair = Pair(kind, name, **settings)
    fragments = [pair.fragment(seed) for seed in range(2)]
    alone = {}
    for policy_id, case in pair.cases.items():
        other = Case(name, net_seed=list(pair.cases).index(policy_id), **settings)
        result = other.update([without_steps(fragment[policy_id]) for fragment in fragments])
        alone[policy_id] = other.model.get_weights(), result.metrics["loss"]
        assert case.model is not other.model
    metrics = pair.metrics(*fragments)
    for policy_id, (weights, loss) in alone.items():
        np.testing.assert_allclose(metrics[f"{policy_id}/loss"], loss, rtol=1e-5)
        for weight_name, weight in pair.learner.get_weights()[policy_id].items():
            np.testing.assert_allclose(weight, weights[weight_name], rtol=1e-4, atol=1e-6)


def test_rows_of_the_same_step_belong_together_in_any_order() -> None:
    pair = Pair(Compared, "pg")
    fragment = pair.fragment()
    left, right = fragment["left"], fragment["right"]
    right[c.ADVANTAGES] = left[c.ADVANTAGES].copy()
    shape = left[c.OBS].shape[:2]
    count = shape[0] * shape[1]
    metrics = pair.metrics(fragment)
    assert metrics["loss"] == 0.0
    assert metrics["both"] == metrics["left"] == metrics["right"] == count
    shuffled = rows_of(right, np.random.default_rng(1).permutation(count))
    assert pair.metrics({"left": left, "right": shuffled}) == metrics


def test_rows_of_one_policy_alone_get_empty_rows_of_the_other() -> None:
    pair = Pair(Compared, "pg")
    fragment = pair.fragment()
    count = fragment["left"][c.OBS].size // fragment["left"][c.OBS].shape[2]
    right = rows_of(fragment["right"], np.arange(count))
    metrics = pair.metrics({"left": rows_of(fragment["left"], np.arange(5)), "right": right})
    numbers = [metrics[name] for name in ("both", "left", "right", "of_invalid")]
    assert numbers == [5, 5, count, 0]
    metrics = pair.metrics({"right": right}, fragment)
    numbers = [metrics[name] for name in ("both", "left", "right", "of_invalid")]
    assert numbers == [count, count, 2 * count, 0]


def test_steps_and_agents_that_can_not_be_told_apart_are_refused() -> None:
    pair = Pair(Compared, "pg")
    fragment = pair.fragment()
    twice = {name: np.concatenate([column] * 2) for name, column in fragment["left"].items()}
    with pytest.raises(BatchError) as refused:
        pair.learner.check_fragment({**fragment, "left": twice})
    assert refused.value.column == c.T
    assert "'left'" in str(refused.value)
    for name in (c.EPS_ID, c.T):
        missing = {key: column for key, column in fragment["left"].items() if key != name}
        with pytest.raises(BatchError) as refused:
            pair.learner.check_fragment({**fragment, "left": missing})
        assert refused.value.column == name
    short = {**fragment["left"], c.T: fragment["left"][c.T][1:]}
    with pytest.raises(BatchError) as refused:
        pair.learner.check_fragment({**fragment, "left": short})
    assert refused.value.column == c.T


def test_sequences_of_different_steps_are_refused() -> None:
    pair = Pair(JointPPO, "ppo", **NO_PENALTY, model=LSTM)
    fragment = pair.fragment()
    with pytest.raises(BatchError) as refused:
        pair.learner.check_fragment({"left": fragment["left"]})
    assert refused.value.column == "batches"
    later = {**fragment["right"], c.T: fragment["right"][c.T] + 1}
    with pytest.raises(BatchError) as refused:
        pair.learner.check_fragment({**fragment, "right": later})
    assert refused.value.column == c.T


def test_a_number_that_is_not_finite_is_found_in_its_policys_column() -> None:
    pair = Pair(JointPG, "pg")
    before = pair.learner.get_state().tensors
    fragment = pair.fragment()
    fragment["right"][c.ADVANTAGES][0, 0] = np.nan
    result = pair.learner.update(pair.learner.make_batch([fragment]), 0)
    assert result.skipped
    assert result.bad_column == "right/advantages"
    after = pair.learner.get_state().tensors
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_state_has_the_weights_of_each_policy_and_goes_back() -> None:
    pair, other = Pair(JointPG, "pg"), Pair(JointPG, "pg")
    pair.metrics(pair.fragment())
    state = pair.learner.get_state()
    models = {policy_id: case.model for policy_id, case in pair.cases.items()}
    assert {name for name in state.tensors if name.startswith("weights/")} == {
        f"weights/{policy_id}/{name}"
        for policy_id, model in models.items()
        for name in model.variables
    }
    other.learner.set_state(state)
    fragment = pair.fragment(1)
    assert pair.metrics(fragment) == other.metrics(fragment)
