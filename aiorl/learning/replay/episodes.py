"""EpisodeReplay: a replay that knows which rows belong to one episode, for hindsight and for
sequences that are cut out when they are drawn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import I64, Array, Columns, ColumnSpec
from aiorl.data.fragment import check_numbers
from aiorl.errors import BatchError
from aiorl.learning.replay.replay import Replay, Sample, rows_of
from aiorl.learning.replay.spec import EPISODE_COLUMNS, ReplaySpec, check_episode_columns

_UNKNOWN = -1
"""Episode of a row from a checkpoint that doesn't say which rows belong together."""
_SAVED_ROWS = "episodes"
_SAVED_EPISODES = "episode_names"
_SAVED_GAPS = "episode_gaps"


class Relabel(Protocol):
    """Function that changes rows after they were drawn, for example their goal and reward."""

    def __call__(
        self, rows: Columns, later: Columns, rng: np.random.Generator
    ) -> Mapping[str, Array]:
        """Return the columns that change.

        Args:
            rows: columns ``[R, ...]`` of the rows drawn, for all minibatches of a call.
            later: the same columns of another row for each, drawn uniformly from the row itself and
                the stored rows that follow it in its episode.
            rng: generator of the replay's random numbers, whose state is saved in checkpoints.

        Returns:
            Name -> new column ``[R, ...]``; the others stay as they are.
        """


class EpisodeReplay(Replay):
    """Replay whose rows know their episode.

    Workers must send the columns in `fragment_columns`. Rows belong together if they have the same `eps_id` and
    `agent_index` and arrive in the order of `t`; the parts of an episode can come between those of
    others, and its first rows can be evicted already. Its end needs no mark: the rows that follow a
    row are those stored so far. It takes 17 bytes a row in addition to `ReplaySpec.bytes_needed`.

    Rows of a checkpoint that was written without episodes are each an episode of their own.

    Attributes:
        fragment_columns: columns that a fragment has in addition to those of the spec.
    """

    fragment_columns: ClassVar[tuple[str, ...]] = EPISODE_COLUMNS

    def __init__(self, spec: ReplaySpec, *, seed: int, relabel: Relabel | None = None) -> None:
        """Allocate all of the replay.

        Args:
            spec: columns and size.
            seed: seed of the random draws.
            relabel: changes rows after they were drawn; None = they are as stored.

        Raises:
            ConfigError: there is no room for it.
        """
        super().__init__(spec, seed=seed)
        self._relabel = relabel
        self._episodes = Episodes(spec.capacity)

    def check_fragment(self, arrays: Columns) -> None:
        """See `Replay.check_fragment`; `fragment_columns` are checked, too."""
        super().check_fragment(arrays)
        check_episode_columns(arrays, arrays[self.spec.columns[0].name].shape[:2])

    def sample(
        self, batch_size: int, *, num_batches: int | None = None, beta: float = 0.0
    ) -> Sample:
        """See `Replay.sample`; rows are relabelled.

        Raises:
            BatchError: there are no rows, or what `relabel` returned doesn't fit.
        """
        sample = super().sample(batch_size, num_batches=num_batches, beta=beta)
        if self._relabel is None:
            return sample
        ids = sample.ids.reshape(-1)
        specs = {column.name: column for column in self.spec.columns}
        rows = {
            name: column.reshape(len(ids), *specs[name].shape)
            for name, column in sample.columns.items()
        }
        changed = self._relabel(rows, self.read(self.later(ids)), self._rng)
        _check_relabelled(changed, specs, len(ids))
        for name, column in changed.items():
            rows[name][...] = column
        return sample

    def episode(self, number: int) -> I64:
        """Return all rows of an episode that can be drawn.

        Args:
            number: number of one of its rows that can be drawn.

        Returns:
            ``[R]``, numbers of the rows in the order of time.
        """
        ((rows, _),) = self._episodes.places(np.array([number]))
        return np.array(rows[bisect_left(rows, self.evicted) :], np.int64)

    def later(self, ids: I64) -> I64:
        """Return one row for each, drawn uniformly from the row itself and those stored after it in
        its episode.

        Args:
            ids: numbers of rows that can be drawn, any shape.
        """
        shares = self._rng.random(ids.size)
        places = self._episodes.places(ids.reshape(-1))
        drawn = [
            rows[place + int(share * (len(rows) - place))]
            for (rows, place), share in zip(places, shares.tolist(), strict=True)
        ]
        return np.array(drawn, np.int64).reshape(ids.shape)

    def following(self, ids: I64, length: int) -> I64:
        """Return each row and those stored after it in its episode, so that a sequence never
        crosses an episode's end, nor a gap that a lost fragment has left.

        A row is behind a gap if it is the first of its agent in a fragment and `t` is not one more
        than before. Within a fragment, `t` can skip steps in which the agent was not observed.

        Args:
            ids: numbers of rows that can be drawn, any shape.
            length: L, maximum number of rows of a sequence.

        Returns:
            ``[*ids.shape, L]``, numbers of rows; -1 where the episode has no further row, or none before a
            gap.
        """
        following = np.full((ids.size, length), -1, np.int64)
        for sequence, (rows, place) in zip(
            following, self._episodes.places(ids.reshape(-1)), strict=True
        ):
            part = rows[place : place + length]
            sequence[: len(part)] = part
        is_behind = self._episodes.are_behind_gap(following)
        is_behind[:, 0] = False
        following[np.logical_or.accumulate(is_behind, axis=1)] = -1
        return following.reshape(*ids.shape, length)

    def _order(self, arrays: Columns) -> I64:
        """See `Replay._order`: rows of one environment follow each other, as in their episode."""
        length, num_envs = arrays[c.EPS_ID].shape
        order = np.arange(length * num_envs).reshape(length, num_envs).T
        if c.VALID in arrays:
            return order[arrays[c.VALID].T]
        return order.reshape(-1)

    def _before_writing(self, arrays: Columns, order: I64 | None) -> None:
        names = {name: rows_of(arrays[name], order) for name in EPISODE_COLUMNS}
        self._episodes.insert(self.stored, names)

    def _saved_arrays(self) -> dict[str, Array]:
        return {**super()._saved_arrays(), **self._episodes.saved(self._ring.oldest, self.stored)}

    def _restore_arrays(self, arrays: Columns) -> None:
        super()._restore_arrays(arrays)
        if _SAVED_ROWS in arrays:
            self._episodes.restore(arrays, self._ring.oldest, self.stored)


def _check_relabelled(changed: Any, specs: Mapping[str, ColumnSpec], num_rows: int) -> None:
    """Check what a `Relabel` returned.

    Raises:
        BatchError: it is no mapping of columns [R, ...] that the replay has, or numbers are not
            finite or too large.
    """
    if not isinstance(changed, Mapping):
        raise BatchError("relabel", "columns by name, as a dict", type(changed).__name__)
    for name, column in changed.items():
        if name not in specs:
            columns = ", ".join(specs)
            raise BatchError(str(name), f"one of the columns {columns} from relabel", "another one")
        if not isinstance(column, np.ndarray):
            raise BatchError(name, "a NumPy array from relabel", type(column).__name__)
        try:
            specs[name].check(column, (num_rows,))
            check_numbers(specs[name], column)
        except BatchError as error:
            raise BatchError(name, f"{error.expected} from relabel", error.got) from None


@dataclass(slots=True)
class _Episode:
    """Stored rows of one agent in one episode.

    Attributes:
        name: its `eps_id` and `agent_index`.
        last_step: `t` of the newest row.
        rows: numbers of its rows, ascending; the first ones can be overwritten.
    """

    name: tuple[int, int]
    last_step: int
    rows: array[int]


class Episodes:
    """Episodes of the rows in the slots of a ring."""

    def __init__(self, capacity: int) -> None:
        """Begin without rows."""
        self._capacity = capacity
        self._of_slots = np.full(capacity, _UNKNOWN, np.int64)
        self._is_behind_gap = np.zeros(capacity, np.bool_)  # of each slot
        self._episodes: dict[int, _Episode] = {}
        self._newest: dict[tuple[int, int], int] = {}
        self._next = 0

    def insert(self, first: int, columns: Columns) -> None:
        """Add rows to their episodes, and forget the rows that they overwrite.

        Args:
            first: number of the first new row.
            columns: EPISODE_COLUMNS [B] of the new rows.
        """
        episode_ids = columns[c.EPS_ID].astype(np.int64)
        agents = columns[c.AGENT_INDEX].astype(np.int64)
        steps = columns[c.T].astype(np.int64)
        end = first + len(steps)
        self._forget(first, end)
        begins = np.ones(len(steps), np.bool_)
        begins[1:] = episode_ids[1:] != episode_ids[:-1]
        begins[1:] |= agents[1:] != agents[:-1]
        begins[1:] |= steps[1:] <= steps[:-1]
        starts = np.flatnonzero(begins).tolist()
        numbers = np.empty(len(steps), np.int64)
        self._is_behind_gap[self._slots(first, end)] = False
        for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
            name = (int(episode_ids[start]), int(agents[start]))
            number = self._number_of(name, int(steps[start]))
            episode = self._episodes[number]
            if episode.rows and steps[start] != episode.last_step + 1:
                self._is_behind_gap[(first + start) % self._capacity] = True
            episode.rows.extend(range(first + start, first + stop))
            episode.last_step = int(steps[stop - 1])
            numbers[start:stop] = number
        self._of_slots[self._slots(first, end)] = numbers

    def places(self, rows: I64) -> Iterator[tuple[Sequence[int], int]]:
        """Yield for each stored row [B] the rows of its episode, and its place among them; the
        first rows can be overwritten.
        """
        episodes = self._of_slots[rows % self._capacity]
        for row, number in zip(rows.tolist(), episodes.tolist(), strict=True):
            if number == _UNKNOWN:
                yield [row], 0
            else:
                of_episode = self._episodes[number].rows
                yield of_episode, bisect_left(of_episode, row)

    def are_behind_gap(self, rows: I64) -> NDArray[np.bool_]:
        """Return whether steps are missing between each stored row and the one before it; anything
        for -1.

        Args:
            rows: numbers of rows, any shape.
        """
        return self._is_behind_gap[rows % self._capacity]

    def saved(self, first: int, stop: int) -> dict[str, Array]:
        """Return the episodes of rows `first` to `stop`, as arrays for `restore`."""
        episodes = [
            (number, *episode.name, episode.last_step) for number, episode in self._episodes.items()
        ]
        return {
            _SAVED_ROWS: self._of_slots[self._slots(first, stop)],
            _SAVED_EPISODES: np.array(episodes, np.int64).reshape(-1, 4),
            _SAVED_GAPS: self._is_behind_gap[self._slots(first, stop)],
        }

    def restore(self, arrays: Columns, first: int, stop: int) -> None:
        """Restore episodes of rows `first` to `stop`.

        Args:
            arrays: arrays that `saved` returned.
            first: number of the oldest row.
            stop: number after the newest row.

        Raises:
            (KeyError, ValueError): they don't fit.
        """
        of_rows = arrays[_SAVED_ROWS]
        if of_rows.shape != (stop - first,) or of_rows.dtype != np.int64:
            raise ValueError(f"episodes are {of_rows.dtype} {of_rows.shape}, for {stop - first}")
        # checkpoints of earlier versions don't say where steps are missing
        is_behind_gap = arrays.get(_SAVED_GAPS, np.zeros(stop - first, np.bool_))
        if is_behind_gap.shape != (stop - first,) or is_behind_gap.dtype != np.bool_:
            raise ValueError(
                f"gaps are {is_behind_gap.dtype} {is_behind_gap.shape}, for {stop - first}"
            )
        for number, episode_id, agent, step in sorted(arrays[_SAVED_EPISODES].tolist()):
            self._episodes[number] = _Episode((episode_id, agent), step, array("q"))
            self._newest[episode_id, agent] = number
            self._next = number + 1
        for row, number in enumerate(of_rows.tolist(), first):
            if number != _UNKNOWN:
                self._episodes[number].rows.append(row)
        self._of_slots[self._slots(first, stop)] = of_rows
        self._is_behind_gap[self._slots(first, stop)] = is_behind_gap

    def _number_of(self, name: tuple[int, int], step: int) -> int:
        """Return the number of the episode that a row at this `step` continues; of a new one if it
        continues none.
        """
        number = self._newest.get(name, _UNKNOWN)
        if number != _UNKNOWN and step > self._episodes[number].last_step:
            return number
        number = self._next
        self._next += 1
        self._newest[name] = number
        self._episodes[number] = _Episode(name, step, array("q"))
        return number

    def _forget(self, first: int, stop: int) -> None:
        """Forget the rows that those from `first` to `stop` overwrite."""
        oldest = stop - self._capacity
        if oldest <= 0:
            return
        for number in np.unique(self._of_slots[self._slots(first, stop)]).tolist():
            if number not in self._episodes:
                continue
            episode = self._episodes[number]
            num_overwritten = bisect_left(episode.rows, oldest)
            if num_overwritten == len(episode.rows):
                del self._episodes[number]
                if self._newest[episode.name] == number:
                    del self._newest[episode.name]
            elif 2 * num_overwritten >= len(episode.rows):  # seldom, as it moves all others
                del episode.rows[:num_overwritten]

    def _slots(self, first: int, stop: int) -> I64:
        return np.arange(first, stop) % self._capacity
