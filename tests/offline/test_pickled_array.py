from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from aiorl.errors import DataError
from aiorl.offline.pickled_array import read_pickled_array

BASE = np.arange(-12, 12).reshape(2, 3, 4)
ARRAYS = {
    **{
        f"{name} C": BASE.astype(name)
        for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    },
    "bool C": BASE % 2 == 0,
    "Fortran": np.asfortranarray(BASE.astype("f4")),
    "neither": BASE.astype("f4")[:, ::2],
    "bytes of latin1": np.arange(256, dtype="u1").reshape(4, 64)[:, ::3],
    "big-endian": BASE.astype(">f4"),
    "one dimension": np.arange(3.0),
    "no dimension": np.array(2.5),
    "no rows": np.zeros((0, 4), "f4"),
    "many dimensions": np.zeros((1, 2, 1, 2, 1, 2), "f4"),
    "readonly": np.frombuffer(b"\1\2\3\4", "u1"),
    "scalar": np.float32(1.5),
}


def as_numpy_1(data: bytes) -> bytes:
    """Return the same pickle with the names of NumPy 1."""
    for module in (b"multiarray", b"numeric"):
        old, new = b"numpy.core." + module, b"numpy._core." + module
        data = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
        data = data.replace(b"c" + new, b"c" + old)
    # without the optional frame, which contains the length
    return data[:2] + data[11:] if data[2] == 0x95 else data


@pytest.mark.parametrize("of_numpy_1", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_form_of_a_pickled_array_is_read(name, protocol, of_numpy_1):
    data = pickle.dumps(ARRAYS[name], protocol)
    if of_numpy_1:
        data = as_numpy_1(data)
        assert b"numpy.core" in data
        assert b"_core" not in data
    unpickled = read_pickled_array(data)
    np.testing.assert_array_equal(unpickled, ARRAYS[name])
    assert unpickled.dtype == ARRAYS[name].dtype.newbyteorder("=")


class Calls:
    called: list[str] = []

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def note(what):
    Calls.called.append(what)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Calls(note, "x"), "note"),
        (Calls(eval, "note('x')"), "eval"),
        (Calls(getattr, "a", "upper"), "getattr"),
        (Calls(np.load, "/etc/passwd"), "load"),
        (np.array([{}], object), "EMPTY_"),
        (np.array(["a"]), "U1"),
        (np.array(["2020"], "M8[D]"), "M8"),
        (np.zeros(2, [("a", "f4")]), "V4|EMPTY_DICT"),
        (np.zeros(2, "c8"), "c8"),
        (slice(1), "slice"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else None,
)
def test_anything_but_an_array_of_numbers_is_refused_by_its_name(value, name, protocol):
    with pytest.raises(DataError, match=name):
        read_pickled_array(pickle.dumps(value, protocol))
    assert Calls.called == []


VALUES = [[1, 2], {}, "text", 7, None, (np.zeros(2),), {1}, b"bytes", 2**100, [np.zeros(2)]]
NO_PICKLES = [b"", b"\x80", b"\x80\x05.", b"\x80\x05(.", b"ARROW1", pickle.dumps(np.zeros(9), 0)]


@pytest.mark.parametrize(
    "data", [pickle.dumps(value, p) for value in VALUES for p in (2, 3, 4, 5)] + NO_PICKLES
)
def test_other_data_than_a_pickled_array_of_protocol_2_or_later_are_refused(data):
    with pytest.raises(DataError):
        read_pickled_array(data)


def test_a_name_cannot_move_the_cursor_or_fill_the_log():
    with pytest.raises(DataError) as caught:
        read_pickled_array(b"\x80\x02c\x1b[2Jos\nsystem\n.")
    assert str(caught.value).isprintable()
    assert "[2Jos.system" in str(caught.value)


def shaped(shape: bytes, dtype: bytes = b"f4", data: bytes = b"") -> bytes:
    """Return a pickle with _frombuffer and a shape in opcodes."""
    return (
        b"\x80\x05\x8c\x13numpy._core.numeric\x8c\x0b_frombuffer\x93(\x8e"
        + len(data).to_bytes(8, "little")
        + data
        + b"\x8c\x05numpy\x8c\x05dtype\x93\x8c"
        + bytes([len(dtype)])
        + dtype
        + b"\x89\x88\x87R"
        + shape
        + b"\x8c\x01CtR."
    )


@pytest.mark.parametrize(
    "shape",
    [
        b"J\xff\xff\xff\xff\x85",  # -1
        b"\x8a\x08" + (2**62).to_bytes(8, "little") + b"K\x04\x86",
        b"\x8a\x09" + (2**64).to_bytes(9, "little") + b"\x85",
        b"(" + b"K\x01" * 60 + b"t",
        b"(" + b"K\x01" * 60_000 + b"t",
        b"\x88\x85",  # True
        b"N\x85",
        b"\x8c\x01a\x85",
    ],
)
def test_an_impossible_shape_is_refused_before_memory_is_allocated(shape):
    assert read_pickled_array(shaped(b"K\x01\x85", data=b"\0\0\0\0")).tolist() == [0.0]
    with pytest.raises(DataError):
        read_pickled_array(shaped(shape, data=b"\0\0\0\0"))


def test_a_pickle_cannot_change_our_functions_nor_fill_memory_through_the_memo():
    name = b"\x8c\x05numpy\x8c\x05dtype\x93"
    for built in (b"N}\x8c\x04nameK\x01s\x86b.", b"\x88b.", b"N\x8c\x01a\x86b."):
        with pytest.raises(DataError):
            read_pickled_array(b"\x80\x05" + name + built)
    with pytest.raises(DataError, match="400"):
        read_pickled_array(b"\x80\x05Nr\xff\xff\xff\xff.")


def test_text_that_is_encoded_many_times_takes_no_memory():
    encoded = b"c_codecs\nencode\nh\x00X\x06\0\0\0latin1\x86R"
    data = (
        b"\x80\x02X" + (10**6).to_bytes(4, "little") + b"a" * 10**6 + b"q\x00" + encoded * 50 + b"."
    )
    tracemalloc.start()
    with pytest.raises(DataError):
        read_pickled_array(data)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10_000_000
