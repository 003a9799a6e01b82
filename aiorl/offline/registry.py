"""Which formats there are, and which of them a file is of."""

from __future__ import annotations

from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.files import suffix_of, without_compression
from aiorl.offline.formats import Format
from aiorl.offline.json_lines import JsonLines, RllibJson
from aiorl.offline.minari_data import PREFIX, MinariDataset
from aiorl.offline.parquet import Parquet

FORMATS: dict[str, Format] = {found.name: found for found in (JsonLines(), RllibJson(), Parquet(), MinariDataset())}
"""Every format by its name."""

SUFFIXES = frozenset(suffix for found in FORMATS.values() for suffix in found.suffixes)
"""How files of experience end, without a suffix of compression."""


def format_of(path: str) -> Format:
    """The format that a path's name tells.

    Raises:
        DataError: it tells none.
    """
    if path.startswith(PREFIX):
        return FORMATS["minari"]
    suffix = suffix_of(path)
    for found in FORMATS.values():
        if suffix in found.suffixes:
            if without_compression(path) != path and not found.can_be_wrapped:
                raise DataError(f"a {found.name} file compresses by itself; unpack it first", path=path)
            return found
    raise DataError(
        f"no format has files that end in {suffix!r}; known are {', '.join(sorted(SUFFIXES))}, with .gz or .lz4 "
        "behind JSON, and minari:NAME",
        path=path,
    )


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"There is no format {name!r}.{nearest(name, FORMATS)}", value=name, hint=f"There are {', '.join(FORMATS)}."
        ) from None
