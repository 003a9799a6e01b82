"""The reference of all config keys, made from the declarations themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aiorl.config.honoured import NOT_YET_HONOURED
from aiorl.config.key import expected, group_of, sub_model, unit_of, where_of
from aiorl.config.merge import to_plain
from aiorl.config.schema import CommonConfig

__all__ = ["render_markdown", "render_text"]


def render_markdown(model: type[BaseModel] = CommonConfig) -> str:
    """The text of docs/config.md: one table for each group of keys."""
    lines = [
        "# Config reference",
        "",
        "The keys that all algorithms share. An algorithm has other defaults and more keys of its own; see all of",
        "them with `python -m aiorl.learner --algo NAME --help-config`. A key is set in a YAML file (`--config FILE`),",
        "or on the command line as `--key-name VALUE` or `--set key=VALUE`; the command line wins. Written with a dot,",
        "`model.use_lstm` is the key `use_lstm` inside `model`.",
        "",
        "Where: L is the learner, W the workers, B both; workers get their part from the learner.",
    ]
    group = ""
    for dotted, field in _ordered(model):
        if group_of(field) != group:
            group = group_of(field)
            lines += ["", f"## {group}", "", "| Key | Default | Type | Where | Meaning |", "|---|---|---|---|---|"]
        where = where_of(field)[:1].upper()
        meaning = _meaning(dotted, field).replace("|", "\\|")
        lines.append(f"| `{dotted}` | `{_default(field)}` | {_kind(field)} | {where} | {meaning} |")
    return "\n".join(lines) + "\n"


def render_text(model: type[BaseModel]) -> str:
    """What `--help-config` prints: each key with its default, and its meaning below."""
    lines: list[str] = []
    group = ""
    for dotted, field in _ordered(model):
        if group_of(field) != group:
            group = group_of(field)
            lines += ["", group.upper()]
        lines += [f"  {dotted}: {_default(field)}", f"      {_meaning(dotted, field)} ({_kind(field)})"]
    return "\n".join(lines[1:]) + "\n"


def _ordered(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """All keys, those of a group together, groups in the order they first come up."""
    keys = list(_all_keys(model))
    groups = list(dict.fromkeys(group_of(field) for _, field in keys))
    return sorted(keys, key=lambda named: groups.index(group_of(named[1])))


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = sub_model(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    value: Any = to_plain(field.get_default(call_default_factory=True))
    return value if isinstance(value, str) else json.dumps(value)


def _kind(field: FieldInfo) -> str:
    unit = unit_of(field)
    return expected(field.annotation) + (f"; {unit}" if unit else "")


def _meaning(dotted: str, field: FieldInfo) -> str:
    text = str(field.description)
    if dotted in NOT_YET_HONOURED:
        text += f" *Only the default for now: {NOT_YET_HONOURED[dotted]}.*"
    return text


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
