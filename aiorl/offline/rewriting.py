"""Files of experience from others: converted, or merged into one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, DataError
from aiorl.offline.files import exists, file_name, in_directory, is_uri, make_directory, suffix_of, without_compression
from aiorl.offline.formats import BatchFile, Format, WriteOptions
from aiorl.offline.inspection import policy_batches
from aiorl.offline.minari_data import PREFIX
from aiorl.offline.registry import SUFFIXES, format_named, format_of

__all__ = ["Rewritten", "convert", "merge"]


@dataclass(slots=True)
class Rewritten:
    """What became of files.

    Attributes:
        rows: rows written by the path of their file.
        left_out: places that could not be read.
    """

    rows: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def convert(
    files: Sequence[str],
    out: str,
    options: WriteOptions,
    format_name: str | None = None,
    *,
    change: Callable[[SampleBatch], None] | None = None,
) -> Rewritten:
    """Write each file again in another format, or with other compression.

    Args:
        files: at least one.
        out: a file or ``minari:NAME``, of a single file; or a directory, made if need be.
        options: how they are written.
        format_name: None = what ``out`` says, JSON lines in a directory.
        change: called with the rows of each policy before they are written; None leaves them as they are.

    Raises:
        ConfigError: what can't be (also a ValueError). Nothing was written then.
        DataError: a format can't hold what is in a file, or there is a file of that name; that file was not written.
        OSError: a file can't be written.
    """
    done = Rewritten()
    for source, target, found in _targets(files, out, format_name):
        with _created(found, target, options) as file:
            batches = _read([source], done, keep_ids=True)
            done.rows[target] = sum(_write(file, _changed(batch, change)) for batch in batches)
    return done


def merge(files: Sequence[str], out: str, options: WriteOptions, format_name: str | None = None) -> Rewritten:
    """Write all files as one; episodes are numbered anew, so that those of different files stay apart.

    Raises: see `convert`.
    """
    done = Rewritten()
    found = format_named(format_name) if format_name else format_of(out)
    with _created(found, out, options) as file:
        done.rows[out] = sum(_write(file, batch) for batch in _read(files, done, keep_ids=False))
    return done


def _targets(files: Sequence[str], out: str, format_name: str | None) -> Iterator[tuple[str, str, Format]]:
    is_file = out.startswith(PREFIX) or (suffix_of(out) in SUFFIXES and not os.path.isdir(out))
    if is_file:
        if len(files) > 1:
            raise ConfigError(
                f"{len(files)} files can't be converted to the one file {out!r}.",
                key="out",
                value=out,
                hint="Give a directory, or make one of them with `python -m aiorl.data merge`.",
            )
        yield files[0], out, format_named(format_name) if format_name else format_of(out)
        return
    found = format_named(format_name or "json")
    if found.name == "minari":
        raise ConfigError("Minari's datasets have names:", key="out", value=out, hint=f"give --out {PREFIX}NAME-v0.")
    suffix = found.suffixes[0] if found.suffixes else ".json"
    names = [os.path.splitext(without_compression(file_name(path.removeprefix(PREFIX))))[0] + suffix for path in files]
    if double := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"Several files would become {sorted(double)[0]!r}.", key="out", value=out, hint="Convert them one by one."
        )
    make_directory(out)
    for path, name in zip(files, names, strict=True):
        yield path, in_directory(out, name), found


@contextlib.contextmanager
def _created(found: Format, path: str, options: WriteOptions) -> Iterator[BatchFile]:
    """A new file that does not stay if the block fails."""
    try:
        file = found.create(path, options)
    except FileExistsError as error:
        raise DataError(str(error) if path.startswith(PREFIX) else "there is a file of that name", path=path) from error
    try:
        yield file
        file.close()
    except BaseException:
        file.abandon()
        if not is_uri(path) and not path.startswith(PREFIX) and exists(path):
            os.unlink(path)
        raise


def _changed(batch: Batch, change: Callable[[SampleBatch], None] | None) -> Batch:
    if change is not None:
        for rows in policy_batches(batch).values():
            change(rows)
    return batch


def _write(file: BatchFile, batch: Batch) -> int:
    file.write(batch)
    return batch.total()


def _read(files: Sequence[str], done: Rewritten, *, keep_ids: bool) -> Iterator[Batch]:
    numbers = iter(range(2**62))
    for path in files:
        renumber = _keep if keep_ids else _Renumbering(numbers)
        try:
            for stored in format_of(path).read(path):
                if isinstance(stored, DataError):
                    done.left_out.append(str(stored))
                else:
                    yield renumber(stored.batch)
        except (DataError, OSError) as error:
            done.left_out.append(str(error))


def _keep(batch: Batch) -> Batch:
    return batch


class _Renumbering:
    """New numbers for the episodes of one file, the same for the same."""

    def __init__(self, numbers: Iterator[int]) -> None:
        """Take numbers that no other file has."""
        self._numbers = numbers
        self._new: dict[int, int] = {}

    def __call__(self, batch: Batch) -> Batch:
        if isinstance(batch, SampleBatch):
            return self._rows(batch)
        return MultiAgentBatch({name: self._rows(rows) for name, rows in batch.policy_batches.items()}, batch.count)

    def _rows(self, batch: SampleBatch) -> SampleBatch:
        if c.EPS_ID not in batch:
            return batch
        old, place = np.unique(batch[c.EPS_ID], return_inverse=True)
        first_seen = np.full(len(old), batch.count)
        np.minimum.at(first_seen, place, np.arange(batch.count))
        for index in np.argsort(first_seen):
            number = int(old[index])
            if number not in self._new:
                self._new[number] = next(self._numbers)
        new = np.array([self._new[int(number)] for number in old], np.int64)
        changed = batch.slice(0, batch.count)
        changed.env_steps = batch.env_steps
        changed[c.EPS_ID] = new[place.reshape(-1)]
        return changed
