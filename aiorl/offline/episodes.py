"""Rows of stored experience by episode and step, wherever they stand in a file.

An episode is named by ``eps_id`` and, if there are several agents, ``agent_index``; ``t`` orders
its rows. Rows of other episodes can lie between them, in the same batch or in other batches of the
file. Without ``t`` the order in the file counts, and without ``eps_id`` an episode ends with a row
that is done.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import I64, Bools
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch, rows_by_policy
from aiorl.errors import DataError
from aiorl.offline.formats import Stored
from aiorl.offline.stored_columns import FLAGS

logger = logging.getLogger(__name__)

_Key = tuple[str, int, int]
"""Policy id, episode number and agent index; both numbers are 0 if the rows don't have them."""

MAX_OPEN_BYTES = 1 << 28
"""Memory for rows of episodes that have not ended yet, in one file. Beyond it, these episodes are
cut."""
_PART_BYTES = 1 << 10
"""Memory of a part of an episode besides its rows, about."""
_MAX_PARTS = 32


def trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Yield runs of consecutive rows of one agent's episode, as views; an end or a gap in ``t``
    ends a run.
    """
    if not batch.count:
        return
    breaks = _changes(batch) | ended(batch)[:-1]
    if c.T in batch:
        breaks |= np.diff(batch[c.T].astype(np.int64)) != 1
    for start, end in _extents(breaks, batch.count):
        yield batch.slice(start, end)


def ended(rows: SampleBatch) -> Bools:
    """Return for each row whether its episode ends with it; False if there are no such columns."""
    ends = np.zeros(rows.count, np.bool_)
    for name in FLAGS:
        if name in rows:
            ends |= rows[name].astype(np.bool_)
    return ends


def episode_order(rows: SampleBatch) -> I64 | None:
    """Return the positions of rows [B] in the order of their episodes, agents and steps.

    Episodes come in the order in which they begin in the batch.

    Args:
        rows: rows of one policy.

    Returns:
        The positions; None if the rows are in this order already.

    Raises:
        DataError: rows of different episodes can't be distinguished.
    """
    if c.EPS_ID not in rows and c.AGENT_INDEX not in rows:
        _refuse_equal_steps(rows)
        return None
    numbers = episode_numbers(rows)
    order: I64 = np.argsort(numbers, kind="stable")
    if c.T in rows:
        sorted_numbers = numbers[order]
        t = rows[c.T][order]
        is_same_episode = sorted_numbers[1:] == sorted_numbers[:-1]
        is_unsorted = is_same_episode & (t[1:] <= t[:-1])
        for number in np.unique(sorted_numbers[1:][is_unsorted]):
            start, end = np.searchsorted(sorted_numbers, [number, number + 1])
            order[start:end] = _by_step(rows, order[start:end])
    return None if (order[1:] > order[:-1]).all() else order


def rows_in_order(rows: SampleBatch) -> SampleBatch:
    """Return rows [B] in the order of `episode_order`.

    Raises:
        DataError: rows of different episodes can't be distinguished.
    """
    order = episode_order(rows)
    return rows if order is None else rows.take(order)


def _refuse_equal_steps(rows: SampleBatch) -> None:
    """Refuse rows that only have ``t``, if two neighbours have the same step: they are of different
    episodes.
    """
    if c.T not in rows:
        return
    t = rows[c.T]
    is_repeated = (t[1:] == t[:-1]) & (t[1:] != 0)
    repeated = np.flatnonzero(is_repeated)
    if len(repeated):
        row = int(repeated[0]) + 1
        raise DataError(
            f"rows {row} and {row + 1} both have t {t[row]}, so they are of different episodes, and"
            " without eps_id it is unknown which rows belong together. Add a column eps_id"
        )


def episode_numbers(rows: SampleBatch) -> I64:
    """Return [B]: for each row the number of its episode and agent, in order of their first rows in
    the batch.
    """
    changes = _changes(rows)
    runs: I64 = np.append(0, np.cumsum(changes)).astype(np.int64)
    starts = np.append(0, np.flatnonzero(changes) + 1)
    keys = np.zeros(len(starts), np.int64)
    for name in (c.EPS_ID, c.AGENT_INDEX):
        if name in rows:
            values, codes = np.unique(rows[name][starts], return_inverse=True)
            keys = keys * len(values) + codes
    unique, firsts, codes = np.unique(keys, return_index=True, return_inverse=True)
    if len(unique) == len(starts):
        return runs
    rank = np.empty(len(unique), np.int64)
    rank[np.argsort(firsts)] = np.arange(len(unique))
    return rank[codes][runs]


def _by_step(rows: SampleBatch, positions: I64) -> I64:
    """Return the positions [K] of an episode's rows in the order of ``t``.

    If ``t`` starts again, the rows are of several episodes with the same name, one after the other:
    some steps are there twice, or each step 0 follows the end of an episode.
    """
    t = rows[c.T][positions]
    by_t = np.argsort(t, kind="stable")
    in_order = t[by_t]
    repeated = np.flatnonzero(in_order[1:] == in_order[:-1])
    starts = np.flatnonzero(t[1:] <= t[:-1]) + 1
    starts_again = bool((t[starts] == in_order[0]).all())
    if len(repeated) and starts_again:
        return positions
    has_all_steps = int(in_order[-1]) - int(in_order[0]) + 1 == len(t)
    could_start_again = starts_again and in_order[0] == 0 and not has_all_steps
    if could_start_again and not len(repeated) and ended(rows)[positions[starts - 1]].all():
        return positions
    if len(repeated):
        index = repeated[0]
        first = int(positions[by_t[index]]) + 1
        second = int(positions[by_t[index + 1]]) + 1
        name = f"eps_id {rows[c.EPS_ID][positions[0]]}" if c.EPS_ID in rows else "one agent"
        raise DataError(
            f"rows {first} and {second} both are step {in_order[index]} of {name}, between"
            " other steps. If they are of different episodes, give each its own eps_id; otherwise"
            " remove one of them"
        )
    return positions[by_t]


def _changes(rows: SampleBatch) -> Bools:
    """Return for each row but the last whether the next one is of another episode or agent."""
    changes = np.zeros(max(0, rows.count - 1), np.bool_)
    for name in (c.EPS_ID, c.AGENT_INDEX):
        if name in rows:
            column = rows[name]
            changes |= column[1:] != column[:-1]
    return changes


def _extents(breaks: Bools, count: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each run, and the row after its last one."""
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), count]
    return itertools.pairwise(edges)


@dataclass(slots=True)
class _OpenEpisode:
    """Rows of an episode that may have more rows in later batches.

    Attributes:
        parts: rows, in the order of the file.
        count: number of rows.
        nbytes: bytes of the rows, about.
        first_step, last_step: smallest and largest ``t``; 0 without ``t``.
        steps: all ``t``, once parts have overlapped; None before that.
    """

    parts: list[SampleBatch] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0
    first_step: int = 0
    last_step: int = 0
    steps: set[int] | None = None

    def add(self, part: SampleBatch) -> None:
        """Add rows."""
        if c.T in part:
            first, last = _steps(part)
            if self.parts:
                first = min(self.first_step, first)
                last = max(self.last_step, last)
            self.first_step = first
            self.last_step = last
            if self.steps is not None:
                self.steps.update(part[c.T].tolist())
        self.count += part.count
        self.nbytes += part.nbytes + _PART_BYTES
        self.parts.append(part)
        if len(self.parts) >= _MAX_PARTS:
            self.parts = [self.joined()]
            self.nbytes = self.parts[0].nbytes + _PART_BYTES

    def cut(self) -> None:
        """Mark the last row as truncated if steps don't show that a row is missing after it."""
        last = self.parts[-1]
        if c.T not in last and c.TRUNCATEDS in last:
            last[c.TRUNCATEDS][-1] = True
            last[c.DONES][-1] = True

    def has_step_of(self, part: SampleBatch) -> bool:
        """Return whether rows have a step that is here already."""
        first, last = _steps(part)
        if first > self.last_step or last < self.first_step:
            return False
        if self.steps is None:
            self.steps = set()
            for earlier in self.parts:
                self.steps.update(earlier[c.T].tolist())
        return not self.steps.isdisjoint(part[c.T].tolist())

    def is_whole(self) -> bool:
        """Return whether all rows are here."""
        last = self.parts[-1]
        if c.T not in last:
            return bool(ended(last)[-1])
        if self.first_step != 0 or self.count != self.last_step + 1:
            return False
        newest = max(self.parts, key=lambda part: _steps(part)[1])
        return bool(ended(newest)[-1])

    def joined(self) -> SampleBatch:
        """Return all rows in the order of their steps."""
        if len(self.parts) == 1:
            return self.parts[0]
        rows = SampleBatch.concat(self.parts)
        if c.T in rows and (rows[c.T][1:] <= rows[c.T][:-1]).any():
            rows = rows.take(np.argsort(rows[c.T], kind="stable"))
        return rows


def _row_shapes(part: SampleBatch) -> dict[str, tuple[int, ...]]:
    """Return the shape of a row in each column. Dtypes can differ from batch to batch: in JSON,
    whole numbers are int64 and fractions float32.
    """
    return {name: column.shape[1:] for name, column in part.items()}


def _steps(part: SampleBatch) -> tuple[int, int]:
    """Return the first and the last step of rows in order."""
    t = part[c.T]
    return int(t[0]), int(t[-1])


class EpisodeJoiner:
    """Joiner of the rows of each episode, which can be in several batches of a file.

    Batches go in one after the other; what comes out are whole episodes. Those that never end, or
    lack steps, come out at the end of the file. If they take more than `MAX_OPEN_BYTES` before
    that, they come out as they are, and rows that follow are further parts.

    Attributes:
        has_held_rows: True once rows were held back for a later batch.
    """

    def __init__(self, path: str) -> None:
        """Start with a file's path, for messages."""
        self.has_held_rows = False
        self._path = path
        self._open: dict[_Key, _OpenEpisode] = {}
        self._bytes = 0
        self._last_steps_cut: dict[_Key, int] = {}
        self._is_multi_agent = False
        self._num_rows = 0
        self._env_steps = 0

    def add(self, stored: Stored) -> Stored | None:
        """Add the next batch; return the episodes that end in it, or None if none does.

        Raises:
            DataError: episodes can't be distinguished, or have rows that are too far apart. The
                batch is left out.
        """
        batch = stored.batch
        # All are ordered before any is added, because an error leaves the batch out.
        in_order = {
            policy_id: rows_in_order(rows) for policy_id, rows in rows_by_policy(batch).items()
        }
        self._is_multi_agent |= isinstance(batch, MultiAgentBatch)
        self._num_rows += batch.total()
        self._env_steps += batch.env_steps
        was_open = bool(self._open)
        released = {
            policy_id: self._add_rows(policy_id, rows) for policy_id, rows in in_order.items()
        }
        if self._bytes > MAX_OPEN_BYTES:
            self._cut_open(released, stored.place)
        self.has_held_rows |= was_open or bool(self._open)
        complete = self._batch(released)
        if complete is None:
            return None
        # the place is part of a piece's number, which must change with the rows
        place = f"joined {stored.place}" if self.has_held_rows else stored.place
        return Stored(place, complete)

    def cut(self, eps_id: int | None) -> None:
        """Take note that a row without ``t`` is left out: later rows don't follow on those here.

        Args:
            eps_id: number of its episode; None if it is unknown, or later rows show the gap.
        """
        for key, episode in self._open.items():
            if eps_id in (None, key[1]):
                episode.cut()

    def finish(self) -> Stored | None:
        """Return the rows of the episodes that have not ended; None if there are none."""
        released: dict[str, list[SampleBatch]] = {}
        self._release_open(released)
        rest = self._batch(released)
        return None if rest is None else Stored("episodes cut by the end of the file", rest)

    def _add_rows(
        self,
        policy_id: str,
        rows: SampleBatch,
    ) -> list[SampleBatch]:
        """Return whole episodes, in the order in which they stand in the batch."""
        if not rows.count:
            return []
        runs = list(_extents(_changes(rows), rows.count))
        starts, stops = np.array(runs).T
        zeros = np.zeros(rows.count, np.int64)
        episodes = rows.get(c.EPS_ID, zeros)
        agents = rows.get(c.AGENT_INDEX, zeros)
        is_whole = _whole_runs(rows, starts, stops - 1)
        released: list[SampleBatch] = []
        # Whole episodes are released with their neighbours, as one slice.
        num_released = 0
        for (start, stop), is_complete in zip(runs, is_whole, strict=True):
            key = (policy_id, int(episodes[start]), int(agents[start]))
            if is_complete and key not in self._open:
                continue
            if start > num_released:
                released.append(rows.slice(num_released, start))
            num_released = stop
            for part in _instances(rows.slice(start, stop)):
                released += self._add_part(key, part, is_last=stop == rows.count)
        if num_released < rows.count:
            released.append(rows.slice(num_released, rows.count))
        return released

    def _add_part(
        self,
        key: _Key,
        part: SampleBatch,
        *,
        is_last: bool,
    ) -> list[SampleBatch]:
        """Add consecutive rows of an episode; return the complete parts."""
        released: list[SampleBatch] = []
        if key in self._open and not self._continues(key, part):
            released.append(self._release(key))
        if c.T in part and key in self._last_steps_cut:
            self._check_after_cut(key, part)
        episode = self._open.setdefault(key, _OpenEpisode())
        before = episode.nbytes
        # a copy, because a view would keep the whole batch in memory
        episode.add(part.copy())
        self._bytes += episode.nbytes - before
        has_flags = any(name in part for name in FLAGS)
        if c.EPS_ID not in part:
            is_over = not has_flags or bool(ended(part)[-1])
        elif has_flags:
            is_over = episode.is_whole()
        else:
            # only the last episode of a batch can continue
            is_over = not is_last
        if is_over:
            released.append(self._release(key))
        return released

    def _continues(self, key: _Key, part: SampleBatch) -> bool:
        """Return whether rows are of the open episode, not of a new one with the same name.

        Raises:
            DataError: some of its steps are there already, and the rows are not the start of an
                episode.
        """
        episode = self._open[key]
        last = episode.parts[-1]
        if _row_shapes(last) != _row_shapes(part):
            return False
        if c.EPS_ID not in part:
            return _follows(last, part)
        if c.T not in part:
            return not ended(last)[-1]
        if not episode.has_step_of(part):
            return True
        step = int(part[c.T][0])
        if step <= episode.first_step:
            return False
        raise DataError(
            f"step {step} of eps_id {key[1]} was in an earlier batch already. If they are of"
            " different episodes, give each its own eps_id"
        )

    def _check_after_cut(self, key: _Key, part: SampleBatch) -> None:
        """Refuse rows that belong before or between rows that were released.

        Raises:
            DataError: they do.
        """
        step = int(part[c.T][0])
        if step > self._last_steps_cut[key]:
            return
        if step == 0:
            del self._last_steps_cut[key]
            return
        raise DataError(
            f"step {step} of eps_id {key[1]} is more than {MAX_OPEN_BYTES >> 20} MiB of rows behind"
            " later steps. Sort the rows by eps_id and t"
        )

    def _release(self, key: _Key) -> SampleBatch:
        episode = self._open.pop(key)
        self._bytes -= episode.nbytes
        return episode.joined()

    def _release_open(self, released: dict[str, list[SampleBatch]]) -> None:
        for key in list(self._open):
            released.setdefault(key[0], []).append(self._release(key))

    def _cut_open(
        self,
        released: dict[str, list[SampleBatch]],
        place: str,
    ) -> None:
        """Release all open episodes, and remember where they were cut."""
        if not self._last_steps_cut:
            logger.warning(
                "%s, %s: %d episodes that have not ended here take more than %d MiB. They are cut:"
                " what follows of them counts as further episodes. Sort the rows by eps_id and t to"
                " avoid it",
                self._path,
                place,
                len(self._open),
                MAX_OPEN_BYTES >> 20,
            )
        for key, episode in self._open.items():
            self._last_steps_cut[key] = episode.last_step
        self._release_open(released)

    def _batch(self, released: dict[str, list[SampleBatch]]) -> Batch | None:
        """Return rows as one batch with its part of the env steps; None if there are no rows."""
        policies = {policy_id: _concat(parts) for policy_id, parts in released.items() if parts}
        count = sum(rows.count for rows in policies.values())
        if not count:
            return None
        env_steps = round(self._env_steps * count / self._num_rows)
        self._num_rows -= count
        self._env_steps -= env_steps
        if self._is_multi_agent:
            return MultiAgentBatch(policies, env_steps)
        (rows,) = policies.values()
        if env_steps != rows.count:
            rows.env_steps = env_steps
        return rows


def _concat(parts: list[SampleBatch]) -> SampleBatch:
    """Return the rows of parts, with only the columns that all of them have."""
    if len(parts) == 1:
        return parts[0]
    names = set.intersection(*map(set, parts))
    if any(len(part.keys()) != len(names) for part in parts):
        narrowed = []
        for part in parts:
            columns = {name: column for name, column in part.items() if name in names}
            narrowed.append(SampleBatch(columns))
        parts = narrowed
    return SampleBatch.concat(parts)


def _instances(run: SampleBatch) -> Iterator[SampleBatch]:
    """Yield the episodes of a run of rows with the same name, which can be several, one after the
    other.
    """
    if c.T in run and c.EPS_ID in run:
        t = run[c.T]
        breaks = t[1:] <= t[:-1]
    elif c.T in run:
        t = run[c.T].astype(np.int64)
        breaks = (np.diff(t) != 1) | ended(run)[:-1]
    else:
        breaks = ended(run)[:-1]
    for start, end in _extents(breaks, run.count):
        yield run.slice(start, end)


def _whole_runs(
    rows: SampleBatch,
    starts: I64,
    lasts: I64,
) -> Bools:
    """Return for each run of rows of the same name whether it consists of whole episodes."""
    ends = ended(rows)
    is_whole = ends[lasts]
    if c.T not in rows:
        return is_whole
    t = rows[c.T].astype(np.int64)
    starts_again = ends[:-1] & (t[1:] == 0)
    follows = (np.diff(t) == 1) | starts_again
    is_wrong = np.append(t[:1] != 0, ~follows)
    is_wrong[starts] = t[starts] != 0
    is_whole &= ~np.logical_or.reduceat(is_wrong, starts)
    return is_whole


def _follows(before: SampleBatch, after: SampleBatch) -> bool:
    """Return whether rows without ``eps_id`` continue the rows before them, as far as they show
    it.
    """
    if ended(before)[-1]:
        return False
    if c.T in after and int(after[c.T][0]) != int(before[c.T][-1]) + 1:
        return False
    if c.NEW_OBS not in before or c.OBS not in after:
        return True
    end = before[c.NEW_OBS][-1]
    start = after[c.OBS][0]
    return bool(np.allclose(end, start, rtol=1e-4, atol=1e-5, equal_nan=True))
