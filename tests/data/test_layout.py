from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.data import columns as c
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.data.layout import to_rows, to_sequences
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError

STATE = c.state_in(0)
PLAN = SamplePlan(columns=(c.OBS, c.T, c.TERMINATEDS, c.TRUNCATEDS, c.LAST_OBS, STATE))


def trajectory(
    number: int, first_t: int, steps: int, ending: str, *, has_state: bool = True
) -> dict[str, Any]:
    """Return steps of episode ``number`` from ``first_t``; observations [episode, t], state = rows
    since a reset.
    """
    t = np.arange(first_t, first_t + steps, dtype=np.int32)
    flags = {name: np.zeros(steps, np.bool_) for name in (c.TERMINATEDS, c.TRUNCATEDS)}
    if ending != "cut":
        flags[ending][-1] = True
    rows = {
        c.EPS_ID: np.full(steps, number, np.int64),
        c.AGENT_INDEX: np.zeros(steps, np.int32),
        c.T: t,
        c.OBS: np.stack([np.full(steps, number), t], 1).astype(np.float32),
        c.NEW_OBS: np.stack([np.full(steps, number), t + 1], 1).astype(np.float32),
        **flags,
    }
    return {**rows, STATE: t[:, None].astype(np.float32)} if has_state else rows


PIECE = st.tuples(
    st.sampled_from([0, 0, 3]),
    st.integers(1, 9),
    st.sampled_from(["cut", c.TERMINATEDS, c.TRUNCATEDS]),
)


@st.composite
def batches(draw: st.DrawFn, *, has_state: bool = True) -> SampleBatch:
    pieces = draw(st.lists(PIECE, min_size=1, max_size=12))
    return SampleBatch.concat(
        [
            SampleBatch(trajectory(number, *piece, has_state=has_state))
            for number, piece in enumerate(pieces)
        ]
    )


def check_sequences(batch: SampleBatch, arrays: dict[str, Any], length: int) -> None:
    """Check row by row what training relies on."""
    valid = arrays[c.VALID]
    assert valid.shape[0] == length
    rows_seen = []
    for s in range(valid.shape[1]):
        count = int(valid[:, s].sum())
        assert count > 0
        assert valid[:count, s].all(), "padding is at the end"
        state = arrays[STATE][s, 0] if STATE in arrays else None
        for row in range(count):
            obs = arrays[c.OBS][row, s].tolist()
            rows_seen.append(tuple(obs))
            ended = arrays[c.TERMINATEDS][row, s] or arrays[c.TRUNCATEDS][row, s]
            if state is not None:
                assert state == arrays[c.T][row, s], "training has the state of acting"
                state = 0 if ended else state + 1
            follower = [obs[0], obs[1] + 1]
            if row + 1 == count:
                assert arrays[c.LAST_OBS][s].tolist() == follower
            elif not ended:
                assert arrays[c.OBS][row + 1, s].tolist() == follower, "rows follow each other"
        for name in (c.OBS, c.T, c.TERMINATEDS, c.TRUNCATEDS):
            assert not arrays[name][count:, s].any(), "padding is zero"
    assert sorted(rows_seen) == sorted(map(tuple, batch[c.OBS].tolist())), "each row once"


@given(batches(), st.integers(1, 12))
def test_sequences_have_each_row_once_with_the_state_of_acting(
    batch: SampleBatch, length: int
) -> None:
    arrays = to_sequences(batch, PLAN, length)
    assert set(arrays) == {*PLAN.columns, c.VALID}
    check_sequences(batch, arrays, length)
    assert (
        Fragment({name: arrays[name] for name in (*PLAN.of_rows, c.VALID)}).env_steps == batch.count
    )


@given(batches(has_state=False), st.integers(1, 12))
def test_without_a_state_any_trajectory_can_follow_one_that_ended(
    batch: SampleBatch, length: int
) -> None:
    arrays = to_sequences(batch, SamplePlan(columns=(*PLAN.of_rows, c.LAST_OBS)), length)
    check_sequences(batch, arrays, length)
    # each can leave its sequence unfilled, and so can the last row
    cut = sum(
        not (part[c.TERMINATEDS][-1] or part[c.TRUNCATEDS][-1]) for part in batch.split_by_episode()
    )
    assert arrays[c.VALID].shape[1] <= -(-batch.count // length) + cut


def test_episodes_that_ended_fill_sequences_to_the_last_place() -> None:
    batch = SampleBatch.concat([SampleBatch(trajectory(n, 0, 5, c.TERMINATEDS)) for n in range(4)])
    arrays = to_sequences(batch, PLAN, 10)
    assert arrays[c.VALID].all()
    assert arrays[c.OBS][:, 1, 0].tolist() == [2.0] * 5 + [3.0] * 5
    assert arrays[STATE].tolist() == [[0.0], [0.0]]


def test_states_can_be_sent_at_an_interval_of_rows_also_after_an_episode_ended() -> None:
    """The state is 0 at an episode's start, and where there is no row."""
    batch = SampleBatch.concat(
        [SampleBatch(trajectory(0, 0, 5, c.TERMINATEDS)), SampleBatch(trajectory(1, 0, 3, "cut"))]
    )
    plan = SamplePlan(columns=PLAN.columns, state_every=3)
    arrays = to_sequences(batch, plan, 10)
    assert arrays[c.T].T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]
    assert arrays[STATE].tolist() == [[[0.0], [3.0], [1.0], [0.0]]]


def test_an_episode_that_keeps_its_state_begins_a_new_sequence() -> None:
    """With a soft horizon, a new episode id at t = 0 has the old state, and rows are never done."""
    first, second = trajectory(0, 0, 3, c.TERMINATEDS), trajectory(1, 0, 3, "cut")
    second[STATE] = second[STATE] + 3
    arrays = to_sequences(SampleBatch.concat([SampleBatch(first), SampleBatch(second)]), PLAN, 10)
    assert arrays[c.VALID].shape == (10, 2)
    assert arrays[STATE].tolist() == [[0.0], [3.0]]


def test_two_agents_of_one_episode_are_two_trajectories() -> None:
    first, second = trajectory(0, 0, 3, "cut"), trajectory(0, 0, 2, "cut")
    second[c.AGENT_INDEX] = second[c.AGENT_INDEX] + 1
    arrays = to_sequences(SampleBatch.concat([SampleBatch(first), SampleBatch(second)]), PLAN, 10)
    assert arrays[c.VALID].sum(0).tolist() == [3, 2]


@given(batches())
def test_rows_are_steps_of_one_environment(batch: SampleBatch) -> None:
    arrays = to_rows(batch, PLAN)
    assert list(arrays) == list(PLAN.of_rows)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, batch[name][:, None])
    assert Fragment(arrays).env_steps == batch.count


def test_a_column_that_is_missing_or_holds_objects_is_named() -> None:
    batch = SampleBatch(trajectory(0, 0, 3, "cut"))
    with pytest.raises(BatchError, match="vf_preds"):
        to_rows(batch, SamplePlan(columns=(c.VF_PREDS,)))
    batch[c.VF_PREDS] = np.array([{}, {}, {}], object)
    with pytest.raises(BatchError, match="vf_preds"):
        to_rows(batch, SamplePlan(columns=(c.VF_PREDS,)))
    with pytest.raises(BatchError, match="new_obs"):
        to_sequences({name: batch[name] for name in batch if name != c.NEW_OBS}, PLAN, 4)
    with pytest.raises(BatchError, match="sequence_length"):
        to_sequences(batch, PLAN, 0)


@pytest.mark.parametrize("has_state", [True, False])
def test_r102_rows_after_suppressed_rows_are_another_trajectory(has_state: bool) -> None:
    """R102: the sequence ends with the observation after its last row, not with a later one."""
    batch = SampleBatch(trajectory(0, 0, 8, c.TERMINATEDS, has_state=has_state)).take(
        np.array([0, 1, 2, 5, 6, 7])
    )
    plan = PLAN if has_state else SamplePlan(columns=(*PLAN.of_rows, c.LAST_OBS))
    arrays = to_sequences(batch, plan, 6)
    assert arrays[c.T].T.tolist() == [[0, 1, 2, 0, 0, 0], [5, 6, 7, 0, 0, 0]]
    assert arrays[c.LAST_OBS].tolist() == [[0.0, 3.0], [0.0, 8.0]]
    check_sequences(batch, arrays, 6)


def test_r102_states_show_a_gap_if_observations_are_equal() -> None:
    """R102, R114."""
    batch = SampleBatch(trajectory(0, 0, 6, "cut")).take(np.array([0, 1, 4, 5]))
    batch[c.OBS][:] = batch[c.NEW_OBS][:] = 0
    assert to_sequences(batch, PLAN, 4)[c.VALID].sum(0).tolist() == [4], (
        "without output states, the gap is not visible"
    )
    batch[c.state_out(0)] = batch[STATE] + 1
    arrays = to_sequences(batch, PLAN, 4)
    assert arrays[c.VALID].sum(0).tolist() == [2, 2]
    assert arrays[STATE].tolist() == [[0.0], [4.0]]


def test_rows_that_span_several_steps_stay_in_one_sequence() -> None:
    """For example rows of agents that take turns."""
    rows = trajectory(0, 0, 4, "cut")
    rows[c.T] = rows[c.T] * 2
    assert to_sequences(SampleBatch(rows), PLAN, 4)[c.VALID].all()
