"""Whole episodes and their statistics from recorded steps in lockstep; fragments are tested with
lockstep.
"""

from __future__ import annotations

import logging

import numpy as np
from hypothesis import given, settings, strategies as st

from aiorl.data import columns as c
from aiorl.sampling.fragments import EpisodeCollector, EpisodeTracker


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    num_envs=st.integers(1, 4),
    blocks=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8),
    odds=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_every_row_is_returned_once_with_its_episode_and_in_order(seed, num_envs, blocks, odds):
    rng = np.random.default_rng(seed)
    collector = EpisodeCollector(num_envs)
    sent: list[list[list[int]]] = [[[]] for _ in range(num_envs)]  # env -> episodes -> row numbers
    got: list[list[list[int]]] = [[] for _ in range(num_envs)]
    number = 0
    for steps, take in blocks:
        dones = rng.random((steps, num_envs)) < odds
        valid = rng.random((steps, num_envs)) < 0.9
        dones &= valid
        rows = np.arange(number, number + steps * num_envs).reshape(steps, num_envs)
        number += steps * num_envs
        for t in range(steps):
            for n in range(num_envs):
                if valid[t, n]:
                    sent[n][-1].append(int(rows[t, n]))
                if dones[t, n]:
                    sent[n].append([])
        env = np.broadcast_to(np.arange(num_envs), rows.shape)
        columns = {
            "row": rows,
            "env": env,
            c.VALID: valid,
            c.TERMINATEDS: dones,
            c.TRUNCATEDS: dones,
        }
        collector.add(columns, -rows[dones])
        if take and collector.ready_rows:
            taken, finals = collector.take()
            flat = {name: column[:, 0] for name, column in taken.items()}
            assert collector.ready_rows == 0
            ends = np.flatnonzero(flat[c.DONES])
            np.testing.assert_array_equal(finals, -flat["row"][ends])
            for part in np.split(np.arange(len(flat["row"])), ends + 1)[:-1]:
                envs = set(flat["env"][part].tolist())
                assert len(envs) == 1
                got[envs.pop()].append(flat["row"][part].tolist())
    for n in range(num_envs):
        assert sent[n][: len(got[n])] == got[n]
        if blocks[-1][1]:
            assert len(got[n]) == len(sent[n]) - 1


def block(steps, *ends, num_envs=2, valid=None):
    """Return steps in which nothing happens except ends of episodes at (t, n)."""
    dones = np.zeros((steps, num_envs), np.bool_)
    for t, n in ends:
        dones[t, n] = True
    columns = {c.TERMINATEDS: dones, c.TRUNCATEDS: np.zeros_like(dones)}
    return columns if valid is None else columns | {c.VALID: valid}


def test_a_warning_is_logged_once_when_very_many_rows_of_an_environment_wait(caplog):
    """R94: rows of one environment's unfinished episode, with the same threshold as in general
    sampling.
    """
    collector = EpisodeCollector(2)
    with caplog.at_level(logging.WARNING):
        for number in range(10):  # 1000 more rows of environment 0 wait each time
            collector.add(block(1000, (999, 0), (number * 50, 1)), None)
        collector.take()
        resets = np.ones((3000, 2), np.bool_)
        resets[:, 1] = False
        collector.add(block(3000, (2999, 0), valid=resets), None)
        collector.add(block(4450), None)
        assert caplog.text == ""
        collector.add(block(100), None)
        collector.add(block(1000), None)
    (said,) = caplog.messages
    assert {"5000", "1"} <= set(said.split())


def slow_tracker(rewards, dones, valid):
    """Count row by row, with dicts."""
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
    if draw(st.booleans()):  # like NEXT_STEP environments: the row after an end is not a transition
        for n in range(num_envs):
            for t in range(1, steps):
                if dones[t - 1, n]:
                    dones[t, n], valid[t, n] = False, False
    rewards = rng.integers(-3, 4, (steps, num_envs)).astype(np.float32) * valid
    cuts = sorted(draw(st.sets(st.integers(1, steps), max_size=5)) | {steps})
    return rewards, dones, valid, cuts


@settings(max_examples=150)
@given(runs())
def test_episodes_equal_those_of_a_row_by_row_count_for_any_cuts(run):
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


def test_returns_are_summed_in_double_precision():
    tracker = EpisodeTracker(1)
    rewards = np.full((100_000, 1), 0.1, np.float32)
    dones = np.zeros((100_000, 1), bool)
    dones[-1] = True
    tracker.advance(rewards, dones)
    assert abs(tracker.take_finished().rewards[0] - 100_000 * float(np.float32(0.1))) < 1e-7
