from __future__ import annotations

import itertools

import numpy as np

from aiorl.data import columns as c
from aiorl.sampling.block import BlockSpec, FinalRows, StepBlock


def make_block(steps=3, num_envs=2, **keep) -> StepBlock:
    kept = {"keep_dist_inputs": True, "keep_values": True} | keep
    spec = BlockSpec(steps, num_envs, (4,), np.float32, (), np.int64, 5, **kept)
    return StepBlock(spec, np.zeros((steps, num_envs, 1), np.float32), [np.ones((num_envs, 2), np.float32)])


def test_rows_for_the_policy_are_views_of_the_columns():
    block = make_block()
    for t, row in enumerate(block.policy_rows(with_logp=True)):
        row.actions[...] = t
        row.values[...] = 10 + t
        row.dist_inputs[...] = 20 + t
        row.logp[...] = 30 + t
    assert block.actions.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert block.values[:, 0].tolist() == [10, 11, 12]
    assert block.dist_inputs[:, 1, 4].tolist() == [20, 21, 22]
    assert block.logp[:, 0].tolist() == [30, 31, 32]


def test_what_is_not_kept_takes_memory_for_one_row_only():
    block = make_block(keep_dist_inputs=False, keep_values=False)
    assert (block.dist_inputs.shape, block.values.shape) == ((1, 2, 5), (1, 2))
    assert len(list(block.policy_rows(with_logp=True))) == 3


def test_valid_is_absent_until_a_row_is_no_transition():
    block = make_block()
    assert block.valid is None
    block.mark_valid(1, np.array([True, False]))
    assert block.valid.tolist() == [[True, True], [True, False], [True, True]]


def test_followers_are_the_next_row_or_the_final_observation_in_order():
    block = make_block()
    block.obs[...] = np.arange(4)[:, None, None]
    block.terminateds[...] = [[False, True], [False, False], [True, False]]
    block.truncateds[...] = [[False, False], [True, False], [False, False]]
    block.finals.append(FinalRows(1, np.array([0]), np.full((1, 4), 77.0), []))
    index, obs = block.followers()
    assert index.tolist() == [[0, 1], [1, 0], [2, 0]]
    assert obs[:, 0].tolist() == [1, 77, 3]


def test_the_state_at_the_first_step_is_a_copy():
    state = [np.zeros((2, 2), np.float32)]
    block = StepBlock(make_block().spec, np.zeros((3, 2, 1), np.float32), state)
    state[0] += 1
    assert not block.states[0][0].any()


def test_what_is_sent_lies_together_integers_first_and_observations_last():
    sent = frozenset({c.OBS, c.LAST_OBS, c.ACTIONS, c.TRUNCATEDS, c.ADVANTAGES, c.REWARDS, c.ACTION_LOGP})
    spec = BlockSpec(3, 2, (4,), np.float32, (), np.int64, 5, True, True, sent)
    names = list(spec.arrays())
    assert names[:6] == [c.ACTIONS, c.TRUNCATEDS, c.ACTION_LOGP, c.REWARDS, c.ADVANTAGES, c.OBS]
    assert set(names[6:]) == {c.TERMINATEDS, c.ACTION_DIST_INPUTS, c.VF_PREDS}
    block = StepBlock(spec, np.zeros((3, 2, 1), np.float32), [])
    assert set(block.derived) == {c.ADVANTAGES}
    parts = [block.logp, block.rewards, block.derived[c.ADVANTAGES], block.obs[:-1], block.obs[-1]]
    for before, after in itertools.pairwise(parts):
        assert after.__array_interface__["data"][0] == before.__array_interface__["data"][0] + before.nbytes


def test_observations_lie_last_of_what_is_sent_whatever_their_dtype_and_float_actions_with_the_floats():
    sent = frozenset({c.OBS, c.ACTIONS, c.TERMINATEDS, c.REWARDS})
    spec = BlockSpec(3, 2, (4,), np.uint8, (2,), np.float32, 5, True, True, sent)
    assert list(spec.arrays())[:4] == [c.TERMINATEDS, c.ACTIONS, c.REWARDS, c.OBS]


def test_blocks_have_memory_of_their_own():
    assert not np.shares_memory(make_block().obs.base, make_block().obs.base)
