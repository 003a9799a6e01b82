"""Format: what a kind of file has to offer, so that readers, writers and `python -m aiorl.data` can use it.

A new format is one file with a `Format`, and a line in `aiorl.offline.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiorl.data.arrays import Batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.text import one_line


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``of``-th batch of a file, from ``index``: what one of several readers takes of a file that all read."""

    index: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        """Return whether the batch of that number, from 0, is among them."""
        return number % self.of == self.index


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch and where in its file it was.

    Attributes:
        place: such as "line 3" or "row group 2".
        batch: the batch.
    """

    place: str
    batch: Batch


def placed(error: Exception, path: str, place: str = "") -> DataError:
    """Return an error of reading as one that names the file and the place in it."""
    return DataError(
        error.reason if isinstance(error, DataError) else one_line(str(error), 200), path=path, place=place
    )


def map_policies(batch: Batch, make: Callable[[str, SampleBatch], SampleBatch | None]) -> Batch | None:
    """Return a batch of the rows that a function makes of each policy's, for as many env steps.

    Args:
        batch: of one policy, which is the default one, or of several.
        make: called with the id of a policy and its rows; None leaves them out.
    Returns: a batch of the same kind; None where nothing is left.
    """
    if isinstance(batch, SampleBatch):
        return make(DEFAULT_POLICY_ID, batch)
    made = {policy_id: make(policy_id, rows) for policy_id, rows in batch.policy_batches.items()}
    kept = {policy_id: rows for policy_id, rows in made.items() if rows is not None}
    return MultiAgentBatch(kept, batch.count) if kept else None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a file is written.

    Attributes:
        compress_columns: columns to compress, where the format doesn't compress by itself.
        env: environment that the data are of, where the format notes it.
    """

    compress_columns: frozenset[str] = frozenset()
    env: str | None = None


class BatchFile(ABC):
    """A file that batches are written to; closed, it is whole."""

    @abstractmethod
    def write(self, batch: Batch) -> int:
        """Take a batch with rows, and return by about how many bytes the file has grown.

        Raises:
            DataError: the format cannot hold such a batch.
            OSError: the file cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is left, and let go of the file; may be called more than once."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the file without writing what is left; what is not whole does not stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class Format(ABC):
    """A kind of file.

    Attributes:
        name: what users call it.
        suffixes: how its files end, without a suffix of compression.
        about: one line of help.
        can_be_wrapped: whether a whole file may be compressed once more (`.gz`, `.lz4`).
    """

    name: str
    suffixes: tuple[str, ...]
    about: str
    can_be_wrapped = False

    @abstractmethod
    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """Yield the batches of a file, and an error for each place that cannot be read.

        Raises:
            DataError: nothing more can be read of the file.
            OSError: the file is not there or cannot be read.
        """

    @abstractmethod
    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """Create a file.

        Raises:
            FileExistsError: there is one of that name.
            OSError: the file cannot be written.
        """
