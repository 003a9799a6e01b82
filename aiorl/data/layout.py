"""Conversion of rows of trajectories to the arrays of a fragment: one by one, or as sequences of
one length.

Rows come trajectory by trajectory: runs of equal ``eps_id`` and ``agent_index``, in the order of
time. If some rows of an agent were not recorded, the run has a gap, and the rows after the gap are
another trajectory.

Arrays are time-major: rows are ``[B, 1, ...]``, B steps of one environment; sequences are ``[L, S,
...]``, padded with zeros where ``valid`` is False.

Learning resets the state and stops bootstrapping after a row that ended an episode, and nowhere
else. Therefore another trajectory can follow such a row in a sequence, if it begins with a state of
zeros; a trajectory that was cut is the last of its sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import I64, Array, Bools, Columns
from aiorl.data.fragment import SamplePlan
from aiorl.errors import BatchError

_STATE = "state_in_"


def to_training_arrays(
    rows: Columns,
    plan: SamplePlan,
    sequence_length: int | None,
) -> dict[str, Array]:
    """Return the arrays to learn from: single rows or sequences of a length, with rewards scaled by
    the plan.

    A plan that asks for SCALED_REWARDS gets them along with REWARDS; otherwise they replace
    REWARDS.

    Raises:
        BatchError: see `to_rows` and `to_sequences`.
    """
    replaces = (
        plan.return_discount is not None
        and c.REWARDS in plan.columns
        and c.SCALED_REWARDS not in plan.columns
    )
    if replaces:
        plan = dataclasses.replace(plan, columns=(*plan.columns, c.SCALED_REWARDS))
    columns = (
        to_rows(rows, plan)
        if sequence_length is None
        else to_sequences(rows, plan, sequence_length)
    )
    if replaces:
        columns[c.REWARDS] = columns.pop(c.SCALED_REWARDS)
    return columns


def to_rows(batch: Columns, plan: SamplePlan) -> dict[str, Array]:
    """Return single rows: the plan's columns as [B, 1, ...].

    Args:
        batch: columns [B, ...].
        plan: names of the columns to return.

    Raises:
        BatchError: one of these columns is missing, or holds objects.
    """
    return {name: column[:, None] for name, column in _numbers(batch, plan.of_rows).items()}


def to_sequences(
    batch: Columns,
    plan: SamplePlan,
    length: int,
) -> dict[str, Array]:
    """Return the rows as sequences, as few as possible without changing the order of rows.

    Args:
        batch: columns [B, ...] with ``eps_id``, ``agent_index``, ``terminateds`` and
            ``truncateds``; ``new_obs`` if the plan has LAST_OBS; ``state_in_i`` if the plan has
            them. Gaps are found if there are ``t``, and ``obs`` and ``new_obs`` or the states.
        plan: names of the columns to return.
        length: L, rows of a sequence.

    Returns:
        The plan's columns [L, S, ...]; VALID [L, S] bool; if the plan has them, LAST_OBS [S, ...],
        the observation after the last valid row, and ``state_in_i`` [S, H], the state before the
        first row; or [S, C, H], the states before every ``state_every``-th row, zeros where there
        is no row.

    Raises:
        BatchError: a needed column is missing or holds objects, or the length is below 1.
    """
    if length < 1:
        raise BatchError("sequence_length", "at least 1", length)
    columns = _numbers(batch, plan.of_rows)
    plan_states = [name for name in plan.of_sequences if name != c.LAST_OBS]
    # Every state of the rows decides where a trajectory can begin, whether or not it is sent.
    batch_states = [name for name in batch if name.startswith(_STATE)]
    states = _numbers(batch, [*plan_states, *batch_states])
    rows = _sequence_rows(batch, states, length)
    is_valid = rows >= 0
    row_or_first = np.where(is_valid, rows, 0)
    arrays: dict[str, Array] = {c.VALID: is_valid}
    for name, column in columns.items():
        arrays[name] = column[row_or_first]
        arrays[name][~is_valid] = 0
    for name in plan_states:
        arrays[name] = _states_before(states[name], rows, plan.state_every)
    if c.LAST_OBS in plan.of_sequences:
        last_steps = is_valid.sum(0) - 1
        last_rows = rows[last_steps, np.arange(rows.shape[1])]
        new_obs = _numbers(batch, [c.NEW_OBS])[c.NEW_OBS]
        arrays[c.LAST_OBS] = new_obs[last_rows]
    return arrays


def _states_before(
    states: Array,
    rows: I64,
    state_every: int,
) -> Array:
    """Return the states before the sequences' first rows, or before every ``state_every``-th."""
    if not state_every:
        first_states: Array = states[rows[0]]
        return first_states
    chosen = rows[::state_every].T
    has_row = (chosen >= 0)[..., None]
    chosen_states: Array = np.where(has_row, states[chosen], np.float32(0.0))
    return chosen_states


def _sequence_rows(
    batch: Columns,
    states: Columns,
    length: int,
) -> I64:
    """Return the row at each place of the sequences, [L, S]; -1 where there is none."""
    names = (c.EPS_ID, c.AGENT_INDEX, c.TERMINATEDS, c.TRUNCATEDS)
    eps_id, agent_index, terminateds, truncateds = _numbers(batch, names).values()
    ended = terminateds | truncateds
    begins = np.ones(len(eps_id), np.bool_)
    begins[1:] = _differs(eps_id) | _differs(agent_index)
    begins[_behind_gaps(batch, begins)] = True
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(eps_id))
    may_follow = np.ones(len(starts), np.bool_)
    for state in states.values():
        may_follow &= ~_any_of_row(state[starts] != 0)

    sequences: list[list[tuple[int, int]]] = []
    # Sequences that end with an episode, with the number of free places.
    room_left: list[tuple[int, int]] = []
    trajectories = zip(
        starts.tolist(),
        stops.tolist(),
        may_follow.tolist(),
        strict=True,
    )
    for start, stop, follows in trajectories:
        first = start
        index, room = room_left.pop() if follows and room_left else (-1, 0)
        while first < stop:
            if not room:
                index = len(sequences)
                room = length
                sequences.append([])
            end = min(first + room, stop)
            sequences[index].append((first, end))
            room -= end - first
            first = end
        if room and ended[stop - 1]:
            room_left.append((index, room))

    rows = np.full((length, len(sequences)), -1, np.int64)
    for index, pieces in enumerate(sequences):
        sequence = np.concatenate([np.arange(first, end) for first, end in pieces])
        rows[: len(sequence), index] = sequence
    return rows


def _behind_gaps(batch: Columns, begins: Bools) -> I64:
    """Return rows within a run that do not start where the previous row ended.

    Time alone is not enough: an agent that is not observed at every step has rows that span several
    steps.
    """
    if c.T not in batch:
        return np.zeros(0, np.int64)
    is_jump = np.diff(batch[c.T]) != 1
    rows = np.flatnonzero(is_jump & ~begins[1:]) + 1
    if not len(rows):
        return rows
    has_gap = np.zeros(len(rows), np.bool_)
    for before, after in ((c.NEW_OBS, c.OBS), *_state_pairs(batch)):
        if before in batch and after in batch:
            ends = np.asarray(batch[before])[rows - 1]
            starts = np.asarray(batch[after])[rows]
            has_gap |= _any_of_row(ends != starts)
    return rows[has_gap]


def _differs(column: Array) -> Bools:
    """Return for all rows but the first whether they differ from the row before."""
    is_other: Bools = column[1:] != column[:-1]
    return is_other


def _any_of_row(flags: Any) -> Bools:
    """Return for each row of [B, ...] whether any of its flags is set."""
    is_any: Bools = flags.reshape(len(flags), -1).any(1)
    return is_any


def _state_pairs(batch: Columns) -> list[tuple[str, str]]:
    return [(name.replace(_STATE, "state_out_"), name) for name in batch if name.startswith(_STATE)]


def _numbers(batch: Columns, names: Collection[str]) -> dict[str, Array]:
    """Return these columns of a batch.

    Raises:
        BatchError: one is missing, or holds objects.
    """
    columns: dict[str, Array] = {}
    for name in names:
        if name not in batch:
            raise BatchError(name, "the column to exist", sorted(batch))
        columns[name] = np.asarray(batch[name])
        if columns[name].dtype.hasobject:
            raise BatchError(name, "numbers", "objects")
    return columns
