"""Spaces as described by checkpoints and handshakes: made within bounds and equal after a round
trip, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np
from gymnasium import spaces

from aiorl.acting.preprocessors import make_preprocessor
from aiorl.data.spaces import MAX_SPACE_ELEMENTS, space_from_dict, space_to_dict
from aiorl.errors import ConfigError, UnsupportedSpaceError
from fuzz_targets.source import Source

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1.0, np.inf, (2, 3)),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Discrete(5, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary((2, 2)),
    spaces.Dict(
        {
            "a": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (3,))]),
            "b": spaces.MultiBinary(3),
        }
    ),
]
NAMES = ["kind", "shape", "dtype", "low", "high", "n", "start", "nvec", "spaces", "more"]
WORDS = [
    b"Box",
    b"Discrete",
    b"MultiBinary",
    b"MultiDiscrete",
    b"Tuple",
    b"Dict",
    b"float32",
    b"uint8",
    b"inf",
    b"nan",
]


def seeds() -> Iterable[bytes]:
    for number, space in enumerate(SPACES):
        yield b"\0" + msgpack.packb(space_to_dict(space))
        for name in range(len(NAMES)):
            yield bytes([1, number, 0, name, 3, 0, name, 7, 1, 2, 3])


def run(data: bytes) -> None:
    source = Source(data)
    if source.below(2) == 0:
        try:
            description = msgpack.unpackb(source.rest())
        except Exception:  # msgpack raises many types
            return
    else:
        description = space_to_dict(source.choice(SPACES))
        while not source.is_empty:
            _edit(description, source)
    try:
        space = space_from_dict(description)
    except ConfigError:
        return
    assert _elements(space) <= MAX_SPACE_ELEMENTS
    assert space_from_dict(space_to_dict(space)) == space
    if _elements(space) < 10_000:
        try:
            preprocessor = make_preprocessor(space)
        except UnsupportedSpaceError:
            return
        assert math.prod(preprocessor.shape) <= MAX_SPACE_ELEMENTS


def _edit(place: dict[str, Any], source: Source) -> None:
    """Change one entry, of a part if there are parts."""
    while isinstance(parts := place.get("spaces"), list) and parts and source.below(3):
        part = source.choice(parts)
        inner = part[1] if isinstance(part, list) and len(part) == 2 else part
        if not isinstance(inner, dict):
            break
        place = inner
    name = source.choice(NAMES)
    match source.below(3):
        case 0:
            place[name] = source.plain()
        case 1:
            place[name] = [source.number() for _ in range(source.below(5))]
        case _:
            place[name] = source.choice(WORDS).decode()


def _elements(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(
            map(
                _elements, space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
            )
        )
    return math.prod(space.shape or ())
