"""Nested msgpack values, as in checkpoints and messages of child processes: read, or refused as
damaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np

from aiorl.data.nested_codec import pack, unpack
from aiorl.errors import BadFrame
from fuzz_targets.source import Source

VALUES: list[Any] = [
    {"a": [1, (2.5, "text", (b"x", None))], ("i", 3): True},
    [np.arange(6, dtype=np.float32).reshape(2, 3), np.int8(-1), np.zeros((0, 4), bool)],
    ((((),),),),
]
DTYPES = ["<f4", "<f8", "|b1", "|u1", ">i8", "<U9", "O", "<c8", "<f9", "f4,f4", ""]


def seeds() -> Iterable[bytes]:
    for value in VALUES:
        yield b"\0" + pack(value)
    for number in range(12):
        yield bytes([1, number, 3, 2, number, 1, 2, 9, 9, 9, 9])


def run(data: bytes) -> None:
    source = Source(data)
    try:
        value = unpack(source.rest() if source.below(2) == 0 else _made(source, 60))
    except BadFrame:
        return
    again = pack(value)
    assert pack(unpack(again)) == again


def _made(source: Source, depth: int) -> bytes:
    """Return the bytes of a value, or almost of one."""
    match source.below(6 if depth else 1):
        case 0:
            return msgpack.packb(source.plain(0))
        case 1:
            return bytes([0x90 | (count := source.below(4))]) + b"".join(
                _made(source, depth - 1) for _ in range(count)
            )
        case 2:
            return msgpack.packb(msgpack.ExtType(3, _made(source, depth - 1)))
        case 3:
            inner = _made(source, depth - 1)
            for _ in range(source.byte()):
                inner = msgpack.packb(msgpack.ExtType(3, b"\x91" + inner))
            return inner
        case 4:
            head = [source.choice(DTYPES), [source.number() for _ in range(source.below(4))]]
            return msgpack.packb(
                msgpack.ExtType(
                    1 + source.below(2), msgpack.packb(head) + source.take(source.byte())
                )
            )
        case _:
            return b"\x81" + _made(source, depth - 1) + _made(source, depth - 1)
