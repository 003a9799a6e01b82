"""Names that other libraries use, and what to write here instead. The table is `other_names.yaml`.

`python -m aiorl.config.other_names PAGE...` makes the tables of pages of the documentation again.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from aiorl.config.key import unit_of
from aiorl.config.yaml_text import parse_yaml

__all__ = ["CALLED", "attribute_hint", "from_rllib", "key_hint", "no_attribute", "with_tables"]

CALLED = "Here it is called "
"""Begins a hint that names a key, which follows."""

_FILE = "other_names.yaml"
_NONE = "none"


def key_hint(name: str, keys: Mapping[str, FieldInfo]) -> str:
    """Return what a key of another library is called here, or "" if no library is known to have it.

    Args:
        name: dotted name of the key. If the table does not have it, the part behind the last dot is looked up.
        keys: all keys of the algorithm by dotted name, groups included.
    """
    texts: list[str] = []
    for answers in _answers(name) or _answers(name.rpartition(".")[2]):
        ours = next((key for key in answers if key in keys), None)
        if ours is not None:
            unit = unit_of(keys[ours])
            return f"{CALLED}{ours}{f' ({unit})' if unit else ''}. {answers[ours] or ''}".strip()
        others = " and ".join(key for key in answers if key != _NONE)
        texts.append(answers.get(_NONE) or f"It is {others} in other algorithms.")
    return next(iter(texts), "")


def attribute_hint(of: str, name: str) -> str:
    """Return what to write instead of an attribute that another library has, or "".

    Args:
        of: aiorl, config or trainer.
        name: of the attribute.
    """
    if name.startswith("_"):
        return ""
    found = (names[of].get(name, "") for names in _table()["python"].values())
    return next(filter(None, found), "")


def no_attribute(of: str, owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have, with a hint if another library has it."""
    said, hint = f"{type(owner).__name__!r} object has no attribute {name!r}", attribute_hint(of, name)
    return AttributeError(f"{said}. {hint}" if hint else said, name=name, obj=owner)


def from_rllib(name: str) -> tuple[str | None, str]:
    """Return aiorl's key for a key of RLlib if both mean exactly the same, else None, and how they differ."""
    is_ours = name.partition(".")[0] in ("model", "multiagent", name)
    entry = _table()["rllib"].get(name, {name: ""} if is_ours else "It has no counterpart.")
    if isinstance(entry, str):
        return None, entry.removesuffix(" Leave it out.")
    ours = next(iter(entry))
    return (None, f"The key here is {ours}. {entry[ours]}") if entry[ours] else (ours, "")


def render_keys(library: str) -> str:
    """Return a Markdown table of the keys of a section."""
    lines = ["| Name | Here | Difference |", "|---|---|---|"]
    for name, entry in _table()[library].items():
        answers = {} if isinstance(entry, str) else entry
        keys = [f"`{key}`" for key in answers if key != _NONE]
        notes = dict.fromkeys(str(note) for key, note in answers.items() if note and key != _NONE)
        otherwise = entry if isinstance(entry, str) else answers.get(_NONE) or ""
        texts = [*notes, f"Otherwise: {otherwise}" if keys and otherwise else otherwise]
        lines.append(f"| `{name}` | {', '.join(keys) or 'none'} | {' '.join(filter(None, texts))} |")
    return "\n".join(lines) + "\n"


def render_python(library: str) -> str:
    """Return a Markdown table of the names in Python code of a section."""
    lines = ["| Name | Here |", "|---|---|"]
    for of, names in _table()["python"][library].items():
        lines += [f"| `{of}.{name}` | {text} |" for name, text in names.items()]
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """Return a page of the documentation with its tables made again, each behind a comment that names it."""
    render = {"keys": render_keys, "python": render_python}
    return re.sub(
        r"(<!-- (keys|python) (\w+) -->\n)(?:\|.*\n)*", lambda found: found[1] + render[found[2]](found[3]), page
    )


def _answers(name: str) -> list[dict[str, str | None]]:
    sections = (_table()[section].get(name) for section in ("rllib", "sb3", "others"))
    return [{_NONE: entry} if isinstance(entry, str) else entry for entry in sections if entry is not None]


@functools.cache
def _table() -> dict[str, Any]:
    content = importlib.resources.files("aiorl.config").joinpath(_FILE).read_bytes()
    return parse_yaml(Path(_FILE), content)[0]


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
