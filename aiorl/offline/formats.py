"""Formats: the interface of a kind of file for readers, writers and `python -m aiorl.data`.

A new format is one file with a `Format`, and a line in `aiorl.offline.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.text import one_line


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one of several readers of a file: every ``of``-th batch, from ``index``."""

    index: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        """Return whether the batch with a number, from 0, belongs to the share."""
        return number % self.of == self.index


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Stored:
    """Batch and its place in a file.

    Attributes:
        place: place in the file, such as "line 3" or "row group 2".
        batch: the batch.
    """

    place: str
    batch: Batch


def placed(error: Exception, path: str, place: str = "") -> DataError:
    """Return an error of reading as a DataError that names the file and the place in it."""
    reason = error.reason if isinstance(error, DataError) else one_line(str(error), 200)
    return DataError(reason, path=path, place=place)


def map_policies(
    batch: Batch, make: Callable[[str, SampleBatch], SampleBatch | None]
) -> Batch | None:
    """Apply a function to each policy's rows, and return the result as a batch with the same env
    steps.

    Args:
        batch: batch of one policy, the default one, or of several.
        make: function of a policy id and its rows; if it returns None, they are left out.

    Returns:
        A batch of the same kind; None if all rows are left out.
    """
    if isinstance(batch, SampleBatch):
        return make(DEFAULT_POLICY_ID, batch)
    results = {policy_id: make(policy_id, rows) for policy_id, rows in batch.policy_batches.items()}
    policies = {policy_id: rows for policy_id, rows in results.items() if rows is not None}
    return MultiAgentBatch(policies, batch.count) if policies else None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of writing a file.

    Attributes:
        compress_columns: columns to compress if the format doesn't compress by itself.
        env: environment of the data, for formats that record it.
    """

    compress_columns: frozenset[str] = frozenset()
    env: str | None = None


class BatchFile(ABC):
    """File for writing batches; complete once it is closed."""

    @abstractmethod
    def write(self, batch: Batch) -> int:
        """Write a batch, and return by about how many bytes the file has grown.

        Raises:
            DataError: the format cannot hold such a batch.
            OSError: the file cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Write the remaining data and release the file; can be called more than once."""

    @abstractmethod
    def abandon(self) -> None:
        """Release the file without writing the remaining data; remove it if it is incomplete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class Format(ABC):
    """Kind of file.

    Attributes:
        name: name for users.
        suffixes: suffixes of its files, without that of a compression.
        about: line of help.
        can_be_wrapped: True if a whole file can be compressed (`.gz`, `.lz4`).
    """

    name: str
    suffixes: tuple[str, ...]
    about: str
    can_be_wrapped = False

    @abstractmethod
    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """Yield the batches of a file, and an error for each place that cannot be read.

        Raises:
            DataError: the rest of the file cannot be read.
            OSError: the file does not exist or cannot be read.
        """

    @abstractmethod
    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """Create a file.

        Raises:
            FileExistsError: the file exists already.
            OSError: the file cannot be written.
        """
