"""Bytes of acting graphs: counted, or refused with a PolicyError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from aiorl.acting.graph_limits import has_loops
from aiorl.errors import PolicyError

_NODE = b"\x0a\x0e\x22\x04Loop\x2a\x06\x32\x04\x0a\x02\x22\x00"
"""Node of a loop with a graph inside."""


def seeds() -> Iterable[bytes]:
    yield b""
    yield bytes([0x3A, len(_NODE)]) + _NODE
    yield bytes([0x3A, 2 * len(_NODE)]) + 2 * _NODE
    yield b"\x08\x08\xca\x01\x02\x0a\x00"
    yield b"\x0d\x00\x00\x00\x00\x09" + bytes(8)


def run(data: bytes) -> None:
    with contextlib.suppress(PolicyError):
        assert has_loops(data) in (True, False)
