"""Readers of what other readers give: shuffled, mixed, postprocessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, DataError, EndOfData
from aiorl.offline.episodes import trajectories
from aiorl.offline.io import InputReader

__all__ = ["AsStoredReader", "MixedReader", "PostprocessedReader", "ShuffledReader", "StoredRowsReader"]

_SUM_TOLERANCE = 1e-6
_MAX_EMPTY = 1000


class ShuffledReader(InputReader):
    """A buffer of batches that is filled first; then each read gives a random one and takes another in its place."""

    def __init__(self, reader: InputReader, size: int, seed: int | None = None) -> None:
        """Read from another reader; nothing is read before the first `next`.

        Raises:
            ConfigError: a size that is none.
        """
        if size < 1:
            raise ConfigError(f"shuffle_buffer_size is {size}; it must be at least 1.", key="shuffle_buffer_size")
        self._reader, self._size = reader, size
        self._rng = np.random.default_rng(seed)
        self._buffer: list[Batch] = []
        self._is_ending = False

    def next(self) -> Batch:
        """See InputReader; at the end of a finite input, what is left comes in random order.

        Raises:
            EndOfData: every batch has been given.
        """
        while not self._is_ending and len(self._buffer) < self._size:
            try:
                self._buffer.append(self._reader.next())
            except EndOfData:
                self._is_ending = True
        if not self._buffer:
            raise EndOfData("all batches have been read")
        at = int(self._rng.integers(len(self._buffer)))
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        return self._buffer.pop()

    def close(self) -> None:
        """See InputReader."""
        self._buffer.clear()
        self._reader.close()


class MixedReader(InputReader):
    """Several readers; each read picks one at random."""

    def __init__(
        self, readers: Mapping[str, InputReader], weights: Mapping[str, float], seed: int | None = None
    ) -> None:
        """Take readers and probabilities by the names of their sources."""
        self._readers = [readers[name] for name in weights]
        self._weights = np.array(list(weights.values()), np.float64)
        self._weights /= self._weights.sum()
        self._rng = np.random.default_rng(seed)

    @staticmethod
    def check(weights: Mapping[str, float]) -> None:
        """Check that probabilities are some and sum to 1.

        Raises:
            ConfigError: they don't (also a ValueError).
        """
        for name, weight in weights.items():
            if not isinstance(weight, int | float) or not 0.0 <= weight <= 1.0:
                raise ConfigError(f"The probability of input {name!r} is {weight!r}, not one of 0 to 1.", key="input")
        total = math.fsum(weights.values())
        if not weights or abs(total - 1.0) > _SUM_TOLERANCE:
            raise ConfigError(
                f"The probabilities of input sum to {total:g}; they must sum to 1.", key="input", value=dict(weights)
            )

    def next(self) -> Batch:
        """See InputReader."""
        return self._readers[int(self._rng.choice(len(self._readers), p=self._weights))].next()

    def close(self) -> None:
        """See InputReader."""
        for reader in self._readers:
            reader.close()


@dataclass(frozen=True, slots=True)
class _AsStored:
    """A batch that has not been postprocessed yet, on its way through a shuffle buffer or a mixture.

    Attributes:
        batch: as it was stored.
        piece: its number; None = it is not to be told.
    """

    batch: Batch
    piece: int | None


class AsStoredReader(InputReader):
    """Mark what a reader gives as not postprocessed, for a `PostprocessedReader` behind it."""

    def __init__(self, reader: InputReader, *, is_numbered: bool = False) -> None:
        """Read from another reader.

        Args:
            reader: the other one.
            is_numbered: rows tell the piece that they were read in; the reader is a `FileReader`.
        """
        self._reader, self._is_numbered = reader, is_numbered

    def next(self) -> Any:
        """See InputReader; the batch is wrapped."""
        batch = self._reader.next()
        return _AsStored(batch, self._reader.piece if self._is_numbered else None)  # type: ignore[attr-defined]

    def close(self) -> None:
        """See InputReader."""
        self._reader.close()


class StoredRowsReader(InputReader):
    """Stored batches whose rows are taken in as they are read: changed, or looked at."""

    def __init__(self, reader: InputReader, take_in: Callable[[str, SampleBatch], None]) -> None:
        """Read from another reader.

        Args:
            reader: the other one.
            take_in: called with the id of a policy and its rows, which it may change.
        """
        self._reader, self._take_in = reader, take_in

    def next(self) -> Batch:
        """See InputReader; columns are exchanged in a batch of its own, since a reader may give the same one again."""
        batch = self._reader.next()
        if isinstance(batch, SampleBatch):
            batch = batch.slice(0, batch.count)
            self._take_in(DEFAULT_POLICY_ID, batch)
        elif isinstance(batch, MultiAgentBatch):
            parts = {policy_id: rows.slice(0, rows.count) for policy_id, rows in batch.policy_batches.items()}
            batch = MultiAgentBatch(parts, batch.count)
            for policy_id, rows in parts.items():
                self._take_in(policy_id, rows)
        return batch

    @property
    def piece(self) -> Any:
        """The piece that was read last, see `FileReader`."""
        return self._reader.piece  # type: ignore[attr-defined]

    def close(self) -> None:
        """See InputReader."""
        self._reader.close()


class PostprocessedReader(InputReader):
    """Stored batches postprocessed episode by episode when they are read, so by the policy as it is then.

    Where they have no ``new_obs``, it is what the next row of the episode observed. The last row of an episode that did
    not terminate has none then, and is left out. Batches that come from a sampler are left as they are.
    """

    def __init__(self, reader: InputReader, postprocess: Callable[[str, SampleBatch], SampleBatch]) -> None:
        """Read from another reader.

        Args:
            reader: the other one, whose stored batches are marked by an `AsStoredReader`.
            postprocess: what is done with each episode's rows of a policy, whose id it is given.
        """
        self._reader, self._postprocess = reader, postprocess

    def next(self) -> Batch:
        """See InputReader.

        Raises:
            DataError: nothing is left of many batches, one after the other.
        """
        for _ in range(_MAX_EMPTY):
            found: Any = self._reader.next()
            if not isinstance(found, _AsStored):
                batch: Batch = found
                return batch
            if isinstance(found.batch, SampleBatch):
                rows = self._made(DEFAULT_POLICY_ID, found.batch, found.piece)
                if rows is not None:
                    return rows
                continue
            made = {name: self._made(name, rows, found.piece) for name, rows in found.batch.policy_batches.items()}
            left = {name: rows for name, rows in made.items() if rows is not None}
            if left:
                return MultiAgentBatch(left, found.batch.count)
        raise DataError(
            f"{_MAX_EMPTY} stored batches, one after the other, have no {c.NEW_OBS!r} and no second row to take it from"
        )

    def _made(self, policy_id: str, rows: SampleBatch, piece: int | None) -> SampleBatch | None:
        """Rows of a policy postprocessed; None if none are left."""
        parts = [part for part in map(_with_new_obs, trajectories(rows)) if part.count]
        if not parts:
            return None
        made = SampleBatch.concat([self._postprocess(policy_id, part) for part in parts])
        if piece is not None:
            made[c.PIECE] = np.full(made.count, piece, np.int64)
        return made

    def close(self) -> None:
        """See InputReader."""
        self._reader.close()


def _with_new_obs(part: SampleBatch) -> SampleBatch:
    """Rows of one episode, all with what was observed behind them."""
    if c.NEW_OBS in part or c.OBS not in part or c.TERMINATEDS not in part:
        return part
    obs, terminated = part[c.OBS], part[c.TERMINATEDS].astype(bool)
    whole = part if terminated[-1] else part.slice(0, part.count - 1)
    if whole.count:
        following = np.concatenate([obs[1:], obs[-1:]])[: whole.count]  # nothing follows a terminal state: any will do
        whole[c.NEW_OBS] = following
    return whole
