from __future__ import annotations

import itertools

import numpy as np
import pytest

from aiorl.data import columns as c

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

from benchmarks import atari as bench


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cnn")
    bench.export_nature_cnn(directory)
    return bench.load_policy(directory)


def test_the_network_takes_four_frames_and_knows_pongs_actions(policy):
    obs = np.zeros((3, 84, 84, 4), np.uint8)
    dist_inputs, values, _ = policy.graph.run(obs)
    assert dist_inputs.shape == (3, 6)
    assert values.shape == (3,)
    shapes = {weight.shape for weight in policy.spec.weights}
    assert {(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)} <= shapes


def test_subject_and_baseline_count_the_steps_they_took(policy):
    for make in (bench.make_subject, bench.make_baseline):
        advance = make(policy, 2, 5)
        assert [advance(), advance()] == [10, 10]


def test_the_baseline_plays_the_game_that_the_wrappers_show():
    """The pictures and stacks of both are of one kind: same courts, same shift from step to step."""
    emulator, env = bench.Emulator(0), bench.make_env(1)
    stacks = np.zeros((21, 84, 84, 4), np.uint8)
    emulator.reset(stacks[0])
    shown = env.reset([0])[0].copy()
    for before, after in itertools.pairwise(stacks):
        emulator.step(0, before, after)
        shown = env.step(np.array([0])).obs[0].copy()
    np.testing.assert_array_equal(stacks[1:, ..., :-1], stacks[:-1, ..., 1:])
    assert np.count_nonzero(np.abs(stacks[-1].astype(int) - shown) > 8) < 0.05 * shown.size
    env.close()


def test_fragments_of_pong_take_less_than_a_tenth_of_their_size_on_the_wire():
    """B3: and the stacks in them are what random play shows, each row going on from the one before."""
    columns = bench.make_fragment(2, 12, 40)
    obs = columns[c.OBS]
    assert obs.shape == (12, 2, 84, 84, 4)
    np.testing.assert_array_equal(obs[1:, ..., :-1], obs[:-1, ..., 1:])
    np.testing.assert_array_equal(columns[c.LAST_OBS][..., :-1], obs[-1, ..., 1:])
    assert len(np.unique(obs[..., -1].reshape(24, -1), axis=0)) > 12
    ratio, encode_rate, decode_rate = bench.measure_wire(columns, rounds=2)
    assert ratio < bench.TARGET_WIRE / 4
    assert encode_rate > 0
    assert decode_rate > 0
