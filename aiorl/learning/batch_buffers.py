"""Train batches: fragments laid out for the update, in reusable buffers.

All columns with four bytes per element and at most one dimension per row lie side by side in one
float32 array, "packed": fetching a minibatch is then one gather of whole rows, and no column costs
an allocation. Integers are stored bit by bit, flags as 1 and 0. Images have their own arrays. Two
sets of buffers alternate, so that one batch can be assembled while the previous one is trained on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import Array, Columns, ColumnSpec, first_not_finite
from aiorl.data.fragment import check_fragment, new_obs, refuse_others
from aiorl.errors import BatchError
from aiorl.learning.algorithm import Batch
from aiorl.learning.compiled import shareable_zeros
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.rows import by_time

PACKED = "packed"
"""Name of the array that holds all small columns."""


class Layout:
    """Arrays in which the columns of a batch are.

    Attributes:
        columns: columns of rows; VALID is among them.
        of_sequences: columns with one entry for each sequence.
        slices: name -> its place in the packed array, for columns that are part of it.
        packed_width: numbers of a row in the packed array.
    """

    def __init__(self, columns: Iterable[ColumnSpec]) -> None:
        """Lay the columns out; VALID is added if it is missing.

        Args:
            columns: columns of a fragment: [T, N, *shape]; or [N, *shape], for batches of sequences
                only.
        """
        specs = list(columns)
        of_rows = {spec.name: spec for spec in specs if not c.is_of_sequences(spec.name)}
        self.columns = tuple({**of_rows, c.VALID: ColumnSpec(c.VALID)}.values())
        self.of_sequences = tuple(spec for spec in specs if c.is_of_sequences(spec.name))
        self.slices: dict[str, slice] = {}
        start = 0
        for column in self.columns:
            if column.is_packed:
                self.slices[column.name] = slice(start, start + column.width)
                start += column.width
        self.packed_width = start

    @classmethod
    def of_tensors(cls, columns: Tensors, *, num_leading: int) -> Layout:
        """Return the layout of columns with `num_leading` dimensions before those of a row."""
        specs = []
        for name, column in columns.items():
            leading = 1 if c.is_of_sequences(name) else num_leading
            shape = tuple(column.shape[leading:])
            specs.append(ColumnSpec(name, shape, column.dtype.name))
        return cls(specs)

    def pack(self, columns: Tensors) -> Tensors:
        """Return the arrays of a batch with these columns."""
        parts = []
        batch: Tensors = {spec.name: columns[spec.name] for spec in self.of_sequences}
        for spec in self.columns:
            column = columns[spec.name]
            if not spec.is_packed:
                batch[spec.name] = column
                continue
            if not spec.shape:
                column = column[..., None]
            if spec.dtype == "int32":
                column = tf.bitcast(column, tf.float32)
            parts.append(column)
        batch[PACKED] = tf.concat(parts, axis=-1)
        return batch

    def unpack(self, batch: Tensors, *, time_major: bool = False) -> Tensors:
        """Return the columns by name, each with its own shape and dtype.

        Args:
            batch: arrays of a batch or of a minibatch.
            time_major: True to turn columns of steps from [M, T, ...] into [T, M, ...]; columns of
                sequences stay [M, ...].
        """
        columns: Tensors = {spec.name: batch[spec.name] for spec in self.of_sequences}
        arrays = {name: array for name, array in batch.items() if name not in columns}
        if time_major:
            arrays = {name: by_time(array) for name, array in arrays.items()}
        for spec in self.columns:
            if not spec.is_packed:
                columns[spec.name] = arrays[spec.name]
                continue
            column = arrays[PACKED][..., self._place(spec)]
            if spec.dtype == "int32":
                column = tf.bitcast(column, tf.int32)
            columns[spec.name] = column
        return columns

    def _place(self, spec: ColumnSpec) -> slice | int:
        """Return the place of a column in the last dimension of the packed array."""
        place = self.slices[spec.name]
        return place if spec.shape else place.start


class BatchBuffers(Layout):
    """Buffers in which train batches are assembled.

    Batches of rows are ``[R, ...]``; batches of sequences are ``[S, T, ...]``, sequence by
    sequence. Rows that no fragment fills are zero and have VALID 0.
    """

    def __init__(self, columns: Iterable[ColumnSpec]) -> None:
        """See `Layout`; two sets of buffers alternate."""
        super().__init__(columns)
        self._sets: Iterator[Batch] = itertools.cycle([{}, {}])

    def rows(self, fragments: Sequence[Columns], num_rows: int) -> Batch:
        """Return the rows of checked fragments one after the other, padded to `num_rows`.

        Returns:
            Arrays [num_rows, ...], valid until the second call after this one.
        """
        batch = self._buffers((num_rows,))
        filled = 0
        for fragment in fragments:
            end = filled + math.prod(self.shape_of(fragment))
            for column in self.columns:
                target = self._target(batch, column)[filled:end]
                source = self.source(fragment, column.name).reshape(target.shape)
                if target.ndim == 2 and source.dtype == target.dtype and source.flags.c_contiguous:
                    # rows as wholes are copied several times faster
                    whole_row = f"V{column.width * target.itemsize}"
                    source = source.view(whole_row)
                    target = target.view(whole_row)
                target[...] = source
            filled = end
        return _cleared(batch, filled)

    def sequences(
        self,
        fragments: Sequence[Columns],
        num_sequences: int,
        length: int,
    ) -> Batch:
        """Return the environments of checked fragments as `num_sequences` sequences of `length`
        steps.

        Returns:
            Arrays [num_sequences, length, ...], and [num_sequences, ...] for columns of sequences,
            valid until the second call after this one.
        """
        batch = self._buffers((num_sequences, length))
        filled = 0
        for fragment in fragments:
            steps, num_envs = self.shape_of(fragment)
            end = filled + num_envs
            for column in self.columns:
                source = self.source(fragment, column.name).swapaxes(0, 1)
                target = self._target(batch, column)
                target[filled:end, :steps] = source.reshape(num_envs, steps, *target.shape[2:])
                target[filled:end, steps:] = 0
            for extra in self.of_sequences:
                batch[extra.name][filled:end] = fragment[extra.name]
            if c.LAST_OBS in batch:
                lengths = _valid_lengths(fragment.get(c.VALID), steps, num_envs)
                self._place_last_obs(batch, filled, lengths, length)
            filled = end
        return _cleared(batch, filled)

    def check(self, fragment: Columns, steps: int | None = None) -> None:
        """Check that a fragment can be laid out. Safe in any thread.

        Args:
            fragment: arrays by name.
            steps: number of steps T that it must have; None = any.

        Raises:
            BatchError: a column is wrong; the error names it.
        """
        columns = (*self.columns, *self.of_sequences)
        refuse_others(fragment, [column.name for column in columns])
        shape = check_fragment(columns, fragment, is_finite=False)
        if steps is not None and shape[0] != steps:
            raise BatchError(
                self.columns[0].name, f"[{steps}, N, ...]", f"[{shape[0]}, {shape[1]}, ...]"
            )

    def zeros(self, *leading: int) -> Batch:
        """Return a batch with `leading` dimensions in which no row is valid, in new arrays."""
        batch = {PACKED: shareable_zeros((*leading, self.packed_width), "float32")}
        for spec in self.columns:
            if not spec.is_packed:
                batch[spec.name] = shareable_zeros((*leading, *spec.shape), spec.dtype)
        for spec in self.of_sequences:
            batch[spec.name] = shareable_zeros((leading[0], *spec.shape), spec.dtype)
        return batch

    def column(self, batch: Columns, name: str) -> Array:
        """Return a column of a batch by name, as a view."""
        for spec in self.columns:
            if spec.name == name:
                return self._target(batch, spec)
        return batch[name]

    def first_not_finite(self, batch: Columns) -> str:
        """Return the first column that holds a NaN or an infinity; "" if there is none."""
        names = [column.name for column in (*self.columns, *self.of_sequences)]
        return first_not_finite({name: self.column(batch, name) for name in names})

    def _place_last_obs(
        self,
        batch: Columns,
        first: int,
        steps: NDArray[np.intp],
        length: int,
    ) -> None:
        """Put the observation that follows a short sequence into the next row, where a longer
        sequence has it.

        Args:
            batch: batch in which the sequences are.
            first: number of the first sequence in it.
            steps: [S], steps of each sequence.
            length: steps of the longest sequence that fits.
        """
        (short,) = np.nonzero(steps < length)
        if len(short):
            target = self.column(batch, c.OBS)
            last_obs = batch[c.LAST_OBS][first + short]
            target[first + short, steps[short]] = last_obs.reshape(-1, *target.shape[2:])

    def _buffers(self, leading: tuple[int, ...]) -> Batch:
        batch = next(self._sets)
        if not batch or batch[PACKED].shape[:-1] != leading:
            batch.update(self.zeros(*leading))
        return batch

    def _target(self, batch: Columns, column: ColumnSpec) -> Array:
        if not column.is_packed:
            return batch[column.name]
        packed = batch[PACKED]
        if column.dtype == "int32":
            packed = packed.view(np.int32)
        return packed[..., self._place(column)]

    def shape_of(self, fragment: Columns) -> tuple[int, int]:
        """Return T and N of a checked fragment."""
        steps, num_envs = fragment[self.columns[0].name].shape[:2]
        return int(steps), int(num_envs)

    def source(self, fragment: Columns, name: str) -> Array:
        """Return a column [T, N, ...] of a checked fragment."""
        if name == c.NEW_OBS:
            return new_obs(fragment)
        if name == c.VALID and c.VALID not in fragment:
            return np.broadcast_to(np.float32(1.0), self.shape_of(fragment))
        return fragment[name]


def num_filled(valid: Array) -> int:
    """Return the number of rows or sequences up to the last one that holds a transition.

    Args:
        valid: VALID of a batch, [R] of rows or [S, T] of sequences.
    """
    if valid[-1].any():
        return len(valid)
    filled = np.flatnonzero(valid.any(axis=tuple(range(1, valid.ndim))))
    return int(filled[-1]) + 1 if len(filled) else 0


def _cleared(batch: Batch, filled: int) -> Batch:
    for array in batch.values():
        array[filled:] = 0
    return batch


def rounded_up(count: int, least: int) -> int:
    """Round `count` up to a coarse ladder that starts at `least`: few shapes mean few compilations.

    The steps of the ladder are `least` times 1, 1.5, 2, 3, 4, 6, 8...
    """
    size = least
    while size < count:
        if least > 1 and size * 3 // 2 >= count and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size


def _valid_lengths(valid: Array | None, steps: int, num_sequences: int) -> NDArray[np.intp]:
    """Return the number of steps [S] up to each sequence's last transition."""
    if valid is None:
        return np.full(num_sequences, steps, np.intp)
    lengths: NDArray[np.intp] = steps - np.argmax(valid[::-1], axis=0)
    return np.where(valid.any(axis=0), lengths, 0)
