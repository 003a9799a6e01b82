"""Putting settings on top of settings."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

__all__ = ["deep_update", "to_plain", "with_base_config"]


def with_base_config(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base`, updated by `extra` one level deep; `base` stays as it is."""
    return {**deepcopy(dict(base)), **deepcopy(dict(extra))}


def deep_update(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `changes` in it: dict onto dict merges, anything else replaces."""
    merged = deepcopy(dict(base))
    for name, value in changes.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping):
            merged[name] = deep_update(old, value)
        else:
            merged[name] = deepcopy(value)
    return merged


def to_plain(value: Any) -> Any:
    """`value` with its tuples as lists, so that YAML and msgpack give back the same."""
    if isinstance(value, dict):
        return {name: to_plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    return value
