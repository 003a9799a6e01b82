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
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.errors import BatchError

Array = NDArray[Any]

_STATE = "state_in_"


def laid_out(
    rows: Mapping[str, Array], plan: SamplePlan, sequence_length: int | None
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
    return with_scaled_rewards(columns) if replaces else columns


def with_scaled_rewards(columns: dict[str, Array]) -> dict[str, Array]:
    """Return the columns with SCALED_REWARDS, if there are any, as REWARDS."""
    if c.SCALED_REWARDS in columns:
        columns[c.REWARDS] = columns.pop(c.SCALED_REWARDS)
    return columns


def to_rows(batch: Mapping[str, Array], plan: SamplePlan) -> dict[str, Array]:
    """Return single rows: the plan's columns as [B, 1, ...].

    Args:
        batch: columns [B, ...].
        plan: names of the columns to return.

    Raises:
        BatchError: one of these columns is missing, or holds objects.
    """
    return {name: column[:, None] for name, column in _wanted(batch, plan.of_rows).items()}


def to_sequences(batch: Mapping[str, Array], plan: SamplePlan, length: int) -> dict[str, Array]:
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
    wanted = _wanted(batch, plan.of_rows)
    state_names = [name for name in plan.of_sequences if name != c.LAST_OBS]
    # every state of the rows decides where a trajectory can begin, whether or not it is sent
    states = _wanted(batch, [*state_names, *(name for name in batch if name.startswith(_STATE))])
    rows = _sequence_rows(batch, states, length)
    is_valid = rows >= 0
    filled = np.where(is_valid, rows, 0)
    arrays: dict[str, Array] = {c.VALID: is_valid}
    for name, column in wanted.items():
        arrays[name] = column[filled]
        arrays[name][~is_valid] = 0
    for name in state_names:
        arrays[name] = states[name][rows[0]]
        if plan.state_every:
            at = rows[:: plan.state_every].T
            arrays[name] = np.where((at >= 0)[..., None], states[name][at], np.float32(0.0))
    if c.LAST_OBS in plan.of_sequences:
        last = rows[is_valid.sum(0) - 1, np.arange(rows.shape[1])]
        arrays[c.LAST_OBS] = _wanted(batch, [c.NEW_OBS])[c.NEW_OBS][last]
    return arrays


def _sequence_rows(
    batch: Mapping[str, Array], states: Mapping[str, Array], length: int
) -> NDArray[np.int64]:
    """Return the row at each place of the sequences, [L, S]; -1 where there is none."""
    names = (c.EPS_ID, c.AGENT_INDEX, c.TERMINATEDS, c.TRUNCATEDS)
    eps_id, agent_index, terminateds, truncateds = _wanted(batch, names).values()
    ended = terminateds | truncateds
    num_rows = len(eps_id)
    begins = np.ones(num_rows, np.bool_)
    begins[1:] = (eps_id[1:] != eps_id[:-1]) | (agent_index[1:] != agent_index[:-1])
    begins[_behind_gaps(batch, begins)] = True
    starts = np.flatnonzero(begins)
    may_follow = np.ones(len(starts), np.bool_)
    for state in states.values():
        may_follow &= ~state[starts].reshape(len(starts), -1).any(1)

    sequences: list[list[tuple[int, int]]] = []
    room_left: list[
        tuple[int, int]
    ] = []  # sequences that end with an episode, with the number of free places
    for start, stop, follows in zip(
        starts.tolist(), [*starts[1:].tolist(), num_rows], may_follow.tolist(), strict=True
    ):
        first = start
        index, room = room_left.pop() if follows and room_left else (-1, 0)
        while first < stop:
            if not room:
                index = len(sequences)
                room = length
                sequences.append([])
            taken = min(room, stop - first)
            sequences[index].append((first, first + taken))
            first += taken
            room -= taken
        if room and ended[stop - 1]:
            room_left.append((index, room))

    rows = np.full((length, len(sequences)), -1, np.int64)
    for index, pieces in enumerate(sequences):
        place = 0
        for first, stop in pieces:
            rows[place : place + stop - first, index] = np.arange(first, stop)
            place += stop - first
    return rows


def _behind_gaps(batch: Mapping[str, Array], begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return rows within a run that do not start where the previous row ended.

    Time alone is not enough: an agent that is not observed at every step has rows that span several
    steps.
    """
    if c.T not in batch:
        return np.zeros(0, np.int64)
    t = np.asarray(batch[c.T])
    rows = np.flatnonzero((t[1:] - t[:-1] != 1) & ~begins[1:]) + 1
    if not len(rows):
        return rows
    follows = np.ones(len(rows), np.bool_)
    for before, after in ((c.NEW_OBS, c.OBS), *_state_pairs(batch)):
        if before in batch and after in batch:
            ends = np.asarray(batch[before])[rows - 1]
            starts = np.asarray(batch[after])[rows]
            follows &= (ends == starts).reshape(len(rows), -1).all(1)
    return rows[~follows]


def _state_pairs(batch: Mapping[str, Array]) -> list[tuple[str, str]]:
    return [(name.replace(_STATE, "state_out_"), name) for name in batch if name.startswith(_STATE)]


def _wanted(batch: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for name in names:
        if name not in batch:
            raise BatchError(name, "the column to exist", sorted(batch))
        column = columns[name] = np.asarray(batch[name])
        if column.dtype.hasobject:
            raise BatchError(name, "numbers", "objects")
    return columns
