from __future__ import annotations

import enum

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.data.nested_codec import pack, pack_infos, unpack
from aiorl.env.registry import EnvContext
from aiorl.errors import BadFrame

arrays = hnp.arrays(
    st.sampled_from(["<f4", "<f8", "i1", "u1", "<i8", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text()
    | st.binary()
    | arrays
)
keys = st.text() | st.integers(-(2**63), 2**63) | st.tuples(st.integers(0, 9), st.text())
values = st.recursive(
    leaves,
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(keys, part, max_size=3) | st.tuples(part, part)
    ),
    max_leaves=8,
)


def same(first, other) -> bool:
    if type(first) is not type(other):
        return False
    if isinstance(first, np.ndarray):
        return (
            first.dtype == other.dtype
            and first.shape == other.shape
            and first.tobytes() == other.tobytes()
        )
    if isinstance(first, dict):
        return list(first) == list(other) and all(same(first[key], other[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(same, first, other))
    return first == other or (first != first and other != other)


@given(values)
def test_packed_values_are_restored_with_their_types(value):
    assert same(unpack(pack(value)), value)


def test_numpy_numbers_are_restored_and_subclasses_of_plain_types_become_plain():
    class Move(enum.IntEnum):
        LEFT = 3

    assert same(unpack(pack(np.float32(0.5))), np.float32(0.5))
    assert same(unpack(pack(Move.LEFT)), 3)
    assert same(unpack(pack(EnvContext({"a": 1}))), {"a": 1})
    array = unpack(pack(np.array([1.5], ">f8")))
    array *= 2  # it is writable
    assert array.tolist() == [3.0]


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array(["a"]), {1, 2}, 1j])
def test_values_that_cannot_be_packed_are_a_type_error(value):
    with pytest.raises(TypeError):
        pack(value)


def test_infos_lose_only_entries_that_cannot_be_packed_and_these_are_counted():
    infos = {"a": {"x": 1, "f": print}, "b": {"y": np.ones(2), "huge": 2**80}}
    data, dropped = pack_infos(infos)
    assert dropped == 2
    assert same(unpack(data), {"a": {"x": 1}, "b": {"y": np.ones(2)}})
    assert pack_infos({"a": {"x": 1}})[1] == 0


HEADS = [
    ["|O", [1]],
    ["<M8[s]", [1]],
    ["<f8", [3]],
    ["<f4", [2**63]],
    ["<f4", [0, 2**62]],
    [[["a", "<f4"]], [1]],
    ["O", [1]],
    7,
    ["<f4", 1],
]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        *(msgpack.packb(msgpack.ExtType(code, b"\xc1")) for code in (1, 9)),
        *(msgpack.packb(msgpack.ExtType(1, msgpack.packb(head) + b"12345678")) for head in HEADS),
    ],
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(BadFrame):
        unpack(data)


def test_the_depth_of_tuples_is_limited_both_ways():
    value, packed = (), pack(())
    for _ in range(400):
        value, packed = (value,), msgpack.packb(msgpack.ExtType(3, b"\x91" + packed))
    with pytest.raises(BadFrame):
        unpack(packed)
    with pytest.raises(ValueError, match="32"):
        pack(value)
