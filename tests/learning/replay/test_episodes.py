"""A replay that knows episodes, compared with plain lists of the rows of each episode."""

from __future__ import annotations

import json
import tracemalloc
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from replay_worlds import StackWorld

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import BatchError, CheckpointError
from aiorl.learning.replay.episodes import EpisodeReplay
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.sequences import Sequences, SequenceShape
from aiorl.learning.replay.spec import EPISODE_COLUMNS, ReplaySpec

SHAPE = (2, 2, 4)
COLUMNS = (
    ColumnSpec(c.OBS, SHAPE, "uint8"),
    ColumnSpec(c.NEW_OBS, SHAPE, "uint8"),
    ColumnSpec("no", (), "int32"),
)
Fragment = dict[str, NDArray[Any]]


def make(capacity: int, *, stack: int = 0, is_prioritised: bool = False, **options: Any) -> Any:
    priorities = Prioritised() if is_prioritised else None
    return EpisodeReplay(ReplaySpec(COLUMNS, capacity, priorities, stack), seed=0, **options)


class World:
    """Environments of one worker; each row has a number of its own, and each environment is an
    agent.
    """

    def __init__(self, index: int, num_envs: int, *, resets_in_next_step: bool = False) -> None:
        self._world = StackWorld(
            num_envs, SHAPE, seed=index, ends=0.15, resets_in_next_step=resets_in_next_step
        )
        self._first_number = 100_000 * index
        self._index = index
        self._episodes = [0] * num_envs
        self._steps = [0] * num_envs

    def fragment(self, length: int) -> Fragment:
        arrays = self._world.fragment(length)
        numbers = arrays.pop(c.ACTIONS)
        ended = {(int(t), int(n)) for t, n in arrays.get(c.FINAL_INDEX, ())}
        columns = {name: np.zeros(numbers.shape, np.int64) for name in EPISODE_COLUMNS}
        for t, n in np.ndindex(numbers.shape):
            if numbers[t, n] < 0:
                self._begin(n)
                continue
            columns[c.EPS_ID][t, n] = 10 * self._episodes[n] + self._index
            columns[c.AGENT_INDEX][t, n] = n
            columns[c.T][t, n] = self._steps[n]
            self._steps[n] += 1
            if (t, n) in ended:
                self._begin(n)
        return {**arrays, **columns, "no": self._first_number + numbers}

    def _begin(self, env: int) -> None:
        self._episodes[env] += 1
        self._steps[env] = 0


def polled(fragment: Fragment) -> Fragment:
    """Return the transitions of a fragment one by one, [B, 1], trajectory by trajectory."""
    new_obs = np.concatenate([fragment[c.OBS][1:], fragment[c.LAST_OBS][None]])
    if c.FINAL_INDEX in fragment:
        new_obs[tuple(fragment[c.FINAL_INDEX].T)] = fragment[c.FINAL_OBS]
    valid = fragment.get(c.VALID, np.ones(new_obs.shape[:2], bool)).T
    names = (c.OBS, c.N_STEPS, "no", *EPISODE_COLUMNS)
    columns = {name: fragment[name] for name in names} | {c.NEW_OBS: new_obs}
    return {name: column.swapaxes(0, 1)[valid][:, None] for name, column in columns.items()}


class Lists:
    """The oracle: numbers of all rows of each episode, and of all rows in the order of storing."""

    def __init__(self) -> None:
        self.episodes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.stored: list[int] = []
        self.t: dict[int, int] = {}

    def add(self, fragment: Fragment, capacity: int) -> None:
        length, num_envs = fragment["no"].shape
        valid = fragment.get(c.VALID, np.ones((length, num_envs), bool))
        for n in range(num_envs):
            for t in range(max(0, length - capacity // num_envs), length):
                if valid[t, n]:
                    name = int(fragment[c.EPS_ID][t, n]), int(fragment[c.AGENT_INDEX][t, n])
                    self.episodes[name].append(int(fragment["no"][t, n]))
                    self.stored.append(int(fragment["no"][t, n]))
                    self.t[int(fragment["no"][t, n])] = int(fragment[c.T][t, n])

    def until_gap(self, numbers: list[int]) -> list[int]:
        """Return the first of these rows that no lost step parts."""
        first = self.t[numbers[0]]
        return [no for place, no in enumerate(numbers) if self.t[no] == first + place]


def check(replay: Any, lists: Lists) -> None:
    ids = np.arange(replay.evicted, replay.stored)
    numbers = replay.read(ids)["no"].tolist()
    assert numbers == lists.stored[len(lists.stored) - len(replay) :]
    at = dict(zip(numbers, ids.tolist(), strict=True))
    parts = [[at[no] for no in rows if no in at] for rows in lists.episodes.values()]
    following = replay.following(ids, 3)
    later = replay.later(ids)
    checked = 0
    for part in parts:
        for place, row in enumerate(part):
            assert replay.episode(row).tolist() == part
            rest = part[place:]
            expected = lists.until_gap([numbers[row - replay.evicted] for row in rest])
            expected = [at[no] for no in expected]
            assert following[row - replay.evicted].tolist() == [*expected, -1, -1][:3]
            assert later[row - replay.evicted] in rest
            checked += 1
    assert checked == len(replay)


@settings(max_examples=60)
@given(
    capacity=st.integers(4, 60),
    stack=st.sampled_from([0, 1, 4]),
    is_prioritised=st.booleans(),
    resets_in_next_step=st.booleans(),
    turns=st.lists(
        st.tuples(
            st.integers(0, 2),  # worker
            st.integers(1, 9),  # steps
            st.sampled_from(["level", "level", "polled", "lost", "restored"]),
        ),
        min_size=1,
        max_size=25,
    ),
)
def test_rows_of_an_episode_are_those_of_a_plain_list(
    capacity: int,
    stack: int,
    is_prioritised: bool,
    resets_in_next_step: bool,
    turns: list[tuple[int, int, str]],
) -> None:
    """Whatever comes in between, is lost, evicted or restored from a checkpoint."""
    worlds = [
        World(index, index + 1, resets_in_next_step=resets_in_next_step) for index in range(3)
    ]
    replay = make(capacity, stack=stack, is_prioritised=is_prioritised)
    lists = Lists()
    for index, length, way in turns:
        fragment = worlds[index].fragment(length)
        if way == "lost":
            continue
        if way == "restored":
            snapshot = replay.snapshot()
            values = json.loads(json.dumps(snapshot.values))
            replay = make(capacity, stack=stack, is_prioritised=is_prioritised)
            replay.restore(values, list(snapshot.pieces(500)))
        if way == "polled":
            fragment = polled(fragment)
            if not len(fragment["no"]):
                continue
        replay.check_fragment(fragment)
        replay.insert_fragment(fragment)
        lists.add(fragment, capacity)
        check(replay, lists)


def rows(first: int, count: int, *, episode: Any = 1, t: Any = None) -> Fragment:
    """Return rows of one environment, whose steps are their numbers unless they are given."""
    numbers = np.arange(first, first + count)[:, None]
    zeros = np.zeros((count, 1, *SHAPE), np.uint8)
    return {
        **{c.OBS: zeros, c.NEW_OBS: zeros, "no": numbers, c.AGENT_INDEX: np.zeros_like(numbers)},
        c.EPS_ID: np.broadcast_to(episode, numbers.shape),
        c.T: numbers if t is None else np.array(t)[:, None],
    }


@pytest.mark.parametrize(("length", "count"), [(1, 15_000), (10**6, 50_000)])
def test_episodes_that_were_evicted_take_no_memory(length: int, count: int) -> None:
    """Nor do the evicted rows of an endless one."""
    replay = make(500)
    used = []
    for first in range(0, count, 250):
        numbers = np.arange(first, first + 250)[:, None]
        replay.insert_fragment(rows(first, 250, episode=numbers // length))
        if first == 2000:
            tracemalloc.start()
        if first > 2000:
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    first = max(count - 500, count - length)
    assert replay.episode(count - 1).tolist() == list(range(first, count))
    assert max(used) < 500_000


def test_rows_that_come_again_begin_another_episode() -> None:
    """For example stored experience that was evicted: a row is followed by later ones alone."""
    replay = make(100)
    for _ in range(2):
        replay.insert_fragment(rows(0, 4))
    replay.insert_fragment(rows(0, 8, t=[5, 6, 7, 8, 5, 6, 7, 8]))
    episodes = [replay.episode(row).tolist() for row in range(replay.stored)]
    assert episodes[:4] == 4 * [[0, 1, 2, 3]]
    assert episodes[4:12] == 8 * [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert episodes[12:] == 4 * [[12, 13, 14, 15]]


def test_a_sequence_ends_where_a_lost_fragment_was_but_not_where_an_agent_was_not_observed() -> (
    None
):
    replay, restored = make(100), make(100)
    replay.insert_fragment(rows(0, 4, t=[0, 1, 3, 4]))
    replay.insert_fragment(rows(0, 2, t=[5, 6]))
    replay.insert_fragment(rows(0, 3, t=[100, 101, 102]))
    snapshot = replay.snapshot()
    restored.restore(snapshot.values, list(snapshot.pieces()))
    for each in (replay, restored):
        assert each.following(np.array([2, 5, 6]), 6).tolist() == [
            [2, 3, 4, 5, -1, -1],
            [5, -1, -1, -1, -1, -1],
            [6, 7, 8, -1, -1, -1],
        ]
        assert each.episode(0).tolist() == list(range(9))


def filled(replay: Any, *, turns: int = 12) -> World:
    world = World(1, 2)
    for _ in range(turns):
        replay.insert_fragment(world.fragment(5))
    return world


def test_later_rows_are_drawn_uniformly() -> None:
    replay = make(200)
    filled(replay)
    row = max(range(replay.stored), key=lambda row: len(replay.following(np.array([row]), 9)[0]))
    rest = replay.episode(row)[replay.episode(row) >= row]
    drawn = replay.later(np.full(4000, row))
    numbers, counts = np.unique(drawn, return_counts=True)
    assert numbers.tolist() == rest.tolist()
    np.testing.assert_allclose(counts / 4000, 1 / len(rest), atol=0.05)


def test_a_function_changes_rows_by_what_their_episode_had_later() -> None:
    pairs: list[tuple[int, int]] = []

    def relabel(rows: Any, later: Any, rng: Any) -> Any:
        pairs.extend(zip(rows["no"].tolist(), later["no"].tolist(), strict=True))
        return {"no": 10 * later["no"] + rng.integers(10, size=len(rows["no"]))}

    replay, plain = make(200, relabel=relabel), make(200)
    filled(replay)
    filled(plain)
    sample = replay.sample(8, num_batches=3)
    assert (sample.columns["no"] // 10).reshape(-1).tolist() == [later for _, later in pairs]
    assert (sample.columns[c.OBS] == plain.read(sample.ids)[c.OBS]).all()
    episode_of = {
        int(no): set(plain.read(plain.episode(row))["no"].tolist())
        for row, no in enumerate(plain.read(np.arange(plain.stored))["no"])
    }
    for number, later in pairs:
        assert later >= number
        assert later in episode_of[number]
    assert any(later > number for number, later in pairs)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"no": np.zeros(3, np.int32)}, "no"),
        ({"no": np.zeros(8, np.float32)}, "no"),
        ({"no": np.full(8, 1 << 40)}, "no"),
        ({"no": [0] * 8}, "no"),
        ({"no": 0}, "no"),
        ({"no": np.int32(0)}, "no"),
        ({"weight": np.full(8, np.nan, np.float32)}, "weight"),
        ({"weight": np.full(8, 1e300)}, "weight"),
        ({"goal": np.zeros(8, np.float32)}, "goal"),
        (None, "relabel"),
        (np.zeros(8), "relabel"),
    ],
)
def test_changed_rows_that_do_not_fit_are_refused(changed: Any, name: str) -> None:
    columns = (*COLUMNS, ColumnSpec("weight"))
    replay = EpisodeReplay(
        ReplaySpec(columns, 200), seed=0, relabel=lambda rows, later, rng: changed
    )
    replay.insert_fragment({**rows(0, 20), "weight": np.ones((20, 1), np.float32)})
    with pytest.raises(BatchError, match="relabel") as caught:
        replay.sample(8)
    assert caught.value.column == name


@pytest.mark.parametrize("name", EPISODE_COLUMNS)
@pytest.mark.parametrize("column", [None, np.zeros((5, 1), np.int64), np.zeros((5, 2), np.float32)])
def test_a_fragment_that_does_not_name_the_episodes_of_its_rows_is_refused(
    name: str, column: Any
) -> None:
    fragment = World(1, 2).fragment(5)
    del fragment[name]
    if column is not None:
        fragment[name] = column
    with pytest.raises(BatchError) as caught:
        make(50).check_fragment(fragment)
    assert caught.value.column == name


def relabelled(rows: Any, later: Any, rng: Any) -> Any:
    return {"no": later["no"]}


def test_a_restored_replay_draws_and_relabels_the_same_rows() -> None:
    replay, other = make(40, relabel=relabelled), make(40, relabel=relabelled)
    world = filled(replay)
    replay.sample(8)
    snapshot = replay.snapshot()
    other.restore(json.loads(json.dumps(snapshot.values)), reversed(list(snapshot.pieces(200))))
    for _ in range(10):
        fragment = world.fragment(3)
        drawn = []
        for restored in (replay, other):
            restored.insert_fragment(fragment)
            drawn.append(restored.sample(8).columns["no"].tolist())
        assert drawn[0] == drawn[1]


def test_a_checkpoint_without_episodes_is_restored_as_rows_that_have_no_later_ones() -> None:
    """Its rows are from an earlier version, or from a replay that didn't know episodes."""
    plain, replay = Replay(ReplaySpec(COLUMNS, 40), seed=0), make(40)
    world = filled(plain)
    snapshot = plain.snapshot()
    replay.restore(snapshot.values, list(snapshot.pieces()))
    rows = np.arange(plain.evicted, plain.stored)
    assert replay.later(rows).tolist() == rows.tolist()
    replay.insert_fragment(world.fragment(6))
    for row in range(replay.evicted, plain.stored):
        assert replay.episode(row).tolist() == [row]
    assert any(len(replay.episode(row)) > 2 for row in range(plain.stored, replay.stored))


def test_a_replay_that_knows_no_episodes_ignores_those_of_a_checkpoint() -> None:
    replay, plain = make(40), Replay(ReplaySpec(COLUMNS, 40), seed=0)
    filled(replay)
    snapshot = replay.snapshot()
    plain.restore(snapshot.values, list(snapshot.pieces()))
    assert (plain.sample(20).columns["no"] == replay.sample(20).columns["no"]).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("episodes", lambda array: array[:-1]),
        ("episodes", lambda array: array.astype(np.float64)),
        ("episodes", lambda array: array + 1000),
        ("episode_names", lambda array: array[:, :3]),
        ("episode_names", lambda array: array[:1]),
        ("episode_gaps", lambda array: array[:-1]),
        ("episode_gaps", lambda array: array.astype(np.int64)),
    ],
)
def test_damaged_episodes_of_a_checkpoint_are_refused(name: str, change: Any) -> None:
    replay = make(40)
    filled(replay)
    snapshot = replay.snapshot()
    pieces = [
        (piece, first, change(array) if piece == name else array)
        for piece, first, array in snapshot.pieces()
    ]
    with pytest.raises(CheckpointError):
        make(40).restore(snapshot.values, pieces)


def test_sequences_of_an_episode_follow_each_other() -> None:
    """Two environments, whose episodes end after 7 and after 12 steps."""
    columns = (
        ColumnSpec(c.OBS, (1,)),
        ColumnSpec(c.NEW_OBS, (1,)),
        ColumnSpec(c.ACTIONS, (), "int32"),
    )
    flags = (ColumnSpec(c.REWARDS), ColumnSpec(c.TERMINATEDS), ColumnSpec(c.TRUNCATEDS))
    cutter = Sequences(SequenceShape(3, 1, 1), (*columns, *flags), (), gamma=0.9, n=1)
    replay = EpisodeReplay(ReplaySpec(cutter.columns, 50), seed=0)
    steps = np.tile(np.arange(12)[:, None], (1, 2))
    ended = np.array([[6, 11]]) == steps
    fragment = {
        c.OBS: steps[..., None].astype(np.float32),
        c.NEW_OBS: steps[..., None].astype(np.float32) + 1,
        c.ACTIONS: steps,
        c.REWARDS: np.ones((12, 2), np.float32),
        c.TERMINATEDS: ended,
        c.TRUNCATEDS: np.zeros_like(ended),
        c.EPS_ID: np.where(steps > [[6, 11]], 3, [[1, 2]]),
        c.AGENT_INDEX: np.zeros_like(steps),
        c.T: steps - 7 * (steps > [[6, 11]]),
    }
    cutter.check(fragment)
    replay.insert_fragment(cutter.cut(fragment))
    episodes = {tuple(replay.episode(row).tolist()) for row in range(replay.stored)}
    starts = [
        replay.read(np.array(episode))[c.ACTIONS][:, 0].tolist() for episode in sorted(episodes)
    ]
    assert starts == [[0, 2, 4], [7, 8, 10], [0, 2, 4, 6, 8, 10]]
    del fragment[c.T]
    with pytest.raises(BatchError, match=c.T):
        cutter.check(fragment)
