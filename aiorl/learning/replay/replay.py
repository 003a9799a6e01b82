"""Replay: rows of experience to train on repeatedly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from aiorl.acting.postprocess import last_rows, n_step_new_obs
from aiorl.data import columns as c
from aiorl.data.columns import F32, F64, I64, Array, Columns, ColumnSpec, Piece
from aiorl.data.fragment import check_fragment
from aiorl.errors import BatchError, CheckpointError
from aiorl.learning.replay.frames import FrameStore, observed
from aiorl.learning.replay.priorities import Priorities
from aiorl.learning.replay.ring import Ring, Snapshot
from aiorl.learning.replay.spec import EPISODE_COLUMNS, FRAMES_OF, ReplaySpec, allocate

_MIN_GROUP = 256
_NUM_SETS = 2


class Sample(NamedTuple):
    """Minibatches of rows.

    Attributes:
        columns: name -> [K, B, ...], C-contiguous; [B, ...] if no number of minibatches was
            requested.
        ids: [K, B] or [B] int64, numbers of the rows, for `Replay.update_priorities`.
        weights: float32 of the same shape, importance weight of each row; 1 if rows are drawn
            uniformly.
    """

    columns: dict[str, Array]
    ids: I64
    weights: F32


class _Group(NamedTuple):
    """Consecutive rows, which are dropped together when any of their frames are overwritten."""

    end: int
    first_frame: int


class Replay:
    """Newest rows of experience, drawn uniformly or by priority.

    Not thread-safe, except for `check_fragment` and for reading the result of `snapshot`. The same
    calls with the same seed give the same rows, bit for bit.

    Attributes:
        spec: columns and size.
        sampled: number of rows drawn so far.
    """

    def __init__(self, spec: ReplaySpec, *, seed: int) -> None:
        """Allocate all of the replay.

        Args:
            spec: columns and size.
            seed: seed of the random draws.

        Raises:
            ConfigError: there is no room for it; `check_fits` checks that beforehand.
        """
        self.spec = spec
        self.sampled = 0
        self._ring = Ring(allocate(spec.capacity, spec.row, spec.spill_dir))
        self._oldest = 0
        self._priorities: Priorities | None = None
        if spec.priorities is not None:
            self._priorities = Priorities(spec.capacity, spec.priorities)
        self._frames: FrameStore | None = None
        if spec.stack:
            frames = allocate(spec.num_frames, spec.frame, spec.spill_dir)
            self._frames = FrameStore(frames, spec.stack)
        self._groups: deque[_Group] = deque()
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._outputs: list[dict[str, Array]] = []
        self._outputs_for = (0, 0)
        self._next_output = 0

    def __len__(self) -> int:
        """Return the number of rows that can be drawn."""
        return self.stored - self._oldest

    @property
    def sampled_columns(self) -> tuple[ColumnSpec, ...]:
        """Columns of a sampled row; a subclass can draw other ones than it stores."""
        return self.spec.columns

    @property
    def stored(self) -> int:
        """Number of rows stored so far."""
        return self._ring.written

    @property
    def evicted(self) -> int:
        """Number of rows evicted so far."""
        return self._oldest

    def check_fragment(self, arrays: Columns) -> None:
        """Check that `insert_fragment` accepts a fragment. Safe in any thread.

        Args:
            arrays: arrays of the fragment by name: columns [T, N, ...], see `insert_fragment`.

        Raises:
            BatchError: it doesn't; the error names the column at fault.
        """
        columns = [*self.spec.columns]
        if c.PRIORITIES in arrays:
            columns.append(ColumnSpec(c.PRIORITIES))
        _, num_envs = check_fragment(columns, arrays)
        most = self.spec.capacity
        if self._frames is not None:
            most = min(most, self._frames.most_rows())
        if num_envs > most:
            raise BatchError(
                self.spec.columns[0].name,
                f"at most {most} rows a step, the size of the replay",
                num_envs,
            )

    def insert_fragment(self, arrays: Columns) -> int:
        """Store the transitions of a checked fragment; only its newest steps if there is no room
        for all.

        Args:
            arrays: arrays of the fragment by name: columns [T, N, ...] and, without `new_obs`, the
                arrays from which it is built (see `aiorl.data.fragment`). With ``n_steps``, the
                observation stored as `new_obs` is the one after that many steps. Integers and
                floats of other sizes are converted. ``priorities`` are absolute TD errors, as
                workers found them; an error above the largest one from `update_priorities`
                (initially 1) counts as that one, as does a missing error.

        Returns:
            Number of rows stored.
        """
        length, num_envs = arrays[self.spec.columns[0].name].shape[:2]
        most = self._most_steps(arrays, length, num_envs)
        if length > most:
            arrays = _newest_steps(self.spec.columns, arrays, length - most)
            length = most
        order = self._order(arrays)
        count: int = length * num_envs
        if order is not None:
            count = len(order)
        if not count:
            return 0
        names = [column.name for column in self.spec.plain_columns if column.name in arrays]
        fields = {name: arrays[name] for name in names}
        first_frame = 0
        if self._frames is not None:
            frames = self._insert_frames(self._frames, arrays)
            first_frame = min(int(numbers.min()) for numbers in frames.values())
            for name, numbers in frames.items():
                fields[FRAMES_OF[name]] = self._frames.slots(numbers)
        elif any(column.name == c.NEW_OBS for column in self.spec.columns):
            fields[c.NEW_OBS] = n_step_new_obs(arrays)
        rows = {name: rows_of(array, order) for name, array in fields.items()}
        errors = None
        if self._priorities is not None and c.PRIORITIES in arrays:
            errors = np.abs(rows_of(arrays[c.PRIORITIES], order).astype(np.float64))
        self._before_writing(arrays, order)
        self._write(rows, count, errors)
        if self._frames is not None:
            self._group(first_frame)
        return count

    def sample(
        self, batch_size: int, *, num_batches: int | None = None, beta: float = 0.0
    ) -> Sample:
        """Draw rows, with replacement.

        Args:
            batch_size: B, rows in a minibatch.
            num_batches: K minibatches, for one call that trains on all; None = one, without an axis
                for K.
            beta: exponent of the importance weights: 0 doesn't correct for priorities, 1 corrects
                fully.

        Returns:
            Rows, in arrays that the second call after this one overwrites, even with other sizes.

        Raises:
            BatchError: there are no rows.
        """
        if not len(self):
            raise BatchError(self.spec.columns[0].name, "rows in the replay", "none")
        shape = (num_batches or 1, batch_size)
        if self._priorities is None:
            ids = self._rng.integers(self._oldest, self.stored, shape)
            slots = ids % self.spec.capacity
            weights = np.ones(shape, np.float32)
        else:
            slots, weights = self._priorities.draw(self._rng, *shape, beta)
            ids = self._ring.newest_in(slots)
        self.sampled += ids.size
        columns = self._output(shape)
        self._read(slots.reshape(-1), columns)
        leading: tuple[int, ...] = shape
        if num_batches is None:
            leading = (batch_size,)
        return Sample(
            {
                column.name: columns[column.name].reshape(*leading, *column.shape)
                for column in self.spec.columns
            },
            ids=ids.reshape(leading),
            weights=weights.reshape(leading),
        )

    def read(self, ids: I64) -> dict[str, Array]:
        """Return columns ``[*ids.shape, ...]`` of rows by name, in new arrays.

        Args:
            ids: numbers of rows that can be drawn, any shape.
        """
        columns = self._new_output(ids.size)
        self._read((ids % self.spec.capacity).reshape(-1), columns)
        return {
            column.name: columns[column.name].reshape(*ids.shape, *column.shape)
            for column in self.spec.columns
        }

    def update_priorities(self, ids: Array, errors: Any) -> None:
        """Set the errors by which rows are drawn; no effect if rows are drawn uniformly.

        Args:
            ids: ids from a `Sample`, any shape. Rows that were evicted are ignored; for a repeated
                row, the last error counts.
            errors: the same shape, finite TD errors; their absolute values are used.
        """
        if self._priorities is None:
            return
        numbers = ids.reshape(-1)
        sizes = np.abs(np.asarray(errors, np.float64)).reshape(-1)
        if numbers.size and numbers.min() < self._oldest:
            is_stored = numbers >= self._oldest
            numbers = numbers[is_stored]
            sizes = sizes[is_stored]
        self._priorities.update(numbers % self.spec.capacity, sizes)

    def write_back(self, ids: Array, columns: Columns) -> None:
        """Replace columns of rows that were drawn.

        Args:
            ids: ids from a `Sample`, any shape. Rows that were evicted are ignored; for a repeated
                row, the last one counts.
            columns: arrays ``[*ids.shape, ...]`` by name. PRIORITIES are finite TD errors, see
                `update_priorities`; all others are columns of the rows themselves, without
                observations that are stored as frames.
        """
        for name, column in columns.items():
            if name == c.PRIORITIES:
                self.update_priorities(ids, column)
                continue
            numbers = ids.reshape(-1)
            rows = column.reshape(len(numbers), *column.shape[ids.ndim :])
            is_stored = numbers >= self._oldest
            self._ring.replace(numbers[is_stored], name, rows[is_stored])

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the replay, to be written piece by piece while rows are inserted and
        sampled.

        It costs an immediate copy of the priorities, and later copies of data that is overwritten
        before it is read. The previous snapshot ends.
        """
        values: dict[str, Any] = {
            "spec": self.spec.identity(),
            "stored": self.stored,
            "oldest": self._oldest,
            "sampled": self.sampled,
            "rng": self._rng.bit_generator.state,
        }
        rings = {"rows": self._ring.snapshot()}
        if self._priorities is not None:
            values["largest_error"] = self._priorities.largest
        if self._frames is not None:
            values["frames_stored"] = self._frames.ring.written
            rings["frames"] = self._frames.ring.snapshot()
        return Snapshot(values, rings, self._saved_arrays())

    def restore(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """Restore a snapshot, bit for bit: the next rows drawn are those that would have been drawn
        then.

        Args:
            values: values of the snapshot, possibly read back from JSON.
            pieces: pieces of the snapshot, in any order.

        Raises:
            CheckpointError: the snapshot is from another replay, incomplete or damaged. The replay
                is then empty or partly filled and must not be used.
        """
        try:
            self._restore(values, pieces)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CheckpointError("replay", f"its saved state can't be used: {error}") from error

    def _restore(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        self._check_identity(values["spec"])
        self._ring.written = int(values["stored"])
        self._oldest = int(values["oldest"])
        self.sampled = int(values["sampled"])
        if not 0 <= self._ring.oldest <= self._oldest <= self.stored:
            raise ValueError(f"oldest is {self._oldest}, stored {self.stored}")
        rings = {"rows": self._ring}
        if self._frames is not None:
            rings["frames"] = self._frames.ring
            self._frames.ring.written = int(values["frames_stored"])
        missing = {name: ring.written - ring.oldest for name, ring in rings.items()}
        arrays: dict[str, Array] = {}
        for name, first, array in pieces:
            if name in rings:
                missing[name] -= rings[name].take_back(first, array)
            else:
                arrays[name] = array
        if any(missing.values()):
            raise ValueError(f"missing rows: {missing}")
        self._restore_arrays(arrays)
        if self._priorities is not None:
            self._priorities.largest = float(values["largest_error"])
        self._rng.bit_generator.state = values["rng"]

    def _saved_arrays(self) -> dict[str, Array]:
        """Return what a snapshot holds besides values and rings, by name."""
        arrays: dict[str, Array] = {}
        if self._priorities is not None:
            arrays["priorities"] = self._priorities.tree.priorities.copy()
        if self._frames is not None:
            arrays["groups"] = np.array(self._groups, np.int64).reshape(-1, 2)
            arrays["last"] = self._frames.last()
        return arrays

    def _restore_arrays(self, arrays: Columns) -> None:
        """Restore what `_saved_arrays` returned, after the rings.

        Raises:
            (KeyError, TypeError, ValueError, IndexError): an array is missing or damaged.
        """
        if self._frames is not None:
            self._groups = deque(_Group(*pair) for pair in arrays["groups"].tolist())
            self._frames.set_last(arrays["last"])
        if self._priorities is not None:
            priorities = arrays["priorities"]
            if priorities.shape != (self.spec.capacity,) or not np.isfinite(priorities).all():
                raise ValueError(
                    f"priorities are {priorities.dtype} {priorities.shape}, or not finite"
                )
            self._priorities.tree.set_run(0, priorities)

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless a replay with this `saved` identity held the same rows."""
        current = self.spec.identity()
        # older snapshots lack some settings
        former = {name: current[name] for name in self.spec.made_with} | dict(saved)
        differing = [
            f"{name} was {former.get(name)!r:.200} and is {current[name]!r:.200}"
            for name in current
            if former.get(name) != current[name]
        ]
        if differing or former.keys() != current.keys():
            raise CheckpointError(
                "replay",
                f"it was saved with other settings: {'; '.join(differing)}. "
                "Set checkpoint_replay: false to continue without it",
            )

    def _order(self, arrays: Columns) -> I64 | None:
        """Return which of the T * N rows of a fragment are stored, in order; None if all are, as
        they are.
        """
        if c.VALID not in arrays or arrays[c.VALID].all():
            return None
        return np.flatnonzero(arrays[c.VALID])

    def _before_writing(self, arrays: Columns, order: I64 | None) -> None:
        """Note the rows of a fragment that will be written in this `order`; for subclasses."""

    def _most_steps(self, arrays: Columns, length: int, num_envs: int) -> int:
        """Return the number of newest steps of a fragment for whose rows and frames there is
        room.
        """
        most = min(length, self.spec.capacity // num_envs)
        if self._frames is None:
            return most
        while most * num_envs > self._frames.most_rows():
            newest = _newest_steps(self.spec.columns, arrays, length - most)
            num_frames = self._frames.num_needed(observed(newest, self._frames.dtype))
            if num_frames <= self._frames.ring.capacity:
                break
            most //= 2
        return most

    def _insert_frames(self, frames: FrameStore, arrays: Columns) -> dict[str, I64]:
        observations = observed(arrays, frames.dtype)
        before, following = frames.insert(observations, self._drop_frames_before)
        if c.N_STEPS in arrays:
            rows = last_rows(arrays[c.N_STEPS])
            following = following[rows, np.arange(rows.shape[1])]
        return {c.OBS: before, c.NEW_OBS: following}

    def _write(self, rows: Columns, count: int, errors: F64 | None) -> None:
        for slots, part in self._ring.advance(count):
            for name, array in rows.items():
                self._ring.slots[name][slots] = array[part]
            if self._priorities is not None:
                initial = None if errors is None else errors[part]
                self._priorities.set_run(slots.start, initial, part.stop - part.start)
        self._oldest = max(self._oldest, self._ring.oldest)

    def _group(self, first_frame: int) -> None:
        """Note the rows just written.

        Groups have rising frames; one that shares frames with an older one joins it.
        """
        groups = self._groups
        while groups and groups[-1].first_frame >= first_frame:
            groups.pop()
        before = self._oldest
        if len(groups) > 1:
            before = groups[-2].end
        if groups and groups[-1].end - before < _MIN_GROUP:
            first_frame = groups.pop().first_frame
        groups.append(_Group(self.stored, first_frame))
        while groups[0].end <= self._oldest:
            groups.popleft()

    def _drop_frames_before(self, first_frame: int) -> None:
        """Drop all rows with frames of lower numbers."""
        end = self._oldest
        while self._groups and self._groups[0].first_frame < first_frame:
            end = max(end, self._groups.popleft().end)
        if end == self._oldest:
            return
        if self._priorities is not None:
            for slots, _ in self._ring.runs(self._oldest, end):
                self._priorities.tree.set_run(slots.start, np.zeros(slots.stop - slots.start))
        self._oldest = end

    def _read(self, slots: I64, columns: Columns) -> None:
        rows = self._ring.slots.take(slots)
        for column in self.spec.plain_columns:
            columns[column.name][...] = rows[column.name]
        if self._frames is not None:
            for name, field in FRAMES_OF.items():
                self._frames.read(rows[field], columns[name])

    def _output(self, shape: tuple[int, int]) -> dict[str, Array]:
        """Return arrays [K * B, ...] by name, reused from the call before the last."""
        if self._outputs_for != shape:
            self._outputs = [self._new_output(math.prod(shape)) for _ in range(_NUM_SETS)]
            self._outputs_for = shape
        self._next_output = (self._next_output + 1) % _NUM_SETS
        return self._outputs[self._next_output]

    def _new_output(self, count: int) -> dict[str, Array]:
        """Return arrays for this number of rows by name."""
        return {
            column.name: np.empty((count, *column.shape), column.dtype)
            for column in self.spec.columns
        }


def rows_of(array: Array, order: I64 | None) -> Array:
    """Return rows [B, ...] of a column [T, N, ...]: those of the T * N in an `order`; None = all."""
    rows = array.reshape(-1, *array.shape[2:])
    if order is None:
        return rows
    return rows[order]


def _newest_steps(columns: tuple[ColumnSpec, ...], arrays: Columns, cut: int) -> dict[str, Array]:
    """Return the row data of a checked fragment without its first steps.

    Args:
        columns: columns of a row.
        arrays: arrays of the fragment by name.
        cut: number of steps to leave out.
    """
    of_steps = {column.name for column in columns}
    of_steps |= {c.VALID, c.N_STEPS, c.PRIORITIES, *EPISODE_COLUMNS}
    newest = {name: array[cut:] if name in of_steps else array for name, array in arrays.items()}
    if c.FINAL_INDEX in arrays:
        is_left = arrays[c.FINAL_INDEX][:, 0] >= cut
        newest[c.FINAL_INDEX] = arrays[c.FINAL_INDEX][is_left] - np.array([cut, 0], np.int32)
        newest[c.FINAL_OBS] = arrays[c.FINAL_OBS][is_left]
    return newest
