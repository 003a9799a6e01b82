"""Frames that are stored once give the same rows as a replay that stores everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from replay_worlds import StackWorld

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec, Dtype
from aiorl.errors import BatchError
from aiorl.learning.replay import frames as frames_module, replay as replay_module, spec
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec

SHAPE = (3, 2, 4)


def make(
    capacity: int,
    stack: int,
    *,
    is_prioritised: bool = False,
    shape: tuple[int, ...] = SHAPE,
    dtype: Dtype = "uint8",
) -> Replay:
    columns = (
        ColumnSpec(c.OBS, shape, dtype),
        ColumnSpec(c.NEW_OBS, shape, dtype),
        ColumnSpec(c.ACTIONS, (), "int32"),
    )
    return Replay(
        ReplaySpec(columns, capacity, Prioritised() if is_prioritised else None, stack), seed=1
    )


def live_rows(replay: Replay) -> dict[int, tuple[Any, Any]]:
    """Return all rows that can be drawn: number -> (observation, observation after its steps)."""
    slots = np.arange(replay.evicted, replay.stored) % replay.spec.capacity
    columns = {
        column.name: np.empty((len(slots), *column.shape), column.dtype)
        for column in replay.spec.columns
    }
    replay._read(slots, columns)
    pairs = zip(columns[c.OBS], columns[c.NEW_OBS], strict=True)
    return dict(zip(columns[c.ACTIONS].tolist(), pairs, strict=True))


def check(replay: Replay, kept: dict[int, tuple[Any, Any]]) -> None:
    """Compare all live rows, which must be the newest ones, and a sample."""
    found = live_rows(replay)
    assert list(found) == list(kept)[len(kept) - len(found) :]
    for number, (obs, new_obs) in found.items():
        assert (obs == kept[number][0]).all()
        assert (new_obs == kept[number][1]).all()
    if len(replay):
        sample = replay.sample(5, num_batches=2, beta=0.5).columns
        for number, obs, new_obs in zip(
            *(sample[n].reshape(10, *sample[n].shape[2:]) for n in (c.ACTIONS, c.OBS, c.NEW_OBS)),
            strict=True,
        ):
            assert int(number) in found
            assert (obs == kept[int(number)][0]).all()
            assert (new_obs == kept[int(number)][1]).all()


@pytest.fixture
def few_spare_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_SPARE_FRAMES", 20)
    monkeypatch.setattr(spec, "RECENT_FRAMES", 0)


@settings(max_examples=40)
@given(data=st.data())
def test_rows_are_those_of_a_replay_that_keeps_everything(data: st.DataObject) -> None:
    stack = data.draw(st.sampled_from([1, 4, 4]), "stack")
    worlds = [
        StackWorld(
            data.draw(st.integers(1, 3)),
            SHAPE,
            seed=data.draw(st.integers(0, 2**16)),
            ends=data.draw(st.sampled_from([0.0, 0.1, 0.6])),
            resets_in_next_step=data.draw(st.booleans()),
            gives_new_obs=data.draw(st.booleans()),
            is_still=data.draw(st.booleans()),
            steps=data.draw(st.integers(1, 4)),
        )
        for _ in range(data.draw(st.integers(1, 3), "worlds"))
    ]
    with pytest.MonkeyPatch.context() as patch:  # so that either frames or rows run out first
        patch.setattr(spec, "_SPARE_FRAMES", data.draw(st.sampled_from([60, 200])))
        patch.setattr(spec, "RECENT_FRAMES", 0)
        replay = make(
            data.draw(st.integers(30, 60)), stack, is_prioritised=data.draw(st.booleans())
        )
    kept: dict[int, tuple[Any, Any]] = {}
    min_group = data.draw(st.sampled_from([1, 256]))
    for _ in range(data.draw(st.integers(1, 12), "fragments")):
        at = data.draw(st.integers(0, len(worlds) - 1))
        world = worlds[at]
        known = len(world.rows)
        arrays = world.fragment(data.draw(st.integers(1, 6)))
        is_new = arrays[c.ACTIONS] >= 0
        arrays[c.ACTIONS] = np.where(is_new, arrays[c.ACTIONS] - known + len(kept), -1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay_module, "_MIN_GROUP", min_group)
            stored = replay.insert_fragment(arrays)
        assert stored == len(world.rows) - known
        kept |= {len(kept) + i: world.rows[known + i] for i in range(stored)}
        check(replay, kept)


def test_each_frame_is_kept_once() -> None:
    """With two environments: 4 frames at the starts, then one for each row, and one for the
    episode's end.
    """
    world = StackWorld(2, SHAPE, seed=0, ends=0.0)
    replay = make(1000, 4)
    frames = replay._frames
    assert frames is not None
    replay.insert_fragment(world.fragment(10))
    at_start = frames.ring.written - 20
    assert 2 <= at_start <= 4  # the same frame throughout, or an empty one before it
    for _ in range(10):
        replay.insert_fragment(world.fragment(10))
    assert frames.ring.written == at_start + 220
    world.fragment(10)  # gets lost on its way
    replay.insert_fragment(world.fragment(10))
    assert frames.ring.written == at_start + 220 + 20 + 2 * 4


def test_a_million_atari_transitions_take_at_most_7500_megabytes() -> None:
    """G4 of issue 11."""
    shape = (84, 84, 4)
    columns = (
        ColumnSpec(c.OBS, shape, "uint8"),
        ColumnSpec(c.NEW_OBS, shape, "uint8"),
        ColumnSpec(c.ACTIONS, (), "int32"),
        ColumnSpec(c.N_STEP_RETURNS),
        ColumnSpec(c.DISCOUNTS),
    )
    needed = ReplaySpec(columns, 1_000_000, Prioritised(), stack=4).bytes_needed
    assert 84 * 84 * 10**6 < needed <= 7.5e9
    assert ReplaySpec(columns, 1_000_000).bytes_needed == 1_000_000 * (8 * 84 * 84 + 12)


@pytest.mark.usefixtures("few_spare_frames")
def test_rows_are_dropped_before_their_frames_are_overwritten() -> None:
    """Every observation starts an episode: four frames a row, and room for about one."""
    rng = np.random.default_rng(0)
    replay = make(50, 4, is_prioritised=True)
    for first in range(0, 200, 10):
        obs = rng.integers(0, 256, (10, 1, *SHAPE)).astype(np.uint8)
        last = rng.integers(0, 256, (1, *SHAPE)).astype(np.uint8)
        actions = np.arange(first, first + 10)[:, None]
        replay.insert_fragment({c.OBS: obs, c.ACTIONS: actions, c.LAST_OBS: last})
        live = live_rows(replay)
        assert list(live) == list(range(first + 10 - len(replay), first + 10))
        assert (live[first + 3][0] == obs[3, 0]).all()
        priorities = replay._priorities
        assert priorities is not None
        assert np.count_nonzero(priorities.tree.priorities) == len(replay)
    assert 10 <= len(replay) < 20
    assert replay.evicted == 200 - len(replay)


@pytest.mark.usefixtures("few_spare_frames")
def test_a_fragment_with_too_many_frames_is_stored_with_its_newest_steps() -> None:
    replay = make(50, 4, is_prioritised=True)
    obs = np.random.default_rng(0).integers(0, 256, (50, 1, *SHAPE)).astype(np.uint8)
    arrays = {c.OBS: obs, c.ACTIONS: np.arange(50)[:, None], c.LAST_OBS: obs[0]}
    replay.check_fragment(arrays)
    stored = replay.insert_fragment(arrays | {c.PRIORITIES: np.ones((50, 1))})
    live = live_rows(replay)
    assert list(live) == list(range(50 - stored, 50)), "72 frames are enough for 18 stacks"
    assert 8 <= stored <= 16
    assert all((live[number][0] == obs[number, 0]).all() for number in live)


@pytest.mark.usefixtures("few_spare_frames")
def test_a_step_with_too_many_frames_is_refused_before_anything_is_stored() -> None:
    replay = make(50, 4)
    obs = np.zeros((1, 7, *SHAPE), np.uint8)
    arrays = {c.OBS: obs, c.ACTIONS: np.zeros((1, 7), np.int64), c.LAST_OBS: obs[0]}
    with pytest.raises(BatchError, match=" 6 "):
        replay.check_fragment(arrays)


@pytest.mark.usefixtures("few_spare_frames")
def test_a_fragment_with_too_many_final_observations_is_refused_before_anything_is_stored() -> None:
    """As from a malicious worker: the observations would take more frames than there are, without
    any limit by rows.
    """
    replay = make(50, 4)
    obs = np.zeros((1, 1, *SHAPE), np.uint8)
    finals = np.random.default_rng(0).integers(0, 256, (20, *SHAPE)).astype(np.uint8)
    arrays = {c.OBS: obs, c.ACTIONS: np.zeros((1, 1), np.int64), c.LAST_OBS: obs[0]}
    with pytest.raises(BatchError, match="final_index"):
        replay.check_fragment(
            arrays | {c.FINAL_INDEX: np.zeros((20, 2), np.int32), c.FINAL_OBS: finals}
        )


@pytest.mark.parametrize("min_group", [1, 256])
@pytest.mark.usefixtures("few_spare_frames")
def test_rows_that_share_older_frames_are_not_kept_longer_than_others(
    min_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers alternate, so that frames shared by a worker's row are older than the other
    worker's previous row.
    """
    monkeypatch.setattr(replay_module, "_MIN_GROUP", min_group)
    worlds = [StackWorld(1, SHAPE, seed=seed, ends=0.5) for seed in range(2)]
    replay, kept = make(200, 4), dict[int, tuple[Any, Any]]()
    for turn in range(300):
        world = worlds[turn % 2]
        known = len(world.rows)
        arrays = world.fragment(1)
        arrays[c.ACTIONS] += len(kept) - known
        replay.insert_fragment(arrays)
        kept[len(kept)] = world.rows[known]
        if turn > 100 and not turn % 3:
            check(replay, kept)
    assert len(replay) < 200  # limited by frames


@pytest.mark.usefixtures("few_spare_frames")
def test_frames_that_the_fragment_itself_overwrites_are_not_shared() -> None:
    rng = np.random.default_rng(0)
    replay = make(127, 4)
    assert replay.spec.num_frames == 152

    def insert(obs: Any, first: int) -> None:
        actions = np.arange(first, first + len(obs) - 1)[:, None]
        replay.insert_fragment({c.OBS: obs[:-1, None], c.ACTIONS: actions, c.LAST_OBS: obs[-1:]})

    obs = rng.integers(0, 256, (39, *SHAPE)).astype(np.uint8)
    insert(obs[:2], 0)
    still = np.full((2, *SHAPE), 7, np.uint8)
    still[1, ..., -1] = 8
    insert(still, 1)
    insert(obs[1:], 2)  # there is room for only 38 observations of 4 frames each
    assert list(live_rows(replay)) == list(range(2, 39))
    for number, (found, behind) in live_rows(replay).items():
        assert (found == obs[number - 1]).all()
        assert (behind == obs[number]).all()


def test_observations_with_the_same_checksum_are_not_confused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames_module.zlib, "crc32", lambda data: 0)
    replay = make(200, 4)
    worlds = [StackWorld(num, SHAPE, seed=num, is_still=True) for num in (1, 2, 1)]
    kept: dict[int, tuple[Any, Any]] = {}
    for turn in range(40):
        world = worlds[turn * 7 % 3]
        known = len(world.rows)
        arrays = world.fragment(4)
        arrays[c.ACTIONS] += len(kept) - known
        count = replay.insert_fragment(arrays)
        kept |= {len(kept) + i: world.rows[known + i] for i in range(count)}
        check(replay, kept)


def test_float_observations_are_shared_by_the_rows_before_and_after_them() -> None:
    shape = (6,)
    replay = make(100, 1, shape=shape, dtype="float32")
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(5, 2, 6))  # float64, as a peer can send it
    arrays = {
        c.OBS: obs,
        c.ACTIONS: np.arange(10).reshape(5, 2),
        c.LAST_OBS: rng.normal(size=(2, 6)),
    }
    replay.insert_fragment(arrays)
    frames = replay._frames
    assert frames is not None
    assert frames.ring.written == 12
    following = np.concatenate([obs[1:], arrays[c.LAST_OBS][None]]).astype(np.float32)
    for number, (found, behind) in live_rows(replay).items():
        assert (found == obs.reshape(10, 6)[number].astype(np.float32)).all()
        assert (behind == following.reshape(10, 6)[number]).all()
    replay.insert_fragment({**arrays, c.OBS: np.concatenate([arrays[c.LAST_OBS][None], obs[1:]])})
    assert frames.ring.written == 12 + 10
