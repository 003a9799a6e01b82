"""All formats, the files that a source names, and all batches of a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.episodes import EpisodeJoiner, rows_in_order
from aiorl.offline.files import find_files, is_uri, suffix_of, without_compression
from aiorl.offline.formats import WHOLE, Format, Share, Stored, map_policies, placed
from aiorl.offline.json_lines import JsonLines, RllibJson
from aiorl.offline.minari_data import PREFIX, MinariDataset
from aiorl.offline.parquet import Parquet
from aiorl.offline.sound_rows import RowLeftOut, sound_rows, with_origins

_FORMATS: tuple[Format, ...] = (JsonLines(), RllibJson(), Parquet(), MinariDataset())
FORMATS = {form.name: form for form in _FORMATS}
"""All formats by name."""

SUFFIXES = frozenset(suffix for form in _FORMATS for suffix in form.suffixes)
"""Suffixes of files of experience, without that of a compression."""

MAX_UNREADABLE = 100_000
"""Unreadable places in one file after which the rest of it is not read."""


def format_of(path: str) -> Format:
    """Return the format of a path by its prefix or suffix.

    Raises:
        DataError: the format is unknown.
    """
    if path.startswith(PREFIX):
        return FORMATS["minari"]
    suffix = suffix_of(path)
    for form in _FORMATS:
        if suffix in form.suffixes:
            if without_compression(path) != path and not form.can_be_wrapped:
                raise DataError(
                    f"a {form.name} file compresses by itself; decompress it first",
                    path=path,
                )
            return form
    raise DataError(
        f"no format has files that end in {suffix!r}; known are {', '.join(sorted(SUFFIXES))}, JSON"
        " also with .gz or .lz4 at the end, and minari:NAME",
        path=path,
    )


def format_named(name: str) -> Format:
    """Return the format with a name.

    Raises:
        ConfigError: it does not exist.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"There is no format {name!r}.{nearest(name, FORMATS)}",
            value=name,
            hint=f"There are {', '.join(FORMATS)}.",
        )
    return FORMATS[name]


def find_sources(sources: str | Sequence[str]) -> list[str]:
    """Return the files that paths, directories, patterns, URIs and ``minari:NAME`` name, each once,
    by the first of its names.

    Raises:
        ConfigError: one of them names no file, or a directory that can't be read (also a
            ValueError).
        DataError: the format of a file is unknown (also a ValueError).
    """
    if isinstance(sources, str):
        sources = [sources]
    files: dict[str, str] = {}
    for source in sources:
        try:
            paths = [source] if source.startswith(PREFIX) else find_files(source, SUFFIXES)
        except OSError as error:
            raise ConfigError(
                f"{source!r} can't be read: {error.strerror}.",
                key="input",
                value=source,
                hint="Check its owner and mode.",
            ) from error
        if not paths:
            raise ConfigError(
                f"No file of experience matches {source!r}.",
                key="input",
                value=source,
                hint=(
                    "Give a file, a directory or a pattern of files that end in"
                    f" {', '.join(sorted(SUFFIXES))}."
                ),
            )
        for path in paths:
            format_of(path)
            is_local = not is_uri(path) and not path.startswith(PREFIX)
            files.setdefault(os.path.realpath(path) if is_local else path, path)
    return list(files.values())


def stored_batches(
    path: str,
    share: Share = WHOLE,
    *,
    joins_episodes: bool = False,
    keeps_origins: bool = False,
    aligned: set[str] | None = None,
) -> Generator[Stored | DataError, None, None]:
    """Yield the batches of a file and an error for each place and row that can't be used.

    An error without a place ends the file, and so do too many unreadable places.

    Args:
        path: the file.
        share: share of the file to read, by the numbers of its batches.
        joins_episodes: True for batches of whole episodes, whose rows can be anywhere in the file;
            the share is then one of these batches. False for batches as stored, with the rows of
            each episode in order.
        keeps_origins: True to add the column `aiorl.offline.sound_rows.ORIGIN`.
        aligned: files of which no episode is in several batches, so that nothing is to be joined; a
            file that turns out to be one is added. None if that is not needed.

    Raises:
        ConfigError: a package for the format is missing.
    """
    is_aligned = aligned is not None and path in aligned
    joiner = EpisodeJoiner(path) if joins_episodes and not is_aligned else None
    num_batches = -1
    # to join episodes, each reader with a share reads the whole file
    for number, stored in enumerate(_read(path, WHOLE if joiner else share)):
        if isinstance(stored, DataError):
            if joiner is None or not stored.place or share.has(number):
                yield stored
            continue
        if keeps_origins:
            with_origins(stored.batch, number)
        for sound in sound_rows(stored, path):
            if joiner is not None and isinstance(sound, RowLeftOut):
                joiner.cut(sound.eps_id)
            result = _in_order(sound, joiner, path, stored.place)
            if result is None:
                continue
            num_batches += 1
            if joiner is None or share.has(num_batches):
                yield result
    if joiner is not None:
        rest = joiner.finish()
        if rest is not None and share.has(num_batches + 1):
            yield rest
        if aligned is not None and not joiner.has_held_rows:
            aligned.add(path)


def _in_order(
    sound: Stored | DataError,
    joiner: EpisodeJoiner | None,
    path: str,
    place: str,
) -> Stored | DataError | None:
    """Return a batch with its rows in order, or what the joiner has of it; errors as they are."""
    if isinstance(sound, DataError):
        return sound
    try:
        if joiner is not None:
            return joiner.add(sound)
        return _with_rows_in_order(sound)
    except DataError as error:
        return placed(error, path, place)


def _with_rows_in_order(stored: Stored) -> Stored:
    batch = map_policies(stored.batch, lambda policy_id, rows: rows_in_order(rows))
    assert batch is not None, "no rows are left out"
    if batch.env_steps != stored.batch.env_steps and isinstance(batch, SampleBatch):
        batch.env_steps = stored.batch.env_steps
    return Stored(stored.place, batch)


def _read(
    path: str,
    share: Share,
) -> Generator[Stored | DataError, None, None]:
    """Yield what a format yields, and the errors that it raises; end after too many errors."""
    num_errors = 0
    try:
        with contextlib.closing(format_of(path).read(path, share)) as batches:
            for stored in batches:
                yield stored
                if isinstance(stored, DataError):
                    num_errors += 1
                    if num_errors == MAX_UNREADABLE:
                        raise DataError(
                            f"reading ends after {num_errors:,} unreadable places",
                            path=path,
                        )
    except DataError as error:
        yield error
    except OSError as error:
        yield DataError(f"can't be read: {error}", path=path)
