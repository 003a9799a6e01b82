"""Common behaviour of policies with a network: previous steps, nested actions, exploration,
postprocessing.
"""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.acting.distributions import make_distribution, make_named_distribution
from aiorl.acting.graph_policy import ActRows, GraphPolicy
from aiorl.acting.postprocess import gae
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.data.spaces import space_to_dict
from aiorl.errors import BatchError, PolicyError

TUPLE = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))])


class PlainNetwork:
    """dist_inputs = mean(obs) + previous reward, vf = sum(obs) + 10 * sum(previous action) + state;
    state + 1.
    """

    def __init__(self, num_inputs):
        self.num_inputs = num_inputs
        self.calls = []

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        self.calls.append((len(obs), prev))
        rows = len(obs)
        values = obs.sum(axis=1) + (state[0][:, 0] if state else 0)
        inputs = np.repeat(obs.mean(axis=1, keepdims=True), self.num_inputs, axis=1)
        if prev is not None:
            values = values + 10.0 * prev[0].reshape(rows, -1).sum(axis=1)
            inputs = inputs + prev[1][:, None]
        if out is not None:
            out[0][...], out[1][...] = inputs, values
            inputs, values = out
        return inputs.astype(np.float32), values.astype(np.float32), [item + 1 for item in state]

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        assert not weights


def make_policy(space, *, config=None, recurrent=False, uses_previous_step=False, seed=0):
    distribution = make_distribution(space)
    spec = ActingSpec(
        obs_shape=(3,),
        obs_dtype="float32",
        state_shapes=((1,),) if recurrent else (),
        num_dist_inputs=distribution.num_inputs,
        distribution=distribution.name,
        action_space=space_to_dict(space),
        weights=(),
        prev_action=ArraySpec("prev_actions", distribution.action_shape, "float32")
        if uses_previous_step
        else None,
    )
    return GraphPolicy(PlainNetwork(distribution.num_inputs), spec, config=config, seed=seed)


def obs_of(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)


def test_r117_tuple_actions_come_as_one_batch_per_component():
    policy = make_policy(TUPLE)
    actions, _, columns = policy.compute_actions(obs_of(5))
    assert type(actions) is tuple
    assert [batch.shape for batch in actions] == [(5,), (5, 2)]
    assert actions[0].dtype == np.int64
    flat = policy.layout.to_column(actions)
    np.testing.assert_allclose(
        policy.distribution.logp(columns[c.ACTION_DIST_INPUTS], flat),
        columns[c.ACTION_LOGP],
        rtol=1e-4,
    )
    rows = policy.layout.to_env(flat)
    assert len(rows) == 5
    assert [np.shape(part) for part in rows[0]] == [(), (2,)]
    single, _, _ = policy.compute_single_action(obs_of(1)[0], explore=False)
    assert [np.shape(part) for part in single] == [(), (2,)]


def test_r117_act_into_writes_flat_rows():
    policy = make_policy(TUPLE)
    noise = policy.draw_noise(np.random.default_rng(1), 5)
    expected = policy.act(obs_of(5), (), noise)
    rows = ActRows(
        actions=np.zeros((5, 3), np.float32),
        dist_inputs=np.zeros((5, policy.spec.num_dist_inputs), np.float32),
        values=np.zeros(5, np.float32),
        logp=np.zeros(5, np.float32),
    )
    policy.act_into(obs_of(5), (), noise, rows)
    np.testing.assert_array_equal(rows.actions, expected.actions)
    np.testing.assert_array_equal(rows.logp, expected.columns[c.ACTION_LOGP])


@pytest.mark.parametrize("uses_previous_step", [False, True])
@pytest.mark.parametrize("space", [spaces.Discrete(4), TUPLE])
def test_a_stored_trajectory_gets_the_states_and_values_that_the_policy_would_have_had(
    space, uses_previous_step
):
    policy = make_policy(space, recurrent=True, uses_previous_step=uses_previous_step)
    space.seed(1)
    actions = [space.sample() for _ in range(5)]
    column = policy.layout.to_column(
        tuple(np.array(part) for part in zip(*actions, strict=True))
        if space is TUPLE
        else np.array(actions)
    )
    rewards = np.arange(1.0, 6.0, dtype=np.float32)
    batch = SampleBatch(
        obs=obs_of(5), actions=column, rewards=rewards, state_in_0=np.full((5, 7), 9.0)
    )
    policy.add_recurrent_columns(batch)
    state, prev = policy.initial_state(1), (policy.layout.zeros(1), np.zeros(1, np.float32))
    for row in range(5):
        np.testing.assert_array_equal(
            batch[c.state_in(0)][row], state[0][0], "those that were stored are not ours"
        )
        value = policy.values(
            batch[c.OBS][row : row + 1], state, prev if uses_previous_step else None
        )
        np.testing.assert_allclose(batch[c.VF_PREDS][row], value[0], rtol=1e-6)
        state = policy.graph.run(batch[c.OBS][row : row + 1], state)[2]
        np.testing.assert_array_equal(batch[c.state_out(0)][row], state[0][0])
        if uses_previous_step:
            np.testing.assert_array_equal(batch[c.PREV_ACTIONS][row], prev[0][0])
            assert batch[c.PREV_REWARDS][row] == prev[1][0]
        prev = column[row : row + 1], rewards[row : row + 1]
    with pytest.raises(BatchError, match="rewards"):
        policy.add_recurrent_columns(SampleBatch(obs=obs_of(5), actions=column))


def test_r111_previous_actions_and_rewards_reach_the_network_in_the_order_of_the_observations():
    policy = make_policy(spaces.Discrete(4), uses_previous_step=True)
    obs = obs_of(3)
    prev_actions, prev_rewards = np.array([3, 0, 1]), np.array([0.5, 0.0, -1.0])
    _, _, columns = policy.compute_actions(obs, (), prev_actions, prev_rewards)
    np.testing.assert_allclose(columns[c.VF_PREDS], obs.sum(axis=1) + 10 * prev_actions, rtol=1e-5)
    expected = obs.mean(axis=1) + prev_rewards
    np.testing.assert_allclose(columns[c.ACTION_DIST_INPUTS][:, 0], expected, rtol=1e-5, atol=1e-6)


def test_r100_unknown_previous_steps_count_as_zeros():
    policy = make_policy(TUPLE, uses_previous_step=True)
    zeros = policy.compute_actions(obs_of(2), (), np.zeros((2, 3)), np.zeros(2))[2]
    missing = policy.compute_actions(obs_of(2))[2]
    np.testing.assert_array_equal(zeros[c.VF_PREDS], missing[c.VF_PREDS])
    single = policy.compute_single_action(obs_of(2)[1], (), (2, [0.5, 0.5]), 1.0)[2]
    assert single[c.VF_PREDS] == pytest.approx(missing[c.VF_PREDS][1] + 30.0, rel=1e-5)


def test_r110_one_call_evaluates_all_rows_and_a_network_that_does_not_look_back_is_given_nothing():
    policy = make_policy(spaces.Discrete(4))
    policy.compute_actions(obs_of(64), (), np.zeros(64, np.int64), np.zeros(64))
    assert policy.graph.calls == [(64, None)]


def test_r112_exploration_replaces_sampling_in_every_way_of_acting_at_the_timestep_given():
    config = {"exploration": {"type": "EpsilonGreedy", "epsilon": [[0, 1.0], [10, 0.0]]}}
    policy = make_policy(spaces.Discrete(4), config=config)
    greedy = np.zeros(40, np.int64)  # with equal logits, the first action
    assert (policy.compute_actions(obs_of(40))[0] != 0).any()
    np.testing.assert_array_equal(policy.compute_actions(obs_of(40), timestep=10)[0], greedy)
    policy.on_global_var_update({"timestep": 10})
    np.testing.assert_array_equal(policy.compute_actions(obs_of(40))[0], greedy)
    rows = ActRows(
        actions=np.ones(40, np.int64),
        dist_inputs=np.zeros((40, 4), np.float32),
        values=np.zeros(40, np.float32),
        logp=np.zeros(40, np.float32),
    )
    noise = policy.draw_noise(np.random.default_rng(0), 40)
    assert noise.shape == (40, 2)
    policy.act_into(obs_of(40), (), noise, rows)
    np.testing.assert_array_equal(rows.actions, greedy)
    np.testing.assert_array_equal(
        policy.compute_actions(obs_of(40), timestep=0, explore=False)[0], greedy
    )


def test_exploration_with_memory_follows_the_rows_of_each_episode():
    policy = make_policy(
        spaces.Box(-1.0, 1.0, (1,)), config={"exploration": "OrnsteinUhlenbeckNoise"}
    )
    first, second = types.SimpleNamespace(episode_id=1), types.SimpleNamespace(episode_id=2)
    policy.compute_actions(obs_of(3), episodes=[first, second, first])
    assert set(policy.exploration.processes) == {(1, 0), (2, 0), (1, 1)}
    policy.exploration.on_episode_end(policy, episode=first)
    assert set(policy.exploration.processes) == {(2, 0)}
    policy.compute_actions(obs_of(3), episodes=[first, second, first], agent_ids=["a", "a", "b"])
    assert set(policy.exploration.processes) == {(2, 0), (1, "a"), (2, "a"), (1, "b")}


def trajectory(policy, steps, *, terminated=False, truncated=False):
    rng = np.random.default_rng(steps)
    obs = obs_of(steps + 1, seed=1)
    flags = np.zeros((2, steps), np.bool_)
    flags[0, -1], flags[1, -1] = terminated, truncated
    batch = SampleBatch(
        {
            c.OBS: obs[:-1],
            c.NEW_OBS: obs[1:],
            c.ACTIONS: rng.integers(0, 4, steps),
            c.REWARDS: rng.standard_normal(steps).astype(np.float32),
            c.TERMINATEDS: flags[0],
            c.TRUNCATEDS: flags[1],
            c.VF_PREDS: rng.standard_normal(steps).astype(np.float32),
        }
    )
    if policy.is_recurrent:
        batch[c.state_out(0)] = np.arange(1, steps + 1, dtype=np.float32)[:, None]
    return batch


SETTINGS = {"postprocess": "gae", "postprocess_params": {"gamma": 0.9, "lam": 0.7}}


@pytest.mark.parametrize(
    "ending", [{}, {"terminated": True}, {"truncated": True}], ids=["cut", "term", "trunc"]
)
@pytest.mark.parametrize("uses_previous_step", [False, True])
def test_a_trajectory_gets_advantages_bootstrapped_from_its_last_new_obs(
    ending, uses_previous_step
):
    """SPEC 4.9: a trajectory cut in mid-episode must be able to bootstrap from the last new_obs."""
    policy = make_policy(
        spaces.Discrete(4), config=SETTINGS, recurrent=True, uses_previous_step=uses_previous_step
    )
    batch = trajectory(policy, 6, **ending)
    last = batch[c.NEW_OBS][-1].sum() + 6.0  # the state after the last step
    if uses_previous_step:
        last += 10.0 * batch[c.ACTIONS][-1]
    last = np.array([last], np.float32)
    expected = gae(
        batch[c.REWARDS][:, None],
        batch[c.VF_PREDS][:, None],
        last,
        batch[c.TERMINATEDS][:, None],
        batch[c.TRUNCATEDS][:, None],
        np.tile(last, (6, 1)),
        gamma=0.9,
        lam=0.7,
    )
    postprocessed = policy.postprocess_trajectory(batch, {}, None)
    np.testing.assert_allclose(postprocessed[c.ADVANTAGES], expected[0][:, 0], rtol=1e-5)
    np.testing.assert_allclose(postprocessed[c.VALUE_TARGETS], expected[1][:, 0], rtol=1e-5)
    assert len(policy.graph.calls) == (0 if ending.get("terminated") else 1)


@pytest.mark.parametrize("name", ["none", "gae"])
@pytest.mark.parametrize(
    "ending", [{}, {"terminated": True}, {"truncated": True}], ids=["cut", "term", "trunc"]
)
def test_bootstrap_values_are_those_of_true_final_observations_of_truncated_trajectories(
    name, ending
):
    policy = make_policy(
        spaces.Discrete(4),
        config={**SETTINGS, "postprocess": name, "bootstrap_values": True},
        recurrent=True,
    )
    batch = trajectory(policy, 4, **ending)
    value = batch[c.NEW_OBS][-1].sum() + 4.0 if ending.get("truncated") else 0.0
    postprocessed = policy.postprocess_trajectory(batch)
    np.testing.assert_allclose(postprocessed[c.BOOTSTRAP_VALUES], [0.0, 0.0, 0.0, value], rtol=1e-6)
    assert postprocessed[c.BOOTSTRAP_VALUES].dtype == np.float32
    assert (c.ADVANTAGES in postprocessed) == (name == "gae")
    evaluations = 1 if ending.get("truncated") or (name == "gae" and not ending) else 0
    assert len(policy.graph.calls) == evaluations


def test_without_postprocessing_a_trajectory_stays_as_it_is():
    policy = make_policy(spaces.Discrete(4))
    batch = trajectory(policy, 3)
    names = list(batch)
    assert list(policy.postprocess_trajectory(batch)) == names
    empty = SampleBatch()
    assert make_policy(spaces.Discrete(4), config=SETTINGS).postprocess_trajectory(empty) is empty


def test_a_column_missing_for_postprocessing_is_named():
    policy = make_policy(spaces.Discrete(4), config=SETTINGS)
    batch = trajectory(policy, 3)
    del batch[c.NEW_OBS]
    with pytest.raises(BatchError, match="new_obs"):
        policy.postprocess_trajectory(batch)


def test_the_description_carries_the_previous_action():
    spec = make_policy(TUPLE, uses_previous_step=True).spec
    assert ActingSpec.from_dict(spec.to_dict()) == spec
    plain = make_policy(TUPLE).spec
    assert ActingSpec.from_dict(plain.to_dict()) == plain
    without = {name: value for name, value in plain.to_dict().items() if name != "prev_action"}
    assert ActingSpec.from_dict(without) == plain
    for damaged in ([[3]], [[3], "float64"], "x", [[-1], "int64"]):
        with pytest.raises(PolicyError):
            ActingSpec.from_dict({**spec.to_dict(), "prev_action": damaged})
    assert dataclasses.replace(spec, prev_action=None) == plain


def test_rows_are_as_wide_as_the_described_features_make_them():
    spec = make_policy(spaces.Box(-1.0, 1.0, (2,))).spec
    described = ActingSpec.from_dict(dataclasses.replace(spec, num_features=3).to_dict())
    inputs = (
        GraphPolicy(PlainNetwork(4 + 3 * 2), described)
        .act(obs_of(5), explore=False)
        .columns[c.ACTION_DIST_INPUTS]
    )
    assert inputs.shape == (5, 4)
    with pytest.raises(PolicyError, match=r"4 .*diag_gaussian.*3"):
        GraphPolicy(PlainNetwork(4), described).act(obs_of(5), explore=False)


GREEDY_CONFIG = {"postprocess": "n_step_priorities", "postprocess_params": {"gamma": 0.5, "n": 2}}


class ShownValues:
    """Network with the observation itself as the values of three actions."""

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        return obs.copy(), obs.max(axis=1), []


def make_greedy_policy(config=None, distribution="greedy"):
    space = spaces.Discrete(3, start=4)
    spec = ActingSpec(
        obs_shape=(3,),
        obs_dtype="float32",
        state_shapes=(),
        num_dist_inputs=make_named_distribution(distribution, space).num_inputs,
        distribution=distribution,
        action_space=space_to_dict(space),
        weights=(),
    )
    return GraphPolicy(
        ShownValues(), spec, config=GREEDY_CONFIG if config is None else config, seed=0
    )


def played(policy, *, has_outputs):
    """Four rows; the last one is the first of another trajectory."""
    obs = np.array([[1, 3, 0], [4, 2, 0], [0, 8, 1], [6, 0, 5]], np.float32)
    rows = {
        c.OBS: obs,
        c.NEW_OBS: np.concatenate([obs[1:3], [[6, 5, 0], [2, 0, 0]]]).astype(np.float32),
        c.ACTIONS: np.array([5, 5, 4, 6]),
        c.REWARDS: np.array([1, 2, 4, 1], np.float32),
        c.TERMINATEDS: np.array([False, False, False, True]),
        c.TRUNCATEDS: np.zeros(4, bool),
    }
    if has_outputs:
        rows |= policy.compute_actions(obs, explore=False)[2]
    return SampleBatch(rows)


@pytest.mark.parametrize("has_outputs", [True, False])
def test_first_priorities_are_errors_of_the_acting_policys_values(has_outputs):
    """|1 + .5*2 + .25*8 - 3|; |2 + .5*4 + .25*6 - 2|; |4 + .5*6 - 0|; |1 - 5|, terminated."""
    policy = make_greedy_policy()
    batch = played(policy, has_outputs=has_outputs)
    policy.postprocess_trajectories(batch, np.array([3, 4]))
    assert batch[c.PRIORITIES].tolist() == [1, 3.5, 7, 4]
    assert batch[c.PRIORITIES].dtype == np.float32
    assert batch[c.N_STEP_RETURNS].tolist() == [2, 4, 4, 1]
    assert batch[c.N_STEPS].tolist() == [2, 2, 1, 1]


def test_first_priorities_without_action_values_are_refused_with_the_distributions_name():
    policy = make_greedy_policy(distribution="categorical")
    with pytest.raises(PolicyError, match="categorical"):
        policy.postprocess_trajectories(played(policy, has_outputs=True), np.array([3, 4]))
