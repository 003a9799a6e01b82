"""The tables are ONNX's own, and only the one encoding that `onnx` writes is read."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import ModelProto
from onnx import onnx_ml_pb2 as onnx_protos

from aiorl.acting import onnx_wire
from aiorl.acting.onnx_wire import read_model, write_model
from aiorl.errors import PolicyError

KINDS = {
    FieldDescriptor.TYPE_INT64: "INT",
    FieldDescriptor.TYPE_INT32: "INT",
    FieldDescriptor.TYPE_ENUM: "INT",
    FieldDescriptor.TYPE_FLOAT: "FLOAT",
    FieldDescriptor.TYPE_STRING: "TEXT",
    FieldDescriptor.TYPE_BYTES: "BYTES",
}
PACKED = {
    FieldDescriptor.TYPE_FLOAT: "PACKED_FIXED",
    FieldDescriptor.TYPE_DOUBLE: "PACKED_FIXED",
    FieldDescriptor.TYPE_INT32: "PACKED_INTS",
    FieldDescriptor.TYPE_INT64: "PACKED_INTS",
}
TEXTS = {("AttributeProto", "s"), ("AttributeProto", "strings")}  # bytes in ONNX, names in all operators
FOR_PEOPLE = {"producer_name", "producer_version", "domain", "doc_string", "denotation"}


def descriptor(message):
    found = onnx_protos
    for part in message.split("."):
        found = getattr(found, part)
    return found.DESCRIPTOR


@pytest.mark.parametrize("message", onnx_wire._MESSAGES)
def test_the_table_has_every_field_of_onnx_as_onnx_has_it(message):
    table = onnx_wire._MESSAGES[message]
    theirs = {field.number: field for field in descriptor(message).fields}
    assert table.keys() == theirs.keys()
    for number, field in table.items():
        their = theirs[number]
        assert field.name == their.name
        if isinstance(field.kind, str):
            assert descriptor(field.kind) is their.message_type
        elif field.kind.name == "REFUSED":
            continue
        elif (message, field.name) in TEXTS:
            assert field.kind.name == "TEXT"
        else:
            kind = (PACKED if their.is_packed else KINDS)[their.type]
            assert field.kind.name == kind or (
                field.name in FOR_PEOPLE and (field.kind.name, kind) == ("BYTES", "TEXT")
            )
        assert field.repeated == (their.is_repeated and not their.is_packed)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31 - 1, 2**31, 2**63 - 1, -1, -(2**63)])
def test_numbers_of_64_bits_are_read_and_written_as_protobuf_does(number):
    data = ModelProto(ir_version=number).SerializeToString()
    assert read_model(data) == {"ir_version": number}
    assert write_model({"ir_version": number}) == data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x08\x80\x00", "longer than it must be"),
        (b"\x88\x00\x08", "longer than it must be"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "longer than it must be"),  # 65 bits
        (b"\x08" + b"\xff" * 10 + b"\x01", "too long"),
        (b"\x08\x08\x08\x08", "ir_version of a ModelProto twice"),
        (b"\x3a\x00\x3a\x00", "graph of a ModelProto twice"),
        (b"\x0d\x00\x00\x00\x00", "wire type 5 for ir_version"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x18\x01", "wire type 0 for producer_version"),
        (b"\x00\x00", "field 0 in a ModelProto"),
        (b"\xda\x01\x00", "field 27 in a ModelProto"),
        (b"\xba\x80\x80\x80\x10\x00", "field 536870919 in a ModelProto"),  # 7 + 2^29
        (b"\x3a\x05\x0a\x00", "ends within a field"),
        (b"\x3a\x04\x0a\x03\x0a\x01", "ends within a field"),  # an inner message that leaves its outer one
        (b"\x3a\x03\x12\x01\xff", "where a text should stand"),
        (b"\x3a\x03\x12\x01\x1b", "no name"),
        (b"\x3a\xec\x07\x12\xe9\x07" + b"x" * 1001, "no name"),
        (b"\x3a\x04\x12\x02\xc1\x81", "where a text should stand"),  # UTF-8 longer than it must be
    ],
    ids=repr,
)
def test_what_onnx_itself_would_not_write_is_refused(data, says):
    with pytest.raises(PolicyError, match=says):
        read_model(data)


def test_lists_packed_otherwise_than_onnx_does_are_refused(by_hand):
    def model(tensor):
        return by_hand.field(7, by_hand.field(5, tensor))

    for tensor, says in (
        (by_hand.field(1, b"\x01\x02"), "wire type 2 for dims"),
        (b"\x3d\x00\x00\x80\x3f", "wire type 5 for int64_data"),
        (b"\x38\x01", "wire type 0 for int64_data"),
    ):
        with pytest.raises(PolicyError, match=says):
            read_model(model(tensor))


def test_a_flood_of_tiny_fields_is_cut_off(monkeypatch):
    monkeypatch.setattr(onnx_wire, "_MAX_FIELDS", 1000)
    with pytest.raises(PolicyError, match="more than 1000 fields"):
        read_model(b"\x42\x00" * 1001)
    with pytest.raises(PolicyError, match="more than 1000 fields"):
        read_model(b"\x3a\xf4\x07\x2a\xf1\x07\x3a\xee\x07" + b"\x01" * 1006)
