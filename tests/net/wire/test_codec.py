"""Round trips of every message through its frames, zero copy, limits, fuzzing."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.config.worker import TransportConfig
from aiorl.data.arrays import allocate_together
from aiorl.errors import BadFrame, LocalProtocolError, MessageTooBig, RemoteProtocolError, VersionMismatch
from aiorl.net.wire import decoding, encoding
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import (
    CONTINUED,
    DEFAULT_LIMITS,
    LZ4,
    MAX_HELLO_BYTES,
    PACK_MAX_BYTES,
    PACK_TOTAL_BYTES,
    PACKED,
    RAW,
    STACKED,
    Limits,
    limits_of,
    max_workers_of,
)
from aiorl.net.wire.schema import MAX_TEXT, MESSAGE_TYPES

names = st.text(min_size=1, max_size=12).filter(str.isprintable)
texts = st.text(max_size=30).filter(str.isprintable)
ids = st.text([chr(code) for code in range(33, 127)], max_size=30)
small = st.integers(0, 2**31 - 1)
seconds = st.floats(0, allow_infinity=False)
counts = st.integers(0, 2**53)
versions = st.integers(-1, 2**53)
floats = st.floats(allow_nan=False)
dtypes = st.sampled_from(["?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", ">f4", ">i8"])
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40))
)
array_maps = st.dictionaries(names, arrays, max_size=3)
policy_arrays = st.dictionaries(names, array_maps, max_size=2)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**60) | floats | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
plain_maps = st.dictionaries(names, plain, max_size=3)
plain_with_arrays = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
snapshots = st.builds(
    m.Snapshot,
    version=versions,
    weights=policy_arrays,
    filters=policy_arrays,
    filter_acks=st.dictionaries(ids, counts, max_size=3),
    global_vars=plain_maps,
    learner_incarnation=ids,
)
graphs = st.dictionaries(
    names,
    st.builds(lambda graph, spec: {"graph": graph, "spec": spec}, st.binary(max_size=99), plain_maps),
    max_size=2,
)
message_strategies: dict[str, st.SearchStrategy[Any]] = {
    "hello": st.builds(m.Hello, counts, ids, ids, ids, small, texts, small, ids),
    "samples": st.builds(
        m.Samples, *[counts] * 4, versions, versions, counts, counts, policy_arrays, array_maps, policy_arrays,
        st.dictionaries(names, floats, max_size=3), counts, counts,
    ),
    "beat": st.builds(m.Beat, counts, texts, seconds, counts),
    "snapshot_request": st.builds(m.SnapshotRequest, versions),
    "failure": st.builds(m.Failure, texts, texts, texts, fatal=st.booleans()),
    "reply": st.builds(m.Reply, counts, st.booleans(), plain_with_arrays),
    "leaving": st.builds(m.Leaving, texts, counts, counts),
    "snapshot": snapshots,
    "welcome": st.builds(
        m.Welcome, counts, counts, ids, ids, plain_maps, graphs, snapshots, ids, counts
    ),
    "refused": st.builds(m.Refused, texts, st.booleans(), texts, ids),
    "lease": st.builds(m.Lease, counts, counts, versions),
    "ack": st.builds(m.Ack, counts, st.booleans()),
    "learner_beat": st.builds(m.LearnerBeat, ids, versions),
    "call": st.builds(m.Call, counts, texts, st.dictionaries(names, plain_with_arrays, max_size=3)),
    "bye": st.builds(m.Bye, texts, st.booleans()),
}  # fmt: skip


def same(left: Any, right: Any) -> bool:
    """Equality that looks into arrays and dataclasses and tells bool from int."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.shape == right.shape
            and left.dtype.newbyteorder("<") == right.dtype.newbyteorder("<")
            and left.astype(right.dtype).tobytes() == right.tobytes()
        )
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def wire(message: m.Message, **options: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **options)]


def samples(columns: dict[str, np.ndarray] | None = None, **changes: Any) -> m.Samples:
    given_columns = {"obs": np.arange(8, dtype=np.float32).reshape(2, 4)} if columns is None else columns
    message = m.Samples(1, 2, 3, 4, 5, 6, 1, 2, {"p": given_columns}, {}, {}, {"env_s": 0.5}, 7, 0)
    return dataclasses.replace(message, **changes)


def header(message: m.Message) -> list[Any]:
    return msgpack.unpackb(encode(message)[0])


def with_header(message: m.Message, position: int, value: Any) -> list[bytes]:
    frames = wire(message)
    parts = msgpack.unpackb(frames[0])
    parts[position] = value
    return [msgpack.packb(parts), *frames[1:]]


def continued(frame: bytes, storage: bytes = bytes([RAW, CONTINUED])) -> list[bytes]:
    """A message of two columns, 32 and 8 bytes, that says to have them so in its frame 1."""
    message = samples({"c0": np.zeros(8, np.float32), "c1": np.zeros(2, np.float32)})
    return [with_header(message, 4, storage)[0], frame]


def test_every_message_type_has_a_round_trip_test() -> None:
    assert message_strategies.keys() == MESSAGE_TYPES.keys()


@pytest.mark.parametrize("name", message_strategies)
def test_a_message_comes_out_as_it_went_in(name: str) -> None:
    @settings(max_examples=20, deadline=None)
    @given(message_strategies[name], st.booleans())
    def round_trip(message: m.Message, compress: bool) -> None:
        assert same(message, decode(wire(message, compress=compress)))

    round_trip()


def test_large_arrays_are_not_copied_either_way() -> None:
    column = np.zeros((PACK_MAX_BYTES // 256 + 1, 64), np.float32)
    frames = encode(samples({"obs": column}))
    assert np.shares_memory(np.frombuffer(frames[-1], np.uint8), column)
    out = decode(frames).batches["p"]["obs"]
    assert np.shares_memory(out, column)


def test_small_arrays_share_one_frame_and_start_at_multiples_of_eight() -> None:
    columns = {f"c{n}": np.arange(n, dtype=np.uint8) for n in range(1, 20)}
    frames = wire(samples(columns))
    assert len(frames) == 2
    out = decode(frames).batches["p"]
    assert all(same(columns[name], out[name]) for name in columns)
    base = out["c1"].__array_interface__["data"][0]
    assert all((array.__array_interface__["data"][0] - base) % 8 == 0 for array in out.values())


@pytest.mark.parametrize("writable", [bytearray, lambda frame: memoryview(bytearray(frame)), bytes, memoryview])
def test_decoded_arrays_are_read_only_whatever_the_frames_are(writable: Any) -> None:
    columns = {
        "small": np.zeros(3, np.float32),
        "large": np.zeros(9000, np.float32),
        "zip": np.zeros(9000, np.int64),
    }
    out = decode([writable(frame) for frame in wire(samples(columns))]).batches["p"]
    assert not any(array.flags.writeable for array in out.values())


def storage_of(message: m.Message) -> list[int]:
    return list(header(message)[4])


@st.composite
def views(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Arrays in the memory of one or two others: next to each other, apart, overlapping, backwards, strided, empty."""
    bases = [np.frombuffer(random.Random(seed).randbytes(800), np.uint8).copy() for seed in (1, 2)]
    places = {0: 0, 1: 0}
    columns = {}
    for number in range(draw(st.integers(1, 7))):
        dtype = np.dtype(draw(st.sampled_from(["?", "u1", "<i4", "<f2", "<f4", "<f8", ">f4"])))
        which = draw(st.sampled_from([0, 0, 0, 1]))
        end = places[which]
        start = draw(st.sampled_from([end + -end % 8] * 4 + [end, end + 8, end + 3, max(0, end - 8), 0]))
        shape = draw(st.sampled_from([(3, 4), (8,), (5, 1), (2, 0), (), (1, 7)]))
        columns[f"c{number}"] = array = np.ndarray(shape, dtype, bases[which], start)
        if draw(st.integers(0, 7)) == 0:
            columns[f"c{number}"] = array.T[::2] if array.ndim else array
        places[which] = start + array.nbytes
    return columns


@settings(max_examples=200, deadline=None)
@given(views(), st.booleans())
def test_arrays_come_out_as_they_went_in_wherever_they_lie_in_memory(
    columns: dict[str, np.ndarray], keep: bool
) -> None:
    with (
        patch.object(encoding, "SHARE_MIN_BYTES", 64),
        patch.object(encoding, "SHARE_FROM_BYTES", 16),
        patch.object(encoding, "PACK_MAX_BYTES", 40 if keep else 0),
    ):
        message = samples(columns)
        assert same(message, decode(wire(message)))


def test_arrays_that_lie_one_behind_the_other_leave_as_one_frame_without_a_copy() -> None:
    arrays = allocate_together([((200, 64), np.float32), ((999,), np.float16), ((7, 300), np.float64)])
    for array in arrays:
        array[...] = np.arange(array.size).reshape(array.shape)
    columns = dict(zip("abc", arrays, strict=True))
    frames = encode(samples(columns, episodes={"lengths": np.arange(3)}))
    assert [len(frame) for frame in frames[1:]] == [3 * 8, 4 * 12_800 + 2000 + 8 * 2100]
    assert storage_of(samples(columns)) == [RAW, CONTINUED, CONTINUED]
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), arrays[0])
    out = decode(frames)
    assert all(np.shares_memory(out.batches["p"][name], columns[name]) for name in columns)
    assert all(same(columns[name], out.batches["p"][name]) for name in columns)


def test_only_what_is_next_in_memory_goes_on_in_a_frame() -> None:
    first, second, third = allocate_together([((8000,), np.float32)] * 3)
    alone = np.zeros(8000, np.float32)
    assert storage_of(samples({"a": first, "b": second, "c": third})) == [RAW, CONTINUED, CONTINUED]
    assert storage_of(samples({"a": second, "b": first, "c": third})) == [RAW, RAW, RAW]
    assert storage_of(samples({"a": first, "b": third})) == [RAW, RAW]
    assert storage_of(samples({"a": first, "b": first})) == [RAW, RAW]
    assert storage_of(samples({"a": first, "x": alone, "b": second})) == [RAW, PACKED, CONTINUED]
    large = np.zeros(PACK_MAX_BYTES, np.float32)
    assert storage_of(samples({"a": first, "x": large, "b": second})) == [RAW, RAW, RAW]
    compressible = np.zeros(8000, np.int64)
    assert storage_of(samples({"a": first, "x": compressible, "b": second})) == [RAW, LZ4, CONTINUED]
    assert storage_of(samples({"a": first, "x": second[:0], "b": second})) == [RAW, PACKED, CONTINUED]
    assert storage_of(samples({"a": first, "b": second[::2]})) == [RAW, PACKED]
    small, *_ = allocate_together([((1000,), np.float32), ((20_000,), np.float32)])
    assert storage_of(samples({"a": small})) == [PACKED]
    assert storage_of(samples({"a": first, "x": small, "b": second})) == [RAW, PACKED, CONTINUED]
    pair = allocate_together([((5000,), np.float32)] * 2)
    assert storage_of(samples({"a": pair[0], "b": pair[1]})) == [PACKED, PACKED]


def screens(steps: int, envs: int) -> np.ndarray:
    """uint8 [T, N, 20, 20, 4]: the last four pictures of a bright column that wanders over random ground."""
    pictures = np.random.default_rng(0).integers(0, 99, (1, envs, 20, 20), np.uint8).repeat(steps + 3, axis=0)
    for step, picture in enumerate(pictures):
        picture[:, :, step % 20] = 200
    return np.stack([pictures[k : k + steps] for k in range(4)], axis=-1)


def test_frames_of_stacks_travel_once() -> None:
    columns = {"obs": screens(50, 4), "rewards": np.zeros((50, 4), np.float32), "last_obs": screens(4, 1)[:, 0]}
    message = samples(columns)
    assert storage_of(message) == [STACKED, PACKED, LZ4]
    frames = wire(message)
    # 4 whole stacks and 196 pictures, of which two columns of 20 differ from the one before
    assert len(frames[2]) < 4 * 1600 + 196 * 200
    assert same(message, decode(frames))
    assert storage_of(samples({"obs": screens(50, 4).astype(np.int8)})) != [STACKED]
    assert same(message, decode(wire(message, compress=False)))


def test_a_frame_of_several_arrays_is_no_longer_than_one_array_may_be() -> None:
    arrays = allocate_together([((8000,), np.float32)] * 3)
    message = samples(dict(zip("abc", arrays, strict=True)))
    frames = encode(message, limits=Limits(max_array_bytes=64_000))
    assert [len(frame) for frame in frames[1:]] == [64_000, 32_000]
    assert same(message, decode(frames))


def test_arrays_in_memory_of_another_kind_travel_too() -> None:
    structured = np.zeros(9000, [("x", "<f4"), ("y", "<f4")])
    dates = np.arange(9000).astype("M8[s]")
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(20_000, dtype=np.float32), 9_000)[7]
    given_away = np.arange(20_000, dtype=np.float32)
    given_away.setflags(write=False)
    for array in (
        structured.view("<f4"),
        dates.view("<i8"),
        np.zeros(9000, ">f8").view("<f8"),
        windows,
        given_away[5:],
    ):
        message = samples({"obs": array})
        assert same(message, decode(wire(message, compress=False)))


def test_strided_and_big_endian_arrays_travel_as_little_endian_c_order() -> None:
    columns = {
        "t": np.arange(20_000, dtype=">f8").reshape(100, 200).T,
        "s": np.arange(40_000, dtype=np.int32)[::2],
    }
    out = decode(wire(samples(columns))).batches["p"]
    assert all(np.array_equal(columns[name], out[name]) for name in columns)
    assert out["t"].dtype.str == "<f8"
    assert out["t"].flags.c_contiguous


def test_env_steps_are_read_from_the_header_alone() -> None:
    """R5: equal to the decoded batch's count."""
    header, *_ = encode(samples(env_steps=123, agent_steps=456, seq=9))
    assert msgpack.unpackb(header)[2]["env_steps"] == 123


def test_numpy_scalars_in_fields_become_plain_numbers() -> None:
    message = decode(wire(samples(env_steps=np.int64(3), perf={"s": np.float32(0.5)})))
    assert type(message.env_steps) is int
    assert type(message.perf["s"]) is float


@pytest.mark.parametrize(
    "bad",
    [
        samples({"obs": np.array([object()])}),
        samples({"obs": np.array(["text"])}),
        samples({"obs": np.zeros(2, complex)}),
        samples({"obs": np.zeros(2, "M8[s]")}),
        samples({"obs": np.zeros((1,) * 9)}),
        samples(batches={"p": np.zeros(3)}),
        samples(batches={"p": {"obs": {"deeper": np.zeros(3)}}}),
        samples(perf={"x": object()}),
        samples(env_steps=2**80),
        m.Call(1, "m", {"x": {1, 2}}),
        samples({"obs\n": np.zeros(2)}),
        samples({"o" * 257: np.zeros(2)}),
    ],
)
def test_what_does_not_travel_is_refused_before_it_is_sent(bad: m.Message) -> None:
    with pytest.raises(LocalProtocolError):
        encode(bad)


def test_an_empty_array_travels_behind_as_much_as_one_frame_packs() -> None:
    full = {f"b{index:02}": PACK_MAX_BYTES for index in range(PACK_TOTAL_BYTES // PACK_MAX_BYTES - 1)}
    sizes = {"a": 3, **full, "c": 3, "d": PACK_MAX_BYTES - 11}  # with what lies between them a little more
    columns = {**{name: np.zeros(size, np.int8) for name, size in sizes.items()}, "e": np.zeros((0, 4), np.float32)}
    message = decode(encode(samples(columns), compress=False))
    assert isinstance(message, m.Samples)
    shapes = {name: array.shape for name, array in message.batches["p"].items()}
    assert shapes == {name: array.shape for name, array in columns.items()}


# What peers may send --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "kind", "field"),
    [
        ([], BadFrame, "frames"),
        ([b""], BadFrame, "header"),
        ([b"\xc1"], BadFrame, "header"),
        ([b"GET / HTTP/1.1\r\n\r\n"], BadFrame, "header"),
        ([msgpack.packb([])], BadFrame, "header"),
        ([msgpack.packb([m.PROTOCOL_VERSION, "beat"])], BadFrame, "header"),
        ([msgpack.packb([m.PROTOCOL_VERSION + 1, "whatever", 5])], VersionMismatch, "version"),
        ([b"x" * 2_000_000], MessageTooBig, "header"),
        ([b"x"] * 2000, MessageTooBig, "frames"),
        (with_header(m.Ack(1), 1, "no_such"), BadFrame, "type"),
        (with_header(m.Ack(1), 1, ["ack"]), BadFrame, "type"),
        (with_header(m.Ack(1), 2, []), BadFrame, "scalars"),
        (with_header(m.Ack(1), 2, {"seq": 1}), BadFrame, "resend"),
        (with_header(m.Ack(1), 2, {"seq": 1, "resend": False, "more": 1}), BadFrame, "more"),
        (with_header(m.Ack(1), 2, {"seq": True, "resend": False}), BadFrame, "seq"),
        (with_header(m.Ack(1), 2, {"seq": -1, "resend": False}), BadFrame, "seq"),
        (with_header(m.Ack(1), 2, {"seq": 2**60, "resend": False}), BadFrame, "seq"),
        (with_header(m.Ack(1), 2, {"seq": 1.0, "resend": False}), BadFrame, "seq"),
        (with_header(m.Ack(1), 2, {"seq": 1, "resend": 0}), BadFrame, "resend"),
        (with_header(m.Bye("", True), 2, {"reason": b"bytes", "final": True}), BadFrame, "reason"),
        ([*wire(m.Ack(1)), b"more"], BadFrame, "layout"),
        (with_header(samples(), 3, b"junk"), BadFrame, "layout"),
        (with_header(samples(), 3, b""), BadFrame, "layout"),
        (with_header(samples(), 4, b""), BadFrame, "shapes"),
        (with_header(samples(), 4, b"\x07"), BadFrame, "obs"),
        (with_header(samples(), 4, b"\x02"), BadFrame, "obs"),
        (with_header(samples(), 5, [[2, 5]]), BadFrame, "frame 1"),
        (with_header(samples(), 5, [[2, 3]]), BadFrame, "frame 1"),
        (with_header(samples(), 5, [[-2, -4]]), BadFrame, "obs"),
        (with_header(samples(), 5, [[2, 4.0]]), BadFrame, "obs"),
        (with_header(samples(), 5, [[2, True]]), BadFrame, "obs"),
        (with_header(samples(), 5, [[2**40, 2**40, "aaaa"]]), BadFrame, "obs"),
        (with_header(samples(), 5, [[1] * 9]), BadFrame, "obs"),
        (with_header(samples(), 5, [8]), BadFrame, "obs"),
        (with_header(samples(), 5, [[2**40]]), MessageTooBig, "obs"),
        (with_header(samples(), 5, [[0, 2**62, 2**62]]), MessageTooBig, "obs"),
        (wire(samples())[:1], BadFrame, "frames"),
        ([*wire(samples()), b""], BadFrame, "frames"),
        ([wire(samples())[0], wire(samples())[1][:-1]], BadFrame, "frame 1"),
        (with_header(samples(), 4, bytes([CONTINUED])), BadFrame, "obs"),
        (with_header(samples(), 4, bytes([RAW]))[:1], BadFrame, "frames"),
        ([with_header(samples(), 4, bytes([RAW]))[0], b"x" * 33], BadFrame, "frame 1"),
        (with_header(samples({"obs": screens(6, 2)}), 5, [[6, 2, 20, 20, 3]]), BadFrame, "obs"),
        (with_header(samples({"obs": screens(6, 2)}), 5, [[6, 2, 1600]]), BadFrame, "obs"),
        (with_header(samples({"obs": screens(6, 2)}), 5, [[2**40, 2, 20, 20, 4]]), MessageTooBig, "obs"),
        (with_header(samples({"obs": screens(6, 2).astype(np.int16)}), 4, bytes([STACKED])), BadFrame, "obs"),
        (continued(b"x" * 36), BadFrame, "frame 1"),
        (continued(b"x" * 40, bytes([CONTINUED, RAW])), BadFrame, "c0"),
        ([*continued(b"x" * 34, bytes([RAW, RAW])), b"x" * 8], BadFrame, "frame 1"),
    ],
)
def test_broken_frames_are_named(frames: list[bytes], kind: type[RemoteProtocolError], field: str) -> None:
    for _ in range(2):  # the second time behind a sound message of the same layout, whose places are remembered
        with pytest.raises(kind) as caught:
            decode(frames)
        assert caught.value.field == field
        decode(wire(samples()))
    assert str(caught.value)


def test_arrays_are_right_whatever_came_before_under_the_same_names() -> None:
    """Also where what the one header packs ends as the other does: 37265 is packed as cd 91 91."""
    shapes = [
        (2, 4),
        (3, 2),
        (2, 4),
        (),
        (37264,),
        (1,),
        (37265, 1),
        (0,),
        (37265, 0),
        (0, 4),
        (8, 1),
        (2, 4, 1),
        (2, 4),
    ]
    for index, shape in enumerate(shapes):
        obs = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(index)
        message = decode(wire(samples({"obs": obs})))
        assert isinstance(message, m.Samples)
        taken = message.batches["p"]["obs"]
        assert taken.shape == shape
        np.testing.assert_array_equal(taken, obs)


@pytest.mark.parametrize(
    "shapes", [[[[[2, 4]]]], [b"\x91\x92\x02\x04"], [{"a": [[2, 4]]}], [[2.0, 4]], [[True, 8]], [msgpack.Timestamp(1)]]
)
def test_what_is_no_shape_is_refused_also_behind_one_like_it(shapes: list[Any]) -> None:
    for obs in (np.zeros((2, 4), np.float32), np.zeros((1, 8), np.float32)):
        decode(wire(samples({"obs": obs})))
    with pytest.raises(BadFrame):
        decode(with_header(samples(), 5, shapes))


def layout(nodes: Any, columns: Any) -> bytes:
    return msgpack.packb([nodes, columns])


NODES = [[0, "batches"], [0, "episodes"], [0, "filter_deltas"], [1, "p"]]


@pytest.mark.parametrize(
    ("bad_layout", "field"),
    [
        (layout(NODES, [[4, "obs", "|O8"]]), "obs"),
        (layout(NODES, [[4, "obs", "<c8"]]), "obs"),
        (layout(NODES, [[4, "obs", ["<f4"]]]), "obs"),
        (layout(NODES, [[0, "batches", "<f4"]]), "batches"),
        (layout(NODES, [[1, "obs", "<f4"]]), "obs"),
        (layout(NODES, [[9, "obs", "<f4"]]), "layout"),
        (layout(NODES, [[4, 7, "<f4"]]), "layout"),
        (layout(NODES[:2], []), "filter_deltas"),
        (layout([*NODES, [0, "elsewhere"]], []), "elsewhere"),
        (layout([*NODES, [1, "p"]], []), "p"),
        (layout([*NODES, [4, "obs"]], []), "obs"),
        (layout([[1, "x"], *NODES], []), "layout"),
        (layout([*NODES, [0, {}]], []), "layout"),
        (layout(3, 4), "layout"),
    ],
)
def test_broken_layouts_are_named(bad_layout: bytes, field: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(with_header(samples(), 3, bad_layout))
    assert caught.value.field == field


def test_references_to_arrays_that_are_not_there_are_refused() -> None:
    call = m.Call(1, "m", {"x": np.zeros(3)})
    for reference in (
        msgpack.ExtType(1, b"\x05\0\0\0"),
        msgpack.ExtType(2, b"\0\0\0\0"),
        msgpack.ExtType(1, b"\0"),
    ):
        frames = with_header(call, 2, {"call_id": 1, "method": "m", "args": {"x": reference}})
        with pytest.raises(BadFrame):
            decode(frames)


@pytest.mark.parametrize("code", [0, 1, 5, 127])
def test_extension_types_travel_nowhere_else(code: int) -> None:
    with pytest.raises(BadFrame):
        decode(with_header(m.Ack(1), 2, {"seq": msgpack.ExtType(code, b"\0\0\0\0"), "resend": False}))


def test_timestamps_do_not_travel() -> None:
    with pytest.raises(BadFrame) as caught:
        decode(with_header(m.Reply(1, True, None), 2, {"call_id": 1, "ok": True, "result": msgpack.Timestamp(0)}))
    assert caught.value.field == "result"


def test_nesting_has_an_end() -> None:
    value: Any = 1
    for _ in range(40):
        value = [value]
    deep = [
        m.PROTOCOL_VERSION,
        "reply",
        {"call_id": 1, "ok": True, "result": value},
        layout([[0, "result"]], []),
        b"",
        [],
    ]
    with pytest.raises(BadFrame, match="deep"):
        decode([msgpack.packb(deep)])
    with pytest.raises(LocalProtocolError):
        encode(m.Reply(1, True, value))


def test_a_graph_needs_its_description() -> None:
    snapshot = m.Snapshot(0, {}, {}, {}, {})
    welcome = m.Welcome(1, 1, "r", "l", {}, {"p": {"graph": b"onnx", "spec": {}}}, snapshot)
    scalars = header(welcome)[2] | {"graphs": {}}
    with pytest.raises(BadFrame) as caught:
        decode(with_header(welcome, 2, scalars))
    assert caught.value.field == "graphs"
    scalars = header(welcome)[2]
    del scalars["snapshot"]["version"]
    with pytest.raises(BadFrame) as caught:
        decode(with_header(welcome, 2, scalars))
    assert caught.value.field == "snapshot.version"


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_frames=1),
        Limits(max_header_bytes=100),
        Limits(max_array_bytes=1000),
        Limits(max_message_bytes=30_000),
        Limits(max_arrays=1),
        Limits(max_ndim=1),
        Limits(max_string=3),
        Limits(max_map=3),
    ],
)
def test_each_limit_holds(limits: Limits) -> None:
    columns = {"a": np.zeros((50, 100), np.float32), "b": np.zeros((50, 100), np.float32)}
    frames = wire(samples(columns))
    decode(frames)
    with pytest.raises(RemoteProtocolError):
        decode(frames, limits)


def huge_claims() -> list[list[bytes]]:
    frames = wire(samples({"obs": np.zeros((1024, 1024), np.uint8)}))
    assert len(frames[-1]) < 10_000
    zeros = wire(samples({"obs": np.zeros(1 << 15, np.uint8)}))
    many = b"\xdd\xff\xff\xff\xff" * 900
    return [
        with_header(samples(), 5, [[1 << 40]]),
        with_header(samples({"obs": np.zeros(99_999, np.uint8)}), 5, [[1 << 28]]),
        [frames[0], frames[1][:6]],
        with_header(samples({"obs": np.zeros(1 << 15, np.uint8)}), 5, [[(1 << 28) - 1]]),
        [zeros[0], b"\xff" * 4],
        [many],
        [b"\xdf\xff\xff\xff\xff" * 900],
        [b"\x96\x02\xa7samples\x80\xc6\x7f\xff\xff\xff"],
        [b"\xdb\xff\xff\xff\xff"],
    ]


@pytest.mark.parametrize("number", range(9))
def test_huge_claims_take_no_memory(number: int) -> None:
    frames = huge_claims()[number]
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_of_messages_with_more_names_than_any_of_ours_nothing_is_kept() -> None:
    """In 20 messages of 1 MB each, that have nothing in common for a cache to keep."""
    frames = [wire(samples(batches={f"{number}_{name:0250}": {} for name in range(3900)})) for number in range(20)]
    decode(frames.pop())
    tracemalloc.start()
    try:
        for each in frames:
            decode(each)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_limits_without_a_configuration_are_those_of_its_defaults() -> None:
    assert dataclasses.asdict(DEFAULT_LIMITS) == dataclasses.asdict(limits_of(TransportConfig()))


HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J \n2026-01-01 00:00:00,000 ERROR aiorl: forged\r\x85\u2028\u2029\u202e\u2066\x9b31m\x00\x7f"
)


def texts_in(value: Any) -> list[str]:
    """Every string in a message, keys included."""
    if isinstance(value, str):
        return [value]
    if dataclasses.is_dataclass(value):
        return [text for field in dataclasses.fields(value) for text in texts_in(getattr(value, field.name))]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in texts_in(item)]
    return [text for item in value for text in texts_in(item)] if isinstance(value, list) else []


def decoded_or_error(frames: list[bytes]) -> m.Message | str:
    try:
        return decode(frames)
    except RemoteProtocolError as error:
        return str(error)


def hostile_messages() -> list[list[bytes]]:
    """Each message with a hostile text in each place that takes a string, the names of arrays included."""
    found = []
    for frames in seeds():
        parts = msgpack.unpackb(frames[0])
        for field, value in parts[2].items():
            put = HOSTILE if isinstance(value, str) else {HOSTILE: 1} if isinstance(value, dict) else None
            if put is not None and field not in ("config", "args", "global_vars", "graphs", "snapshot"):
                found.append([msgpack.packb([*parts[:2], {**parts[2], field: put}, *parts[3:]]), *frames[1:]])
        for number, part in enumerate(msgpack.unpackb(parts[3]) if parts[3] else []):
            for index in range(len(part)):
                tree = msgpack.unpackb(parts[3])
                tree[number][index][1] = HOSTILE
                found.append([msgpack.packb([*parts[:3], msgpack.packb(tree), *parts[4:]]), *frames[1:]])
    result = {"call_id": 1, "ok": True, "result": [HOSTILE, {HOSTILE: HOSTILE}]}
    found.append([msgpack.packb([m.PROTOCOL_VERSION, "reply", result, layout([[0, "result"]], []), b"", []])])
    return found


def test_no_text_of_a_message_can_do_anything_to_a_terminal_or_begin_a_line_of_a_log() -> None:
    """Names are refused, texts made printable; an error that names what was wrong is printable too."""
    taken = 0
    hostile = hostile_messages()
    assert len(hostile) > 40
    for frames in hostile:
        message = decoded_or_error(frames)
        if isinstance(message, str):
            assert message.isprintable()
            continue
        taken += 1
        lines = [line for text in texts_in(message) for line in text.split("\n")]
        assert all(line.isprintable() for line in lines)
        may_have_lines = isinstance(message, m.Reply | m.Failure)
        assert may_have_lines or not any("\n" in text for text in texts_in(message))
    assert taken == 11, "host, state, kind, message, traceback, three reasons, code, method and the reply"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (m.Hello(1, "", "w" * 65, "i"), "worker_id"),
        (m.Hello(1, "", "w", "i" * 60_000), "incarnation"),
        (m.Hello(1, "", "w", "i", learner_incarnation="l" * 65), "learner_incarnation"),
        (m.Hello(1, "r" * 65, "w", "i"), "run_id"),
        (m.Hello(1, "", "w", "i i"), "incarnation"),
        (m.Hello(1, "", "w", "\u00e9"), "incarnation"),
        (m.Hello(1, "", "w", "i", pid=2**31), "pid"),
        (m.Hello(1, "", "w", "i", slot_hint=2**31), "slot_hint"),
        (m.Beat(1, "", float("nan")), "in_env_s"),
        (m.Beat(1, "", float("inf")), "in_env_s"),
        (samples(perf={f"p{number}": 1.0 for number in range(65)}), "perf"),
        (samples(perf={"p" * 257: 1.0}), "perf"),
        (m.Snapshot(1, {}, {}, {"i" * 65: 1}, {}), "filter_acks"),
    ],
)
def test_names_are_short_and_numbers_within_their_range(message: m.Message, field: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(wire(message))
    assert caught.value.field == field


@pytest.mark.parametrize("name", message_strategies)
def test_whatever_text_a_message_is_given_it_can_be_sent_and_is_taken(name: str) -> None:
    """A failure whose traceback is long, a name that a file system made up: said all the same, cut and printable."""
    kind = MESSAGE_TYPES[name]
    if not kind.texts:
        return
    long = (HOSTILE + "\udcff\U0001f600") * 20_000
    values = {field: long if field in kind.texts else 1 for field in kind.scalars}
    values |= {"retry": True, "fatal": True, "ok": True, "final": True}
    names = {"run_id", "worker_id", "incarnation", "learner_incarnation"} & values.keys()
    message = kind.cls(
        **{field: values[field] for field in kind.scalars}
        | dict.fromkeys(names, "x" * 64)
        | ({"args": {}} if name == "call" else {})
    )
    frames = wire(message, limits=Limits(max_header_bytes=1 << 17))
    out = decode(frames, Limits(max_header_bytes=1 << 17))
    assert same(out, decode(wire(out)))
    assert all(3 < len(text) <= MAX_TEXT for text in texts_in(out) if text[:1] != "x")


def test_the_end_of_a_traceback_is_kept() -> None:
    out = decode(wire(m.Failure("env", "boom", "x\n" * 100_000 + "the end")))
    assert len(out.traceback) == MAX_TEXT
    assert out.traceback.endswith("x\nthe end")


@pytest.mark.parametrize("limits", [DEFAULT_LIMITS, Limits(max_header_bytes=1 << 17)])
def test_a_snapshot_with_the_longest_names_of_all_workers_a_run_may_have_leaves_half_of_its_header_free(
    limits: Limits,
) -> None:
    count = max_workers_of(limits)
    assert count >= 850
    acks = {f"{number:x>64}": 2**53 for number in range(count)}
    frames = wire(m.Snapshot(2**53, {}, {}, acks, {}), limits=limits)
    assert len(frames[0]) < limits.max_header_bytes / 2 + 200
    assert decode(frames, limits).filter_acks == acks


def test_of_somebody_who_is_not_registered_only_a_hello_is_decoded() -> None:
    hello = m.Hello(1, "r" * 64, "w" * 64, "i" * 64, 2**31 - 1, "h" * 255, 2**31 - 1, "l" * 64)
    assert same(decode_hello(encode(hello)), hello)
    assert len(wire(hello)[0]) < MAX_HELLO_BYTES / 2
    compressible = samples({"obs": np.zeros((1024, 1024), np.uint8)})
    with (
        patch.object(decoding, "decompress", side_effect=AssertionError("it was decompressed")),
        patch.object(decoding, "_parse_layout", side_effect=AssertionError("its layout was read")),
        patch.object(decoding, "_cached_layout", side_effect=AssertionError("its layout was read")),
    ):
        for frames in (*seeds()[1:], wire(compressible), [b"x" * 1_000_000], [b""] * 9, []):
            assert decode_hello(frames) is None
    with patch.object(msgpack, "unpackb", side_effect=AssertionError("it was unpacked")):
        for frames in (wire(compressible), [b"x" * 5000], [b"x"] * 2):
            assert decode_hello(frames) is None


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [msgpack.packb([2, "hello", {}])], with_header(m.Ack(1), 2, 3)])
def test_what_is_short_and_no_message_is_refused_also_before_registration(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_hello(frames)


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    out = [bytearray(frame) for frame in frames]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(out)
        kind = rng.randrange(7)
        if kind == 0 and frame:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        elif kind == 1 and frame:
            del frame[rng.randrange(len(frame)) :]
        elif kind == 2:
            at = rng.randrange(len(frame) + 1)
            frame[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3 and frame:
            at = rng.randrange(len(frame))
            del frame[at : at + rng.randint(1, 5)]
        elif kind == 4:
            out.insert(rng.randrange(len(out) + 1), bytearray(rng.randbytes(rng.randint(0, 30))))
        elif kind == 5 and len(out) > 1:
            out.remove(frame)
        elif kind == 6 and frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [bytes(frame) for frame in out]


def seeds() -> list[list[bytes]]:
    snapshot = m.Snapshot(3, {"p": {"w": np.ones((3, 2), np.float32)}}, {"p": {"n": np.array(3.0)}}, {"i": 4}, {"t": 1})
    large = {"obs": np.zeros((40, 4, 84), np.uint8), "f": np.zeros((40, 200), np.float32)}
    stacks = {"obs": screens(6, 2), "f": np.zeros((6, 2), np.float32)}
    return [
        wire(m.Hello(1, "run", "w", "i", 1, "host", 5, "")),
        wire(samples(large, episodes={"lengths": np.arange(3)})),
        wire(samples(stacks)),
        wire(snapshot),
        wire(m.Welcome(1, 2, "r", "l", {"a": [1, {"b": 2.0}]}, {"p": {"graph": b"g" * 9, "spec": {"x": 1}}}, snapshot)),
        wire(m.Call(1, "method", {"x": np.zeros(4), "y": [1, None, "z"]})),
        wire(m.Beat(1, "sampling", 0.5)),
        wire(m.Failure("env", "boom", "Traceback", fatal=False)),
        wire(m.Leaving("done")),
        wire(m.Refused("no", retry=True, code="full", incarnation="i")),
        wire(m.Bye("over", final=True)),
    ]


def test_mutated_frames_raise_remote_protocol_errors_and_nothing_else() -> None:
    """Bad input: garbage and truncated frames; a float or a name may change, the kinds of values may not."""
    rng = random.Random(0)
    survived = 0
    for frames in seeds():
        decode(frames)
        for _ in range(2500):
            message = decoded_or_error(mutate(rng, frames))
            if isinstance(message, str):
                assert message.isprintable()
                continue
            survived += 1
            assert type(message) in {kind.cls for kind in MESSAGE_TYPES.values()}
            encode(message)
    assert survived < 6000


def test_the_pack_limit_decides_about_frames() -> None:
    at = np.zeros(PACK_MAX_BYTES // 4, np.float32)
    above = np.zeros(PACK_MAX_BYTES // 4 + 1, np.float32)
    assert len(wire(samples({"a": at}))) == 2
    assert len(wire(samples({"a": above}))) == 2
    assert len(wire(samples({"a": above, "b": at}))) == 3


NESTED = b"\x91" * 1000 + b"\xc0"
"""Lists within lists, as deep as msgpack takes them: deeper than Python recurses."""


@pytest.mark.parametrize("place", ["scalars", "extent", "node", "key", "parent", "dtype"])
def test_what_is_nested_without_end_is_refused_in_a_short_sentence(place: str) -> None:
    snapshot = m.Snapshot(0, {"p": {"w": np.zeros(2)}}, {}, {}, {}, "L")
    header, *frames = (bytes(frame) for frame in encode(snapshot))
    version, name, scalars, layout, storage, shapes = msgpack.unpackb(header)
    nodes, columns = msgpack.unpackb(layout)
    hole = "hole"
    match place:
        case "scalars":
            scalars["version"] = hole
        case "extent":
            shapes[0][0] = hole
        case "node":
            columns[0][0] = hole
        case "key":
            columns[0][1] = [hole]
        case "parent":
            nodes[0][0] = hole
        case "dtype":
            columns[0][2] = hole
    filled = msgpack.packb([nodes, columns]).replace(msgpack.packb(hole), NESTED)
    header = msgpack.packb([version, name, scalars, filled, storage, shapes]).replace(msgpack.packb(hole), NESTED)
    with pytest.raises(BadFrame) as caught:
        decode([header, *frames])
    assert len(str(caught.value)) < 300
