"""What an ONNX graph that came over a socket may hold, checked before ONNX Runtime sees it.

A graph can name files to read tensors from ("external data"; one special name even means an address in
memory). Ours uses that only as a placeholder for weights, which are always handed over by name; everything
else that refers outside is refused. Workers don't have the `onnx` package, so the few fields that matter are
read straight from the Protocol Buffers encoding (https://protobuf.dev/programming-guides/encoding/; field
numbers from https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiorl.errors import PolicyError

__all__ = ["MAX_GRAPH_BYTES", "WEIGHTS_LOCATION", "check_graph"]

MAX_GRAPH_BYTES = 16 * 1024 * 1024
WEIGHTS_LOCATION = b"weights"
"""Where a weight's external data claims to lie; no such file is ever opened."""

_ALLOWED_DOMAINS = frozenset([b"", b"ai.onnx", b"ai.onnx.ml"])
_MAX_DEPTH = 16
_ONNX_DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}

# field numbers
_MODEL_GRAPH, _MODEL_TRAINING, _MODEL_FUNCTIONS = 7, 20, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_ATTRIBUTE, _NODE_DOMAIN = 5, 7
_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = 5, 6, 10, 11
_ATTRIBUTE_SPARSE = (22, 23)
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 13, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_graph(graph: bytes, weights: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Check that a graph is small, takes exactly the given weights from outside, and nothing else.

    Args:
        graph: a serialised ONNX ModelProto.
        weights: shape and dtype by name.

    Raises: PolicyError if the graph is too large or damaged; holds external data that is no weight; lacks a
        weight or holds one twice, or with another shape or dtype; uses operators from outside the ONNX
        standard, functions or training graphs.
    """
    if len(graph) > MAX_GRAPH_BYTES:
        raise PolicyError(f"the acting graph has {len(graph)} bytes; at most {MAX_GRAPH_BYTES} are accepted")
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    graphs = 0
    for field, value in _fields(graph):
        if field == _MODEL_GRAPH:
            _check_graph(_message(value), found, depth=0)
            graphs += 1
        elif field in (_MODEL_TRAINING, _MODEL_FUNCTIONS):
            raise PolicyError("the acting graph holds functions or training graphs; these are not accepted")
    if graphs != 1:
        raise PolicyError("the acting graph holds no graph")
    for name, expected in weights.items():
        if name not in found:
            raise PolicyError(f"the acting graph has no place for the weight {name!r}")
        if found[name] != expected:
            raise PolicyError(f"weight {name!r}: the acting graph has {found[name]}, its description {expected}")
    for name in found:
        if name not in weights:
            raise PolicyError(f"the acting graph takes {name!r} from outside, which is no weight of the policy")


def _check_graph(graph: memoryview, found: dict[str, tuple[tuple[int, ...], str]], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise PolicyError(f"the acting graph is nested deeper than {_MAX_DEPTH}")
    for field, value in _fields(graph):
        if field == _GRAPH_NODE:
            _check_node(_message(value), found, depth)
        elif field == _GRAPH_INITIALIZER:
            _check_tensor(_message(value), found, may_be_weight=depth == 0)
        elif field == _GRAPH_SPARSE:
            raise PolicyError("the acting graph holds sparse tensors; these are not accepted")


def _check_node(node: memoryview, found: dict[str, tuple[tuple[int, ...], str]], depth: int) -> None:
    for field, value in _fields(node):
        if field == _NODE_DOMAIN and bytes(_message(value)) not in _ALLOWED_DOMAINS:
            raise PolicyError(f"the acting graph uses operators of {bytes(_message(value))!r:.80}, not of ONNX")
        if field != _NODE_ATTRIBUTE:
            continue
        for attribute_field, content in _fields(_message(value)):
            if attribute_field in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
                _check_tensor(_message(content), found, may_be_weight=False)
            elif attribute_field in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                _check_graph(_message(content), found, depth + 1)
            elif attribute_field in _ATTRIBUTE_SPARSE:
                raise PolicyError("the acting graph holds sparse tensors; these are not accepted")


def _check_tensor(tensor: memoryview, found: dict[str, tuple[tuple[int, ...], str]], *, may_be_weight: bool) -> None:
    external, name, data_type = False, b"", 0
    shape: list[int] = []
    location = b""
    for field, value in _fields(tensor):
        if field == _TENSOR_DIMS:
            shape.extend([value] if isinstance(value, int) else _varints(value))
        elif field == _TENSOR_TYPE:
            data_type = value if isinstance(value, int) else 0
        elif field == _TENSOR_NAME:
            name = bytes(_message(value))
        elif field == _TENSOR_LOCATION:
            external = external or value != 0
        elif field == _TENSOR_EXTERNAL:
            external = True
            entry = dict(_fields(_message(value)))
            if bytes(_message(entry.get(_ENTRY_KEY, b""))) == b"location":
                location = bytes(_message(entry.get(_ENTRY_VALUE, b"")))
    if not external:
        return
    shown = name.decode("utf-8", "replace")[:80]
    if not may_be_weight or location != WEIGHTS_LOCATION:
        raise PolicyError(
            f"the acting graph reads tensor {shown!r} from {location!r:.120}; only weights handed over by name "
            "may come from outside"
        )
    if shown in found:
        raise PolicyError(f"the acting graph holds the weight {shown!r} twice")
    found[name.decode("utf-8", "replace")] = (tuple(shape), _ONNX_DTYPES.get(data_type, f"ONNX type {data_type}"))


def _message(value: int | bytes | memoryview) -> memoryview:
    if isinstance(value, int):
        raise PolicyError("the acting graph is damaged: a number stands where a message should")
    return memoryview(value)


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of one encoded message; numbers of fixed width are given as bytes."""
    view = memoryview(data)
    position, end = 0, len(view)
    while position < end:
        tag, position = _varint(view, position)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            number, position = _varint(view, position)
            yield field, number
            continue
        if kind == _BYTES:
            size, position = _varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise PolicyError(f"the acting graph is damaged: wire type {kind}")
        if size > end - position:
            raise PolicyError("the acting graph is damaged: it ends within a field")
        yield field, view[position : position + size]
        position += size


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        if position >= len(view):
            raise PolicyError("the acting graph is damaged: it ends within a number")
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
    raise PolicyError("the acting graph is damaged: a number is too long")


def _varints(packed: memoryview) -> list[int]:
    numbers, position = [], 0
    while position < len(packed):
        number, position = _varint(packed, position)
        numbers.append(number)
    return numbers
