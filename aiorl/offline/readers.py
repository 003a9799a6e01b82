"""Readers of stored experience: files in random order, batches prepared for training, and whole episodes.

Reading is shared among workers: where there are as many files as workers, each file is one worker's; else each worker
takes every n-th batch of every file. Either way all of them together read each row once a pass. A hold-out split is
made by episode and by the file's name, so it is the same in every worker, pass and run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import AiorlError, BatchError, ConfigError, DataError, EndOfData
from aiorl.offline.files import file_name
from aiorl.offline.formats import WHOLE, Share, Stored, map_policies
from aiorl.offline.io import InputReader, SamplerInput
from aiorl.offline.registry import find_sources, stored_batches

logger = logging.getLogger(__name__)


class EpisodeAssembler:
    """Joins the parts of episodes that come in the order of time, of one worker or file.

    An episode begins with the row whose ``t`` is 0 and ends with one that is done. Without ``t`` it begins where
    another one ends or its ``eps_id`` is new; without flags of its end, each part is whole.

    Attributes:
        num_left_out: rows of episodes whose beginning or end never came.
    """

    def __init__(self) -> None:
        """Begin without any part."""
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
        """Leave out the episodes that have not ended."""
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
    """Yield runs of rows that follow each other in one episode, as views; an end or a gap in ``t`` ends a run."""
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
        """Return those rows of a batch that are read; None where there are none."""
        kept = map_policies(batch, lambda policy_id, rows: self._rows(rows, path, place))
        if isinstance(kept, MultiAgentBatch):
            share = kept.total() / max(1, batch.total())
            return MultiAgentBatch(kept.policy_batches, round(batch.count * share))
        return kept

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
    """Return numbers in [0, 1), scattered as if they were random (the finaliser of SplitMix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of reading files.

    Attributes:
        share: which of several readers this is; None = the only one.
        epochs: passes over the files; None = without end.
        hold_out: which part of the episodes is read; None = all.
        shuffle_files: whether each pass reads the files in another order.
        seed: of everything random; None = differently each time.
        batch_rows: env steps that a batch aims at: larger ones that a file holds are cut behind the episode that gets
            there; None = batches as they are stored.
        whole_episodes: whether cuts are made between episodes only; else also within one of more than twice the rows.
        max_corrupt: places that may be unreadable, over all passes; one more ends the run.
    """

    share: Share | None = None
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
        if self.share is not None and not 0 <= self.share.index < self.share.of:
            raise ConfigError(f"There is no share {self.share.index} of {self.share.of}.", key="share")


class FileReader(InputReader):
    """Batches of files; endless, or so many passes in each of which every row of its share comes once.

    Places that can't be read are noted, logged and passed over, and so is a whole file that vanished; more of them than
    ``max_corrupt`` end the reading, and so does a pass in which nothing at all could be read. An endless reader whose
    share is empty, since there are more workers than batches, reads everything.

    Attributes:
        files: the files that it reads, all or its share of them.
        num_passes: whole passes so far.
        num_rows: rows read so far.
        unreadable: reason by file and place, each once, however many passes come to it; place "" is a whole file.
        piece: number of the batch that `next` gave last, see `aiorl.data.columns.PIECE`; 0 before.
    """

    def __init__(self, sources: str | Sequence[str], options: ReaderOptions | None = None) -> None:
        """Find the files; they are opened one after the other.

        Raises:
            ConfigError: a source names no file (also a ValueError).
            DataError: a file is of no known format (also a ValueError).
        """
        self._options = options = options or ReaderOptions()
        self._all_files = self.files = find_sources(sources)
        self._share = share = options.share or WHOLE
        if len(self.files) >= share.of:
            self.files, self._share = self.files[share.index :: share.of], WHOLE
        self.num_passes = self.num_rows = self.piece = 0
        self.unreadable: dict[tuple[str, str], str] = {}
        self._rng = np.random.default_rng(None if options.seed is None else [options.seed, share.index])
        self._ended_by: AiorlError = EndOfData(f"all passes over {len(self.files)} files have been read")
        self._is_closed = False
        self._batches = self._read()

    def __iter__(self) -> Iterator[Batch]:
        """Yield every batch that is left."""
        with contextlib.suppress(EndOfData):
            while True:
                yield self.next()

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
        while self._options.epochs is None or self.num_passes < self._options.epochs:
            is_empty = True
            files = list(self.files)
            if self._options.shuffle_files:
                self._rng.shuffle(files)
            for path in files:
                for stored in stored_batches(path, self._share):
                    if isinstance(stored, DataError):
                        self._note(stored)
                        continue
                    self.num_rows += stored.batch.total()
                    for batch in self._pieces(stored, path):
                        is_empty = False
                        yield batch
            self.num_passes += 1
            if is_empty:
                self._go_on_after_nothing(len(files))

    def _go_on_after_nothing(self, num_files: int) -> None:
        """Raise if there is nothing to be read; else see to it that the next pass finds something."""
        if self.unreadable:
            raise DataError(f"nothing could be read of {num_files} files; the first: {self._first_error}")
        if self._options.epochs is None:
            if self._share == WHOLE and self.files == self._all_files:
                raise DataError(f"there is nothing to be read in {num_files} files", path=self.files[0])
            logger.warning("There are more workers than stored batches: this one reads all of them")
            self.files, self._share = self._all_files, WHOLE

    def _pieces(self, stored: Stored, path: str) -> Iterator[Batch]:
        options = self._options
        batch = stored.batch if options.hold_out is None else options.hold_out.of(stored.batch, path, stored.place)
        parts: Iterator[Batch] = iter([] if batch is None else [batch])
        if options.batch_rows is not None and isinstance(batch, SampleBatch) and batch.count > options.batch_rows:
            parts = _cut(batch, options.batch_rows, whole_episodes=options.whole_episodes)
        start = 0
        for part in parts:
            self.piece = _piece_number(path, stored.place, start)
            start += part.total()
            yield part

    def _note(self, error: DataError) -> None:
        if (error.path, error.place) in self.unreadable:
            return
        self.unreadable[error.path, error.place] = str(error)  # its traceback would keep what was read
        count, most = len(self.unreadable), self._options.max_corrupt
        if count <= _MAX_LOGGED:
            logger.warning("Left out: %s", error)
        if count > most:
            raise DataError(
                f"{count} places of the input could not be read, more than the {most} that are allowed; the first: "
                f"{self._first_error}"
            )

    @property
    def _first_error(self) -> str:
        return next(iter(self.unreadable.values()))


def _cut(batch: SampleBatch, rows: int, *, whole_episodes: bool) -> Iterator[SampleBatch]:
    """Cut a batch behind the episode in which there are enough rows, or within it if it is much longer."""
    start, count = 0, batch.count
    episodes = batch.get(c.EPS_ID)
    ends = None if episodes is None else np.append(np.flatnonzero(episodes[1:] != episodes[:-1]) + 1, count)
    while start < count:
        end = min(start + rows, count)
        if ends is not None:
            episode_end = int(ends[np.searchsorted(ends, end)])
            end = episode_end if whole_episodes or episode_end - start <= 2 * rows else end
        yield batch.slice(start, end)
        start = end


def _piece_number(path: str, place: str, start: int) -> int:
    """Return a number above 0 that int64 holds; two pieces have the same one by chance in 2^63 only."""
    digest = hashlib.blake2b(f"{path}\0{place}\0{start}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


_MAX_EMPTY = 1000


class PreparedReader(InputReader):
    """Batches of readers, prepared for training.

    Each read picks a reader by the weights. Stored rows are taken in as they are read. The batch goes into a buffer,
    which gives a random one. Stored rows are postprocessed as they leave it, by the policy as it is then. Batches of a
    sampler are left as they are.

    Where rows that are postprocessed have no ``new_obs``, it is what the next row of the episode observed. The last row
    of an episode that did not terminate has none then, and is left out. Rows of a single `FileReader` get the number of
    their piece; rows of a mixture come as often as it says, known or not.
    """

    def __init__(
        self,
        readers: Sequence[InputReader],
        weights: Sequence[float] = (1.0,),
        *,
        buffer_size: int = 0,
        seed: Sequence[int] | None = None,
        take_in: Callable[[str, SampleBatch], None] | None = None,
        postprocess: Callable[[str, SampleBatch], SampleBatch] | None = None,
    ) -> None:
        """Read from other readers; nothing is read before the first `next`.

        Args:
            readers: the others.
            weights: probabilities with which they are read.
            buffer_size: batches in the buffer that shuffles; 0 keeps the order.
            seed: of everything random; None = differently each time.
            take_in: called with the id of a policy and its stored rows, which it may change or look at.
            postprocess: makes each episode's rows of a policy, whose id it is given, into those that are trained on.
        """
        self._readers, self._weights = readers, np.array(weights, np.float64) / sum(weights)
        self._size, self._take_in, self._postprocess = buffer_size, take_in, postprocess
        self._rng = np.random.default_rng(seed)
        self._buffer: list[tuple[Batch, bool, int | None]] = []
        self._is_ending = False

    def next(self) -> Batch:
        """See InputReader; at the end of a finite input, batches that are left in the buffer come in random order.

        Raises:
            EndOfData: every batch has been given.
            DataError: nothing is left of many batches, one after the other.
        """
        for _ in range(_MAX_EMPTY):
            batch, is_stored, piece = self._drawn() if self._size else self._read()
            if not is_stored or self._postprocess is None:
                return batch
            made = map_policies(batch, functools.partial(self._made, piece))
            if made is not None:
                return made
        raise DataError(
            f"{_MAX_EMPTY} stored batches, one after the other, have no {c.NEW_OBS!r} and no second row to take it from"
        )

    def close(self) -> None:
        """See InputReader."""
        self._buffer.clear()
        for reader in self._readers:
            reader.close()

    def _drawn(self) -> tuple[Batch, bool, int | None]:
        while not self._is_ending and len(self._buffer) < self._size:
            try:
                self._buffer.append(self._read())
            except EndOfData:
                self._is_ending = True
        if not self._buffer:
            raise EndOfData("all batches have been read")
        at = int(self._rng.integers(len(self._buffer)))
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        return self._buffer.pop()

    def _read(self) -> tuple[Batch, bool, int | None]:
        """Return the next batch, whether it was stored, and the number of its piece if that is known."""
        is_mixture = len(self._readers) > 1
        reader = self._readers[int(self._rng.choice(len(self._readers), p=self._weights)) if is_mixture else 0]
        batch = reader.next()
        # a user's reader may give anything, which whoever asked for a batch refuses
        is_stored = isinstance(batch, SampleBatch | MultiAgentBatch) and not isinstance(reader, SamplerInput)
        if is_stored and self._take_in is not None:
            batch = map_policies(batch, self._taken_in) or batch
        return batch, is_stored, None if is_mixture else getattr(reader, "piece", None)

    def _taken_in(self, policy_id: str, rows: SampleBatch) -> SampleBatch:
        rows = rows.slice(0, rows.count)  # a reader may give the same batch again
        assert self._take_in is not None
        self._take_in(policy_id, rows)
        return rows

    def _made(self, piece: int | None, policy_id: str, rows: SampleBatch) -> SampleBatch | None:
        """Return the rows of a policy postprocessed; None if none are left."""
        assert self._postprocess is not None
        parts = [part for part in map(_with_new_obs, trajectories(rows)) if part.count]
        if not parts:
            return None
        made = SampleBatch.concat([self._postprocess(policy_id, part) for part in parts])
        if piece is not None:
            made[c.PIECE] = np.full(made.count, piece, np.int64)
        return made


def _with_new_obs(part: SampleBatch) -> SampleBatch:
    """Return rows of one episode, all with the observation behind them."""
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
        """Yield each episode, with the file that it is in.

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
            self.num_corrupt += len(reader.unreadable)
            self.num_left_out += assembler.num_left_out
