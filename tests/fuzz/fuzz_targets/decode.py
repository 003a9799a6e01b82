"""Frames to messages: three declared errors, bounded memory, and accepted messages can be encoded
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np

from aiorl.errors import BadFrame, MessageTooBig, VersionMismatch
from aiorl.net.wire import compression
from aiorl.net.wire.compression import compress_blocks
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import Limits
from fuzz_targets.examples import example_messages, same
from fuzz_targets.source import Source

BLOCK_BYTES = 1 << 12  # of LZ4, so that an array of several blocks is small
LIMITS = Limits(max_header_bytes=1 << 16, max_array_bytes=1 << 20, max_message_bytes=1 << 20)
DECLARED = (BadFrame, MessageTooBig, VersionMismatch)
HEADER = ("version", "type", "scalars", "layout", "storage", "shapes")
NAMES = [
    "samples",
    "hello",
    "snapshot",
    "welcome",
    "reply",
    "call",
    "batches",
    "weights",
    "*",
    "obs",
    "default_policy",
]
CODES = ["|u1", "<f4", "<f8", "<i8", "|b1", "<f2", ">f4", "|O", "|S9", "<M8[s]", ""]


def _parts(message: Any) -> tuple[list[Any], list[bytes]]:
    frames = [bytes(frame) for frame in encode(message)]
    header = msgpack.unpackb(frames[0], ext_hook=msgpack.ExtType)
    return header, frames[1:]


with patch.object(compression, "BLOCK_BYTES", BLOCK_BYTES):
    EXAMPLES = [_parts(message) for message in example_messages()]


def seeds() -> Iterable[bytes]:
    for number, (header, frames) in enumerate(EXAMPLES):
        yield bytes([0, number])
        yield bytes([2, number])
        for edit in range(12):
            yield bytes([0, number, edit, 1, 2, 3, 4, 5, 6, 7])
        whole = [msgpack.packb(header), *frames]
        if sum(map(len, whole)) < 1000:
            yield b"\1" + b"".join(len(frame).to_bytes(2, "little") + frame for frame in whole)


def run(data: bytes) -> None:
    whole, compression.BLOCK_BYTES = compression.BLOCK_BYTES, BLOCK_BYTES
    try:
        _run(Source(data))
    finally:
        compression.BLOCK_BYTES = whole


def _run(source: Source) -> None:
    kind = source.byte()
    frames = list(_raw(source)) if kind & 1 else _edited(source)
    if kind & 2 and frames:
        with contextlib.suppress(DECLARED):
            decode_hello(frames)
    check(frames)


def check(frames: list[bytes]) -> None:
    try:
        message = decode(frames, LIMITS)
    except DECLARED:
        return
    if sum(array.nbytes for array in _arrays(message)) > LIMITS.max_message_bytes:
        raise AssertionError(f"more arrays than are allowed in a {type(message).__name__}")
    again = decode([bytes(frame) for frame in encode(message)])
    if not same(message, again):
        raise AssertionError(
            f"a message differs after a round trip: {message!r:.300} and {again!r:.300}"
        )


def _raw(source: Source) -> Iterator[bytes]:
    while not source.is_empty:
        yield source.take(int.from_bytes(source.take(2), "little"))


def _edited(source: Source) -> list[bytes]:
    """Return the frames of an example after a few changes."""
    header, frames = EXAMPLES[source.below(len(EXAMPLES))]
    version, name, scalars, layout, storage, shapes = header
    scalars, storage, frames = dict(scalars), bytearray(storage), list(frames)
    shapes = [list(shape) for shape in shapes]
    nodes, columns = msgpack.unpackb(layout) if layout else ([], [])
    whole: dict[int, Any] = {}
    while not source.is_empty:
        match source.below(14):
            case 0 | 1:
                scalars[_key(source, scalars)] = _value(source)
            case 2:
                scalars.pop(_key(source, scalars), None)
            case 3 if storage:
                storage[source.below(len(storage))] = source.below(7)
            case 4 if shapes:
                shape = shapes[source.below(len(shapes))]
                shape[source.below(len(shape) + 1) :][:1] = [source.number()]
            case 5 if shapes and shapes[0]:
                shapes[0][source.below(len(shapes[0]))] = source.plain(1)
            case 6 if columns:
                columns[source.below(len(columns))][source.below(3)] = source.choice(
                    [*NAMES, *CODES, 0, 1, -1, None]
                )
            case 7 if nodes:
                nodes[source.below(len(nodes))][source.below(2)] = source.choice(
                    [*NAMES, 0, 1, 9, -1, None]
                )
            case 8 if frames:
                changed = bytearray(frames[number := source.below(len(frames))])
                if changed:
                    changed[int.from_bytes(source.take(2), "little") % len(changed)] = source.byte()
                frames[number] = bytes(changed)
            case 9 if frames:
                number = source.below(len(frames))
                frames[number] = frames[number][: source.byte()] + source.take(source.byte())
            case 10 if frames:
                frames[source.below(len(frames))] = _compressed(source)
            case 11:
                frames.insert(source.below(len(frames) + 1), source.take(source.byte()))
            case 12 if frames:
                del frames[source.below(len(frames))]
            case 13:
                whole[source.below(6)] = source.plain()
    header = [
        version,
        name,
        scalars,
        msgpack.packb([nodes, columns]) if layout else b"",
        bytes(storage),
        shapes,
    ]
    for position, value in whole.items():
        header[position] = value
    try:
        return [msgpack.packb(header), *frames]
    except (OverflowError, ValueError):  # a number or a nesting that msgpack can't write
        return frames


def _key(source: Source, scalars: dict[str, Any]) -> str:
    names = [*scalars, source.text()]
    return names[source.below(len(names))]


def _value(source: Source) -> Any:
    return (
        msgpack.ExtType(source.below(3), source.take(4)) if source.below(8) == 0 else source.plain()
    )


def _compressed(source: Source) -> bytes:
    """Return valid LZ4 blocks, with or without the bits of stacks before them."""
    bits = source.take(source.below(4))
    content = source.take(source.byte())
    return bits + compress_blocks(memoryview(content.ljust(64 * source.byte(), b"\0")))


def _arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)
