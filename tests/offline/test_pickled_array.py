from __future__ import annotations

import base64
import pickle

import lz4.frame
import numpy as np
import pytest

from aiorl.errors import DataError
from aiorl.offline.pickled_array import read_pickled_array

LIMIT = 1 << 24
BASE = np.arange(-12, 12).reshape(2, 3, 4)
ARRAYS = {
    **{f"{name} C": BASE.astype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")},
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
}


def as_numpy_1(data: bytes) -> bytes:
    """The same pickle with the names that NumPy 1 wrote."""
    for module in (b"multiarray", b"numeric"):
        old, new = b"numpy.core." + module, b"numpy._core." + module
        data = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
        data = data.replace(b"c" + new, b"c" + old)
    return data[:2] + data[11:] if data[2] == 0x95 else data  # without a frame, which need not be and says its length


@pytest.mark.parametrize("of_numpy_1", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_spelling_of_a_pickled_array_is_read(name, protocol, of_numpy_1):
    data = pickle.dumps(ARRAYS[name], protocol)
    if of_numpy_1:
        data = as_numpy_1(data)
        assert b"numpy.core" in data
        assert b"_core" not in data
    found = read_pickled_array(data, max_bytes=LIMIT)
    np.testing.assert_array_equal(found, ARRAYS[name])
    assert found.dtype == ARRAYS[name].dtype.newbyteorder("=")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickled_scalar_is_an_array_without_dimensions(protocol):
    assert read_pickled_array(pickle.dumps(np.float32(1.5), protocol), max_bytes=LIMIT) == np.float32(1.5)


def test_a_column_as_rllib_wrote_it_is_read():
    """The form of rllib/tests/data/pendulum: protocol 5, NumPy 1, in an LZ4 frame with its size."""
    head = "BCJNGGhAAbwAAAAAAACtAbwAgIAFlfa7AAAAAAAAjBJudW1weS5jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWgLs"
    array = np.random.default_rng(0).normal(size=(4000, 3)).astype("f4")
    packed = lz4.frame.compress(as_numpy_1(pickle.dumps(array, 5)))
    text = base64.b64encode(packed).decode()
    assert text[:5] == head[:5]
    found = read_pickled_array(lz4.frame.decompress(base64.b64decode(text)), max_bytes=LIMIT)
    np.testing.assert_array_equal(found, array)


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
        (np.array([{}], object), "opcode EMPTY_"),
        (np.array(["a"]), "U1"),
        (np.array(["2020"], "M8[D]"), "M8"),
        (np.zeros(2, [("a", "f4")]), "V4|opcode EMPTY_DICT"),
        (np.zeros(2, "c8"), "c8"),
        (slice(1), "slice"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else None,
)
def test_what_asks_for_anything_but_an_array_of_numbers_is_refused_by_its_name(value, name, protocol):
    with pytest.raises(DataError, match=name):
        read_pickled_array(pickle.dumps(value, protocol), max_bytes=LIMIT)
    assert Calls.called == []


@pytest.mark.parametrize("value", [[1, 2], {}, "text", 7, None, (np.zeros(2),), {1}, b"bytes", 2**100, [np.zeros(2)]])
def test_what_is_no_array_is_refused(value):
    for protocol in (2, 3, 4, 5):
        with pytest.raises(DataError):
            read_pickled_array(pickle.dumps(value, protocol), max_bytes=LIMIT)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x05.", b"\x80\x05(.", b"ARROW1", pickle.dumps(np.zeros(9), 0)])
def test_what_is_no_pickle_of_protocol_2_or_later_is_refused(data):
    with pytest.raises(DataError):
        read_pickled_array(data, max_bytes=LIMIT)


def test_a_name_cannot_move_the_cursor_or_fill_the_log():
    with pytest.raises(DataError) as caught:
        read_pickled_array(b"\x80\x02c\x1b[2Jos\nsystem\n.", max_bytes=LIMIT)
    assert str(caught.value).isprintable()
    assert "[2Jos.system" in str(caught.value)


def shaped(shape: bytes, dtype: bytes = b"f4", data: bytes = b"") -> bytes:
    """A pickle by _frombuffer with a shape as opcodes."""
    return (
        b"\x80\x05\x8c\x13numpy._core.numeric\x8c\x0b_frombuffer\x93(\x8e" + len(data).to_bytes(8, "little") + data
        + b"\x8c\x05numpy\x8c\x05dtype\x93\x8c" + bytes([len(dtype)]) + dtype + b"\x89\x88\x87R" + shape
        + b"\x8c\x01CtR."
    )  # fmt: skip


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
def test_an_impossible_shape_is_refused_before_memory_is_taken(shape):
    with pytest.raises(DataError):
        read_pickled_array(shaped(shape, data=b"\0\0\0\0"), max_bytes=LIMIT)


def test_a_pickle_cannot_change_what_names_stand_for_nor_take_memory_by_a_place_in_the_memo():
    name = b"\x8c\x05numpy\x8c\x05dtype\x93"
    for built in (b"N}\x8c\x04nameK\x01s\x86b.", b"\x88b.", b"N\x8c\x01a\x86b."):
        with pytest.raises(DataError):
            read_pickled_array(b"\x80\x05" + name + built, max_bytes=LIMIT)
    with pytest.raises(DataError, match="more than 400"):
        read_pickled_array(b"\x80\x05Nr\xff\xff\xff\xff.", max_bytes=LIMIT)


def test_the_shapes_above_would_be_read_if_they_were_possible():
    assert read_pickled_array(shaped(b"K\x01\x85", data=b"\0\0\0\0"), max_bytes=LIMIT).tolist() == [0.0]


def test_an_array_over_the_limit_is_refused():
    data = pickle.dumps(np.zeros(1000), 5)
    assert len(read_pickled_array(data, max_bytes=8000)) == 1000
    with pytest.raises(DataError, match="8,000 bytes"):
        read_pickled_array(data, max_bytes=7999)


def test_booleans_that_are_none_are_refused():
    with pytest.raises(DataError, match="booleans"):
        read_pickled_array(shaped(b"K\x02\x85", b"b1", b"\1\2"), max_bytes=LIMIT)


def mutants(number: int):
    """Pickles of arrays and of hostile objects, with bytes changed, cut out, put in or crossed with another's."""
    rng = np.random.default_rng(0)
    bases = [pickle.dumps(array, protocol) for array in ARRAYS.values() for protocol in (2, 3, 4, 5)]
    bases += [as_numpy_1(data) for data in bases]
    bases += [pickle.dumps(Calls(note, "x"), protocol) for protocol in (2, 3, 4, 5)]
    opcodes = bytes(range(0x80, 0x99)) + b"().NKMJXCBtchjqrRb0125}]uesaiodl"
    for _ in range(number):
        data = bytearray(bases[rng.integers(len(bases))])
        for _ in range(rng.integers(1, 5)):
            at = int(rng.integers(len(data) + 1))
            match rng.integers(5):
                case 0 if at < len(data):
                    data[at] = rng.integers(256)
                case 1:
                    data[at:at] = bytes([opcodes[rng.integers(len(opcodes))]])
                case 2:
                    del data[at : at + int(rng.integers(1, 9))]
                case 3:
                    other = bases[rng.integers(len(bases))]
                    start = int(rng.integers(len(other)))
                    data[at:at] = other[start : start + int(rng.integers(1, 40))]
                case _:
                    data[at:at] = b"c" + b"tests\nnote\n" + b"X\x01\0\0\0x\x85R"
        yield bytes(data)


def check_mutants(number: int) -> None:
    read, refused = [], []
    for data in mutants(number):
        try:
            read.append(read_pickled_array(data, max_bytes=LIMIT).dtype.kind)
        except DataError as error:
            refused.append(str(error))
    assert set(read) <= set("biuf")
    assert read
    assert all(text.isprintable() and len(text) < 400 for text in refused)
    assert any("tests.note" in text for text in refused)
    assert Calls.called == []


def test_a_mutated_pickle_is_read_as_an_array_or_refused_and_calls_nothing():
    check_mutants(3_000)


@pytest.mark.nightly
def test_a_hundred_thousand_mutated_pickles_call_nothing():
    check_mutants(100_000)
