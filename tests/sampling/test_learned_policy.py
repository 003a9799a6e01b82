"""A learner's exported graph, acting in a RolloutWorker without TensorFlow."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.loading import learned_policy_class
from aiorl.data import columns as c
from aiorl.errors import PolicyError
from aiorl.offline.estimators import action_log_likelihoods
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

ACTIONS = spaces.Discrete(2)
WEIGHTS = mlp_weights(4, 2)
CARTPOLE = spaces.Box(-1, 1, (4,), np.float32)


@pytest.fixture
def policy_class():
    graph, acting_spec = make_acting_graph(4, ACTIONS, 2, WEIGHTS)
    return learned_policy_class(graph, acting_spec.to_dict())


def test_a_learners_graph_acts_in_a_worker(make_worker, policy_class):
    """R27, R40, R41: equal seeds and weights give equal rows."""
    batches = []
    for _ in range(2):
        worker = make_worker("CartPole-v1", policy_class, num_envs=2, rollout_fragment_length=20, seed=3)
        worker.set_weights({"default_policy": WEIGHTS})
        assert worker.get_weights()["default_policy"].keys() == WEIGHTS.keys()
        batches.append(worker.sample())
    assert batches[0].count == 40
    assert {c.ACTION_LOGP, c.VF_PREDS, c.ACTION_DIST_INPUTS} <= batches[0].keys()
    for name in (c.OBS, c.ACTIONS, c.REWARDS, c.ACTION_LOGP):
        np.testing.assert_array_equal(batches[0][name], batches[1][name])


def test_its_state_is_saved_and_restored(make_worker, policy_class):
    """R51."""
    worker, other = (make_worker("CartPole-v1", policy_class, seed=1) for _ in range(2))
    worker.set_weights({"default_policy": WEIGHTS}, {"timestep": 9})
    other.restore(worker.save())
    for name, array in other.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(array, WEIGHTS[name])


def test_a_graph_policy_tells_how_likely_its_actions_were(make_worker, policy_class, monkeypatch):
    """R191: the recorded log-probabilities, from observations and actions alone."""
    worker = make_worker("CartPole-v1", policy_class, rollout_fragment_length=30, seed=3)
    worker.set_weights({"default_policy": WEIGHTS})
    batch = worker.sample()
    policy = worker.get_policy()
    compute_actions = Mock(wraps=policy.compute_actions)
    monkeypatch.setattr(policy, "compute_actions", compute_actions)
    found = action_log_likelihoods(policy, batch)
    np.testing.assert_allclose(found, batch[c.ACTION_LOGP], rtol=1e-5, atol=1e-6)
    obs, states, prev_actions, prev_rewards = compute_actions.call_args.args
    assert states == []
    for given, name in ((obs, c.OBS), (prev_actions, c.PREV_ACTIONS), (prev_rewards, c.PREV_REWARDS)):
        np.testing.assert_array_equal(given, batch[name])


def test_spaces_of_another_environment_are_refused(policy_class):
    with pytest.raises(PolicyError, match="action space"):
        policy_class(CARTPOLE, spaces.Discrete(3), {})
    with pytest.raises(PolicyError, match=r"observations of shape \(5,\)"):
        policy_class(spaces.Box(-1, 1, (5,), np.float32), ACTIONS, {})
