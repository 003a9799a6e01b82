"""Batches: rows of experience as named columns ``[B, ...]``, plain or compressed, of one or several
policies.
"""

from __future__ import annotations

import itertools
from collections.abc import (
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Literal, TypeAlias, TypeGuard, overload

import lz4.block
import numpy as np
from numpy.typing import ArrayLike

from aiorl.data.columns import DEFAULT_POLICY_ID, EPS_ID, NEW_OBS, OBS, Array
from aiorl.errors import BatchError

RowSlice = slice
CompressionMode = Literal["rows", "bulk"]
StoredColumn: TypeAlias = "Array | PackedColumn"


class SampleBatch(MutableMapping[str, Array]):
    """Columns of equal length, by name; their order is kept.

    A batch is a mapping of columns with the length of a sequence of rows: ``len`` counts rows, and
    a slice picks rows. A compressed column is decompressed at each access; `decompress` does it
    once and for all.

    Attributes:
        count: number of rows B (agent steps; for a single agent also environment steps).
        env_steps: number of environment steps behind the rows. A sampler sets it, because several
            agents can share a policy and steps can leave no row; rows picked from a batch count one
            each.
    """

    def __init__(
        self,
        columns: Mapping[str, ArrayLike] | None = None,
        **named_columns: ArrayLike,
    ) -> None:
        """Store the columns without copying arrays.

        Args:
            columns: name -> column ``[B, ...]``, of any dtype.
            **named_columns: further columns ``[B, ...]``, by name.

        Raises:
            BatchError: columns have different lengths, or a column is a scalar.
        """
        self._columns: dict[str, StoredColumn] = {}
        self.count = 0
        self._env_steps: int | None = None
        for name, column in {**(columns or {}), **named_columns}.items():
            self[name] = np.asarray(column)

    @overload
    def __getitem__(self, name: str) -> Array: ...

    @overload
    def __getitem__(self, name: RowSlice) -> SampleBatch: ...

    def __getitem__(self, name: str | RowSlice) -> Array | SampleBatch:
        if isinstance(name, slice):
            return self.take(name)
        return _array(self._columns[name])

    def __setitem__(self, name: str, column: ArrayLike) -> None:
        array = np.asarray(column)
        if array.ndim == 0:
            raise BatchError(
                name,
                "an array with one row per step",
                "a scalar",
            )
        num_others = len(self._columns) - (name in self._columns)
        if num_others and len(array) != self.count:
            raise BatchError(
                name,
                f"{self.count} rows",
                f"{len(array)} rows",
            )
        self._columns[name] = array
        self.count = len(array)

    def __delitem__(self, name: str) -> None:
        del self._columns[name]
        if not self._columns:
            self.count = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of rows: ``count``."""
        return self.count

    def keys(self) -> KeysView[str]:
        """Return the names of the columns."""
        return self._columns.keys()

    def items(self) -> ItemsView[str, Array]:
        """Return the names and columns ``[B, ...]``."""
        return {name: _array(column) for name, column in self._columns.items()}.items()

    def columns(self, names: Iterable[str]) -> list[Array]:
        """Return the columns ``[B, ...]`` with these names, in the order of the names."""
        return [self[name] for name in names]

    @property
    def env_steps(self) -> int:  # noqa: D102 (the class describes it)
        if self._env_steps is None:
            return self.count
        return self._env_steps

    @env_steps.setter
    def env_steps(self, steps: int) -> None:
        self._env_steps = steps

    def total(self) -> int:
        """Return the number of agent steps, which is the number of rows."""
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all columns in their current form."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def packed(self) -> frozenset[str]:
        """Names of the compressed columns."""
        return frozenset(
            name for name, column in self._columns.items() if isinstance(column, PackedColumn)
        )

    def compress(
        self,
        mode: CompressionMode = "rows",
        columns: Collection[str] = (OBS, NEW_OBS),
        *,
        bulk: bool = False,
    ) -> None:
        """Compress columns in place; missing and compressed ones are skipped.

        Args:
            mode: rows compresses each row by itself, so that rows can be picked and joined without
                decompression; bulk compresses the whole column.
            columns: names of the columns.
            bulk: True for mode bulk, by RLlib's name.

        Raises:
            ValueError: the mode is another one.
        """
        if bulk:
            mode = "bulk"
        if mode not in ("rows", "bulk"):
            raise ValueError(f"mode of compression is {mode!r}, expected 'rows' or 'bulk'")
        for name in columns:
            column = self._columns.get(name)
            if isinstance(column, np.ndarray) and column.dtype != object:
                self._columns[name] = PackedColumn.pack(column, by_row=mode == "rows")

    def decompress(self) -> None:
        """Replace every compressed column by its array."""
        for name in self.packed:
            self._columns[name] = self[name]

    @staticmethod
    def concat_samples(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Concatenate batches; see `SampleBatch.concat`. Users of RLlib know this name."""
        return SampleBatch.concat(batches)

    @staticmethod
    def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Return the rows of all batches in the order given.

        Raises:
            BatchError: batches have different columns.
        """
        joined = SampleBatch._of(_joined_columns([batch._columns for batch in batches]))
        if any(batch._env_steps is not None for batch in batches):
            joined._env_steps = sum(batch.env_steps for batch in batches)
        return joined

    @staticmethod
    def _of(columns: dict[str, StoredColumn]) -> SampleBatch:
        """Return a batch of columns known to be of equal length."""
        batch = SampleBatch()
        batch._columns = columns
        batch.count = len(next(iter(columns.values()), ()))
        return batch

    def slice(self, start: int, end: int) -> SampleBatch:
        """Return the rows from ``start`` up to but not including ``end``, as views."""
        return self.take(slice(start, end))

    def take(self, index: Array | RowSlice) -> SampleBatch:
        """Return a selection of the rows.

        Args:
            index: integer positions ``[K]`` or a boolean mask ``[B]``, which copy rows; or a slice,
                which makes views.
        """
        rows: dict[str, StoredColumn] = {}
        for name, column in self._columns.items():
            if _is_by_row(column):
                rows[name] = column.take(index)
            else:
                rows[name] = _array(column)[index]
        return SampleBatch._of(rows)

    def shuffled(self, rng: np.random.Generator) -> SampleBatch:
        """Return the same rows in a random order, which ``rng`` determines."""
        return self.take(rng.permutation(self.count))

    def shuffle(self, rng: np.random.Generator | None = None) -> None:
        """Shuffle the rows in place.

        Args:
            rng: generator of the order; None takes a new one.
        """
        self._columns = self.shuffled(rng or np.random.default_rng())._columns

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a mapping column -> value for each row, in order."""
        columns = dict(self)
        for index in range(self.count):
            yield {name: column[index] for name, column in columns.items()}

    def split_by_episode(self) -> list[SampleBatch]:
        """Return one batch (of views) for each run of equal ``eps_id``, in order.

        Raises:
            BatchError: there is no ``eps_id`` column.
        """
        if EPS_ID not in self:
            raise BatchError(EPS_ID, "the column to exist", sorted(self))
        episode_ids = self[EPS_ID]
        if not self.count:
            return []
        cuts = np.flatnonzero(episode_ids[1:] != episode_ids[:-1]) + 1
        edges = [0, *cuts.tolist(), self.count]
        # Columns compressed in bulk are decompressed once for all cuts.
        whole = self.take(slice(None))
        return [whole.slice(start, end) for start, end in itertools.pairwise(edges)]

    def copy(self) -> SampleBatch:
        """Return a batch with its own copy of every column."""
        # The blocks of a compressed column never change, so both batches can have them.
        columns = {
            name: column if isinstance(column, PackedColumn) else column.copy()
            for name, column in self._columns.items()
        }
        copied = SampleBatch._of(columns)
        copied._env_steps = self._env_steps
        return copied

    def __repr__(self) -> str:
        return f"SampleBatch({self.count} rows: {', '.join(self._columns)})"


def _is_by_row(column: StoredColumn) -> TypeGuard[PackedColumn]:
    return isinstance(column, PackedColumn) and column.by_row


def _array(column: StoredColumn) -> Array:
    if isinstance(column, PackedColumn):
        return column.unpack()
    return column


def _joined_columns(batches: Sequence[Mapping[str, StoredColumn]]) -> dict[str, StoredColumn]:
    """Return the rows of all batches that have columns.

    Raises:
        BatchError: batches have different columns.
    """
    filled = [columns for columns in batches if columns]
    if not filled:
        return {}
    first = filled[0]
    for columns in filled[1:]:
        differing = sorted(columns.keys() ^ first.keys())
        if differing:
            expected = f"columns {sorted(first)} in every batch"
            raise BatchError(differing[0], expected, sorted(columns))
    return {name: _joined([columns[name] for columns in filled]) for name in first}


def _joined(columns: Sequence[StoredColumn]) -> StoredColumn:
    packed = [column for column in columns if _is_by_row(column)]
    kinds = {(column.dtype, column.shape[1:]) for column in packed}
    if len(packed) < len(columns) or len(kinds) > 1:
        return np.concatenate([_array(column) for column in columns])
    dtype, row_shape = kinds.pop()
    num_rows = sum(map(len, packed))
    blobs = itertools.chain.from_iterable(column.blobs for column in packed)
    return PackedColumn(
        dtype,
        (num_rows, *row_shape),
        blobs,
        by_row=True,
    )


# LZ4 allows blocks of about 2 GB; smaller ones limit the memory of a step.
_BLOCK_BYTES = 1 << 26


class PackedColumn:
    """Column ``[B, ...]`` in compressed form.

    Attributes:
        dtype: dtype of the array.
        shape: shape of the array.
        blobs: compressed blocks; empty for an array without bytes.
        by_row: True if each row is its own block, so that rows can be picked and joined without
            decompression.
    """

    __slots__ = ("blobs", "by_row", "dtype", "shape")

    def __init__(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        blobs: Iterable[bytes],
        *,
        by_row: bool,
    ) -> None:
        """Store the compressed form.

        Args:
            dtype: dtype of the array.
            shape: shape of the array.
            blobs: compressed blocks.
            by_row: True if each row is its own block.
        """
        self.dtype = dtype
        self.shape = shape
        self.blobs = tuple(blobs)
        self.by_row = by_row

    @classmethod
    def pack(cls, column: Array, *, by_row: bool) -> PackedColumn:
        """Compress ``[B, ...]``."""
        packed = cls(column.dtype, column.shape, (), by_row=by_row)
        raw = _bytes_of(np.ascontiguousarray(column))
        packed.blobs = tuple(
            lz4.block.compress(raw[start:end], store_size=False)
            for start, end in packed._extents(len(raw))
        )
        return packed

    @property
    def nbytes(self) -> int:
        """Size of the compressed form."""
        return sum(map(len, self.blobs))

    def __len__(self) -> int:
        return self.shape[0]

    def unpack(self) -> Array:
        """Decompress the array into new memory."""
        out = np.empty(self.shape, self.dtype)
        raw = _bytes_of(out)
        for (start, end), blob in zip(self._extents(len(raw)), self.blobs, strict=True):
            raw[start:end] = lz4.block.decompress(blob, uncompressed_size=end - start)
        return out

    def take(self, index: Any) -> PackedColumn:
        """Return rows of a column compressed by row, by slice, mask or positions, still
        compressed.
        """
        positions = np.arange(len(self))[index]
        # An array without bytes has no blocks.
        blobs = [self.blobs[row] for row in positions] if self.blobs else []
        shape = (len(positions), *self.shape[1:])
        return PackedColumn(self.dtype, shape, blobs, by_row=True)

    def _extents(self, size: int) -> list[tuple[int, int]]:
        """Return the first and last byte of each block of an array with a number of bytes."""
        step = size // len(self) if self.by_row and size else _BLOCK_BYTES
        return [(start, min(start + step, size)) for start in range(0, size, step)]


def _bytes_of(array: Array) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data


class MultiAgentBatch:
    """Rows of several policies.

    Attributes:
        policy_batches: policy id -> its rows.
        count: number of environment steps (not rows).
    """

    def __init__(
        self,
        policy_batches: Mapping[str, SampleBatch],
        count: int,
    ) -> None:
        """Store the batches without copying them.

        Args:
            policy_batches: policy id -> its rows.
            count: number of environment steps (not rows).
        """
        self.policy_batches = dict(policy_batches)
        self.count = int(count)

    @property
    def env_steps(self) -> int:
        """Number of environment steps: ``count``."""
        return self.count

    def total(self) -> int:
        """Return the number of agent steps: rows of all policies together."""
        return sum(batch.count for batch in self.policy_batches.values())

    def keys(self) -> KeysView[str]:
        """Return the ids of the policies that have rows."""
        return self.policy_batches.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.policy_batches)

    def __getitem__(self, policy_id: str) -> SampleBatch:
        """Return the rows of a policy."""
        return self.policy_batches[policy_id]

    def compress(
        self,
        mode: CompressionMode = "rows",
        columns: Collection[str] = (OBS, NEW_OBS),
        *,
        bulk: bool = False,
    ) -> None:
        """Compress columns of every policy's batch in place; see `SampleBatch.compress` for the
        arguments.
        """
        for batch in self.policy_batches.values():
            batch.compress(mode, columns, bulk=bulk)

    def decompress(self) -> None:
        """Replace every compressed column by its array."""
        for batch in self.policy_batches.values():
            batch.decompress()

    @staticmethod
    def concat_samples(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Concatenate batches; see `MultiAgentBatch.concat`. Users of RLlib know this name."""
        return MultiAgentBatch.concat(batches)

    @staticmethod
    def concat(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Concatenate the rows of each policy in the order of the `batches`, and add up the
        counts.
        """
        by_policy: dict[str, list[SampleBatch]] = {}
        for batch in batches:
            for policy_id, rows in batch.policy_batches.items():
                by_policy.setdefault(policy_id, []).append(rows)
        joined = {policy_id: SampleBatch.concat(rows) for policy_id, rows in by_policy.items()}
        return MultiAgentBatch(joined, sum(batch.count for batch in batches))

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch],
        count: int,
    ) -> SampleBatch | MultiAgentBatch:
        """Return a plain batch, with ``env_steps`` set, for at most the default policy; otherwise a
        MultiAgentBatch.

        With several policies, the type must not depend on which of them have rows: create a
        MultiAgentBatch instead.

        Args:
            policy_batches: policy id -> its rows.
            count: number of environment steps behind the rows.
        """
        if policy_batches.keys() <= {DEFAULT_POLICY_ID}:
            plain = policy_batches.get(DEFAULT_POLICY_ID, SampleBatch())
            plain.env_steps = count
            return plain
        return MultiAgentBatch(policy_batches, count)

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.count} env steps, {self.policy_batches})"


Batch = SampleBatch | MultiAgentBatch


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches in the order given; a single batch is returned itself.

    If plain and multi-agent batches are mixed, the plain ones are rows of the default policy. Such
    mixtures come from callbacks and files; all batches of a sampler are of one type.

    Args:
        batches: at least one.

    Raises:
        ValueError: there are no batches.
        BatchError: batches of one policy have different columns (also a ValueError).
    """
    if not batches:
        raise ValueError("there are no batches to concatenate")
    if len(batches) == 1:
        return batches[0]
    plain = [batch for batch in batches if isinstance(batch, SampleBatch)]
    if len(plain) == len(batches):
        return SampleBatch.concat(plain)
    return MultiAgentBatch.concat(list(map(_as_multi_agent, batches)))


def _as_multi_agent(batch: Batch) -> MultiAgentBatch:
    if isinstance(batch, MultiAgentBatch):
        return batch
    return MultiAgentBatch({DEFAULT_POLICY_ID: batch}, batch.env_steps)


def columns_of(batch: Batch) -> Mapping[str, Any]:
    """Return the columns of a plain batch by name, or each policy's columns of a multi-agent batch
    by policy id.
    """
    if isinstance(batch, MultiAgentBatch):
        return batch.policy_batches
    return batch


def rows_by_policy(batch: Batch) -> Mapping[str, SampleBatch]:
    """Return policy id -> its rows, [B, ...] each; those of a plain batch are of the default
    policy.
    """
    if isinstance(batch, MultiAgentBatch):
        return batch.policy_batches
    return {DEFAULT_POLICY_ID: batch}


def compressed(batch: Batch, *, is_bulk: bool) -> Batch:
    """Return a copy of a batch with compressed observations; the original does not change."""
    packed: Batch
    if isinstance(batch, SampleBatch):
        packed = batch.slice(0, batch.count)
        packed.env_steps = batch.env_steps
    else:
        views = {
            policy_id: rows.slice(0, rows.count) for policy_id, rows in batch.policy_batches.items()
        }
        packed = MultiAgentBatch(views, batch.count)
    packed.compress("bulk" if is_bulk else "rows")
    return packed
