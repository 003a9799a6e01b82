"""Round trips of every message through its frames, zero copy, limits, fuzzing."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any, get_args
from unittest.mock import patch

import msgpack
import numpy as np
import pytest
from fuzz_targets.decode import check
from fuzz_targets.examples import example_messages, make_snapshot, same, stacked_frames
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.config.worker import TransportConfig
from aiorl.errors import (
    BadFrame,
    LocalProtocolError,
    MessageTooBig,
    RemoteProtocolError,
    VersionMismatch,
)
from aiorl.net.wire import decoding, encoding, messages as m
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import (
    CONTINUED,
    DEFAULT_LIMITS,
    FORMAT_VERSION,
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
from aiorl.net.wire.schema import MAX_TEXT, MESSAGE_TYPES, MESSAGE_TYPES_BY_CLASS
from aiorl.sampling.table import allocate_together

names = st.text(min_size=1, max_size=12).filter(str.isprintable)
texts = st.text(max_size=30).filter(str.isprintable)
ids = st.text([chr(code) for code in range(33, 127)], max_size=30)
small = st.integers(0, 2**31 - 1)
seconds = st.floats(0, allow_infinity=False)
counts = st.integers(0, 2**53)
versions = st.integers(-1, 2**53)
floats = st.floats(allow_nan=False)
dtypes = st.sampled_from(
    ["?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", ">f4", ">i8"]
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40)
    )
)
array_maps = st.dictionaries(names, arrays, max_size=3)
policy_arrays = st.dictionaries(names, array_maps, max_size=2)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**60)
    | floats
    | texts
    | st.binary(max_size=20),
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
    since=versions,
    policies=array_maps,
    env_config=plain_maps,
    env_changes=counts,
)
graphs = st.dictionaries(
    names,
    st.builds(
        lambda graph, spec: {"graph": graph, "spec": spec}, st.binary(max_size=99), plain_maps
    ),
    max_size=2,
)
message_strategies: dict[str, st.SearchStrategy[Any]] = {
    "hello": st.builds(m.Hello, counts, ids, ids, ids, small, texts, small, ids),
    "samples": st.builds(
        m.Samples,
        *[counts] * 4,
        versions,
        versions,
        counts,
        counts,
        policy_arrays,
        array_maps,
        policy_arrays,
        st.dictionaries(names, floats, max_size=3),
        counts,
        counts,
    ),
    "beat": st.builds(m.Beat, counts, texts, seconds, counts),
    "snapshot_request": st.builds(m.SnapshotRequest, versions),
    "failure": st.builds(m.Failure, texts, texts, texts, fatal=st.booleans()),
    "reply": st.builds(m.Reply, counts, st.booleans(), plain_with_arrays),
    "leaving": st.builds(m.Leaving, texts, counts, counts),
    "status_request": st.builds(m.StatusRequest, small),
    "status": st.builds(m.Status, plain_maps),
    "snapshot": snapshots,
    "welcome": st.builds(
        m.Welcome, counts, counts, ids, ids, plain_maps, graphs, snapshots, ids, counts
    ),
    "refused": st.builds(m.Refused, texts, st.booleans(), texts, ids),
    "lease": st.builds(m.Lease, counts, counts, versions),
    "ack": st.builds(m.Ack, counts, st.booleans()),
    "learner_beat": st.builds(m.LearnerBeat, ids, versions),
    "call": st.builds(
        m.Call,
        counts,
        ids,
        st.dictionaries(names, plain_with_arrays, max_size=3),
        ids,
        small,
    ),
    "item": st.builds(m.Item, counts, plain_with_arrays),
    "credit": st.builds(m.Credit, counts, small),
    "cancel": st.builds(m.Cancel, counts),
    "payload": st.builds(m.Payload, counts, plain_with_arrays),
    "payload_request": st.builds(m.PayloadRequest, counts),
    "bye": st.builds(m.Bye, texts, st.booleans()),
}


def wire(message: m.Message, **options: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **options)]


def samples(columns: dict[str, np.ndarray] | None = None, **changes: Any) -> m.Samples:
    given_columns = (
        {"obs": np.arange(8, dtype=np.float32).reshape(2, 4)} if columns is None else columns
    )
    message = m.Samples(1, 2, 3, 4, 5, 6, 1, 2, {"p": given_columns}, {}, {}, {"env_s": 0.5}, 7, 0)
    return message._replace(**changes)


def header(message: m.Message) -> list[Any]:
    return msgpack.unpackb(encode(message)[0])


def with_header(message: m.Message, position: int, value: Any) -> list[bytes]:
    parts = header(message)
    parts[position] = value
    return [msgpack.packb(parts), *wire(message)[1:]]


def continued(frame: bytes, storage: bytes = bytes([RAW, CONTINUED])) -> list[bytes]:
    """Return a message of two columns, 32 and 8 bytes, that claims to have both in its frame 1."""
    message = samples({"c0": np.zeros(8, np.float32), "c1": np.zeros(2, np.float32)})
    return [with_header(message, 4, storage)[0], frame]


def test_every_message_type_has_a_round_trip_test() -> None:
    assert set(get_args(m.Message)) == set(MESSAGE_TYPES_BY_CLASS)
    assert message_strategies.keys() == EXAMPLES.keys() == MESSAGE_TYPES.keys()
    for kind in MESSAGE_TYPES.values():
        assert set(kind.cls._fields) == kind.scalars.keys() | kind.arrays.keys()


@pytest.mark.parametrize("name", message_strategies)
def test_a_message_comes_out_as_it_went_in(name: str) -> None:
    @settings(max_examples=20)
    @given(message_strategies[name], st.booleans())
    def round_trip(message: m.Message, compress: bool) -> None:
        assert same(message, decode(wire(message, compress=compress)))

    round_trip()


@pytest.mark.parametrize("leaf", [0, np.arange(3)], ids=["number", "array"])
def test_a_value_is_sent_as_deep_as_it_is_accepted(leaf: Any) -> None:
    """Otherwise a call would be sent that its receiver ignores."""
    value: Any = leaf
    for _ in range(DEFAULT_LIMITS.max_depth):
        value = [value]
    assert same(m.Reply(1, True, value), decode(wire(m.Reply(1, True, value))))
    with pytest.raises(LocalProtocolError, match="too deeply"):
        encode(m.Reply(1, True, [value]))


def noise(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return floats that do not shrink."""
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_large_arrays_are_not_copied_either_way() -> None:
    column = noise(PACK_MAX_BYTES // 256 + 1, 64)
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


@pytest.mark.parametrize(
    "writable", [bytearray, lambda frame: memoryview(bytearray(frame)), bytes, memoryview]
)
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
    """Arrays in the memory of one or two others: adjacent, apart, overlapping, backwards, strided,
    empty.
    """
    bases = [np.frombuffer(random.Random(seed).randbytes(800), np.uint8).copy() for seed in (1, 2)]
    places = {0: 0, 1: 0}
    columns = {}
    for number in range(draw(st.integers(1, 7))):
        dtype = np.dtype(draw(st.sampled_from(["?", "u1", "<i4", "<f2", "<f4", "<f8", ">f4"])))
        which = draw(st.sampled_from([0, 0, 0, 1]))
        end = places[which]
        start = draw(
            st.sampled_from([end + -end % 8] * 4 + [end, end + 8, end + 3, max(0, end - 8), 0])
        )
        shape = draw(st.sampled_from([(3, 4), (8,), (5, 1), (2, 0), (), (1, 7)]))
        columns[f"c{number}"] = array = np.ndarray(shape, dtype, bases[which], start)
        if draw(st.integers(0, 7)) == 0:
            columns[f"c{number}"] = array.T[::2] if array.ndim else array
        places[which] = start + array.nbytes
    return columns


@settings(max_examples=100)
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


def test_adjacent_arrays_leave_as_one_frame_without_a_copy() -> None:
    arrays = allocate_together(
        [((200, 64), np.float32), ((999,), np.float16), ((7, 300), np.float64)]
    )
    for array in arrays:
        array[...] = noise(*array.shape, dtype=array.dtype)
    columns = dict(zip("abc", arrays, strict=True))
    frames = encode(samples(columns, episodes={"lengths": np.arange(3)}))
    assert [len(frame) for frame in frames[1:]] == [3 * 8, 4 * 12_800 + 2000 + 8 * 2100]
    assert storage_of(samples(columns)) == [RAW, CONTINUED, CONTINUED]
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), arrays[0])
    out = decode(frames)
    assert all(np.shares_memory(out.batches["p"][name], columns[name]) for name in columns)
    assert all(same(columns[name], out.batches["p"][name]) for name in columns)


def test_only_adjacent_arrays_share_a_frame() -> None:
    first, second, third = allocate_together([((8000,), np.float32)] * 3)
    for array in (first, second, third):
        array[...] = noise(8000)
    alone = noise(8000)
    assert storage_of(samples({"a": first, "b": second, "c": third})) == [RAW, CONTINUED, CONTINUED]
    assert storage_of(samples({"a": second, "b": first, "c": third})) == [RAW, RAW, RAW]
    assert storage_of(samples({"a": first, "b": third})) == [RAW, RAW]
    assert storage_of(samples({"a": first, "b": first})) == [RAW, RAW]
    assert storage_of(samples({"a": first, "x": alone, "b": second})) == [RAW, PACKED, CONTINUED]
    large = noise(PACK_MAX_BYTES)
    assert storage_of(samples({"a": first, "x": large, "b": second})) == [RAW, RAW, RAW]
    compressible = np.zeros(8000, np.int64)
    assert storage_of(samples({"a": first, "x": compressible, "b": second})) == [
        RAW,
        LZ4,
        CONTINUED,
    ]
    assert storage_of(samples({"a": first, "x": second[:0], "b": second})) == [
        RAW,
        PACKED,
        CONTINUED,
    ]
    assert storage_of(samples({"a": first, "b": second[::2]})) == [RAW, PACKED]
    small, *_ = allocate_together([((1000,), np.float32), ((20_000,), np.float32)])
    small[...] = noise(1000)
    assert storage_of(samples({"a": small})) == [PACKED]
    assert storage_of(samples({"a": first, "x": small, "b": second})) == [RAW, PACKED, CONTINUED]
    pair = allocate_together([((5000,), np.float32)] * 2)
    for array in pair:
        array[...] = noise(5000)
    assert storage_of(samples({"a": pair[0], "b": pair[1]})) == [PACKED, PACKED]


def test_frames_of_stacks_are_sent_once() -> None:
    message = samples({"obs": stacked_frames(), "rewards": np.zeros((4, 2), np.float32)})
    assert storage_of(message) == [STACKED, PACKED]
    assert storage_of(samples({"obs": stacked_frames().astype(np.int8)})) != [STACKED]
    for compress in (True, False):
        assert same(message, decode(wire(message, compress=compress)))


def one_hot(rows: int, size: int) -> np.ndarray:
    return np.eye(size, dtype=np.float32)[np.random.default_rng(0).integers(0, size, rows)]


def test_floats_that_shrink_are_compressed_and_come_back() -> None:
    columns = {
        "obs": one_hot(512, 16),
        "dense": noise(512, 16),
        "planes": one_hot(512, 600).astype(np.float64),
    }
    message = samples(columns)
    assert storage_of(message) == [LZ4, PACKED, LZ4]
    assert storage_of(samples({"obs": noise(512, 16)})) == [PACKED]
    frames = wire(message)
    assert 8 * sum(len(frame) for frame in frames) < sum(
        column.nbytes for column in columns.values()
    )
    assert same(message, decode(frames))
    assert storage_of(samples(columns)) == [LZ4, PACKED, LZ4]


def test_dense_floats_are_tried_in_few_messages_and_compressed_again_soon_after_they_have_become_sparse() -> (
    None
):
    with patch.object(encoding, "compress_array", wraps=encoding.compress_array) as tried:
        for _ in range(63 + 320):
            encode(samples({"seldom_sparse": noise(512, 16)}))
        assert tried.call_count == 6 + 10
    sparse = samples({"seldom_sparse": one_hot(512, 16)})
    assert [LZ4] in [storage_of(sparse) for _ in range(32)]
    assert storage_of(sparse) == [LZ4]


def test_compressed_columns_leave_frames_to_others() -> None:
    arrays = {f"c{number}": np.zeros(400, np.float32) for number in range(1100)}
    message = samples(arrays)
    frames = encode(message)
    assert len(frames) <= DEFAULT_LIMITS.max_frames
    assert same(message, decode(frames))


def test_a_frame_of_several_arrays_is_no_longer_than_one_array_may_be() -> None:
    arrays = allocate_together([((8000,), np.float32)] * 3)
    for array in arrays:
        array[...] = noise(8000)
    message = samples(dict(zip("abc", arrays, strict=True)))
    frames = encode(message, limits=Limits(max_array_bytes=64_000))
    assert [len(frame) for frame in frames[1:]] == [64_000, 32_000]
    assert same(message, decode(frames))


def test_arrays_in_other_kinds_of_memory_can_be_sent() -> None:
    structured = np.zeros(9000, [("x", "<f4"), ("y", "<f4")])
    dates = np.arange(9000).astype("M8[s]")
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(20_000, dtype=np.float32), 9_000)[
        7
    ]
    given_away = np.arange(20_000, dtype=np.float32)
    given_away.setflags(write=False)
    for array in (
        structured.view("<f4"),
        dates.view("<i8"),
        np.zeros(9000, ">f8").view("<f8"),
        windows,
        given_away[5:],
        np.arange(20_000, dtype=">f8").reshape(100, 200).T,
        np.arange(40_000, dtype=np.int32)[::2],
    ):
        message = samples({"obs": array})
        assert same(message, out := decode(wire(message, compress=False)))
        assert out.batches["p"]["obs"].flags.c_contiguous
        assert out.batches["p"]["obs"].dtype.byteorder in "<=|"


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
def test_values_that_cannot_be_sent_are_refused_by_the_sender(bad: m.Message) -> None:
    with pytest.raises(LocalProtocolError):
        encode(bad)


def test_messages_that_are_too_large_in_total_are_refused_by_the_sender() -> None:
    limits = Limits(max_message_bytes=100_000)
    arrays = {"a": np.zeros(60_000, np.uint8), "b": np.zeros(60_000, np.uint8)}
    with pytest.raises(LocalProtocolError, match="limit of 100,000 bytes"):
        encode(m.Reply(1, True, arrays), limits=limits)  # small, but not once it is unpacked
    one = {"a": np.zeros(100_000, np.uint8)}  # with its header it is too large
    with pytest.raises(LocalProtocolError, match="limit of 100,000 bytes"):
        encode(m.Reply(1, True, one), limits=limits, compress=False)
    assert encode(m.Reply(1, True, one), limits=limits)


def test_an_empty_array_can_follow_a_full_packed_frame() -> None:
    full = {
        f"b{index:02}": PACK_MAX_BYTES for index in range(PACK_TOTAL_BYTES // PACK_MAX_BYTES - 1)
    }
    sizes = {"a": 3, **full, "c": 3, "d": PACK_MAX_BYTES - 11}  # with padding, slightly more
    columns = {
        **{name: np.zeros(size, np.int8) for name, size in sizes.items()},
        "e": np.zeros((0, 4), np.float32),
    }
    message = decode(encode(samples(columns), compress=False))
    assert isinstance(message, m.Samples)
    shapes = {name: array.shape for name, array in message.batches["p"].items()}
    assert shapes == {name: array.shape for name, array in columns.items()}


# What peers may send
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "kind", "field"),
    [
        ([], BadFrame, "frames"),
        ([b""], BadFrame, "header"),
        ([b"\xc1"], BadFrame, "header"),
        ([b"GET / HTTP/1.1\r\n\r\n"], BadFrame, "header"),
        ([msgpack.packb([])], BadFrame, "header"),
        ([msgpack.packb([FORMAT_VERSION, "beat"])], BadFrame, "header"),
        ([msgpack.packb([FORMAT_VERSION + 1, "whatever", 5])], VersionMismatch, "version"),
        ([b"x" * 2_000_000], MessageTooBig, "header"),
        ([b"x"] * 2000, MessageTooBig, "frames"),
        (with_header(m.Ack(1), 1, "no_such"), BadFrame, "type"),
        (with_header(m.Ack(1), 1, ["ack"]), BadFrame, "type"),
        (with_header(m.Ack(1), 2, []), BadFrame, "scalars"),
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
        (with_header(samples({"obs": stacked_frames()}), 5, [[4, 2, 16, 16, 3]]), BadFrame, "obs"),
        (with_header(samples({"obs": stacked_frames()}), 5, [[4, 2, 1024]]), BadFrame, "obs"),
        (
            with_header(samples({"obs": stacked_frames()}), 5, [[2**40, 2, 16, 16, 4]]),
            MessageTooBig,
            "obs",
        ),
        (
            with_header(samples({"obs": stacked_frames().astype(np.int16)}), 4, bytes([STACKED])),
            BadFrame,
            "obs",
        ),
        (continued(b"x" * 36), BadFrame, "frame 1"),
        (continued(b"x" * 40, bytes([CONTINUED, RAW])), BadFrame, "c0"),
        ([*continued(b"x" * 34, bytes([RAW, RAW])), b"x" * 8], BadFrame, "frame 1"),
    ],
)
def test_broken_frames_are_named(
    frames: list[bytes], kind: type[RemoteProtocolError], field: str
) -> None:
    # the second time after a valid message with the same layout, which is cached
    for _ in range(2):
        with pytest.raises(kind) as caught:
            decode(frames)
        assert caught.value.field == field
        decode(wire(samples()))
    assert str(caught.value)


def test_arrays_are_right_whatever_came_before_under_the_same_names() -> None:
    """Even if a packed header ends like another one: 37265 is packed as cd 91 91."""
    shapes = [
        (2, 4),
        (3, 2),
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
        obs = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(
            index
        )
        message = decode(wire(samples({"obs": obs})))
        assert isinstance(message, m.Samples)
        taken = message.batches["p"]["obs"]
        assert taken.shape == shape
        np.testing.assert_array_equal(taken, obs)


@pytest.mark.parametrize(
    "shapes",
    [
        [[[[2, 4]]]],
        [b"\x91\x92\x02\x04"],
        [{"a": [[2, 4]]}],
        [[2.0, 4]],
        [[True, 8]],
        [msgpack.Timestamp(1)],
    ],
)
def test_an_invalid_shape_is_refused_even_after_a_similar_valid_one(shapes: list[Any]) -> None:
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


EXAMPLES = {MESSAGE_TYPES_BY_CLASS[type(message)].name: message for message in example_messages()}


@pytest.mark.parametrize("name", MESSAGE_TYPES)
def test_each_field_is_required_and_no_other_is_accepted(name: str) -> None:
    scalars = header(EXAMPLES[name])[2]
    optional = MESSAGE_TYPES[name].defaults
    for field in scalars.keys() - optional.keys():
        with pytest.raises(BadFrame) as caught:
            decode(
                with_header(
                    EXAMPLES[name], 2, {key: scalars[key] for key in scalars if key != field}
                )
            )
        assert caught.value.field == field
    with pytest.raises(BadFrame) as caught:
        decode(with_header(EXAMPLES[name], 2, scalars | {"more": 1}))
    assert caught.value.field == "more"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ack", "seq", True),
        ("ack", "seq", -1),
        ("ack", "seq", 2**60),
        ("ack", "seq", 1.0),
        ("ack", "seq", "1"),
        ("ack", "resend", 0),
        ("samples", "first_version", -2),
        ("samples", "first_version", True),
        ("samples", "perf", []),
        ("samples", "perf", {"x": "1"}),
        ("samples", "perf", {b"x": 1.0}),
        ("beat", "in_env_s", "1"),
        ("beat", "in_env_s", False),
        ("beat", "state", b"1"),
        ("snapshot", "filter_acks", [1]),
        ("snapshot", "filter_acks", {b"i": 1}),
        ("snapshot", "filter_acks", {"i": 1.0}),
        ("snapshot", "global_vars", None),
        ("snapshot", "global_vars", {b"x": 1}),
        ("reply", "result", {b"x": 2}),
        ("reply", "result", msgpack.Timestamp(0)),
        ("call", "args", {"x": msgpack.ExtType(1, b"\x05\0\0\0")}),
        ("welcome", "graphs", {"p": 1}),
        ("welcome", "graphs", []),
        ("welcome", "graphs", {}),
        ("welcome", "config", 1),
        ("welcome", "snapshot", 1),
    ],
)
def test_wrong_values_are_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(with_header(EXAMPLES[name], 2, header(EXAMPLES[name])[2] | {field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("code", [0, 1, 2, 5, 127])
@pytest.mark.parametrize("data", [b"\0\0\0\0", b"\0"])
def test_extension_types_are_refused_unless_they_stand_for_an_array(code: int, data: bytes) -> None:
    for message, field in ((EXAMPLES["ack"], "seq"), (EXAMPLES["call"], "call_id")):
        with pytest.raises(BadFrame):
            decode(
                with_header(message, 2, header(message)[2] | {field: msgpack.ExtType(code, data)})
            )


def test_fields_of_the_snapshot_in_a_welcome_are_named_with_their_path() -> None:
    snapshot = header(EXAMPLES["welcome"])[2]["snapshot"]
    for broken in (
        {**snapshot, "version": "1"},
        {key: snapshot[key] for key in snapshot if key != "version"},
    ):
        with pytest.raises(BadFrame) as caught:
            decode(
                with_header(
                    EXAMPLES["welcome"], 2, header(EXAMPLES["welcome"])[2] | {"snapshot": broken}
                )
            )
        assert caught.value.field == "snapshot.version"


def test_a_whole_snapshot_without_new_policies_has_the_fields_of_protocol_3() -> None:
    whole = EXAMPLES["snapshot"]
    assert "since" not in header(whole)[2]
    assert "since" not in header(EXAMPLES["welcome"])[2]["snapshot"]
    assert all(name != "policies" for _, name in msgpack.unpackb(header(whole)[3])[0])
    partial = whole._replace(since=0, policies={"joins": np.ones(3, np.uint8)})
    assert header(partial)[2] == header(whole)[2] | {"since": 0}
    decoded = decode(wire(partial))
    assert isinstance(decoded, m.Snapshot)
    assert (decoded.since, decoded.policies["joins"].tolist()) == (0, [1, 1, 1])
    with pytest.raises(BadFrame) as caught:
        decode(with_header(whole, 2, header(whole)[2] | {"since": "0"}))
    assert caught.value.field == "since"


def test_nesting_has_an_end() -> None:
    value: Any = 1
    for _ in range(40):
        value = [value]
    deep = [
        FORMAT_VERSION,
        "reply",
        {"call_id": 1, "ok": True, "result": value},
        layout([[0, "result"]], []),
        b"",
        [],
    ]
    with pytest.raises(BadFrame) as caught:
        decode([msgpack.packb(deep)])
    assert caught.value.field == "result"
    with pytest.raises(LocalProtocolError):
        encode(m.Reply(1, True, value))


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


def test_messages_with_excessively_many_names_are_not_cached() -> None:
    """8 messages of 1 MB each, without common names for a cache."""
    frames = [
        wire(samples(batches={f"{number}_{name:0250}": {} for name in range(3900)}))
        for number in range(8)
    ]
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
    "\x1b]0;owned\x07\x1b[2J \n2026-01-01 00:00:00,000 ERROR aiorl:"
    " forged\r\x85\u2028\u2029\u202e\u2066\x9b31m\x00\x7f"
)


def texts_in(value: Any) -> list[str]:
    """Return every string in a message, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in texts_in(item)]
    is_nested = isinstance(value, list | tuple)
    return [text for item in value for text in texts_in(item)] if is_nested else []


def decoded_or_error(frames: list[bytes]) -> m.Message | str:
    try:
        return decode(frames)
    except RemoteProtocolError as error:
        return str(error)


def hostile_messages() -> list[list[bytes]]:
    """Yield each message with a hostile text in each place for a string, including the names of
    arrays.
    """
    found = []
    for message in EXAMPLES.values():
        scalars, tree = header(message)[2:4]
        for field, value in scalars.items():
            put = (
                HOSTILE
                if isinstance(value, str)
                else {HOSTILE: 1}
                if isinstance(value, dict)
                else None
            )
            if put is not None and field not in (
                "config",
                "args",
                "global_vars",
                "graphs",
                "snapshot",
                "result",
                "value",
            ):
                found.append(with_header(message, 2, scalars | {field: put}))
        for number, part in enumerate(msgpack.unpackb(tree) if tree else []):
            for index in range(len(part)):
                changed = msgpack.unpackb(tree)
                changed[number][index][1] = HOSTILE
                found.append(with_header(message, 3, msgpack.packb(changed)))
    return found


def test_no_text_of_a_message_can_do_anything_to_a_terminal_or_begin_a_line_of_a_log() -> None:
    """Names are refused, texts made printable; an error that quotes them is printable, too. Values
    of calls are for programs, which make them printable before they show them.
    """
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
        may_have_lines = isinstance(message, m.Failure | m.Status)
        assert may_have_lines or not any("\n" in text for text in texts_in(message))
    assert taken == 10, "host, state, kind, message, traceback, three reasons, code and the account"


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
def test_a_message_with_any_text_can_be_sent_and_decoded(name: str) -> None:
    """A long traceback, or a name from a file system, is sent all the same, cut and printable."""
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


def test_only_a_hello_or_a_status_request_is_decoded_from_an_unregistered_peer() -> None:
    hello = m.Hello(1, "r" * 64, "w" * 64, "i" * 64, 2**31 - 1, "h" * 255, 2**31 - 1, "l" * 64)
    assert same(decode_hello(encode(hello)), hello)
    assert decode_hello(encode(EXAMPLES["status_request"])) == EXAMPLES["status_request"]
    others = [
        message
        for message in example_messages()
        if not isinstance(message, m.Hello | m.StatusRequest)
    ]
    assert len(wire(hello)[0]) < MAX_HELLO_BYTES / 2
    compressible = samples({"obs": np.zeros((1024, 1024), np.uint8)})
    with (
        patch.object(decoding, "decompress", side_effect=AssertionError("it was decompressed")),
        patch.object(decoding, "_parse_layout", side_effect=AssertionError("its layout was read")),
        patch.object(decoding, "_cached_layout", side_effect=AssertionError("its layout was read")),
    ):
        for frames in (*map(wire, others), wire(compressible), [b"x" * 1_000_000], [b""] * 9, []):
            assert decode_hello(frames) is None
    with patch.object(msgpack, "unpackb", side_effect=AssertionError("it was unpacked")):
        for frames in (wire(compressible), [b"x" * 5000], [b"x"] * 2):
            assert decode_hello(frames) is None


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [msgpack.packb([2, "hello", {}])], with_header(m.Ack(1), 2, 3)]
)
def test_short_frames_that_are_no_message_are_refused_before_registration(
    frames: list[bytes],
) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_hello(frames)


NESTED = b"\x91" * 1000 + b"\xc0"
"""Lists within lists, as deep as msgpack allows: deeper than Python recurses."""


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("scalars", "version"),
        ("shapes", 0),
        ("nodes", 0),
        ("columns", 0),
        ("columns", 1),
        ("columns", 2),
    ],
)
def test_endless_nesting_is_refused_in_a_short_sentence(part: str, key: Any) -> None:
    version, name, scalars, layout, storage, shapes = header(make_snapshot())
    nodes, columns = msgpack.unpackb(layout)
    {"scalars": scalars, "shapes": shapes[0], "nodes": nodes[0], "columns": columns[0]}[part][
        key
    ] = "hole"
    layout = msgpack.packb([nodes, columns]).replace(msgpack.packb("hole"), NESTED)
    head = msgpack.packb([version, name, scalars, layout, storage, shapes]).replace(
        msgpack.packb("hole"), NESTED
    )
    with pytest.raises(BadFrame) as caught:
        decode([head, *wire(make_snapshot())[1:]])
    assert len(str(caught.value)) < 300


def test_mutated_frames_raise_remote_protocol_errors_and_nothing_else() -> None:
    """Bad input: messages that decode can be encoded again, and are then equal."""
    rng = random.Random(0)
    for message in example_messages():
        sound = wire(message)
        for _ in range(600):
            frames = [bytearray(frame) for frame in sound]
            for _ in range(rng.randint(1, 3)):
                frame = rng.choice(frames)
                at = rng.randrange(len(frame) + 1)
                frame[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
            check([bytes(frame) for frame in frames])
