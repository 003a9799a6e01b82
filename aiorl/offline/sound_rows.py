"""Rows of a stored batch that can be used: those without a number that is missing or not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import I64, Bools
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch, rows_by_policy
from aiorl.errors import DataError
from aiorl.offline.episodes import episode_numbers
from aiorl.offline.formats import Stored
from aiorl.offline.stored_columns import FLAGS, WHOLE_NUMBERS, complete

FINITE = (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS)
"""Columns whose numbers must be finite, because algorithms learn from them."""

_LARGEST = np.finfo(np.float32).max

ORIGIN = "stored_at"
"""int64: number of the batch in its file, from 0, times 2**32, plus number of the row in it, from
0."""
_ROWS_OF_BATCH = 1 << 32


class RowLeftOut(DataError):
    """Row of a batch that can't be used.

    Attributes:
        eps_id: number of its episode if the rest of it does not show that the row is missing, as
            steps do; None if it does, or the number is unknown.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: str,
        place: str,
        eps_id: int | None,
    ) -> None:
        super().__init__(reason, path=path, place=place)
        self.eps_id = eps_id


def with_origins(batch: Batch, number: int) -> None:
    """Add the column ORIGIN to the batch with a number."""
    for rows in rows_by_policy(batch).values():
        row_numbers = np.arange(rows.count, dtype=np.int64)
        rows[ORIGIN] = number * _ROWS_OF_BATCH + row_numbers


def origins(column: I64) -> tuple[I64, I64]:
    """Return the batch and the row, both from 0, of each value [B] of ORIGIN."""
    return column // _ROWS_OF_BATCH, column % _ROWS_OF_BATCH


def sound_rows(stored: Stored, path: str) -> Iterator[Stored | DataError]:
    """Yield an error for each row that can't be used, then the batch without these rows, if any are
    left.

    The observation after a terminal state has no effect; if it is missing, it is replaced by that
    of the row.

    Args:
        stored: the batch; its rows can be changed.
        path: its file.
    """
    if isinstance(stored.batch, SampleBatch):
        rows = yield from _sound(stored.batch, stored.place, path)
        if rows is not None:
            yield Stored(stored.place, rows)
        return
    policies: dict[str, SampleBatch] = {}
    for policy_id, all_rows in stored.batch.policy_batches.items():
        rows = yield from _sound(all_rows, f"{stored.place}, policy {policy_id!r}", path)
        if rows is not None:
            policies[policy_id] = rows
    if policies:
        count = sum(rows.count for rows in policies.values())
        env_steps = round(stored.batch.count * count / max(1, stored.batch.total()))
        yield Stored(stored.place, MultiAgentBatch(policies, env_steps))


def _sound(
    rows: SampleBatch,
    place: str,
    path: str,
) -> Any:
    """Yield errors, and return the rows that can be used; None if there are none."""
    reasons: dict[int, str] = {}
    for is_bad, reason in _faults(rows):
        for row in np.flatnonzero(is_bad).tolist():
            reasons.setdefault(row, reason)
    for row, reason in sorted(reasons.items()):
        yield RowLeftOut(
            reason,
            path=path,
            place=f"{place}, row {row + 1}",
            eps_id=_number_without_steps(rows, row),
        )
    if not reasons:
        return rows
    is_sound = np.ones(rows.count, np.bool_)
    is_sound[list(reasons)] = False
    if not is_sound.any():
        return None
    is_before_gap = _before_gaps(rows, is_sound)
    sound = rows.take(is_sound)
    try:
        complete(sound)
    except DataError as error:
        yield DataError(error.reason, path=path, place=place)
        return None
    _cut(sound, is_before_gap[is_sound])
    return sound


def _number_without_steps(rows: SampleBatch, row: int) -> int | None:
    """Return the number of a row's episode; None if it has none, or the rows have steps."""
    if c.T in rows or c.EPS_ID not in rows or np.isnan(rows[c.EPS_ID][row]):
        return None
    return int(rows[c.EPS_ID][row])


def _faults(rows: SampleBatch) -> Iterator[tuple[Bools, str]]:
    """Yield flags [B] of rows with the same fault, and the fault."""
    for name in (*WHOLE_NUMBERS, *FLAGS):
        if name in rows and rows[name].dtype.kind == "f":
            yield np.isnan(rows[name]), f"{name} has no value"
    for name in FINITE:
        if name not in rows or rows[name].dtype.kind != "f":
            continue
        column = rows[name]
        # policies take float32, in which larger numbers are infinite
        is_finite = np.isfinite(column)
        if column.dtype.itemsize > 4:
            is_finite = np.abs(column) <= _LARGEST
        is_bad: Bools = np.asarray(~is_finite.reshape(rows.count, -1).all(axis=1))
        if name == c.NEW_OBS and is_bad.any():
            is_bad = _without_successor(rows, is_bad)
        yield is_bad, f"{name} holds a number that is not finite, or has no value"


def _without_successor(rows: SampleBatch, is_bad: Bools) -> Bools:
    """Replace observations after terminal states that are not finite; return the flags of the other
    rows.
    """
    if c.TERMINATEDS not in rows or c.OBS not in rows:
        return is_bad
    obs = rows[c.OBS]
    new_obs = rows[c.NEW_OBS].copy()
    has_no_effect = is_bad & rows[c.TERMINATEDS].astype(np.bool_)
    if obs.shape != new_obs.shape or not has_no_effect.any():
        return is_bad
    new_obs[has_no_effect] = obs[has_no_effect]
    rows[c.NEW_OBS] = new_obs
    return is_bad & ~has_no_effect


def _before_gaps(rows: SampleBatch, is_sound: Bools) -> Bools:
    """Return for each row [B] whether the next one of its episode is left out."""
    numbers = episode_numbers(rows)
    order = np.argsort(numbers, kind="stable")
    is_same_episode = np.diff(numbers[order]) == 0
    is_before_gap = np.zeros(rows.count, np.bool_)
    is_before_gap[order[:-1]] = is_same_episode & ~is_sound[order[1:]]
    for name in (c.EPS_ID, c.AGENT_INDEX):
        if name in rows:  # rows without a number may be of the episode of the row before them
            is_before_gap[:-1] |= np.isnan(rows[name][1:])
    return is_before_gap


def _cut(rows: SampleBatch, is_before_gap: Bools) -> None:
    """Without ``t``, mark the rows before those left out as truncated, so that no row joins what it
    does not follow.
    """
    if c.T in rows or c.TRUNCATEDS not in rows or c.TERMINATEDS not in rows:
        return
    terminateds = rows[c.TERMINATEDS]
    truncateds = rows[c.TRUNCATEDS] | (is_before_gap & ~terminateds)
    rows[c.TRUNCATEDS] = truncateds
    rows[c.DONES] = terminateds | truncateds
