"""Strict reading and canonical writing of ONNX models in the Protocol Buffers encoding.

A worker has neither `onnx` nor `protobuf`, and a lenient reader is what must not stand between a stranger's bytes and
ONNX Runtime: whatever two readers of the same bytes understand differently can hide something from one of them. So
`read_model` takes only the fields of the tables below, each in the one encoding that `onnx` itself writes, and
`write_model` writes what was read and nothing else.

Encoding: https://protobuf.dev/programming-guides/encoding/; field numbers:
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from aiorl.errors import PolicyError

__all__ = ["Message", "read_model", "write_model"]

Message = dict[str, Any]
"""Fields of one message by name; those that may be repeated as lists. Absent ones are left out."""

_MAX_FIELDS = 500_000
_MAX_DEPTH = 32  # three messages for each graph within another
_MAX_TEXT = 1000
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5


class _Kind(Enum):
    """Encoding of a field on the wire, and its type in Python."""

    INT = "int64 or enum: int"
    FLOAT = "float: its four bytes"
    BYTES = "bytes, or a string for people, which nobody here reads"
    TEXT = "string: str, printable"
    PACKED_INTS = "packed varints: list of int"
    PACKED_FIXED = "packed floats or doubles: their bytes"
    REFUSED = "known, not accepted"


@dataclass(frozen=True)
class _Field:
    name: str
    kind: _Kind | str  # a string is the name of a message
    repeated: bool = False

    @cached_property
    def wire_type(self) -> int:
        if self.kind is _Kind.INT:
            return _VARINT
        return _FIXED32 if self.kind is _Kind.FLOAT else _LENGTH


def _one(name: str, kind: _Kind | str) -> _Field:
    return _Field(name, kind)


def _many(name: str, kind: _Kind | str) -> _Field:
    return _Field(name, kind, repeated=True)


def _refused(name: str) -> _Field:
    return _Field(name, _Kind.REFUSED)


_MESSAGES: Mapping[str, Mapping[int, _Field]] = {
    "ModelProto": {
        1: _one("ir_version", _Kind.INT),
        2: _one("producer_name", _Kind.BYTES),
        3: _one("producer_version", _Kind.BYTES),
        4: _one("domain", _Kind.BYTES),
        5: _one("model_version", _Kind.INT),
        6: _one("doc_string", _Kind.BYTES),
        7: _one("graph", "GraphProto"),
        8: _many("opset_import", "OperatorSetIdProto"),
        14: _many("metadata_props", "StringStringEntryProto"),
        20: _refused("training_info"),
        25: _refused("functions"),
        26: _refused("configuration"),
    },
    "OperatorSetIdProto": {1: _one("domain", _Kind.TEXT), 2: _one("version", _Kind.INT)},
    "GraphProto": {
        1: _many("node", "NodeProto"),
        2: _one("name", _Kind.TEXT),
        5: _many("initializer", "TensorProto"),
        10: _one("doc_string", _Kind.BYTES),
        11: _many("input", "ValueInfoProto"),
        12: _many("output", "ValueInfoProto"),
        13: _many("value_info", "ValueInfoProto"),
        14: _refused("quantization_annotation"),
        15: _refused("sparse_initializer"),
        16: _many("metadata_props", "StringStringEntryProto"),
    },
    "NodeProto": {
        1: _many("input", _Kind.TEXT),
        2: _many("output", _Kind.TEXT),
        3: _one("name", _Kind.TEXT),
        4: _one("op_type", _Kind.TEXT),
        5: _many("attribute", "AttributeProto"),
        6: _one("doc_string", _Kind.BYTES),
        7: _one("domain", _Kind.TEXT),
        8: _refused("overload"),
        9: _many("metadata_props", "StringStringEntryProto"),
        10: _refused("device_configurations"),
    },
    "AttributeProto": {
        1: _one("name", _Kind.TEXT),
        2: _one("f", _Kind.FLOAT),
        3: _one("i", _Kind.INT),
        4: _one("s", _Kind.TEXT),
        5: _one("t", "TensorProto"),
        6: _one("g", "GraphProto"),
        7: _many("floats", _Kind.FLOAT),
        8: _many("ints", _Kind.INT),
        9: _many("strings", _Kind.TEXT),
        10: _refused("tensors"),
        11: _refused("graphs"),
        13: _one("doc_string", _Kind.BYTES),
        14: _refused("tp"),
        15: _refused("type_protos"),
        20: _one("type", _Kind.INT),
        21: _refused("ref_attr_name"),
        22: _refused("sparse_tensor"),
        23: _refused("sparse_tensors"),
    },
    "TensorProto": {
        1: _many("dims", _Kind.INT),
        2: _one("data_type", _Kind.INT),
        3: _refused("segment"),
        4: _one("float_data", _Kind.PACKED_FIXED),
        5: _one("int32_data", _Kind.PACKED_INTS),
        6: _refused("string_data"),
        7: _one("int64_data", _Kind.PACKED_INTS),
        8: _one("name", _Kind.TEXT),
        9: _one("raw_data", _Kind.BYTES),
        10: _one("double_data", _Kind.PACKED_FIXED),
        11: _refused("uint64_data"),
        12: _one("doc_string", _Kind.BYTES),
        13: _many("external_data", "StringStringEntryProto"),
        14: _one("data_location", _Kind.INT),
        16: _many("metadata_props", "StringStringEntryProto"),
    },
    "StringStringEntryProto": {1: _one("key", _Kind.TEXT), 2: _one("value", _Kind.TEXT)},
    "ValueInfoProto": {
        1: _one("name", _Kind.TEXT),
        2: _one("type", "TypeProto"),
        3: _one("doc_string", _Kind.BYTES),
        4: _many("metadata_props", "StringStringEntryProto"),
    },
    "TypeProto": {
        1: _one("tensor_type", "TypeProto.Tensor"),
        4: _refused("sequence_type"),
        5: _refused("map_type"),
        6: _one("denotation", _Kind.BYTES),
        7: _refused("opaque_type"),
        8: _refused("sparse_tensor_type"),
        9: _refused("optional_type"),
    },
    "TypeProto.Tensor": {1: _one("elem_type", _Kind.INT), 2: _one("shape", "TensorShapeProto")},
    "TensorShapeProto": {1: _many("dim", "TensorShapeProto.Dimension")},
    "TensorShapeProto.Dimension": {
        1: _one("dim_value", _Kind.INT),
        2: _one("dim_param", _Kind.TEXT),
        3: _one("denotation", _Kind.BYTES),
    },
}


def read_model(data: bytes) -> Message:
    """The fields of a serialised ModelProto.

    Raises: PolicyError if the bytes are damaged, hold a field that isn't accepted, or are no encoding that `onnx`
        itself would write: numbers longer than they must be, single fields given twice, lists packed otherwise.
    """
    return _Reader(data).message("ModelProto", 0, len(data), depth=0)


def write_model(model: Message) -> bytes:
    """A ModelProto serialised: fields in the order of their numbers, every number as short as can be."""
    return _write("ModelProto", model)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields_left = _MAX_FIELDS

    def message(self, name: str, position: int, end: int, depth: int) -> Message:
        if depth > _MAX_DEPTH:
            raise PolicyError(f"the acting graph is nested deeper than {_MAX_DEPTH} messages")
        table = _MESSAGES[name]
        found: Message = {}
        while position < end:
            self._count()
            tag, position = self._varint(position, end)
            field = table.get(tag >> 3)
            if field is None:
                raise PolicyError(f"the acting graph has a field {tag >> 3} in a {name}, which is not known")
            if field.kind is _Kind.REFUSED:
                raise PolicyError(f"the acting graph has {field.name} in a {name}; this is not accepted")
            if tag & 7 != field.wire_type:
                raise PolicyError(
                    f"the acting graph is damaged: wire type {tag & 7} for {field.name} of a {name}, which has "
                    f"{field.wire_type}"
                )
            value, position = self._value(field, position, end, depth)
            if field.repeated:
                found.setdefault(field.name, []).append(value)
            elif field.name in found:
                raise PolicyError(f"the acting graph is damaged: it gives {field.name} of a {name} twice")
            else:
                found[field.name] = value
        return found

    def _value(self, field: _Field, position: int, end: int, depth: int) -> tuple[Any, int]:
        """The field's value and the position after it."""
        size = 4
        if field.wire_type != _FIXED32:
            size, position = self._varint(position, end)
            if field.wire_type == _VARINT:
                return _signed(size), position
        if size > end - position:
            raise PolicyError("the acting graph is damaged: it ends within a field")
        stop = position + size
        if isinstance(field.kind, str):
            return self.message(field.kind, position, stop, depth + 1), stop
        if field.kind is _Kind.PACKED_INTS:
            return self._varints(position, stop), stop
        content = self._data[position:stop]
        return _text(content) if field.kind is _Kind.TEXT else content, stop

    def _count(self) -> None:
        self._fields_left -= 1
        if self._fields_left < 0:
            raise PolicyError(f"the acting graph has more than {_MAX_FIELDS} fields")

    def _varints(self, position: int, end: int) -> list[int]:
        numbers = []
        while position < end:
            self._count()
            number, position = self._varint(position, end)
            numbers.append(_signed(number))
        return numbers

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        data = self._data
        result = shift = 0
        while position < end:
            byte = data[position]
            position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                if result >= 1 << 64 or (byte == 0 and shift):
                    raise PolicyError("the acting graph is damaged: a number is longer than it must be")
                return result, position
            shift += 7
            if shift >= 70:
                raise PolicyError("the acting graph is damaged: a number is too long")
        raise PolicyError("the acting graph is damaged: it ends within a number")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _text(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise PolicyError(f"the acting graph is damaged: {content!r:.80} where a text should stand") from error
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise PolicyError(f"the acting graph has a text of {len(text)} characters that is no name: {text!r:.80}")
    return text


def _write(name: str, message: Message) -> bytes:
    written = bytearray()
    for number, field in sorted(_MESSAGES[name].items()):
        value = message.get(field.name)
        if value is None:
            continue
        tag = _to_varint(number << 3 | field.wire_type)
        for item in value if field.repeated else (value,):
            written += tag
            if field.kind is _Kind.INT:
                written += _to_varint(item)
                continue
            content = _content(field.kind, item)
            if field.wire_type == _LENGTH:
                written += _to_varint(len(content))
            written += content
    return bytes(written)


def _content(kind: _Kind | str, value: Any) -> bytes:
    if isinstance(kind, str):
        return _write(kind, value)
    if kind is _Kind.TEXT:
        content: bytes = value.encode()
        return content
    if kind is _Kind.PACKED_INTS:
        return b"".join(map(_to_varint, value))
    return bytes(value)


def _to_varint(number: int) -> bytes:
    rest = number & 0xFFFF_FFFF_FFFF_FFFF
    written = bytearray()
    while rest >= 0x80:
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    written.append(rest)
    return bytes(written)
