"""Limits of an acting graph that can come from a stranger: its nodes are counted before ONNX
Runtime sees them.

ONNX Runtime takes minutes to prepare some hundred thousand nodes, and never returns from a loop
without end. The bytes of the graph are read here as Protocol Buffers, without the package `onnx`,
which workers don't have.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiorl.errors import PolicyError

__all__ = ["MAX_NODES", "has_loops"]

MAX_NODES = 20_000
"""Limit of the nodes of a graph, with those of graphs inside it."""
_MAX_FIELDS = 1_000_000
_FIELDS = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node"},
    "node": {4: "kind", 5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}
"""Message -> number of a field -> its content; others are skipped."""
_WITHOUT_LOOPS = b"If"
_VARINT = 0
_CONTENT = 2
_FIXED_BYTES = {1: 8, 5: 4}
"""Kinds of Protocol Buffers fields; those of fixed size with their bytes."""


def has_loops(graph: bytes) -> bool:
    """Return whether a serialised ONNX model contains a node that can run nodes again and again.

    Args:
        graph: the model.

    Raises:
        PolicyError: it has too many nodes, functions of its own (which could multiply them), or is
            no such model.
    """
    nodes = fields = 0
    loops = False
    waiting: list[tuple[str, memoryview]] = [("model", memoryview(graph))]
    while waiting:
        message, content = waiting.pop()
        kind = b""
        has_graph = False
        for number, value in _fields_of(content):
            fields += 1
            name = _FIELDS[message].get(number, "")
            if name == "node":
                nodes += 1
            elif name == "kind":
                kind = bytes(value)
            elif name == "attribute":
                has_graph = has_graph or any(
                    inner in _FIELDS["attribute"] for inner, _ in _fields_of(value)
                )
            elif name == "function":
                raise PolicyError(
                    "the acting graph has functions of its own, which are not accepted"
                )
            if nodes > MAX_NODES or fields > _MAX_FIELDS:
                raise PolicyError(f"the acting graph has more than {MAX_NODES:,} nodes")
            if name in _FIELDS:
                waiting.append((name, value))
        loops = loops or (has_graph and kind != _WITHOUT_LOOPS)
    return loops


def _fields_of(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of the fields of a message; those that are numbers have no content.

    Raises:
        PolicyError: it is damaged.
    """
    at = 0
    end = len(content)
    while at < end:
        tag, at = _varint(content, at)
        kind = tag & 7
        value = content[:0]
        if kind == _VARINT:
            _, at = _varint(content, at)
        elif kind == _CONTENT:
            size, at = _varint(content, at)
            value = content[at : at + size]
            at += size
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise _damaged()
        if at > end:
            raise _damaged()
        yield tag >> 3, value


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """Return a number, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _damaged()


def _damaged() -> PolicyError:
    return PolicyError("the acting graph cannot be loaded: it is no ONNX model, or is damaged")
