"""Replay of plain columns: which rows are stored, drawn and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from replay_worlds import StackWorld, insert

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import BatchError
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec

COLUMNS = (
    ColumnSpec(c.OBS, (3,)),
    ColumnSpec(c.NEW_OBS, (3,)),
    ColumnSpec(c.ACTIONS, (), "int32"),
    ColumnSpec(c.N_STEP_RETURNS),
    ColumnSpec("picture", (2, 2), "uint8"),
)


def make(
    capacity: int = 10, *, alpha: float | None = None, seed: int = 0, epsilon: float = 0.0
) -> Replay:
    priorities = None if alpha is None else Prioritised(alpha, epsilon)
    return Replay(ReplaySpec(COLUMNS, capacity, priorities), seed=seed)


def rows(first: int, count: int) -> dict[str, Any]:
    """Return rows whose columns follow from their numbers."""
    number = np.arange(first, first + count)
    return {
        c.OBS: (number[:, None] + np.array([0.0, 0.25, 0.5])).astype(np.float32),
        c.NEW_OBS: (number[:, None] + np.array([1.0, 1.25, 1.5])).astype(np.float32),
        c.ACTIONS: number,
        c.N_STEP_RETURNS: -number.astype(np.float64),
        "picture": np.broadcast_to((number % 256).astype(np.uint8)[:, None, None], (count, 2, 2)),
        "unknown": number,
    }


def check_rows(columns: dict[str, Any]) -> np.ndarray:
    """Compare sampled rows with the expected ones; return their numbers."""
    number = columns[c.ACTIONS]
    flat = number.reshape(-1)
    expected = rows(0, int(flat.max()) + 1)
    for column in COLUMNS:
        found = columns[column.name]
        assert found.dtype == column.dtype
        assert found.shape == (*number.shape, *column.shape)
        assert found.flags.c_contiguous
        assert (
            found.reshape(-1, *column.shape) == expected[column.name][flat].astype(column.dtype)
        ).all()
    return flat


@settings(max_examples=60)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.sampled_from([None, 0.5]))
def test_the_newest_rows_are_kept_and_the_columns_of_a_row_belong_together(
    counts: list[int], alpha: float | None
) -> None:
    replay = make(alpha=alpha)
    total = 0
    for count in counts:
        if count:
            assert insert(replay, rows(total, count)) == count
        total += count
    assert (len(replay), replay.stored, replay.evicted) == (
        min(10, total),
        total,
        max(0, total - 10),
    )
    if total:
        sample = replay.sample(50, num_batches=4, beta=0.4)
        numbers = check_rows(sample.columns)
        assert set(numbers) == set(range(max(0, total - 10), total))
        assert (sample.ids.reshape(-1) == numbers).all()
        assert replay.sampled == 200


def test_arrays_of_a_sample_are_valid_until_the_second_sample_after_it() -> None:
    replay = make(1000)
    insert(replay, rows(0, 1000))
    first = replay.sample(50).columns
    before = first[c.OBS].copy()
    second = replay.sample(50).columns
    assert (first[c.OBS] == before).all()
    third = replay.sample(50).columns
    assert third[c.OBS].ctypes.data == first[c.OBS].ctypes.data
    assert second[c.OBS].ctypes.data != first[c.OBS].ctypes.data


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_rows_are_drawn_in_proportion_to_their_priorities(alpha: float) -> None:
    replay = make(alpha=alpha)
    errors = np.array([0.125, 0.25, 0.5, 1.0, 0.0])
    insert(replay, rows(0, 5) | {c.PRIORITIES: errors})
    insert(replay, rows(5, 5) | {c.PRIORITIES: -errors})  # the absolute error counts
    sample = replay.sample(1000, num_batches=100, beta=0.0)
    shares = np.bincount(sample.ids.reshape(-1), minlength=10) / 100_000
    expected = np.tile(np.maximum(errors, 1e-300) ** alpha, 2)
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.005)


def test_weights_are_those_of_the_paper() -> None:
    """(N P)^-beta divided by the largest of the minibatch, by hand:

    P = 1/8, 2/8, 5/8 of 3 rows, beta 0.5.
    """
    replay = make(alpha=1.0)
    insert(replay, rows(0, 3) | {c.PRIORITIES: np.array([0.2, 0.4, 1.0])})
    sample = replay.sample(8, beta=0.5)
    assert sample.ids.tolist() == [0, 1, 1, 2, 2, 2, 2, 2]
    plain = (3 * np.array([1, 2, 5]) / 8) ** -0.5
    np.testing.assert_allclose(sample.weights, (plain / plain.max())[sample.ids], rtol=1e-6)
    assert sample.weights.max() == 1
    assert (replay.sample(8, beta=0.0).weights == 1).all()
    np.testing.assert_allclose(
        replay.sample(8, beta=1.0).weights[[0, 1, 3]], [1, 1 / 2, 1 / 5], rtol=1e-6
    )


def test_new_rows_get_the_largest_priority_so_far() -> None:
    replay = make(alpha=1.0)
    priorities = replay._priorities
    assert priorities is not None
    insert(replay, rows(0, 2))
    assert priorities.tree.priorities[:2].tolist() == [1, 1]
    replay.update_priorities(np.array([0, 1]), np.array([0.25, 3.0]))
    insert(replay, rows(2, 1))
    # the largest ever, not the current largest
    replay.update_priorities(np.array([1]), np.array([0.5]))
    insert(replay, rows(3, 1))
    assert priorities.tree.priorities[:4].tolist() == [0.25, 0.5, 3, 3]


def test_huge_priorities_from_a_sender_count_like_those_of_new_rows() -> None:
    replay = make(alpha=1.0)
    insert(replay, rows(0, 6) | {c.PRIORITIES: np.full(6, 0.5)})
    insert(replay, rows(6, 2) | {c.PRIORITIES: np.full(2, 1e30)})
    sample = replay.sample(50, num_batches=200, beta=1.0)
    shares = np.bincount(sample.ids.reshape(-1), minlength=8) / sample.ids.size
    np.testing.assert_allclose(shares, [0.1] * 6 + [0.2] * 2, atol=0.02)
    np.testing.assert_allclose(np.unique(sample.weights), [0.5, 1])
    replay.update_priorities(np.array([6, 7]), np.array([0.25, 0.25]))
    insert(replay, rows(8, 2))
    shares = np.bincount(replay.sample(50, num_batches=200).ids.reshape(-1), minlength=10) / 10_000
    np.testing.assert_allclose(shares, np.array([2] * 6 + [1] * 2 + [4] * 2) / 22, atol=0.02)


def test_the_last_error_of_a_row_drawn_twice_counts() -> None:
    replay = make(alpha=1.0)
    insert(replay, rows(0, 4))
    replay.update_priorities(
        np.array([[0, 1], [1, 2]]), np.array([[5.0, 6.0], [7.0, 8.0]], np.float32)
    )
    assert replay._priorities is not None
    assert replay._priorities.tree.priorities[:4].tolist() == [5, 7, 8, 1]


def test_errors_of_evicted_rows_are_ignored() -> None:
    replay = make(4, alpha=1.0)
    insert(replay, rows(0, 4))
    ids = replay.sample(4).ids
    insert(replay, rows(4, 2))  # where rows 0 and 1 were
    replay.update_priorities(ids, np.array([10.0, 10.0, 20.0, 30.0]))
    assert replay._priorities is not None
    assert replay._priorities.tree.priorities[:4].tolist() == [1, 1, 20, 30]


def test_extreme_errors_neither_overflow_nor_vanish() -> None:
    replay = make(alpha=1.0)
    insert(replay, rows(0, 3))
    replay.update_priorities(np.arange(3), np.array([0.0, 1.7e308, 1e-320]))
    sample = replay.sample(16, beta=1.0)
    assert np.isfinite(sample.weights).all()
    assert set(sample.ids) == {1}


def test_the_same_calls_and_seed_give_the_same_rows() -> None:
    def run(seed: int) -> list[Any]:
        replay, drawn = make(alpha=0.6, seed=seed), []
        for first in range(0, 30, 3):
            insert(replay, rows(first, 3))
            sample = replay.sample(7, num_batches=2, beta=0.4)
            replay.update_priorities(sample.ids, np.sin(sample.ids))
            drawn += [sample.ids.tolist(), sample.weights.tolist()]
        return drawn

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_fragment_is_stored_without_its_padding_rows() -> None:
    replay = make()
    arrays: dict[str, Any] = {
        name: column.reshape(3, 2, *column.shape[1:])
        for name, column in rows(0, 6).items()
        if name != c.NEW_OBS
    }
    del arrays["unknown"]
    arrays[c.VALID] = np.array([[True, True], [False, True], [True, False]])
    arrays[c.LAST_OBS] = np.full((2, 3), 9, np.float32)
    arrays[c.FINAL_INDEX] = np.array([[1, 1]], np.int32)
    arrays[c.FINAL_OBS] = np.full((1, 3), 8, np.float32)
    errors = np.arange(1.0, 7.0).reshape(3, 2)
    assert replay.insert_fragment(arrays | {c.PRIORITIES: errors}) == 4
    columns = replay.sample(100).columns
    following = {
        int(number): new_obs.tolist()
        for number, new_obs in zip(columns[c.ACTIONS], columns[c.NEW_OBS], strict=True)
    }
    assert following == {0: [2, 2.25, 2.5], 1: [3, 3.25, 3.5], 3: [8] * 3, 4: [9] * 3}


def test_the_observation_after_n_steps_is_stored() -> None:
    replay = make()
    arrays = {name: column[:, None] for name, column in rows(0, 4).items()}
    arrays[c.N_STEPS] = np.array([[3], [2], [1], [1]], np.int32)
    replay.insert_fragment(arrays)
    columns = replay.sample(100).columns
    behind = dict(zip(columns[c.ACTIONS].tolist(), columns[c.NEW_OBS][:, 0].tolist(), strict=True))
    assert behind == {0: 3, 1: 3, 2: 3, 3: 4}


def broken(name: str, array: Any) -> dict[str, Any]:
    return {**rows(0, 3), name: array}


@pytest.mark.parametrize(
    ("arrays", "column"),
    [
        ({}, "'obs'"),
        ({c.ACTIONS: np.zeros(3, np.int64)}, "'obs'"),
        ({name: column for name, column in rows(0, 3).items() if name != "picture"}, "'picture'"),
        ({name: column[:0] for name, column in rows(0, 3).items()}, "'obs'"),
        (broken(c.OBS, np.zeros((3, 4), np.float32)), "'obs'"),
        (broken(c.ACTIONS, np.zeros(2, np.int64)), "'actions'"),
        (broken(c.ACTIONS, np.zeros(3, np.float32)), "'actions'"),
        (broken(c.ACTIONS, np.full(3, 2**31)), "'actions'"),
        (broken(c.ACTIONS, np.full(3, 2**32 - 1, np.uint32)), "'actions'"),
        (broken(c.OBS, np.full((3, 3), np.nan, np.float32)), "'obs'"),
        (broken(c.NEW_OBS, np.full((3, 3), -np.inf, np.float32)), "'new_obs'"),
        (broken(c.N_STEP_RETURNS, np.full(3, 1e39)), "'n_step_returns'"),
        (broken("picture", np.zeros((3, 2, 2), np.int8)), "'picture'"),
        (broken(c.VALID, np.ones(3, np.int8)), "'valid'"),
        (broken(c.VALID, np.ones(2, bool)), "'valid'"),
        (broken(c.N_STEPS, np.full(3, 2, np.int32)), "'n_steps'"),
        (broken(c.OBS, np.float32(1)), "'obs'"),
    ],
)
def test_fragments_that_do_not_fit_are_refused_and_not_stored(
    arrays: dict[str, Any], column: str
) -> None:
    replay = make(alpha=1.0)
    with pytest.raises(BatchError, match=column):
        insert(replay, arrays)
    assert replay.stored == 0
    assert replay._priorities is not None
    assert replay._priorities.tree.total == 0


def test_a_step_with_more_rows_than_the_replay_holds_is_refused() -> None:
    with pytest.raises(BatchError, match=" 10 "):
        make().check_fragment({name: column[None] for name, column in rows(0, 11).items()})


@pytest.mark.parametrize("stack", [0, 4])
@pytest.mark.parametrize("gives_new_obs", [False, True])
@pytest.mark.parametrize("resets_in_next_step", [False, True])
def test_a_fragment_longer_than_the_replay_is_stored_with_its_newest_steps(
    stack: int, gives_new_obs: bool, resets_in_next_step: bool
) -> None:
    shape = (2, 2, 4)
    columns = (
        ColumnSpec(c.OBS, shape, "uint8"),
        ColumnSpec(c.NEW_OBS, shape, "uint8"),
        ColumnSpec(c.ACTIONS, (), "int32"),
    )
    world = StackWorld(
        2,
        shape,
        seed=1,
        steps=3,
        gives_new_obs=gives_new_obs,
        resets_in_next_step=resets_in_next_step,
    )
    replay = Replay(ReplaySpec(columns, 11, Prioritised(), stack), seed=0)
    fragment = world.fragment(40)
    assert replay.insert_fragment(fragment | {c.PRIORITIES: np.ones((40, 2))}) == len(replay)
    newest = fragment[c.ACTIONS][-5:]
    sample = replay.sample(200)
    assert set(sample.columns[c.ACTIONS].tolist()) == set(newest[newest >= 0].tolist())
    for number, obs, new_obs in zip(
        *(sample.columns[name] for name in (c.ACTIONS, c.OBS, c.NEW_OBS)), strict=True
    ):
        assert (obs == world.rows[int(number)][0]).all()
        assert (new_obs == world.rows[int(number)][1]).all()


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {c.LAST_OBS: np.zeros((2, 3), np.float32)},
        {c.LAST_OBS: np.full((1, 3), np.inf, np.float32)},
        {c.LAST_OBS: np.zeros((1, 3), np.float32), c.FINAL_INDEX: np.array([[3, 0]], np.int32)},
        {
            c.LAST_OBS: np.zeros((1, 3), np.float32),
            c.FINAL_INDEX: np.array([[3, 0]], np.int32),
            c.FINAL_OBS: np.zeros((1, 3), np.float32),
        },
        {
            c.LAST_OBS: np.zeros((1, 3), np.float32),
            c.FINAL_INDEX: np.array([[0, 0]], np.int32),
            c.FINAL_OBS: np.full((1, 3), np.nan, np.float32),
        },
    ],
)
def test_next_observations_must_fit_too(extra: dict[str, Any]) -> None:
    arrays = {name: column[:, None] for name, column in rows(0, 3).items() if name != c.NEW_OBS}
    replay = make()
    with pytest.raises(BatchError):
        replay.check_fragment(arrays | extra)


ARRAYS = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(-3, 300, shape).astype(dtype),
    st.sampled_from(
        [(), (2,), (2, 1), (2, 1, 3), (2, 1, 2, 2), (1, 2, 3), (1, 3), (0, 1, 3), (2, 2), (3, 1)]
    ),
    st.sampled_from(
        ["float32", "float64", "int32", "int64", "uint8", "bool", "complex64", "S3", "O"]
    ),
    st.integers(0, 9),
)


@settings(max_examples=80)
@given(st.data(), st.sampled_from([0, 1]))
def test_any_fragment_is_stored_or_refused(data: st.DataObject, stack: int) -> None:
    replay = Replay(ReplaySpec(COLUMNS, 10, Prioritised(), stack), seed=0)
    arrays: dict[str, Any] = {
        c.OBS: np.zeros((2, 1, 3), np.float32),
        c.LAST_OBS: np.zeros((1, 3), np.float32),
        c.ACTIONS: np.zeros((2, 1), np.int64),
        c.N_STEP_RETURNS: np.zeros((2, 1), np.float32),
        "picture": np.zeros((2, 1, 2, 2), np.uint8),
    }
    names = [*arrays, c.NEW_OBS, c.FINAL_INDEX, c.FINAL_OBS, c.VALID, c.N_STEPS]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=4)):
        arrays[name] = data.draw(ARRAYS)
    try:
        replay.check_fragment(arrays)
        stored = replay.insert_fragment(arrays)
    except BatchError:
        stored = 0
    assert replay.stored == len(replay) == stored
    if stored:
        assert set(replay.sample(4).ids.tolist()) <= {0, 1}
