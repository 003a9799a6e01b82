"""All formats, the files that a source names, and all batches of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.files import find_files, suffix_of, without_compression
from aiorl.offline.formats import WHOLE, Format, Share, Stored
from aiorl.offline.json_lines import JsonLines, RllibJson
from aiorl.offline.minari_data import PREFIX, MinariDataset
from aiorl.offline.parquet import Parquet

FORMATS: dict[str, Format] = {found.name: found for found in (JsonLines(), RllibJson(), Parquet(), MinariDataset())}
"""All formats by name."""

SUFFIXES = frozenset(suffix for found in FORMATS.values() for suffix in found.suffixes)
"""Suffixes of files of experience, without that of a compression."""


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
                raise DataError(f"a {found.name} file compresses by itself; decompress it first", path=path)
            return found
    raise DataError(
        f"no format has files that end in {suffix!r}; known are {', '.join(sorted(SUFFIXES))}, JSON also with .gz or "
        ".lz4 at the end, and minari:NAME",
        path=path,
    )


def format_named(name: str) -> Format:
    """Return the format with a name.

    Raises:
        ConfigError: it does not exist.
    """
    if name not in FORMATS:
        hint = f"There are {', '.join(FORMATS)}."
        raise ConfigError(f"There is no format {name!r}.{nearest(name, FORMATS)}", value=name, hint=hint)
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
                hint=f"Give a file, a directory or a pattern of files that end in {', '.join(sorted(SUFFIXES))}.",
            )
        for path in paths:
            format_of(path)
            found[path] = None
    return list(found)


def stored_batches(path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
    """Yield the batches of a file and an error for each unreadable place; an error without a place ends the file.

    Raises:
        ConfigError: a package for the format is missing.
    """
    try:
        with contextlib.closing(format_of(path).read(path, share)) as found:
            yield from found
    except DataError as error:
        yield error
    except OSError as error:
        yield DataError(f"can't be read: {error}", path=path)
