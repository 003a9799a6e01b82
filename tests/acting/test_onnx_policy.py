"""The worker's policy: acting, writing into columns, and the generic policy interface."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.graph_policy import ActRows, OnnxPolicy
from aiorl.data.columns import ACTION_DIST_INPUTS, ACTION_LOGP, ACTIONS, VF_PREDS
from aiorl.errors import PolicyError

ACTION_SPACES = [
    spaces.Discrete(2),
    spaces.Discrete(4, start=1),
    spaces.MultiDiscrete([3, 2]),
    spaces.Box(-1.0, 1.0, (2,)),
]


def policy_of(network, seed=0, **kw):
    policy = OnnxPolicy(network.graph(), network.spec, seed=seed, **kw)
    policy.set_weights(network.weights())
    return policy


def obs_of(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_act_returns_actions_and_their_columns(make_network, space, rows):
    network = make_network(space)
    policy = policy_of(network)
    noise = policy.draw_noise(np.random.default_rng(1), 4, rows)
    actions, columns, state_out = policy.act(obs_of(rows), (), noise[2])
    dist_inputs, values = network.expected(network.weights(), obs_of(rows))
    assert actions.shape == (rows, *space.shape)
    assert actions.dtype == space.dtype
    assert state_out == []
    np.testing.assert_allclose(columns[ACTION_DIST_INPUTS], dist_inputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(columns[VF_PREDS], values, rtol=1e-5, atol=1e-5)
    expected = policy.distribution.logp(columns[ACTION_DIST_INPUTS], actions)
    np.testing.assert_allclose(columns[ACTION_LOGP], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(policy.values(obs_of(rows)), columns[VF_PREDS])


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_act_into_writes_the_same_bits_into_columns(make_network, space, rows):
    policy = policy_of(make_network(space))
    noise = policy.draw_noise(np.random.default_rng(1), rows)
    actions, columns, _ = policy.act(obs_of(rows), (), noise)
    fragment = {
        ACTIONS: np.zeros((5, rows, *space.shape), space.dtype),
        ACTION_DIST_INPUTS: np.zeros((5, rows, policy.spec.num_dist_inputs), np.float32),
        VF_PREDS: np.zeros((5, rows), np.float32),
        ACTION_LOGP: np.zeros((5, rows), np.float32),
    }
    assert (
        policy.act_into(
            obs_of(rows), (), noise, ActRows(*(column[3] for column in fragment.values()))
        )
        == []
    )
    for name, expected in {ACTIONS: actions, **columns}.items():
        np.testing.assert_array_equal(fragment[name][3], expected)
        assert not fragment[name][[0, 1, 2, 4]].any()


def test_r114_recurrent_state_chains_from_call_to_call(recurrent_network):
    policy = policy_of(recurrent_network)
    assert policy.is_recurrent
    (start,) = policy.initial_state(3)
    assert start.shape == (3, 2)
    assert not start.any()
    assert [component.shape for component in policy.get_initial_state()] == [(2,)]
    first = policy.act(obs_of(3), [start]).state_out
    second = policy.act(obs_of(3, seed=1), first).state_out
    kernel = recurrent_network.weights()["policy/cell/kernel"]
    expected = np.tanh(np.tanh(obs_of(3) @ kernel) + obs_of(3, seed=1) @ kernel)
    np.testing.assert_allclose(second[0], expected, rtol=1e-5, atol=1e-6)


def test_state_and_weights_round_trip(network):
    policy = policy_of(network)
    policy.on_global_var_update({"timestep": 123})
    restored = OnnxPolicy(network.graph(), network.spec)
    restored.set_state(policy.get_state())
    assert restored.global_timestep == 123
    np.testing.assert_array_equal(
        policy.act(obs_of(9), explore=False).columns[ACTION_DIST_INPUTS],
        restored.act(obs_of(9), explore=False).columns[ACTION_DIST_INPUTS],
    )
    assert restored.get_weights().keys() == network.weights().keys()


def test_a_distribution_of_another_size_is_refused(network):
    spec = dataclasses.replace(network.spec, action_space={"kind": "Discrete", "n": 3, "start": 0})
    with pytest.raises(PolicyError, match="Discrete"):
        OnnxPolicy(network.graph(), spec)
