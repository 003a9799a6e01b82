"""Packed values of any form: what can be read can be packed again, and is then the same value.

Nothing else than `RemoteProtocolError` is raised, no code is imported, and a value that was read takes no
more memory than what has arrived, but for a factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aiorl.actors.values import _READERS, LIMITS, ActorName, pack, unpack
from aiorl.errors import LocalProtocolError, RemoteProtocolError, UnsendableError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Reply
from fuzz_targets.source import Source

MARKS = sorted(_READERS)
ARRAYS = [
    np.arange(3),
    np.zeros(()),
    np.zeros((2, 0), np.float32),
    np.frombuffer(b"text \xff", np.uint8),
    np.ones((2, 3), np.bool_),
]
SPACES: list[Any] = [
    {"kind": "Discrete", "n": 3, "start": 0, "dtype": "int64"},
    {"kind": "Box", "low": 0, "high": 1, "shape": [2], "dtype": "float32"},
    {"kind": "Tuple", "spaces": []},
]
KEYS = ["columns", "env_steps", "policies", "extras", "is_filled", "items", "a", "$tuple", "kind"]


def seeds() -> Iterable[bytes]:
    for mark in range(len(MARKS)):
        for kind in range(12):
            yield bytes([7, mark, kind, 2, 3, 4, 1, 2, 3, 0, 1])
            yield bytes([9, 2, 0, kind, 2, 2, 1, kind, 1, 1, 7, mark, kind, 1, 1])


def run(data: bytes) -> None:
    source = Source(data)
    try:
        frames = encode(Reply(1, True, packed(source, 5)), compress=False, limits=LIMITS)
    except LocalProtocolError:  # nested too deeply
        return
    reply = decode([bytes(frame) for frame in frames], LIMITS)
    assert isinstance(reply, Reply)
    try:
        read = unpack(reply.result, ActorName, imports_code=False)
    except RemoteProtocolError:
        return
    try:
        again = pack(read)
    except UnsendableError:  # a part of it is too long, or an array of another kind
        return
    repr(unpack(again, ActorName, imports_code=False))


def packed(source: Source, depth: int) -> Any:
    """Return a value as it could have arrived: marks in all places, with any contents."""
    match source.below(12 if depth else 6):
        case 0:
            return source.number()
        case 1:
            return source.text()
        case 2 | 3:
            return source.choice(ARRAYS)
        case 4:
            return source.choice(SPACES)
        case 5:
            return source.plain(1)
        case 6 | 7 | 8:
            return {source.choice(MARKS): packed(source, depth - 1)}
        case 9:
            return {key: packed(source, depth - 1) for key in KEYS[: source.below(len(KEYS) + 1)]}
        case 10:
            return {source.choice(KEYS): packed(source, depth - 1) for _ in range(source.below(4))}
        case _:
            return [packed(source, depth - 1) for _ in range(source.below(5))]
