"""The reference of all config keys, made from the declarations themselves."""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aiorl.config.key import all_keys, by_group, expected, group_of, reason_unsupported, unit_of, where_of
from aiorl.config.merge import to_plain
from aiorl.config.schema import CommonConfig

__all__ = ["default_text", "render_markdown", "render_text"]


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
    for dotted, field in by_group(all_keys(model)):
        if group_of(field) != group:
            group = group_of(field)
            lines += ["", f"## {group}", "", "| Key | Default | Type | Where | Meaning |", "|---|---|---|---|---|"]
        where = "" if reason_unsupported(field) else where_of(field)[:1].upper()
        meaning = _meaning(field).replace("|", "\\|")
        lines.append(f"| `{dotted}` | `{default_text(field)}` | {_kind(field)} | {where} | {meaning} |")
    return "\n".join(lines) + "\n"


def render_text(model: type[BaseModel]) -> str:
    """What `--help-config` prints: each key with its default, and its meaning below."""
    lines: list[str] = []
    group = ""
    for dotted, field in by_group(all_keys(model)):
        if group_of(field) != group:
            group = group_of(field)
            lines += ["", group.upper()]
        lines += [f"  {dotted}: {default_text(field)}", f"      {_meaning(field)} ({_kind(field)})"]
    return "\n".join(lines[1:]) + "\n"


def default_text(field: FieldInfo) -> str:
    """Return a key's default as a config file would say it."""
    value: Any = to_plain(field.get_default(call_default_factory=True))
    return value if isinstance(value, str) else json.dumps(value)


def _kind(field: FieldInfo) -> str:
    unit = unit_of(field)
    return expected(field.annotation) + (f"; {unit}" if unit else "")


def _meaning(field: FieldInfo) -> str:
    reason = reason_unsupported(field)
    return f"{field.description} *Only the default: {reason}.*" if reason else str(field.description)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
