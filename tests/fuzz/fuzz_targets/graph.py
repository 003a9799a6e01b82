"""Descriptions of acting graphs: refused with a PolicyError, or equal to their source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgpack

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.errors import PolicyError
from fuzz_targets.source import Source

SPEC = ActingSpec(
    (4,),
    "float32",
    ((2,),),
    2,
    "Categorical",
    {"type": "Discrete", "n": 2, "start": 0},
    (ArraySpec("w", (2, 3), "float32"), ArraySpec("b", (), "int64")),
    ArraySpec("prev_actions", (2,), "int64"),
).to_dict()


def seeds() -> Iterable[bytes]:
    yield b"\1" + msgpack.packb(SPEC)
    for number in range(len(SPEC)):
        yield bytes([2, number, 2, 3, number, 8, 1, 2, 3])


def run(data: bytes) -> None:
    source = Source(data)
    if source.below(3) == 1:
        try:
            description = msgpack.unpackb(source.rest())
        except Exception:  # msgpack raises many types
            return
        if isinstance(description, dict):
            _check_spec(description)
        return
    spec = dict(SPEC)
    names = [*spec, "more"]
    while not source.is_empty:
        spec[source.choice(names)] = source.plain()
    _check_spec(spec)


def _check_spec(description: Any) -> None:
    try:
        spec = ActingSpec.from_dict(description)
    except PolicyError:
        return
    again = ActingSpec.from_dict(spec.to_dict())
    with contextlib.suppress(RecursionError):  # two spaces may be nested too deeply to compare
        assert again == spec
