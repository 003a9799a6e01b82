"""Readers of stored experience: files in random order, batches prepared for training, and whole
episodes.

Workers share the files: with at least as many files as workers, each file belongs to one worker;
otherwise each worker takes every n-th batch of every file. Either way all of them together read
each row once a pass. A hold-out split goes by episode and by the file's name, so it is the same in
every worker, pass and run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import F64
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch, rows_by_policy
from aiorl.errors import AiorlError, BatchError, ConfigError, DataError, EndOfData
from aiorl.offline.episodes import ended, trajectories
from aiorl.offline.files import file_name
from aiorl.offline.formats import WHOLE, Share, Stored, map_policies, placed
from aiorl.offline.io import InputReader, SamplerInput
from aiorl.offline.registry import find_sources, stored_batches
from aiorl.offline.sound_rows import RowLeftOut
from aiorl.offline.stored_columns import FLAGS

logger = logging.getLogger(__name__)


class EpisodeAssembler:
    """Assembler of episodes from parts of one worker or file, in the order of time.

    An episode begins with the row whose ``t`` is 0 and ends with a row that is done. Without ``t``
    it begins after the end of another one or with a new ``eps_id``; without flags of the end, each
    part is a whole episode.

    Attributes:
        num_left_out: rows of episodes without a beginning or an end.
    """

    def __init__(self) -> None:
        """Start without parts."""
        self._open: dict[int, list[SampleBatch]] = {}
        self.num_left_out = 0

    def add(self, batch: Batch) -> Iterator[SampleBatch]:
        """Add a batch, and yield the episodes that end in it.

        Raises:
            BatchError: the batch is multi-agent, or parts of one episode have different columns (a
                ValueError).
        """
        if not isinstance(batch, SampleBatch):
            raise BatchError(
                "policy_batches",
                "a single-agent batch",
                "a MultiAgentBatch",
            )
        for part in trajectories(batch):
            yield from self._add_part(part)

    def finish(self) -> None:
        """Leave out the episodes that have not ended."""
        for key in list(self._open):
            self._drop(key)

    def _add_part(self, part: SampleBatch) -> Iterator[SampleBatch]:
        key = int(part.get(c.EPS_ID, (0,))[0])
        if c.T in part:
            step = int(part[c.T][0])
            next_step = 0
            if key in self._open:
                next_step = int(self._open[key][-1][c.T][-1]) + 1
            if step != next_step:
                self._drop(key)
                if step != 0:
                    self.num_left_out += part.count
                    return
        self._open.setdefault(key, []).append(part)
        has_flags = any(name in part for name in FLAGS)
        if not has_flags or ended(part)[-1]:
            yield SampleBatch.concat(self._open.pop(key))

    def _drop(self, key: int) -> None:
        self.num_left_out += sum(part.count for part in self._open.pop(key, []))


MAX_CORRUPT = 100
"""Default limit of unreadable places in the input."""
_MAX_LOGGED = 20


@dataclass(frozen=True, slots=True)
class HoldOut:
    """Part of the episodes to read.

    Attributes:
        fraction: fraction of all episodes that is held out.
        part: ``"train"`` reads the other episodes, ``"held_out"`` those held out.
    """

    fraction: float
    part: Literal["train", "held_out"] = "train"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: the fraction leaves one part empty.
        """
        if not 0.0 < self.fraction < 1.0:
            raise ConfigError(
                f"A hold-out split of {self.fraction} leaves one part empty.",
                hint="Give 0.1, say.",
            )

    def of(
        self,
        batch: Batch,
        path: str,
        place: str,
    ) -> Batch | None:
        """Return the rows of a batch that belong to the part; None if there are none."""
        part = map_policies(batch, lambda policy_id, rows: self._rows(rows, path, place))
        if isinstance(part, MultiAgentBatch):
            share = part.total() / max(1, batch.total())
            return MultiAgentBatch(part.policy_batches, round(batch.count * share))
        return part

    def _rows(
        self,
        batch: SampleBatch,
        path: str,
        place: str,
    ) -> SampleBatch | None:
        seed = zlib.crc32(file_name(path).encode())
        if c.EPS_ID in batch:
            numbers = batch[c.EPS_ID].astype(np.uint64)
        else:
            # without known episodes, batches are not divided
            numbers = np.full(batch.count, zlib.crc32(place.encode()), np.uint64)
        is_in_part = _uniform(numbers ^ np.uint64(seed << 32)) < self.fraction
        if self.part == "train":
            is_in_part = ~is_in_part
        if is_in_part.all():
            return batch
        return batch.take(np.flatnonzero(is_in_part)) if is_in_part.any() else None


def _uniform(numbers: NDArray[np.uint64]) -> F64:
    """Return numbers in [0, 1) that look random (the finaliser of SplitMix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of reading files.

    Attributes:
        share: share of this reader among several; None = it is the only one.
        epochs: passes over the files; None = without end.
        hold_out: part of the episodes to read; None = all.
        shuffle_files: True if each pass reads the files in another order.
        seed: seed of all random numbers; None = a new one each time.
        batch_rows: env steps to aim at for a batch: a larger stored batch is cut after the episode
            that reaches them; None = batches as stored.
        whole_episodes: True to cut only between episodes; False also cuts episodes longer than
            twice the rows.
        max_corrupt: limit of unreadable places and rows over all passes; one more ends the run.
        joins_episodes: True for batches of whole episodes, whose rows can be anywhere in a file;
            False for batches as stored.
        adds_new_obs: True to add ``new_obs`` if files have none, with the observation of the
            episode's next row.
    """

    share: Share | None = None
    epochs: int | None = None
    hold_out: HoldOut | None = None
    shuffle_files: bool = True
    seed: int | None = None
    batch_rows: int | None = None
    whole_episodes: bool = False
    max_corrupt: int = MAX_CORRUPT
    joins_episodes: bool = False
    adds_new_obs: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a number is too small.
        """
        for name, least in (("epochs", 1), ("batch_rows", 1), ("max_corrupt", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(
                    f"{name} is {value}; it must be at least {least}.",
                    key=name,
                    value=value,
                )
        if self.share is not None and not 0 <= self.share.index < self.share.of:
            raise ConfigError(
                f"There is no share {self.share.index} of {self.share.of}.",
                key="share",
            )


class _SharedFiles:
    """The files of one reader among several.

    Attributes:
        files: files to read.
        share: share of the batches of each.
    """

    def __init__(self, files: list[str], share: Share) -> None:
        self._all_files = files
        self.files = files
        self.share = share
        if len(files) >= share.of:
            self.files = files[share.index :: share.of]
            self.share = WHOLE

    @property
    def is_all(self) -> bool:
        """True if this reader reads all batches of all files."""
        return self.share == WHOLE and self.files == self._all_files

    def take_all(self) -> None:
        """Read all batches of all files from now on."""
        self.files = self._all_files
        self.share = WHOLE


class FileReader(InputReader):
    """Batches of files, without end or for a number of passes; each pass has every row of its share
    once.

    Unreadable places and files that vanished are recorded, logged and skipped. More of them than
    ``max_corrupt`` end the reading, and so does a pass in which nothing could be read. If there are
    more workers than batches, an endless reader with an empty share reads everything.

    Attributes:
        num_passes: whole passes so far.
        num_rows: rows read so far.
        unreadable: reason by file and place, each only once for all passes; place "" is a whole
            file.
        incomplete: numbers of the episodes whose rows are without ``t`` and not all here.
        piece: number of the batch that `next` returned last, see `aiorl.data.columns.PIECE`; 0
            before the first.
        path: file of that batch; "" before the first.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        options: ReaderOptions | None = None,
        *,
        fit: Callable[[str, SampleBatch], None] | None = None,
    ) -> None:
        """Find the files, which are opened one after the other.

        Args:
            sources: paths, directories, patterns, URIs, ``minari:NAME``.
            options: options of reading.
            fit: function that changes a policy's rows [B, ...], in place, to the form that it
                takes.

        Raises:
            ConfigError: a source names no file (also a ValueError).
            DataError: the format of a file is unknown (also a ValueError).
        """
        options = options or ReaderOptions()
        share = options.share or WHOLE
        self._options = options
        self._sources = _SharedFiles(find_sources(sources), share)
        self.num_passes = 0
        self.num_rows = 0
        self.piece = 0
        self.path = ""
        self._fit = fit
        self._aligned: set[str] = set()
        self._steps = StepsLeftOut()
        self.unreadable: dict[tuple[str, str], str] = {}
        self.incomplete: set[int | None] = set()
        seed = None if options.seed is None else [options.seed, share.index]
        self._rng = np.random.default_rng(seed)
        end = f"all passes over {len(self.files)} files have been read"
        self._ended_by: AiorlError = EndOfData(end)
        self._is_closed = False
        self._batches = self._read()

    @property
    def files(self) -> list[str]:
        """Files to read, all or the share of them."""
        return self._sources.files

    def __iter__(self) -> Iterator[Batch]:
        """Yield all remaining batches."""
        with contextlib.suppress(EndOfData):
            while True:
                yield self.next()

    def next(self) -> Batch:
        """See `InputReader.next`.

        Raises:
            EndOfData: all passes are over.
            DataError: too much is unreadable, or everything.
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
        """See `InputReader.close`; a `next` in another thread ends first."""
        self._is_closed = True
        with contextlib.suppress(ValueError):  # another thread runs the generator
            self._batches.close()

    def _read(self) -> Generator[Batch, None, None]:
        while self._options.epochs is None or self.num_passes < self._options.epochs:
            is_empty = True
            files = list(self.files)
            if self._options.shuffle_files:
                self._rng.shuffle(files)
            for path in files:
                self.path = path
                joins = self._options.joins_episodes or self._options.hold_out is not None
                batches = stored_batches(
                    path,
                    self._sources.share,
                    joins_episodes=joins,
                    aligned=self._aligned,
                )
                for stored in batches:
                    if isinstance(stored, DataError):
                        self._note(stored)
                        continue
                    self.num_rows += stored.batch.total()
                    self._fit_rows(stored, path)
                    for batch in self._pieces(stored, path):
                        is_empty = False
                        yield batch
            self.num_passes += 1
            if is_empty:
                self._widen_share(len(files))

    def _fit_rows(self, stored: Stored, path: str) -> None:
        """Give rows the form that their policies take.

        Raises:
            DataError: they can't have it.
        """
        if self._fit is None:
            return
        for policy_id, rows in rows_by_policy(stored.batch).items():
            try:
                self._fit(policy_id, rows)
            except DataError as error:
                raise placed(error, path, stored.place) from error

    def _widen_share(self, num_files: int) -> None:
        """Raise if there is nothing to read; otherwise change the share so that the next pass finds
        batches.
        """
        if self.unreadable:
            raise DataError(
                f"nothing could be read of {num_files} files; the first: {self._first_error}"
            )
        if self._options.epochs is not None:
            return
        if self._sources.is_all:
            raise DataError(
                f"there is nothing to be read in {num_files} files",
                path=self.files[0],
            )
        logger.warning("There are more workers than stored batches: this one reads all of them")
        self._sources.take_all()

    def _pieces(self, stored: Stored, path: str) -> Iterator[Batch]:
        options = self._options
        batch: Batch | None = stored.batch
        if options.hold_out is not None:
            batch = options.hold_out.of(stored.batch, path, stored.place)
        # before episodes are cut into batches
        if options.adds_new_obs and batch is not None:
            batch = map_policies(batch, lambda _, rows: self._steps.with_new_obs(rows, path))
        if batch is None:
            return
        parts: Iterator[Batch] = iter([batch])
        most = options.batch_rows
        if most is not None and isinstance(batch, SampleBatch) and batch.count > most:
            parts = _cut(batch, most, whole_episodes=options.whole_episodes)
        start = 0
        for part in parts:
            self.piece = _piece_number(path, stored.place, start)
            start += part.total()
            yield part

    def _note(self, error: DataError) -> None:
        if (error.path, error.place) in self.unreadable:
            return
        if isinstance(error, RowLeftOut):
            self.incomplete.add(error.eps_id)
        # the error itself has a traceback, which would keep the data in memory
        self.unreadable[error.path, error.place] = str(error)
        count = len(self.unreadable)
        most = self._options.max_corrupt
        if count <= _MAX_LOGGED:
            logger.warning("Left out: %s", error)
        if count > most:
            raise DataError(
                f"{count} places of the input could not be read, more than the limit of {most}; the"
                f" first: {self._first_error}"
            )

    @property
    def _first_error(self) -> str:
        return next(iter(self.unreadable.values()))


def _cut(
    batch: SampleBatch,
    rows: int,
    *,
    whole_episodes: bool,
) -> Iterator[SampleBatch]:
    """Cut a batch after the episode that reaches the number of rows, or within it if it is much
    longer.
    """
    start = 0
    count = batch.count
    ends = np.arange(1, count + 1)
    if c.EPS_ID in batch:
        episodes = batch[c.EPS_ID]
        is_end = episodes[1:] != episodes[:-1]
        ends = np.append(np.flatnonzero(is_end) + 1, count)
    while start < count:
        end = min(start + rows, count)
        episode_end = int(ends[np.searchsorted(ends, end)])
        if whole_episodes or episode_end - start <= 2 * rows:
            end = episode_end
        yield batch.slice(start, end)
        start = end


def _piece_number(
    path: str,
    place: str,
    start: int,
) -> int:
    """Return a number above 0 that fits into int64; two pieces have the same one with probability
    2^-63.
    """
    digest = hashlib.blake2b(f"{path}\0{place}\0{start}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


_MAX_EMPTY = 1000


class PreparedReader(InputReader):
    """Batches of other readers, prepared for training.

    Each read picks the reader whose share of all env steps is furthest below its weight, and passes
    stored rows to `take_in`. The batch goes into a buffer, which returns a random one. Stored rows
    are postprocessed when they leave the buffer, with the policy of that time. Batches of a sampler
    are not changed.

    If rows to postprocess have no ``new_obs``, it is taken from the next row of the episode. The
    last row of an episode that did not terminate has none then, and is left out. Rows of a single
    `FileReader` get the number of their piece; for a mixture, its shares determine how often rows
    come.
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
            readers: the other readers.
            weights: their shares of all env steps.
            buffer_size: batches in the shuffling buffer; 0 keeps the order.
            seed: seed of all random numbers; None = a new one each time.
            take_in: function of a policy id and its stored rows, which it can change or inspect.
            postprocess: function of a policy id and an episode's rows; returns the rows to train
                on.
        """
        self._readers = readers
        self._weights = np.array(weights, np.float64) / sum(weights)
        self._size = buffer_size
        self._take_in = take_in
        self._postprocess = postprocess
        self._rng = np.random.default_rng(seed)
        self.mixes_sources = len(readers) > 1
        self._num_steps = np.zeros(len(readers))
        self._buffer: list[tuple[Batch, bool, int | None]] = []
        self._is_ending = False
        self._steps = StepsLeftOut()

    def next(self) -> Batch:
        """See `InputReader.next`; at the end of a finite input, the rest of the buffer is returned
        in random order.

        Raises:
            EndOfData: all batches have been returned.
            DataError: many batches, one after the other, have no rows to train on.
        """
        for _ in range(_MAX_EMPTY):
            batch, is_stored, piece = self._drawn() if self._size else self._read()
            if not is_stored or self._postprocess is None:
                return batch
            prepared = map_policies(batch, functools.partial(self._postprocessed, piece))
            if prepared is not None:
                return prepared
        raise DataError(
            f"{_MAX_EMPTY} stored batches, one after the other, have no {c.NEW_OBS!r} and no second"
            " row to take it from"
        )

    def close(self) -> None:
        """See `InputReader.close`."""
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
        index = int(self._rng.integers(len(self._buffer)))
        drawn = self._buffer[index]
        # the last one takes its place
        self._buffer[index] = self._buffer[-1]
        del self._buffer[-1]
        return drawn

    def _read(self) -> tuple[Batch, bool, int | None]:
        """Return the next batch, whether it was stored, and the number of its piece if that is
        known.
        """
        number = self._furthest_behind() if self.mixes_sources else 0
        reader = self._readers[number]
        batch = reader.next()
        # a user's reader can return anything; the caller refuses wrong objects
        is_batch = isinstance(batch, SampleBatch | MultiAgentBatch)
        if is_batch:
            self._num_steps[number] += batch.env_steps
        is_stored = is_batch and not isinstance(reader, SamplerInput)
        if is_stored and self._take_in is not None:
            batch = map_policies(batch, self._taken_in) or batch
        piece = None if self.mixes_sources else getattr(reader, "piece", None)
        return batch, is_stored, piece

    def _furthest_behind(self) -> int:
        """Return the number of the reader whose env steps are furthest behind its share; its
        batches can be large.
        """
        due = self._weights * (1.0 + self._num_steps.sum())
        return int(np.argmax(due - self._num_steps))

    def _taken_in(self, policy_id: str, rows: SampleBatch) -> SampleBatch:
        rows = rows.slice(0, rows.count)  # a reader can return the same batch again
        assert self._take_in is not None
        self._take_in(policy_id, rows)
        return rows

    def _postprocessed(
        self,
        piece: int | None,
        policy_id: str,
        rows: SampleBatch,
    ) -> SampleBatch | None:
        """Return the postprocessed rows of a policy; None if none are left."""
        assert self._postprocess is not None
        whole = self._steps.with_new_obs(rows, "")
        if whole is None:
            return None
        parts = [self._postprocess(policy_id, part) for part in trajectories(whole)]
        joined = SampleBatch.concat(parts)
        if piece is not None:
            joined[c.PIECE] = np.full(joined.count, piece, np.int64)
        return joined


_ENOUGH_ROWS = 32
"""Rows after which it is decided whether too many have no next step."""


class StepsLeftOut:
    """Rows without ``new_obs`` that are left out, because the row of the next step is not in the
    file.

    The last row of an episode that did not terminate is one of them. If there are many, the rows of
    the file are not those of episodes.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._num_rows = 0
        self._num_left_out = 0

    def with_new_obs(
        self,
        rows: SampleBatch,
        path: str,
    ) -> SampleBatch | None:
        """Return rows, each with the observation that followed it; None if there are none.

        Args:
            rows: rows of one policy, those of each episode one after the other.
            path: their file, for messages.

        Raises:
            DataError: more than half of all rows so far are left out.
        """
        if c.NEW_OBS in rows or c.OBS not in rows or c.TERMINATEDS not in rows:
            return rows
        parts = [_with_new_obs(part) for part in trajectories(rows)]
        whole = [part for part in parts if part.count]
        num_left_out = rows.count - sum(part.count for part in whole)
        self._num_rows += rows.count
        self._num_left_out += num_left_out
        are_enough = self._num_rows >= _ENOUGH_ROWS
        if num_left_out and are_enough and 2 * self._num_left_out > self._num_rows:
            raise DataError(
                f"{self._num_left_out:,} of {self._num_rows:,} rows have no {c.NEW_OBS!r}, and no"
                " row of the next step of their episode to take it from; the first here is"
                f" {_name_of_first_left_out(rows)}. Is eps_id the same in all rows of an episode,"
                " are all of them in one file, and does t count up by 1?",
                path=path,
            )
        return SampleBatch.concat(whole) if whole else None


def _name_of_first_left_out(rows: SampleBatch) -> str:
    start = 0
    for part in trajectories(rows):
        row = start + part.count - 1
        if not part[c.TERMINATEDS][-1]:
            names = [f"{name} {rows[name][row]}" for name in (c.EPS_ID, c.T) if name in rows]
            if not names:
                return f"row {row + 1}"
            return f"row {row + 1} ({', '.join(names)})"
        start += part.count
    return "unknown"


def _with_new_obs(part: SampleBatch) -> SampleBatch:
    """Return rows of one episode, each with the observation that followed it."""
    obs = part[c.OBS]
    if part[c.TERMINATEDS][-1]:
        # after a terminal state it has no effect
        part[c.NEW_OBS] = np.concatenate([obs[1:], obs[-1:]])
        return part
    whole = part.slice(0, part.count - 1)
    if whole.count:
        whole[c.NEW_OBS] = obs[1:].copy()
        # no row says any longer that the episode ends here
        if c.TRUNCATEDS in whole:
            truncateds = whole[c.TRUNCATEDS].copy()
            truncateds[-1] = True
            whole[c.TRUNCATEDS] = truncateds
    return whole


class StoredEpisodes:
    """Whole episodes of files, in the order of the files, each once.

    Attributes:
        files: the files.
        num_corrupt: unreadable places so far.
        num_left_out: rows of episodes without a beginning or an end so far.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        *,
        hold_out: HoldOut | None = None,
        max_corrupt: int = MAX_CORRUPT,
    ) -> None:
        """Find the files.

        Args:
            sources: paths, directories, patterns, URIs, ``minari:NAME``.
            hold_out: part of the episodes to read; None = all.
            max_corrupt: limit of unreadable places in a file.

        Raises:
            ConfigError: a source names no file (also a ValueError).
            DataError: the format of a file is unknown (also a ValueError).
        """
        self.files = find_sources(sources)
        self._options = ReaderOptions(
            epochs=1,
            hold_out=hold_out,
            shuffle_files=False,
            max_corrupt=max_corrupt,
            joins_episodes=True,
        )
        self.num_corrupt = 0
        self.num_left_out = 0

    def __iter__(self) -> Iterator[tuple[str, SampleBatch]]:
        """Yield each file's path and episode, one at a time.

        Raises:
            DataError: too much of a file is unreadable, or its rows are not episodes.
        """
        for path in self.files:
            assembler = EpisodeAssembler()
            reader = FileReader(path, self._options)
            for batch in reader:
                try:
                    for episode in assembler.add(batch):
                        if c.EPS_ID in episode and int(episode[c.EPS_ID][0]) in reader.incomplete:
                            assembler.num_left_out += episode.count
                        else:
                            yield path, episode
                except BatchError as error:
                    raise DataError(str(error), path=path) from error
            assembler.finish()
            self.num_corrupt += len(reader.unreadable)
            self.num_left_out += assembler.num_left_out
