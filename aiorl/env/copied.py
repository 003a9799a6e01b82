"""Copies of what environments and their clients gave, and may go on using."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["copied"]

_PLAIN = (int, float, bool, str)


def copied(value: Any) -> Any:
    """The same value with arrays, lists, tuples and dicts of its own, however nested; other objects are shared."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: inner if type(inner) in _PLAIN else copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(inner if type(inner) in _PLAIN else copied(inner) for inner in value)
    return value
