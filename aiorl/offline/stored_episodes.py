"""Whole episodes out of files of experience."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, DataError
from aiorl.offline.episodes import EpisodeAssembler
from aiorl.offline.readers import MAX_CORRUPT, FileReader, HoldOut, ReaderOptions, find_sources

__all__ = ["StoredEpisodes"]


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
