from __future__ import annotations

import logging

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.data import columns as c
from aiorl.sampling.complete import EpisodeCollector, Recorded


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_envs=st.integers(1, 4),
    blocks=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8),
    odds=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_every_row_comes_out_once_with_its_episode_and_in_order(seed, num_envs, blocks, odds):
    rng = np.random.default_rng(seed)
    collector = EpisodeCollector()
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
        index = np.argwhere(dones)
        env = np.broadcast_to(np.arange(num_envs), rows.shape)
        columns = {"row": rows, "env": env, c.VALID: valid, c.DONES: dones}
        collector.add(Recorded(columns, dones, index, -rows[dones][:, None]))
        if take and collector.ready_rows:
            taken = collector.take()
            assert collector.ready_rows == 0
            flat = {name: column[:, 0] for name, column in taken.columns.items()}
            ends = np.flatnonzero(flat[c.DONES])
            np.testing.assert_array_equal(taken.final_rows, ends)
            np.testing.assert_array_equal(taken.final_obs[:, 0], -flat["row"][ends])
            for part in np.split(np.arange(len(flat["row"])), ends + 1)[:-1]:
                envs = set(flat["env"][part].tolist())
                assert len(envs) == 1
                got[envs.pop()].append(flat["row"][part].tolist())
    for n in range(num_envs):
        assert sent[n][: len(got[n])] == got[n]
        if blocks[-1][1]:
            assert len(got[n]) == len(sent[n]) - 1


def block(steps, *ends, num_envs=2, valid=None):
    """Steps in which nothing happens but for the ends of episodes at (t, n)."""
    dones = np.zeros((steps, num_envs), np.bool_)
    for t, n in ends:
        dones[t, n] = True
    columns = {"row": np.zeros((steps, num_envs))}
    return Recorded(columns if valid is None else columns | {c.VALID: valid}, dones, None, None)


def test_a_warning_comes_once_when_very_many_rows_of_an_environment_wait(caplog):
    """R94: rows of one environment's unfinished episode, as many as in general sampling."""
    collector = EpisodeCollector()
    with caplog.at_level(logging.WARNING):
        for number in range(10):  # 1000 rows of environment 0 wait, ever again
            collector.add(block(1000, (999, 0), (number * 50, 1)))
        collector.take()
        resets = np.ones((3000, 2), np.bool_)
        resets[:, 1] = False
        collector.add(block(3000, (2999, 0), valid=resets))
        collector.add(block(4450))
        assert collector.kept_steps > 5000
        assert caplog.text == ""
        collector.add(block(100))
        collector.add(block(1000))
    assert caplog.text.count("More than 5000 rows of environment 1 wait for their episode's end") == 1
    assert "set horizon" in caplog.text


def test_adding_steps_to_a_long_episode_costs_the_same_however_long_it_is():
    """R94: what is kept is not copied before it is taken."""
    collector = EpisodeCollector()
    blocks = [block(10) for _ in range(50)]
    for one in blocks:
        collector.add(one)
    kept = [columns["row"] for columns, _ in collector._blocks]
    assert all(column is one.columns["row"] for column, one in zip(kept, blocks, strict=True))
    collector.add(block(10, (9, 0), (3, 1)))
    assert collector.ready_rows == 510 + 504
    assert len(collector.take().columns["row"]) == 510 + 504
    assert (collector.ready_rows, collector.kept_steps) == (0, 6)
