"""Importance sampling, compared with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.offline.estimators import (
    ImportanceSamplingEstimator,
    WeightedImportanceSamplingEstimator,
    action_log_likelihoods,
    behaviour_log_likelihoods,
    episode_parts,
)
from aiorl.offline.io import IOContext

SPACE = spaces.Box(-1, 1, (1,), np.float32)


class Mute(Policy):
    """Policy that does not compute probabilities of actions."""

    def __init__(self):
        super().__init__(SPACE, spaces.Discrete(2), {})

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return np.zeros(len(obs), np.int64), [], {}


class Coin(Mute):
    """Policy that takes action 1 with the observation as probability."""

    def compute_log_likelihoods(
        self, actions, obs, state_batches, prev_action_batch, prev_reward_batch
    ):
        self.given = (state_batches, prev_action_batch, prev_reward_batch)
        return np.log(np.where(actions == 1, obs[:, 0], 1 - obs[:, 0]))


def episode(new, old, rewards, eps_id=0):
    """Return an episode of action 1 with these probabilities under the new and the old policy."""
    length = len(rewards)
    return SampleBatch(
        obs=np.array(new, np.float64)[:, None],
        actions=np.ones(length, np.int64),
        rewards=np.array(rewards, np.float32),
        action_prob=np.array(old, np.float32),
        eps_id=np.full(length, eps_id),
    )


def test_is_matches_hand_worked_numbers():
    """R191: ratios 2 and 1/2, so p = 2, 1; discount 1/2."""
    estimator = ImportanceSamplingEstimator(Coin(), 0.5)
    estimator.process(episode([0.5, 0.25], [0.25, 0.5], [1.0, 4.0]))
    ((name, metrics),) = estimator.get_metrics()
    assert name == "is"
    assert metrics == pytest.approx({"V_prev": 1 + 2, "V_step_IS": 2 + 2, "V_gain_est": 4 / 3})
    assert estimator.get_metrics() == []


def test_wis_matches_hand_worked_numbers():
    """R191: p = (2, 1) and then (1,): means at step 0 are 2 and 3/2, at step 1 it is 1."""
    estimator = WeightedImportanceSamplingEstimator(Coin(), 0.5)
    estimator.process(episode([0.5, 0.25], [0.25, 0.5], [1.0, 4.0]))
    estimator.process(episode([0.5], [0.5], [3.0]))
    first, second = (estimate.metrics for estimate in estimator.get_metrics())
    assert first == pytest.approx({"V_prev": 3, "V_step_WIS": 3, "V_gain_est": 1})
    assert second == pytest.approx({"V_prev": 3, "V_step_WIS": 3 / 1.5, "V_gain_est": 2 / 3})


def test_zero_returns_and_impossible_actions_do_not_divide_by_zero():
    """R191."""
    estimator = WeightedImportanceSamplingEstimator(Coin(), 1.0)
    with np.errstate(divide="ignore"):
        estimator.process(episode([0.0, 0.5], [0.5, 0.5], [0.0, 0.0]))
    ((_, metrics),) = estimator.get_metrics()
    assert metrics == {"V_prev": 0.0, "V_step_WIS": 0.0, "V_gain_est": 0.0}


def test_a_multi_agent_batch_is_refused():
    """R191."""
    batch = MultiAgentBatch({"a": episode([0.5], [0.5], [1.0])}, 1)
    assert episode_parts(batch) == [batch]
    with pytest.raises(BatchError, match="MultiAgentBatch"):
        ImportanceSamplingEstimator(Coin(), 1.0).process(batch)


def test_a_plain_batch_is_split_at_episode_boundaries():
    """R64."""
    batch = SampleBatch.concat(
        [episode([0.5] * 2, [0.5] * 2, [1, 2], 7), episode([0.5], [0.5], [3], 8)]
    )
    assert [part["rewards"].tolist() for part in episode_parts(batch)] == [[1, 2], [3]]


def test_a_policy_without_likelihoods_is_refused_and_others_get_states_and_previous_steps():
    batch = episode([0.5], [0.5], [1.0])
    with pytest.raises(PolicyError, match="compute_log_likelihoods"):
        action_log_likelihoods(Mute(), batch)
    batch["state_in_0"] = np.array([[3.0]])
    batch["state_in_1"] = np.array([[4.0]])
    batch["prev_actions"], batch["prev_rewards"] = np.array([1]), np.array([2.0])
    policy = Coin()
    assert action_log_likelihoods(policy, batch) == pytest.approx([math.log(0.5)])
    states, actions, rewards = policy.given
    assert [state.tolist() for state in states] == [[[3.0]], [[4.0]]]
    assert (actions.tolist(), rewards.tolist()) == ([1], [2.0])


def test_estimators_are_created_from_the_context():
    class Worker:
        def __init__(self, policy):
            self.policy = policy

        def get_policy(self):
            return self.policy

    worker, without = Worker(Coin()), Worker(None)
    estimator = ImportanceSamplingEstimator.create(IOContext(config={"gamma": 0.7}, worker=worker))
    assert estimator.gamma == 0.7
    assert isinstance(estimator.policy, Coin)
    with pytest.raises(ConfigError, match="default_policy"):
        ImportanceSamplingEstimator.create(IOContext(worker=without))


def test_impossible_probabilities_are_refused_with_their_rows():
    """R191: not above 0, above 1, undefined; a density can be above 1, but must be finite."""
    old = np.array([0.5, 0.0, 0.5, -1.0, 1.5, np.nan, np.inf, 0.0], np.float32)
    bad = SampleBatch(action_prob=old, eps_id=np.full(8, 12))
    with pytest.raises(
        BatchError, match=r" 1: 0, .* 3: -1, .* 4: 1.5, .* 5: nan, .* 6: inf \D+ 1 .*12"
    ):
        behaviour_log_likelihoods(bad, spaces.Discrete(2))
    with pytest.raises(BatchError, match=r" 1: 0, .* 3: -1, .* 5: nan, .* 6: inf, .* 7: 0 .*12"):
        behaviour_log_likelihoods(bad, SPACE)
    for space, logp, rows in (
        (spaces.Discrete(2), [-1.0, 0.5, np.nan], " 1: 0.5, .* 2: nan"),
        (spaces.Tuple([SPACE, spaces.Discrete(2)]), [0.5, -np.inf, np.nan], " 1: -inf, .* 2: nan"),
    ):
        with pytest.raises(BatchError, match=rf"'action_logp'.*{rows}$"):
            behaviour_log_likelihoods(SampleBatch(action_logp=np.array(logp)), space)
    with pytest.raises(BatchError, match="action_prob"):
        behaviour_log_likelihoods(SampleBatch(obs=np.zeros(1)), SPACE)
    with pytest.raises(BatchError, match=r"\[2, 1\]"):
        behaviour_log_likelihoods(SampleBatch(action_logp=np.zeros((2, 1))), SPACE)


def test_a_probability_and_its_logarithm_that_differ_are_refused():
    """As in ray#37447: action_logp 0.0 and action_prob 0.4."""
    batch = SampleBatch(
        action_prob=np.array([0.5, 0.4]), action_logp=np.array([math.log(0.5), 0.0])
    )
    with pytest.raises(BatchError, match=r"'action_prob'.* 1: 0$"):
        behaviour_log_likelihoods(batch, spaces.Discrete(2))
    batch["action_logp"] = np.log(batch["action_prob"]).astype(np.float32)
    assert behaviour_log_likelihoods(batch, spaces.Discrete(2)) == pytest.approx(np.log([0.5, 0.4]))


def test_weights_among_episodes_that_reached_a_step_ignore_how_long_policies_last():
    """The convention of WIS in a run: with a reward of 1 per step, the estimate equals the return
    for any policies.
    """
    estimator = WeightedImportanceSamplingEstimator(Coin(), 1.0)
    batches = [episode([0.9, 0.9], [0.5, 0.5], [1, 1]), episode([0.1], [0.5], [1])]
    for _ in range(200):
        for batch in batches:
            estimator.process(batch)
    values = [estimate.metrics["V_step_WIS"] for estimate in estimator.get_metrics()]
    assert np.mean(values[-100:]) == pytest.approx(1.5, abs=0.01)
