"""Names of columns in other formats of stored experience; `other_columns.yaml` lists them."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from aiorl.config.yaml_text import parse_yaml
from aiorl.data import columns as c
from aiorl.errors import nearest

V = TypeVar("V")

_FILE = "other_columns.yaml"
_NEEDED = {
    c.OBS: "nothing can be learned without observations",
    c.ACTIONS: "nothing can be learned without actions",
    c.REWARDS: "only bc learns without rewards",
    c.TERMINATEDS: "only bc learns without the ends of episodes",
}
"""Column that algorithms need -> consequence if it is missing."""


@functools.cache
def other_columns() -> dict[str, str]:
    """Return the name of a column in another format -> its name here."""
    content = importlib.resources.files("aiorl.offline").joinpath(_FILE).read_bytes()
    formats, _ = parse_yaml(Path(_FILE), content)
    return {name: column for names in formats.values() for name, column in names.items()}


def with_known_names(columns: Mapping[str, V]) -> dict[str, V]:
    """Return columns by their names here; a column keeps its name if there is another column of the
    name here.

    Args:
        columns: columns by the names in a file, in the order of the file.
    """
    names = other_columns()
    renamed: dict[str, V] = {}
    for name, column in columns.items():
        new_name = names.get(name, name)
        if new_name in columns or new_name in renamed:
            new_name = name
        renamed[new_name] = column
    return renamed


def missing_columns(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each column that algorithms need and that is missing, with the consequence and similar
    names.

    Args:
        names: names of the columns in a file.
    """
    unneeded = sorted(set(names) - set(_NEEDED))
    for name, consequence in _NEEDED.items():
        if name not in names:
            yield name, consequence + "." + nearest(name, unneeded)
