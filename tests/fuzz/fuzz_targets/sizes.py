"""Size of everything that an object keeps."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy as np

_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, np.ndarray, types.FunctionType)


def num_items(root: Any) -> int:
    """Count the items of all containers reachable from an object, and one for each 64 characters or
    bytes.
    """
    seen: set[int] = set()
    waiting = [root]
    items = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            items += len(value) // 64
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            items += len(value)
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            items += len(value)
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
            slots = [
                name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            waiting += [getattr(value, name) for name in slots if hasattr(value, name)]
    return items
