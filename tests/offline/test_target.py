"""Evaluation of a policy on stored episodes, compared with stepping through them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces
from plain_graph import make_graph

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.graph_policy import GraphPolicy, learned_policy_class
from aiorl.data.sample_batch import SampleBatch
from aiorl.data.spaces import space_to_dict
from aiorl.errors import BatchError, PolicyError
from aiorl.offline.estimators.fitted_q import evaluate_policy, log_likelihoods
from aiorl.offline.estimators.judgement import judge

THREE = spaces.Discrete(3, start=2)


def make_policy(**kind):
    graph, spec, weights = make_graph((2,), THREE, **kind)
    policy = learned_policy_class(graph, spec.to_dict())(spaces.Box(-9, 9, (2,)), THREE, {})
    policy.set_weights(weights)
    return policy


def episodes(rng, lengths=(4, 1, 7, 4)):
    played = []
    for number, length in enumerate(lengths):
        obs = rng.normal(size=(length + 1, 2)).astype(np.float32)
        ends = np.arange(length) == length - 1
        played.append(
            SampleBatch(
                obs=obs[:-1],
                new_obs=obs[1:],
                actions=rng.integers(2, 5, length),
                eps_id=np.full(length, number),
                rewards=rng.normal(size=length).astype(np.float32),
                action_logp=np.full(length, np.log(1 / 3)),
                terminateds=ends & bool(number % 2),
                truncateds=ends & (not number % 2),
                dones=ends,
            )
        )
    return played


@pytest.mark.parametrize(
    "kind",
    [
        {"recurrent": recurrent, "uses_previous_step": uses_previous_step}
        for recurrent in (False, True)
        for uses_previous_step in (False, True)
    ],
)
def test_look_at_equals_stepping_through_each_episode_with_the_policys_states(kind):
    policy, stored = make_policy(**kind), episodes(np.random.default_rng(1))
    outputs = evaluate_policy(policy, stored, need_ends=True)
    network_inputs, expected = [], []
    for episode in stored:
        state = policy.initial_state(1)
        action, reward = np.zeros(1, np.int64), np.zeros(1, np.float32)
        for row in range(episode.count + 1):
            obs = episode["obs"][row : row + 1] if row < episode.count else episode["new_obs"][-1:]
            network_inputs.append(np.concatenate([obs[0], state[0][0] if state else []]))
            _, state, columns = policy.compute_actions(obs, state, action, reward, explore=False)
            expected.append(columns["action_dist_inputs"][0])
            if row < episode.count:
                action, reward = (
                    episode["actions"][row : row + 1],
                    episode["rewards"][row : row + 1],
                )
    np.testing.assert_allclose(outputs.dist_inputs, expected, rtol=1e-5)
    np.testing.assert_allclose(outputs.inputs, network_inputs, rtol=1e-5)
    actions = np.concatenate([episode["actions"] for episode in stored])
    np.testing.assert_allclose(
        outputs.logp, policy.distribution.logp(np.array(expected)[outputs.steps], actions)
    )
    np.testing.assert_allclose(log_likelihoods(policy, stored), outputs.logp)


def test_observations_of_the_environment_are_converted_to_inputs_first():
    policy, stored = (
        make_policy(recurrent=False, uses_previous_step=False),
        episodes(np.random.default_rng(2)),
    )
    expected = evaluate_policy(policy, stored, need_ends=True).logp
    for episode in stored:
        for name in ("obs", "new_obs"):
            episode[name] = episode[name].astype(np.float64) * 10
    outputs = evaluate_policy(
        policy, stored, lambda rows: np.stack(rows).astype(np.float32) / 10, need_ends=True
    )
    np.testing.assert_allclose(outputs.logp, expected, rtol=1e-4)


def test_a_policy_with_broken_weights_is_distinguished_from_broken_data():
    policy, stored = (
        make_policy(recurrent=False, uses_previous_step=False),
        episodes(np.random.default_rng(3)),
    )
    policy.distribution.logp = lambda inputs, actions: np.full(len(actions), np.nan, np.float32)
    with pytest.raises(PolicyError, match=r" 0 .*nan"):
        judge(policy, stored, methods=["is"])


class Leaning:
    """Network with normally distributed actions around half the observation."""

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        return (
            np.concatenate([0.5 * obs, np.full_like(obs, -1.0)], axis=1),
            np.zeros(len(obs), np.float32),
            [],
        )


def test_a_continuous_policy_is_also_judged_by_its_model():
    """One step, reward -(a - o)^2: V = -(o^2 / 4 + exp(-2)), here with o uniform in [-1, 1]."""
    space = spaces.Box(-1, 1, (1,), np.float32)
    policy = GraphPolicy(
        Leaning(), ActingSpec((1,), "float32", (), 2, "diag_gaussian", space_to_dict(space), ())
    )
    rng = np.random.default_rng(4)
    obs = rng.uniform(-1, 1, (3000, 1)).astype(np.float32)
    actions = rng.normal(0.0, 1.0, (3000, 1)).astype(np.float32)
    rewards = -((actions - obs) ** 2)[:, 0]
    density = (-0.5 * actions**2 - 0.5 * np.log(2 * np.pi))[:, 0]
    over = np.array([True])
    stored = [
        SampleBatch(
            obs=obs[[row]],
            actions=actions[[row]],
            rewards=rewards[[row]],
            action_logp=density[[row]],
            terminateds=over,
        )
        for row in range(3000)
    ]
    estimate = judge(policy, stored, num_resamples=200)
    truth = -(1 / 12 + np.exp(-2.0))
    for name in ("is", "wis", "pdis", "dr"):
        low, high = estimate.estimates[name].interval
        assert low - 0.02 < truth < high + 0.02, name
    assert estimate.estimates["dm"].value == pytest.approx(truth, abs=0.02)
    assert estimate.v_prev == pytest.approx(-4 / 3, abs=0.1)


class LeaningWithShares(Leaning):
    """The same network with noise of one feature and an unchanged state."""

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        inputs, values, _ = super().run(obs)
        return np.concatenate([inputs, np.ones_like(obs)], axis=1), values, [*state]


@pytest.mark.parametrize("state_shapes", [(), ((2,),)])
def test_features_of_state_dependent_noise_are_not_part_of_the_result(state_shapes):
    space = spaces.Box(-9, 9, (2,), np.float32)
    spec = ActingSpec(
        (2,), "float32", state_shapes, 4, "diag_gaussian", space_to_dict(space), (), num_features=1
    )
    stored = episodes(np.random.default_rng(6))
    for episode in stored:
        episode["actions"] = episode["obs"]
    outputs = evaluate_policy(GraphPolicy(LeaningWithShares(), spec), stored, need_ends=True)
    np.testing.assert_array_equal(outputs.dist_inputs, Leaning().run(outputs.inputs[:, :2])[0])


def test_frames_stored_as_other_numbers_are_refused_if_values_would_change():
    policy = make_policy(recurrent=False, uses_previous_step=False)
    policy.spec = dataclasses.replace(policy.spec, obs_dtype="uint8")
    with pytest.raises(BatchError, match=r" 0 .* 255.* 0"):
        evaluate_policy(policy, episodes(np.random.default_rng(6)), need_ends=True)
