"""What a config comes to: each value, and where it comes from."""

from __future__ import annotations

import json
from functools import reduce
from typing import TYPE_CHECKING, Any

from aiorl.config.key import all_keys, by_group
from aiorl.config.withheld import without_secrets

if TYPE_CHECKING:
    from aiorl.config.schema import CommonConfig

__all__ = ["render_effective"]


def render_effective(config: CommonConfig) -> str:
    """A line for each key: its name, where its value comes from, and the value; secrets are withheld."""
    values = without_secrets(config.to_dict())
    keys = [name for name, _ in by_group(all_keys(type(config)))]
    for group in ("model", "multiagent"):  # they may have more, which only the user knows
        keys += [name for inner in values[group] if (name := f"{group}.{inner}") not in keys]
    rows = [(name, config.origin_of(name), _text(reduce(_inner, name.split("."), values))) for name in keys]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "".join(f"{name:{widths[0]}}  {origin:{widths[1]}}  {text}\n" for name, origin, text in rows)


def _inner(values: Any, name: str) -> Any:
    return values[name]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
