from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.sampling.episodes import EpisodeTracker


def slow_tracker(rewards, dones, valid):
    """One row at a time, with dicts."""
    steps, num_envs = rewards.shape
    length, total = [0] * num_envs, [0.0] * num_envs
    finished = []
    for t in range(steps):
        for n in range(num_envs):
            if not valid[t, n]:
                continue
            length[n] += 1
            total[n] += float(rewards[t, n])
            if dones[t, n]:
                finished.append((length[n], total[n]))
                length[n], total[n] = 0, 0.0
    return finished


@st.composite
def runs(draw):
    steps, num_envs = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    dones = rng.random((steps, num_envs)) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    valid = np.ones((steps, num_envs), bool)
    if draw(st.booleans()):  # as NEXT_STEP environments: the row after an end is no transition
        for n in range(num_envs):
            for t in range(1, steps):
                if dones[t - 1, n]:
                    dones[t, n], valid[t, n] = False, False
    rewards = rng.integers(-3, 4, (steps, num_envs)).astype(np.float32) * valid
    cuts = sorted(draw(st.sets(st.integers(1, steps), max_size=5)) | {steps})
    return rewards, dones, valid, cuts


@settings(max_examples=300, deadline=None)
@given(runs())
def test_episodes_are_those_of_a_row_by_row_count_however_the_run_is_cut(run):
    """R91: lengths and returns, also across blocks."""
    rewards, dones, valid, cuts = run
    tracker = EpisodeTracker(rewards.shape[1])
    lengths, returns = [], []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        part = slice(start, end)
        tracker.advance(rewards[part], dones[part], None if valid.all() else valid[part])
        finished = tracker.take_finished()
        lengths += finished.lengths.tolist()
        returns += finished.rewards.tolist()
    assert list(zip(lengths, returns, strict=True)) == slow_tracker(rewards, dones, valid)


def test_no_episode_yet_gives_empty_columns():
    finished = EpisodeTracker(2).take_finished()
    assert (finished.lengths.dtype, finished.rewards.dtype) == (np.int32, np.float64)
    assert len(finished.lengths) == len(finished.rewards) == 0


def test_returns_are_summed_in_double_precision():
    tracker = EpisodeTracker(1)
    rewards = np.full((100_000, 1), 0.1, np.float32)
    dones = np.zeros((100_000, 1), bool)
    dones[-1] = True
    tracker.advance(rewards, dones)
    assert abs(tracker.take_finished().rewards[0] - 100_000 * float(np.float32(0.1))) < 1e-7
