from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.data import columns as c
from aiorl.sampler.complete import EpisodeCollector, Recorded


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
