"""Readers of stored experience: files in random order, whole episodes, and shuffled, mixed or postprocessed batches.

Reading is shared among workers: where there are as many files as workers, each file is one worker's; else each worker
takes every n-th batch of every file. Either way all of them together read each row once a pass. A hold-out split is
made by episode and by the file's name, so it is the same in every worker, pass and run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import AiorlError, BatchError, ConfigError, DataError, EndOfData
from aiorl.offline.files import file_name, find_files
from aiorl.offline.formats import WHOLE, Share, Stored
from aiorl.offline.io import InputReader
from aiorl.offline.minari_data import PREFIX
from aiorl.offline.registry import SUFFIXES, format_of

logger = logging.getLogger(__name__)


class EpisodeAssembler:
    """Joins the parts of episodes that come in the order of time, of one worker or file.

    An episode begins with the row whose ``t`` is 0 and ends with one that is done. Without ``t`` it begins where
    another one ends or its ``eps_id`` is new; without flags of its end, each part is whole.

    Attributes:
        num_left_out: rows of episodes whose beginning or end never came.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._open: dict[int, list[SampleBatch]] = {}
        self.num_left_out = 0

    def add(self, batch: Batch) -> Iterator[SampleBatch]:
        """Take a batch, and yield the episodes that end in it.

        Raises:
            BatchError: a multi-agent batch, or parts of one episode with different columns (a ValueError).
        """
        if not isinstance(batch, SampleBatch):
            raise BatchError("policy_batches", "a single-agent batch", "a MultiAgentBatch")
        for part in trajectories(batch) if batch.count else ():
            yield from self._add_part(part)

    def finish(self) -> None:
        """No more will come: episodes that have not ended are left out."""
        for key in list(self._open):
            self._drop(key)

    def _add_part(self, part: SampleBatch) -> Iterator[SampleBatch]:
        key = int(part[c.EPS_ID][0]) if c.EPS_ID in part else 0
        if c.T in part:
            before = self._open.get(key)
            expected = int(before[-1][c.T][-1]) + 1 if before else 0
            if int(part[c.T][0]) != expected:
                self._drop(key)
                if part[c.T][0] != 0:
                    self.num_left_out += part.count
                    return
        self._open.setdefault(key, []).append(part)
        if _is_over(part):
            yield SampleBatch.concat(self._open.pop(key))

    def _drop(self, key: int) -> None:
        self.num_left_out += sum(part.count for part in self._open.pop(key, []))


def trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Runs of rows that follow each other in one episode, as views; none goes on behind an end, or a gap in ``t``."""
    for part in batch.split_by_episode() if c.EPS_ID in batch else [batch]:
        ends = np.zeros(part.count, bool)
        for name in (c.DONES, c.TERMINATEDS, c.TRUNCATEDS):
            if name in part:
                ends |= part[name].astype(bool)
        if c.T in part:
            ends[:-1] |= part[c.T][1:] != part[c.T][:-1] + 1
        edges = [0, *(np.flatnonzero(ends[:-1]) + 1).tolist(), part.count]
        for start, end in itertools.pairwise(edges):
            yield part.slice(start, end)


def _is_over(part: SampleBatch) -> bool:
    flags = [name for name in (c.DONES, c.TERMINATEDS, c.TRUNCATEDS) if name in part]
    return not flags or any(bool(part[name][-1]) for name in flags)


MAX_CORRUPT = 100
"""Places of the input that may be unreadable, unless said otherwise."""
_MAX_LOGGED = 20


@dataclass(frozen=True, slots=True)
class HoldOut:
    """Which part of the episodes is read.

    Attributes:
        fraction: of all episodes, which are held out.
        part: ``"train"`` reads those that are not, ``"held_out"`` those that are.
    """

    fraction: float
    part: Literal["train", "held_out"] = "train"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a fraction that leaves nothing for one of both.
        """
        if not 0.0 < self.fraction < 1.0:
            raise ConfigError(f"A hold-out split of {self.fraction} leaves one part empty.", hint="Give 0.1, say.")

    def of(self, batch: Batch, path: str, place: str) -> Batch | None:
        """Those rows of a batch that are read; None where there are none."""
        if isinstance(batch, SampleBatch):
            return self._rows(batch, path, place)
        parts = {name: self._rows(rows, path, place) for name, rows in batch.policy_batches.items()}
        kept = {name: rows for name, rows in parts.items() if rows is not None}
        share = sum(rows.count for rows in kept.values()) / max(1, batch.total())
        return MultiAgentBatch(kept, round(batch.count * share)) if kept else None

    def _rows(self, batch: SampleBatch, path: str, place: str) -> SampleBatch | None:
        seed = zlib.crc32(file_name(path).encode())
        if c.EPS_ID in batch:
            numbers = batch[c.EPS_ID].astype(np.uint64)
        else:  # no episodes are known, so batches are what is kept together
            numbers = np.full(batch.count, zlib.crc32(place.encode()), np.uint64)
        is_held_out = _uniform(numbers ^ np.uint64(seed << 32)) < self.fraction
        wanted = is_held_out if self.part == "held_out" else ~is_held_out
        if wanted.all():
            return batch
        return batch.take(np.flatnonzero(wanted)) if wanted.any() else None


def _uniform(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), scattered as if they were random (the finaliser of SplitMix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How files are read.

    Attributes:
        share: which of several readers this is.
        epochs: passes over the files; None = without end.
        hold_out: which part of the episodes is read; None = all.
        shuffle_files: whether each pass reads the files in another order.
        seed: of that order; None = another one each time.
        batch_rows: env steps that a batch aims at: larger ones that a file holds are cut behind the episode that gets
            there; None = batches as they are stored.
        whole_episodes: whether cuts are made between episodes only; else also within one of more than twice the rows.
        max_corrupt: places that may be unreadable, over all passes; one more ends the run.
    """

    share: Share = WHOLE
    epochs: int | None = None
    hold_out: HoldOut | None = None
    shuffle_files: bool = True
    seed: int | None = None
    batch_rows: int | None = None
    whole_episodes: bool = False
    max_corrupt: int = MAX_CORRUPT

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a number that is none.
        """
        for name, least in (("epochs", 1), ("batch_rows", 1), ("max_corrupt", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}.", key=name, value=value)
        if not 0 <= self.share.index < self.share.of:
            raise ConfigError(f"There is no share {self.share.index} of {self.share.of}.", key="share")


@dataclass(slots=True)
class ReadCounts:
    """What a reader has read so far.

    Attributes:
        passes: whole passes.
        batches: stored batches.
        rows: rows of them.
        corrupt: places that could not be read, each counted once, however many passes come to it.
        lost_files: those of them that are files: gone, or not to be read any further.
    """

    passes: int = 0
    batches: int = 0
    rows: int = 0
    corrupt: int = 0
    lost_files: int = 0


def find_sources(sources: str | Sequence[str]) -> list[str]:
    """The files that paths, directories, patterns, URIs and ``minari:NAME`` name, each once.

    Raises:
        ConfigError: one of them names no file (also a ValueError).
        DataError: a file is of no known format (also a ValueError).
    """
    found: dict[str, None] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        paths = [source] if source.startswith(PREFIX) else find_files(source, SUFFIXES)
        if not paths:
            raise ConfigError(
                f"No file of experience matches {source!r}.",
                key="input",
                value=source,
                hint=f"Name a file, a directory or a pattern of files that end in {', '.join(sorted(SUFFIXES))}.",
            )
        for path in paths:
            format_of(path)
            found[path] = None
    return list(found)


class FileReader(InputReader):
    """Batches of files; endless, or so many passes in each of which every row of its share comes once.

    What can't be read is counted, logged and passed over, a file that vanished as a whole; more of it than
    ``max_corrupt`` ends the reading, and so does a pass in which nothing at all could be read. An endless reader whose
    share is empty, since there are more workers than batches, reads everything.

    Attributes:
        files: the files that it reads, all or its share of them.
        counts: what it has read so far.
        piece: number of what `next` gave last, see `aiorl.data.columns.PIECE`; 0 before.
    """

    def __init__(self, sources: str | Sequence[str], options: ReaderOptions | None = None) -> None:
        """Find the files; they are opened one after the other.

        Raises:
            ConfigError: a source names no file (also a ValueError).
            DataError: a file is of no known format (also a ValueError).
        """
        self._options = options = options or ReaderOptions()
        self._all_files = files = find_sources(sources)
        self._share = share = options.share
        if len(files) >= share.of:
            files, self._share = files[share.index :: share.of], WHOLE
        self.files = files
        self.counts = ReadCounts()
        self.piece = 0
        self._rng = np.random.default_rng(None if options.seed is None else [options.seed, share.index])
        self._corrupt: set[tuple[str, str]] = set()
        self._lost: set[str] = set()
        self._first_error: DataError | None = None
        self._ended_by: AiorlError = EndOfData(f"all passes over {len(files)} files have been read")
        self._is_closed = False
        self._batches = self._read()

    def __iter__(self) -> Iterator[Batch]:
        """Every batch that is left."""
        while True:
            try:
                yield self.next()
            except EndOfData:
                return

    def next(self) -> Batch:
        """See InputReader.

        Raises:
            EndOfData: every pass has been read.
            DataError: too much could not be read, or nothing could.
        """
        if self._is_closed:
            raise EndOfData("the reader was closed")
        try:
            return next(self._batches)
        except StopIteration:
            raise self._ended_by from None
        except DataError as error:
            self._ended_by = error
            raise

    def close(self) -> None:
        """See InputReader; a `next` that another thread is in ends first."""
        self._is_closed = True
        with contextlib.suppress(ValueError):  # the other thread is in the generator
            self._batches.close()

    def _read(self) -> Generator[Batch, None, None]:
        epochs = self._options.epochs
        while epochs is None or self.counts.passes < epochs:
            is_empty = True
            files = list(self.files)
            if self._options.shuffle_files:
                self._rng.shuffle(files)
            for path in files:
                for batch in self._read_file(path):
                    is_empty = False
                    yield batch
            self.counts.passes += 1
            if is_empty:
                self._go_on_after_nothing(len(files))

    def _go_on_after_nothing(self, num_files: int) -> None:
        """Raise if there is nothing to be read; else see to it that the next pass finds something."""
        if self._first_error is not None:
            raise DataError(f"nothing could be read of {num_files} files; the first: {self._first_error}")
        if self._options.epochs is None:
            if self._share == WHOLE and self.files == self._all_files:
                raise DataError(f"there is nothing to be read in {num_files} files", path=self.files[0])
            logger.warning("There are more workers than stored batches: this one reads all of them")
            self.files, self._share = self._all_files, WHOLE

    def _read_file(self, path: str) -> Iterator[Batch]:
        try:
            with contextlib.closing(format_of(path).read(path, self._share)) as found:
                for stored in found:
                    if isinstance(stored, DataError):
                        self._note(stored)
                        continue
                    self.counts.batches += 1
                    self.counts.rows += stored.batch.total()
                    yield from self._cut(stored, path)
        except _TooCorrupt:
            raise
        except (DataError, OSError) as error:
            self._lost.add(path)
            self.counts.lost_files = len(self._lost)
            self._note(error if isinstance(error, DataError) else DataError(f"can't be read: {error}", path=path))

    def _cut(self, stored: Stored, path: str) -> Iterator[Batch]:
        batch: Batch | None = stored.batch
        hold_out, rows = self._options.hold_out, self._options.batch_rows
        if hold_out is not None:
            batch = hold_out.of(stored.batch, path, stored.place)
        if batch is None:
            return
        if rows is None or not isinstance(batch, SampleBatch) or batch.count <= rows:
            self.piece = _piece_number(path, stored.place, 0)
            yield batch
            return
        start = 0
        for end in _cuts(batch, rows, whole_episodes=self._options.whole_episodes):
            self.piece = _piece_number(path, stored.place, start)
            yield batch.slice(start, end)
            start = end

    def _note(self, error: DataError) -> None:
        where = (error.path, error.place)
        if where in self._corrupt:
            return
        self._corrupt.add(where)
        self.counts.corrupt = len(self._corrupt)
        self._first_error = self._first_error or error
        if self.counts.corrupt <= _MAX_LOGGED:
            logger.warning("Left out: %s", error)
        if self.counts.corrupt > self._options.max_corrupt:
            raise _TooCorrupt(
                f"{self.counts.corrupt} places of the input could not be read, more than the "
                f"{self._options.max_corrupt} that are allowed; the first: {self._first_error}"
            )


class _TooCorrupt(DataError):
    """More than may be could not be read."""


def _cuts(batch: SampleBatch, rows: int, *, whole_episodes: bool) -> Iterator[int]:
    """Where a batch is cut: behind the episode in which there are enough rows, or within it if it is much longer."""
    count = batch.count
    episodes = batch.get(c.EPS_ID)
    if episodes is None:
        yield from range(rows, count, rows)
        yield count
        return
    ends = np.append(np.flatnonzero(episodes[1:] != episodes[:-1]) + 1, count)
    start = 0
    while start < count:
        end = int(ends[np.searchsorted(ends, min(start + rows, count))])
        if not whole_episodes and end - start > 2 * rows:
            end = start + rows
        yield end
        start = end


def _piece_number(path: str, place: str, start: int) -> int:
    """A number above 0 that int64 holds; two pieces have the same one by chance in 2^63 only."""
    digest = hashlib.blake2b(f"{path}\0{place}\0{start}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


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


class StoredEpisodes:
    """The whole episodes of files, in the files' order, each once.

    Attributes:
        files: the files.
        num_corrupt: places that could not be read, so far.
        num_left_out: rows of episodes without beginning or end, so far.
    """

    def __init__(
        self, sources: str | Sequence[str], *, hold_out: HoldOut | None = None, max_corrupt: int = MAX_CORRUPT
    ) -> None:
        """Find the files.

        Args:
            sources: paths, directories, patterns, URIs, ``minari:NAME``.
            hold_out: which part of the episodes is read; None = all.
            max_corrupt: places of a file that may be unreadable.

        Raises:
            ConfigError: a source names no file (also a ValueError).
            DataError: a file is of no known format (also a ValueError).
        """
        self.files = find_sources(sources)
        self._options = ReaderOptions(epochs=1, hold_out=hold_out, shuffle_files=False, max_corrupt=max_corrupt)
        self.num_corrupt = 0
        self.num_left_out = 0

    def __iter__(self) -> Iterator[tuple[str, SampleBatch]]:
        """Each episode, with the file that it is in.

        Raises:
            DataError: of a file nothing can be read, or too little, or what it holds are no episodes.
        """
        for path in self.files:
            assembler = EpisodeAssembler()
            reader = FileReader(path, self._options)
            for batch in reader:
                try:
                    yield from ((path, episode) for episode in assembler.add(batch))
                except BatchError as error:
                    raise DataError(str(error), path=path) from error
            assembler.finish()
            self.num_corrupt += reader.counts.corrupt
            self.num_left_out += assembler.num_left_out
