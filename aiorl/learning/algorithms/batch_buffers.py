"""Train batches: fragments laid out for the update, in buffers that are used again and again.

All columns of four bytes an element and at most one dimension a row lie side by side in one float32 array, "packed":
fetching a minibatch is then one gather of whole rows, and no column costs an allocation. Integers are there bit
by bit, flags as 1 and 0. Images have arrays of their own. Two sets of buffers take turns, so that one batch can be
put together while the one before it is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.column_spec import ColumnSpec
from aiorl.data.finite import first_not_finite
from aiorl.data.fragment import check_new_obs, new_obs
from aiorl.errors import BatchError

__all__ = ["PACKED", "BatchBuffers", "ColumnSpec", "rounded_up"]

PACKED = "packed"
"""Name of the array that holds all small columns."""

Array = NDArray[Any]


class BatchBuffers:
    """Buffers in which train batches are assembled.

    Batches of rows are ``[R, ...]``; batches of sequences ``[S, T, ...]``, sequence by sequence. Rows that no
    fragment filled are zero, with VALID 0.
    """

    def __init__(self, columns: Iterable[ColumnSpec], *, num_sets: int = 2) -> None:
        """Lay the columns out; VALID is added if it is missing.

        Args:
            columns: of a fragment: [T, N, *shape]; or [N, *shape], for batches of sequences only.
            num_sets: batches that may be in use at a time.
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
        self._sets: list[dict[str, Array]] = [{} for _ in range(num_sets)]
        self._next = 0

    def rows(self, fragments: Sequence[Mapping[str, Array]], num_rows: int) -> dict[str, Array]:
        """All rows of the fragments, one after the other, padded to `num_rows`.

        Returns: arrays [num_rows, ...], valid until `num_sets` further calls.
        Raises: BatchError if the fragments hold more rows, or a column is missing or does not fit.
        """
        batch = self._buffers((num_rows,))
        filled = 0
        for fragment in fragments:
            length, num_envs = self.shape_of(fragment)
            end = filled + length * num_envs
            if end > num_rows:
                raise BatchError(c.OBS, f"at most {num_rows} rows in all fragments", f"{end} or more")
            for column in self.columns:
                source = self._source(fragment, column, (length, num_envs))
                target = self._target(batch, column)
                target[filled:end] = source.reshape(end - filled, *target.shape[1:])
            filled = end
        self._clear(batch, filled)
        return batch

    def sequences(self, fragments: Sequence[Mapping[str, Array]], num_sequences: int, length: int) -> dict[str, Array]:
        """The fragments' environments as sequences, padded to `num_sequences` of `length` steps.

        Returns: arrays [num_sequences, length, ...], and [num_sequences, ...] of what sequences have one of, valid
            until `num_sets` further calls.
        Raises: BatchError if the fragments hold more or longer sequences, or a column is missing or does not fit.
        """
        batch = self._buffers((num_sequences, length))
        filled = 0
        for fragment in fragments:
            steps, num_envs = self.shape_of(fragment)
            end = filled + num_envs
            if end > num_sequences or steps > length:
                raise BatchError(
                    c.OBS, f"at most {num_sequences} sequences of {length} steps", f"{end} or more of {steps}"
                )
            for column in self.columns:
                source = self._source(fragment, column, (steps, num_envs)).swapaxes(0, 1)
                target = self._target(batch, column)
                target[filled:end, :steps] = source.reshape(num_envs, steps, *target.shape[2:])
                target[filled:end, steps:] = 0
            for extra in self.of_sequences:
                batch[extra.name][filled:end] = self._source(fragment, extra, (num_envs,))
            if c.LAST_OBS in batch:
                self._place_last_obs(batch, filled, _valid_lengths(fragment.get(c.VALID), steps, num_envs), length)
            filled = end
        self._clear(batch, filled)
        return batch

    def check(self, fragment: Mapping[str, Array], steps: int | None = None) -> None:
        """Refuse a fragment that could not be laid out. Safe in any thread.

        Args:
            fragment: arrays by name.
            steps: T it must have, None for any.
        Raises: BatchError naming the column at fault.
        """
        shape = self.shape_of(fragment)
        if min(shape) < 1:
            raise BatchError(self.columns[0].name, "at least one row", f"[{shape[0]}, {shape[1]}, ...]")
        known = {column.name for column in (*self.columns, *self.of_sequences)}
        if c.NEW_OBS in known and c.NEW_OBS not in fragment:
            known |= {c.LAST_OBS, c.FINAL_INDEX, c.FINAL_OBS}
        if unknown := sorted(fragment.keys() - known):
            raise BatchError("batches", f"no other columns than {', '.join(sorted(known))}", f"{unknown[0]!r:.100}")
        valid = fragment.get(c.VALID)
        if valid is not None and valid.dtype != np.bool_:
            raise BatchError(c.VALID, "dtype bool", valid.dtype)
        if steps is not None and shape[0] != steps:
            raise BatchError(self.columns[0].name, f"[{steps}, N, ...]", f"[{shape[0]}, {shape[1]}, ...]")
        for column in self.columns:
            if column.name == c.NEW_OBS and c.NEW_OBS not in fragment:
                check_new_obs(fragment)  # it is made once it is needed
                column = ColumnSpec(c.OBS, column.shape, column.dtype)
            self._source(fragment, column, shape)
        for extra in self.of_sequences:
            self._source(fragment, extra, shape[1:])

    def zeros(self, *leading: int) -> dict[str, Array]:
        """A batch of `leading` dimensions in which no row is valid, in arrays of its own."""
        return self._allocate(leading)

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
            batch = self._sets[self._next] = self._allocate(leading)
        self._next = (self._next + 1) % len(self._sets)
        return batch

    def _allocate(self, leading: tuple[int, ...]) -> dict[str, Array]:
        batch: dict[str, Array] = {PACKED: np.zeros((*leading, self.packed_width), np.float32)}
        for column in self.columns:
            if not column.is_packed:
                batch[column.name] = np.zeros((*leading, *column.shape), column.dtype)
        for extra in self.of_sequences:
            batch[extra.name] = np.zeros((leading[0], *extra.shape), extra.dtype)
        return batch

    def _target(self, batch: Mapping[str, Array], column: ColumnSpec) -> Array:
        if not column.is_packed:
            return batch[column.name]
        packed = batch[PACKED] if column.dtype == "float32" else batch[PACKED].view(np.int32)
        place = self.slices[column.name]
        return packed[..., place] if column.shape else packed[..., place.start]

    def _clear(self, batch: Mapping[str, Array], filled: int) -> None:
        for array in batch.values():
            array[filled:] = 0

    def shape_of(self, fragment: Mapping[str, Array]) -> tuple[int, int]:
        """T and N of a fragment.

        Raises: BatchError if it lacks the first column.
        """
        first = fragment.get(self.columns[0].name)
        if first is None or first.ndim < 2:
            raise BatchError(self.columns[0].name, "a column [T, N, ...]", "none" if first is None else first.shape)
        return int(first.shape[0]), int(first.shape[1])

    def _source(self, fragment: Mapping[str, Array], column: ColumnSpec, leading: tuple[int, ...]) -> Array:
        source = new_obs(fragment) if column.name == c.NEW_OBS else fragment.get(column.name)
        if source is None:
            if column.name == c.VALID:
                return np.broadcast_to(np.float32(1.0), leading)
            raise BatchError(column.name, "in every fragment", f"only {sorted(fragment)!r:.500}")
        column.check(source, leading)
        return source


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
