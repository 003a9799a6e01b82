"""A RolloutWorker with TensorFlow policies, and TensorFlow itself."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.data import columns as c

tf = pytest.importorskip("tensorflow")

from aiorl.learning.models.tf_policy import TFPolicy  # noqa: E402

ACTIONS = spaces.Discrete(2)
MODEL = {"fcnet_hiddens": [8]}


class Cloning(TFPolicy):
    """Policy that imitates the actions in the batch, and counts its inference calls."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rows_per_call = []

    def compute_actions(self, obs, *args, **kwargs):
        self.rows_per_call.append(len(obs))
        return super().compute_actions(obs, *args, **kwargs)

    def loss(self, batch):
        dist_inputs, _ = self.model.forward(batch[c.OBS])
        return -tf.reduce_mean(self.tf_distribution.logp(dist_inputs, batch[c.ACTIONS]))


def make_cartpole(make_worker, policy=Cloning, **more):
    settings = {
        "rollout_fragment_length": 20,
        "num_envs": 3,
        "seed": 4,
        "policy_config": {"model": MODEL, "lr": 0.05},
    }
    return make_worker("CartPole-v1", policy, **(settings | more))


def test_r110_a_tensorflow_policy_gets_one_call_per_turn_and_its_outputs_are_in_the_rows(
    make_worker,
):
    worker = make_cartpole(make_worker)
    batch = worker.sample()
    assert batch.count == 60
    policy = worker.get_policy()
    assert set(policy.rows_per_call) == {3}
    dist_inputs, values = policy.model.forward(batch[c.OBS])
    np.testing.assert_allclose(batch[c.ACTION_DIST_INPUTS], dist_inputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch[c.VF_PREDS], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        batch[c.ACTION_LOGP],
        policy.distribution.logp(batch[c.ACTION_DIST_INPUTS], batch[c.ACTIONS]),
        atol=1e-5,
    )


def test_r114_r116_a_recurrent_tensorflow_policys_state_chains_and_restarts(make_worker):
    model = MODEL | {"use_lstm": True, "lstm_cell_size": 4}
    worker = make_cartpole(
        make_worker,
        TFPolicy,
        policy_config={"model": model},
        num_envs=1,
        rollout_fragment_length=80,
    )
    batch = worker.sample()
    starts = np.flatnonzero(batch[c.T] == 0)
    assert len(starts) >= 2
    for index in (0, 1):
        state_in, state_out = batch[c.state_in(index)], batch[c.state_out(index)]
        assert not state_in[starts].any()
        goes_on = np.flatnonzero(batch[c.T][1:] > 0)
        np.testing.assert_array_equal(state_in[goes_on + 1], state_out[goes_on])
        assert state_out.any()


def test_r27_equal_seeds_give_equal_tensorflow_weights_and_batches(make_worker):
    found = []
    for seed in (4, 4, 5):
        worker = make_cartpole(make_worker, seed=seed)
        found.append(
            (worker.get_weights()[DEFAULT], worker.sample()[c.OBS], tf.random.uniform(()).numpy())
        )
    one, same, other = found
    for name, weight in one[0].items():
        np.testing.assert_array_equal(weight, same[0][name])
    np.testing.assert_array_equal(one[1], same[1])
    assert one[2] == same[2], "TensorFlow's own generator is seeded, too"
    assert not np.array_equal(one[1], other[1])
    assert one[2] != other[2]


def test_r35_tensorflow_itself_is_switched_to_eager_mode_unless_workers_are_exempt_or_traced():
    seen = set()

    class Notes(TFPolicy):
        def compute_actions(self, *args, **kwargs):
            actions = super().compute_actions(*args, **kwargs)
            seen.add(tf.config.functions_run_eagerly())
            return actions

    eager, runs = {"eager": True}, []
    try:
        for settings in (
            {},
            eager | {"no_eager_on_workers": True},
            eager | {"eager_tracing": True},
            eager,
        ):
            seen.clear()
            config = {"model": {"fcnet_hiddens": [4]}, **settings}
            with RolloutWorker(
                "CartPole-v1", Notes, policy_config=config, rollout_fragment_length=8, seed=1
            ) as worker:
                runs.append((worker.sample()["obs"], set(seen)))
    finally:
        tf.config.run_functions_eagerly(False)
    assert [modes for _, modes in runs] == [{False}, {False}, {False}, {True}]
    for obs, _ in runs:
        np.testing.assert_allclose(obs, runs[0][0], rtol=1e-4, atol=1e-5)
