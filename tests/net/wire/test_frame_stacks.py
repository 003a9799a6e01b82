"""Stacks of frames on the wire: exact round trips, each frame once, and hostile frames."""

from __future__ import annotations

import struct
import tracemalloc

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from aiorl.errors import BadFrame
from aiorl.net.wire.compression import (
    MIN_STACK_BYTES,
    compress_blocks,
    compress_stacks,
    decompress_stacks,
    is_shape_of_stacks,
)


def game(
    steps: int,
    envs: int,
    side: int,
    count: int,
    resets: set[tuple[int, int]] = frozenset(),
    seed: int = 0,
) -> np.ndarray:
    """[T, N, side, side, count] stacks, made frame by frame: a still background, moving squares,
    noise in a corner.
    """
    rng = np.random.default_rng(seed)
    background = rng.integers(0, 256, (envs, side, side), np.uint8)
    column = np.empty((steps, envs, side, side, count), np.uint8)
    for env in range(envs):
        stack: list[np.ndarray] = []
        for step in range(steps):
            frame = background[env].copy()
            at = (3 * step + env) % (side - 4)
            frame[at : at + 4, at : at + 4] = 250
            frame[:2, :2] = rng.integers(0, 256, (2, 2))
            is_first = step == 0 or (step, env) in resets
            stack = [frame] * count if is_first else [*stack[1:], frame]
            column[step, env] = np.stack(stack, axis=-1)
    return column


def back(frame: bytes, column: np.ndarray) -> np.ndarray:
    return np.frombuffer(
        decompress_stacks(memoryview(frame), column.dtype, column.shape), np.uint8
    ).reshape(column.shape)


@st.composite
def columns(draw: st.DrawFn) -> np.ndarray:
    """Stacks with resets and changed bytes anywhere, of any size that is sent as stacks."""
    steps, envs, count = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(2, 16))
    side = draw(st.integers(int(np.ceil(np.sqrt(MIN_STACK_BYTES / count))), 40))
    places = st.tuples(st.integers(1, 8), st.integers(0, 4))
    column = game(
        steps, envs, side, count, draw(st.sets(places, max_size=6)), draw(st.integers(0, 99))
    )
    for at in draw(st.lists(st.integers(0, column.size - 1), max_size=3)):
        column.reshape(-1)[at] ^= draw(st.integers(1, 255))
    return column


@settings(max_examples=120)
@given(columns())
def test_columns_come_back_byte_for_byte(column: np.ndarray) -> None:
    frame = compress_stacks(column)
    if frame is not None:
        assert back(frame, column).tobytes() == column.tobytes()
        assert not back(frame, column).flags.writeable


def test_each_frame_is_sent_once_and_a_reset_sends_its_stack() -> None:
    """Counted by hand: 3 whole stacks (2 first rows, 1 reset) and 17 single frames that LZ4 cannot
    shrink.
    """
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (13, 2, 32, 32), np.uint8)
    column = np.stack([frames[k : k + 10] for k in range(4)], axis=-1)
    column[6, 1] = rng.integers(0, 256, (32, 32, 4), np.uint8)
    frame = compress_stacks(column)
    assert frame is not None
    # A changed row continues neither the row before it, nor does the next row continue it.
    assert np.unpackbits(np.frombuffer(frame[:3], np.uint8)).tolist() == [
        1,
        1,
        *[0] * 11,
        1,
        0,
        1,
        *[0] * 8,
    ]
    blocks = 4 * 1024 * 4 + 16 * 1024
    assert blocks <= len(frame) <= 1.01 * blocks
    assert back(frame, column).tobytes() == column.tobytes()


def test_a_still_picture_takes_next_to_nothing() -> None:
    column = game(64, 8, 84, 4)
    column[:, :, :2, :2] = 7
    frame = compress_stacks(column)
    assert frame is not None
    assert len(frame) < column.nbytes / 4 / 6


def test_resets_everywhere_are_not_worth_it() -> None:
    half = {(step, env) for step in range(1, 10) for env in range(4)}
    assert compress_stacks(game(10, 4, 20, 4, half)) is None
    assert (
        compress_stacks(game(10, 4, 20, 4, {place for place in half if place[0] % 3 == 0}))
        is not None
    )
    assert (
        compress_stacks(np.random.default_rng(0).integers(0, 256, (10, 4, 20, 20, 4), np.uint8))
        is None
    )
    one_step = game(1, 4, 20, 4)
    assert compress_stacks(one_step) is None


def test_columns_that_continue_only_in_their_first_pixel_are_sent_raw() -> None:
    column = np.random.default_rng(0).integers(0, 256, (10, 4, 20, 20, 4), np.uint8)
    column[:, :, 0, 0] = 3
    assert compress_stacks(column) is None


def test_zeros_that_pad_sequences_continue() -> None:
    column = game(20, 3, 20, 4)
    column[12:, 1] = 0
    frame = compress_stacks(column)
    assert frame is not None
    assert back(frame, column).tobytes() == column.tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.uint8, (10, 2, 84, 84, 4), True),
        (np.uint8, (10, 2, 16, 16, 4), True),
        (np.uint8, (10, 2, 16, 15, 4), False),
        (np.int8, (10, 2, 84, 84, 4), False),
        (np.float32, (10, 2, 84, 84, 4), False),
        (np.uint8, (10, 84, 84, 4), False),
        (np.uint8, (10, 2, 2, 84, 84, 4), False),
        (np.uint8, (10, 2, 84, 84, 1), False),
        (np.uint8, (10, 2, 84, 84, 17), False),
        (np.uint8, (10, 2, 84, 84, 16), True),
        (np.uint8, (0, 2, 84, 84, 4), False),
        (np.uint8, (10, 0, 84, 84, 4), False),
    ],
)
def test_only_stacks_of_pictures_are_sent_as_stacks(
    dtype: type, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_shape_of_stacks(np.dtype(dtype), shape) is expected
    if not expected:
        assert compress_stacks(np.zeros(shape, dtype)) is None
        frame = claim(np.packbits(np.ones(shape[:2], bool)).tobytes(), int(np.prod(shape)))
        with pytest.raises(BadFrame):
            decompress_stacks(memoryview(frame), np.dtype(dtype), shape)


SHAPE = (6, 3, 16, 16, 4)
WHOLE_BITS = bytes([0b11100000, 0, 0])
"""The first three of 18 rows are whole."""


def claim(bits: bytes, raw_bytes: int) -> bytes:
    return bits + compress_blocks(memoryview(bytes(raw_bytes)))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        WHOLE_BITS[:2],
        WHOLE_BITS,
        claim(WHOLE_BITS, 15 * 256 + 3 * 1024 - 1),
        claim(WHOLE_BITS, 15 * 256 + 3 * 1024 + 1),
        claim(WHOLE_BITS, 18 * 1024),
        claim(WHOLE_BITS, 15 * 256 + 3 * 1024) + b"x",
        claim(bytes([0b11000000, 0, 0]), 16 * 256 + 2 * 1024),
        claim(bytes([0b11100000, 0, 1]), 15 * 256 + 3 * 1024),
        claim(bytes([0b11100000, 0, 0b00100000]), 15 * 256 + 3 * 1024),
        WHOLE_BITS + struct.pack("<I", 4) + b"\xff\xff\xff\xff",
        WHOLE_BITS + struct.pack("<I", 5) + lz4.block.compress(b"abcd", store_size=False),
    ],
)
def test_damaged_or_lying_frames_are_refused(frame: bytes) -> None:
    decompress_stacks(memoryview(claim(WHOLE_BITS, 15 * 256 + 3 * 1024)), np.dtype(np.uint8), SHAPE)
    with pytest.raises(BadFrame):
        decompress_stacks(memoryview(frame), np.dtype(np.uint8), SHAPE)


@pytest.mark.parametrize(
    ("frame", "shape"),
    [
        (b"", (1 << 18, 1, 16, 16, 4)),
        (b"\xff" * 1000, (1 << 12, 1, 128, 128, 4)),
        (b"\xff" * 4096, (1 << 12, 1, 128, 128, 4)),
        (b"\x80" + bytes(4096), (1 << 12, 1, 128, 128, 4)),
    ],
)
def test_huge_claims_take_no_memory(frame: bytes, shape: tuple[int, ...]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            decompress_stacks(memoryview(frame), np.dtype(np.uint8), shape)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
