"""All formats, the files that a source names, and all batches of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.episodes import EpisodeJoiner, episode_order
from aiorl.offline.files import find_files, suffix_of, without_compression
from aiorl.offline.formats import WHOLE, Format, Share, Stored, map_policies, placed
from aiorl.offline.json_lines import JsonLines, RllibJson
from aiorl.offline.minari_data import PREFIX, MinariDataset
from aiorl.offline.parquet import Parquet
from aiorl.offline.sound_rows import sound_rows, with_origins

FORMATS: dict[str, Format] = {
    found.name: found for found in (JsonLines(), RllibJson(), Parquet(), MinariDataset())
}
"""All formats by name."""

SUFFIXES = frozenset(suffix for found in FORMATS.values() for suffix in found.suffixes)
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
    for found in FORMATS.values():
        if suffix in found.suffixes:
            if without_compression(path) != path and not found.can_be_wrapped:
                raise DataError(
                    f"a {found.name} file compresses by itself; decompress it first", path=path
                )
            return found
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
        hint = f"There are {', '.join(FORMATS)}."
        raise ConfigError(
            f"There is no format {name!r}.{nearest(name, FORMATS)}", value=name, hint=hint
        )
    return FORMATS[name]


def find_sources(sources: str | Sequence[str]) -> list[str]:
    """Return the files that paths, directories, patterns, URIs and ``minari:NAME`` name, each once.

    Raises:
        ConfigError: one of them names no file (also a ValueError).
        DataError: the format of a file is unknown (also a ValueError).
    """
    found: dict[str, None] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        paths = [source] if source.startswith(PREFIX) else find_files(source, SUFFIXES)
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
            found[path] = None
    return list(found)


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
    joiner = EpisodeJoiner(path) if joins_episodes and path not in (aligned or ()) else None
    number = made_number = -1
    # to join episodes, each reader with a share reads the whole file
    for number, stored in enumerate(_read(path, WHOLE if joiner else share)):
        if isinstance(stored, DataError):
            if joiner is None or not stored.place or share.has(number):
                yield stored
            continue
        if keeps_origins:
            with_origins(stored.batch, number)
        for sound in sound_rows(stored, path):
            made: Stored | DataError | None = sound
            if isinstance(sound, Stored):
                try:
                    made = joiner.add(sound) if joiner else _with_rows_in_order(sound)
                except DataError as error:
                    made = placed(error, path, stored.place)
            if made is None:
                continue
            made_number += 1
            if joiner is None or share.has(made_number):
                yield made
    if joiner is not None:
        rest = joiner.finish()
        if rest is not None and share.has(made_number + 1):
            yield rest
        if aligned is not None and not joiner.has_held_rows:
            aligned.add(path)


def _with_rows_in_order(stored: Stored) -> Stored:
    def in_order(policy_id: str, rows: SampleBatch) -> SampleBatch:
        order = episode_order(rows)
        return rows if order is None else rows.take(order)

    batch = map_policies(stored.batch, in_order)
    assert batch is not None, "no rows are left out"
    if batch.env_steps != stored.batch.env_steps and isinstance(batch, SampleBatch):
        batch.env_steps = stored.batch.env_steps
    return Stored(stored.place, batch)


def _read(path: str, share: Share) -> Generator[Stored | DataError, None, None]:
    """Yield what a format yields, and the errors that it raises; end after too many errors."""
    num_errors = 0
    try:
        with contextlib.closing(format_of(path).read(path, share)) as found:
            for stored in found:
                yield stored
                if isinstance(stored, DataError):
                    num_errors += 1
                    if num_errors == MAX_UNREADABLE:
                        raise DataError(
                            f"reading ends after {num_errors:,} unreadable places", path=path
                        )
    except DataError as error:
        yield error
    except OSError as error:
        yield DataError(f"can't be read: {error}", path=path)
