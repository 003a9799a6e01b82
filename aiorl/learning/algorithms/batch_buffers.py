"""Train batches: fragments laid out for the update, in buffers that are used again and again.

All columns of four bytes an element and at most one dimension a row lie side by side in one float32 array, "packed":
fetching a minibatch is then one gather of whole rows, and no column costs an allocation. Integers are there bit
by bit, flags as 1 and 0. Images have arrays of their own. Two sets of buffers take turns, so that one batch can be
put together while the one before it is trained on.

`GradientBuffers` does the same for gradients that workers computed: one row for each, weight after weight. The step is
taken with their mean, in which each counts by the transitions that it is of: that is the gradient of all of these
together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import first_not_finite
from aiorl.data.columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS, ColumnSpec, num_rows
from aiorl.data.fragment import check_fragment, new_obs, refuse_others
from aiorl.errors import BatchError
from aiorl.learning.algorithms.rows import by_time
from aiorl.learning.lazy import Tensors, tf

_NUM_SETS = 2
PACKED = "packed"
"""Name of the array that holds all small columns."""

Array = NDArray[Any]


class BatchBuffers:
    """Buffers in which train batches are assembled.

    Batches of rows are ``[R, ...]``; batches of sequences ``[S, T, ...]``, sequence by sequence. Rows that no
    fragment filled are zero, with VALID 0.
    """

    def __init__(self, columns: Iterable[ColumnSpec]) -> None:
        """Lay the columns out; VALID is added if it is missing.

        Args:
            columns: of a fragment: [T, N, *shape]; or [N, *shape], for batches of sequences only.
        """
        given = list(columns)
        of_rows = {spec.name: spec for spec in given if not c.is_of_sequences(spec.name)}
        self.columns = tuple({**of_rows, c.VALID: ColumnSpec(c.VALID)}.values())
        self.of_sequences = tuple(spec for spec in given if c.is_of_sequences(spec.name))
        self.slices: dict[str, slice] = {}
        start = 0
        for column in self.columns:
            if column.is_packed:
                self.slices[column.name] = slice(start, start + column.width)
                start += column.width
        self.packed_width = start
        self._sets: list[dict[str, Array]] = [{} for _ in range(_NUM_SETS)]
        self._next = 0

    def rows(self, fragments: Sequence[Mapping[str, Array]], num_rows: int) -> dict[str, Array]:
        """All rows of fragments that `check` has passed, one after the other, padded to `num_rows`.

        Returns: arrays [num_rows, ...], valid until two further calls.
        """
        batch = self._buffers((num_rows,))
        filled = 0
        for fragment in fragments:
            end = filled + math.prod(self.shape_of(fragment))
            for column in self.columns:
                target = self._target(batch, column)
                target[filled:end] = self._source(fragment, column.name).reshape(-1, *target.shape[1:])
            filled = end
        return _cleared(batch, filled)

    def sequences(self, fragments: Sequence[Mapping[str, Array]], num_sequences: int, length: int) -> dict[str, Array]:
        """The environments of fragments that `check` has passed, as `num_sequences` sequences of `length` steps.

        Returns: arrays [num_sequences, length, ...], and [num_sequences, ...] of what sequences have one of, valid
            until two further calls.
        """
        batch = self._buffers((num_sequences, length))
        filled = 0
        for fragment in fragments:
            steps, num_envs = self.shape_of(fragment)
            end = filled + num_envs
            for column in self.columns:
                source = self._source(fragment, column.name).swapaxes(0, 1)
                target = self._target(batch, column)
                target[filled:end, :steps] = source.reshape(num_envs, steps, *target.shape[2:])
                target[filled:end, steps:] = 0
            for extra in self.of_sequences:
                batch[extra.name][filled:end] = fragment[extra.name]
            if c.LAST_OBS in batch:
                self._place_last_obs(batch, filled, _valid_lengths(fragment.get(c.VALID), steps, num_envs), length)
            filled = end
        return _cleared(batch, filled)

    def check(self, fragment: Mapping[str, Array], steps: int | None = None) -> None:
        """Refuse a fragment that could not be laid out. Safe in any thread.

        Args:
            fragment: arrays by name.
            steps: T it must have, None for any.
        Raises: BatchError naming the column at fault.
        """
        columns = (*self.columns, *self.of_sequences)
        refuse_others(fragment, [column.name for column in columns])
        shape = check_fragment(columns, fragment, is_finite=False)
        if steps is not None and shape[0] != steps:
            raise BatchError(self.columns[0].name, f"[{steps}, N, ...]", f"[{shape[0]}, {shape[1]}, ...]")

    def zeros(self, *leading: int) -> dict[str, Array]:
        """A batch of `leading` dimensions in which no row is valid, in arrays of its own."""
        batch: dict[str, Array] = {PACKED: np.zeros((*leading, self.packed_width), np.float32)}
        for column in self.columns:
            if not column.is_packed:
                batch[column.name] = np.zeros((*leading, *column.shape), column.dtype)
        for extra in self.of_sequences:
            batch[extra.name] = np.zeros((leading[0], *extra.shape), extra.dtype)
        return batch

    def column(self, batch: Mapping[str, Array], name: str) -> Array:
        """A column of a batch by name, as a view."""
        for column in self.columns:
            if column.name == name:
                return self._target(batch, column)
        return batch[name]

    def num_filled(self, batch: Mapping[str, Array]) -> int:
        """Rows or sequences of a batch up to the last one that holds a transition."""
        valid = self.column(batch, c.VALID)
        filled = np.flatnonzero(valid.any(axis=tuple(range(1, valid.ndim))))
        return int(filled[-1]) + 1 if len(filled) else 0

    def first_not_finite(self, batch: Mapping[str, Array]) -> str:
        """The first column that holds a NaN or an infinity; "" if none does."""
        names = [column.name for column in (*self.columns, *self.of_sequences)]
        return first_not_finite({name: self.column(batch, name) for name in names})

    def _place_last_obs(self, batch: Mapping[str, Array], first: int, steps: NDArray[np.intp], length: int) -> None:
        """Put what follows each sequence's last transition where a longer one has it: in the row behind."""
        (short,) = np.nonzero(steps < length)
        if len(short):
            obs = next(column for column in self.columns if column.name == c.OBS)
            target = self._target(batch, obs)
            target[first + short, steps[short]] = batch[c.LAST_OBS][first + short].reshape(-1, *target.shape[2:])

    def _buffers(self, leading: tuple[int, ...]) -> dict[str, Array]:
        batch = self._sets[self._next]
        if not batch or batch[PACKED].shape[:-1] != leading:
            batch = self._sets[self._next] = self.zeros(*leading)
        self._next = (self._next + 1) % len(self._sets)
        return batch

    def _target(self, batch: Mapping[str, Array], column: ColumnSpec) -> Array:
        if not column.is_packed:
            return batch[column.name]
        packed = batch[PACKED] if column.dtype == "float32" else batch[PACKED].view(np.int32)
        place = self.slices[column.name]
        return packed[..., place] if column.shape else packed[..., place.start]

    def shape_of(self, fragment: Mapping[str, Array]) -> tuple[int, int]:
        """T and N of a fragment that `check` has passed."""
        steps, num_envs = fragment[self.columns[0].name].shape[:2]
        return int(steps), int(num_envs)

    def _source(self, fragment: Mapping[str, Array], name: str) -> Array:
        """A column [T, N, ...] of a fragment."""
        if name == c.NEW_OBS:
            return new_obs(fragment)
        if name == c.VALID and c.VALID not in fragment:
            return np.broadcast_to(np.float32(1.0), self.shape_of(fragment))
        return fragment[name]


def _cleared(batch: dict[str, Array], filled: int) -> dict[str, Array]:
    for array in batch.values():
        array[filled:] = 0
    return batch


def rounded_up(count: int, least: int) -> int:
    """`count`, or the next number of a coarse ladder from `least`: few shapes, so few compilations.

    The steps of the ladder are `least` times 1, 1.5, 2, 3, 4, 6, 8...
    """
    size = least
    while size < count:
        if least > 1 and size * 3 // 2 >= count and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size


def _valid_lengths(valid: Array | None, steps: int, num_sequences: int) -> NDArray[np.intp]:
    """Steps [S] up to each sequence's last transition."""
    if valid is None:
        return np.full(num_sequences, steps, np.intp)
    lengths: NDArray[np.intp] = steps - np.argmax(valid[::-1], axis=0)
    return np.where(valid.any(axis=0), lengths, 0)


_GRADIENTS = "gradients"


class GradientBuffers:
    """Buffers in which the gradients of one train batch are put together; two of them take turns."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], metric_names: Sequence[str], columns: Sequence[str],
        num_fragments: int,
    ) -> None:  # fmt: skip
        """Lay them out.

        Args:
            shapes: weight name -> shape, in the order of the variables that are trained.
            metric_names: what a loss says, without the loss itself.
            columns: of the sample plan, which a worker names by their number.
            num_fragments: F, gradients in a train batch at most.
        """
        self._metric_names, self._columns, self._num_fragments = tuple(metric_names), tuple(columns), num_fragments
        self._shapes = {GRADIENT_OF + name: shape for name, shape in shapes.items()}
        self._shapes[METRICS] = (len(metric_names) + 1,)
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()]).tolist()
        self._places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._sets = itertools.cycle([self.zeros() for _ in range(2)])

    def zeros(self) -> dict[str, Array]:
        """A batch without any gradient, in arrays of its own."""
        return {
            _GRADIENTS: np.zeros((self._num_fragments, self._places[-1].stop), np.float32),
            NUM_ROWS: np.zeros(self._num_fragments, np.float32),
            CULPRIT: np.zeros(self._num_fragments, np.int32),
        }

    def batch(self, fragments: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """The gradients of at most F fragments that `check` has passed; one that was not finite is NaN.

        Returns: arrays [F, ...], valid until two further calls.
        """
        batch = next(self._sets)
        for array in batch.values():
            array[:] = 0
        for row, fragment in enumerate(fragments):
            batch[NUM_ROWS][row] = fragment[NUM_ROWS][0]
            if CULPRIT in fragment:
                batch[CULPRIT][row], batch[_GRADIENTS][row] = fragment[CULPRIT][0], np.nan
                continue
            for name, place in zip(self._shapes, self._places, strict=True):
                batch[_GRADIENTS][row, place] = fragment[name].reshape(-1)
        return batch

    def check(self, fragment: Mapping[str, Array]) -> None:
        """Refuse what is no gradient of these weights. Safe in any thread.

        Raises: BatchError naming the column at fault.
        """
        num_rows(fragment)
        is_finite, dtype = CULPRIT not in fragment, "float32" if CULPRIT not in fragment else "int32"
        wanted = self._shapes if is_finite else {CULPRIT: (1,)}
        if unknown := sorted(fragment.keys() - wanted.keys() - {NUM_ROWS}):
            raise BatchError("batches", f"no other columns than {', '.join(sorted(wanted))}", f"{unknown[0]!r:.100}")
        for name, shape in wanted.items():
            column = fragment.get(name)
            if column is None or column.shape != shape or column.dtype != dtype:
                found = "none" if column is None else f"{column.dtype} {column.shape}"
                raise BatchError(name, f"{dtype} {shape}", found)
        if not is_finite and not 0 <= fragment[CULPRIT][0] <= len(self._columns):
            raise BatchError(CULPRIT, f"from 0 to {len(self._columns)}", f"{fragment[CULPRIT][0]}")
        if name := first_not_finite(fragment):
            raise BatchError(name, "finite numbers", "one that is not")

    def num_filled(self, batch: Mapping[str, Array]) -> int:
        """Gradients in a batch."""
        return int(np.count_nonzero(batch[NUM_ROWS]))

    def first_not_finite(self, batch: Mapping[str, Array]) -> str:
        """The first column of rows that a worker found at fault; "" if there is none."""
        found = batch[CULPRIT][batch[CULPRIT] > 0]
        return self._columns[found[0] - 1] if len(found) else ""

    def mean(self, minibatch: Tensors, coefficients: Tensors) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        """The mean gradient of a batch with its metrics, as a `CompiledUpdate` takes it."""
        weights = minibatch[NUM_ROWS] / tf.maximum(tf.reduce_sum(minibatch[NUM_ROWS]), 1.0)
        flat = tf.linalg.matvec(minibatch[_GRADIENTS], weights, transpose_a=True)
        parts = zip(self._places, self._shapes.values(), strict=True)
        *gradients, figures = [tf.reshape(flat[place], shape) for place, shape in parts]
        *metrics, loss = tf.unstack(figures)
        return gradients, loss, dict(zip(self._metric_names, metrics, strict=True))


def unpacked(minibatch: Tensors, buffers: BatchBuffers, *, time_major: bool = False) -> Tensors:
    """The columns of a minibatch by name, each with its own shape and dtype.

    Args:
        minibatch: arrays gathered from a batch of `buffers`.
        buffers: where it came from.
        time_major: sequences [M, T, ...] are turned into [T, M, ...]; those of sequences stay [M, ...].
    """
    packed = by_time(minibatch[PACKED]) if time_major else minibatch[PACKED]
    columns: Tensors = {spec.name: minibatch[spec.name] for spec in buffers.of_sequences}
    for spec in buffers.columns:
        if not spec.is_packed:
            own = minibatch[spec.name]
            columns[spec.name] = by_time(own) if time_major else own
            continue
        place = buffers.slices[spec.name]
        column = packed[..., place] if spec.shape else packed[..., place.start]
        columns[spec.name] = tf.bitcast(column, tf.int32) if spec.dtype == "int32" else column
    return columns
