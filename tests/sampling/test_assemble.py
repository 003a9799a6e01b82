from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.postprocess import gae
from aiorl.data import columns as c
from aiorl.sampling.assemble import Assembler
from aiorl.sampling.block import BlockSpec, FinalRows, StepBlock
from aiorl.sampling.episodes import EpisodeTracker
from aiorl.testing.fake_policy import FakePolicy

STEPS, NUM_ENVS = 4, 3


def recorded_block(keep_values=True, sent=frozenset()) -> StepBlock:
    """Env 0 truncates at 1 and is reset at once, env 1 both terminates and truncates at 2, env 2 goes on."""
    rng = np.random.default_rng(0)
    spec = BlockSpec(STEPS, NUM_ENVS, (1,), np.float32, (), np.int64, 2, True, keep_values, sent)
    block = StepBlock(spec, np.zeros((STEPS, NUM_ENVS, 1), np.float32), [])
    block.obs[...] = rng.integers(0, 50, block.obs.shape)
    block.values[...] = 1.0 + 0.25 * block.obs[:-1, :, 0]
    block.actions[...], block.logp[...], block.dist_inputs[...] = 1, -0.5, 0.0
    block.rewards[...] = rng.integers(-3, 4, block.rewards.shape)
    block.terminateds[...] = block.truncateds[...] = False
    block.truncateds[1, 0] = block.truncateds[2, 1] = block.terminateds[2, 1] = True
    block.finals.append(FinalRows(1, np.array([0]), np.array([[40.0]], np.float32), []))
    block.finals.append(FinalRows(2, np.array([1]), np.array([[44.0]], np.float32), []))
    block.filled = STEPS
    return block


def assemble(columns, postprocess="none", limit=0.0, policy=None, **settings):
    policy = policy or FakePolicy(spaces.Discrete(2))
    block = recorded_block()
    return Assembler(policy, columns, postprocess, settings, limit).assemble(block, EpisodeTracker(NUM_ENVS), [])


def test_only_truncated_rows_that_did_not_terminate_are_bootstrapped_from_their_final_observation():
    policy = FakePolicy(spaces.Discrete(2))
    fragment = assemble([c.OBS, c.BOOTSTRAP_VALUES], policy=policy)
    expected = np.zeros((STEPS, NUM_ENVS), np.float32)
    expected[1, 0] = 1.0 + 0.25 * 40
    np.testing.assert_array_equal(fragment.columns[c.BOOTSTRAP_VALUES], expected)
    assert policy.value_calls == [NUM_ENVS + 1]


def test_advantages_are_those_of_gae_on_the_clipped_rewards():
    block = recorded_block()
    fragment = assemble([c.ADVANTAGES, c.VALUE_TARGETS, c.REWARDS], "gae", limit=1.0, gamma=0.9, lam=0.7)
    rewards = np.clip(block.rewards, -1, 1)
    final_values = np.zeros((STEPS, NUM_ENVS), np.float32)
    final_values[1, 0] = 11.0
    bootstrap = 1.0 + 0.25 * block.obs[-1, :, 0]
    expected = gae(
        rewards, block.values, bootstrap, block.terminateds, block.truncateds, final_values, gamma=0.9, lam=0.7
    )
    np.testing.assert_array_equal(fragment.columns[c.REWARDS], rewards)
    np.testing.assert_array_equal(fragment.columns[c.ADVANTAGES], expected[0])
    np.testing.assert_array_equal(fragment.columns[c.VALUE_TARGETS], expected[1])


@pytest.mark.parametrize(("limit", "largest"), [(0.0, 3.0), (1.0, 1.0), (2.5, 2.5)])
def test_rewards_are_clipped_to_the_range_asked_for(limit, largest):
    """R103."""
    assert np.abs(assemble([c.REWARDS], limit=limit).columns[c.REWARDS]).max() == largest


def test_values_are_needed_only_for_what_uses_them():
    def needs(columns, postprocess="none"):
        return Assembler(FakePolicy(spaces.Discrete(2)), columns, postprocess, {}, 0.0).needs_values

    assert not needs([c.OBS, c.REWARDS])
    assert needs([c.VF_PREDS])
    assert needs([c.BOOTSTRAP_VALUES])
    assert needs([c.ADVANTAGES], "gae")


def test_final_observations_are_extras_only_when_new_obs_can_be_asked_for():
    assert assemble([c.OBS]).extras == {}
    assert set(assemble([c.OBS, c.LAST_OBS]).extras) == {c.LAST_OBS}
    fragment = assemble([c.OBS, c.NEW_OBS])
    assert set(fragment.extras) == {c.LAST_OBS, c.FINAL_INDEX, c.FINAL_OBS}
    assert fragment.extras[c.FINAL_INDEX].dtype == np.int32
    assert fragment.new_obs()[[1, 2], [0, 1], 0].tolist() == [40.0, 44.0]


def test_derived_columns_lie_with_the_recorded_ones_and_leave_in_their_order():
    columns = [c.OBS, c.LAST_OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES]
    block = recorded_block(sent=frozenset(columns))
    policy = FakePolicy(spaces.Discrete(2))
    assembler = Assembler(policy, columns, "gae", {"gamma": 0.9, "lam": 0.7}, 0.0)
    fragment = assembler.assemble(block, EpisodeTracker(NUM_ENVS), [])
    own = [name for name in block.spec.arrays() if name in columns]
    assert list(fragment.columns) == own
    assert all(np.shares_memory(fragment.columns[name], block.obs.base) for name in own)
    scattered = assemble(columns, "gae", gamma=0.9, lam=0.7)
    for name in columns:
        if name != c.LAST_OBS:
            np.testing.assert_array_equal(fragment.columns[name], scattered.columns[name])
