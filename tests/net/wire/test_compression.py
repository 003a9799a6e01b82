from __future__ import annotations

import struct
import tracemalloc

import lz4.block
import numpy as np
import pytest

from aiorl.errors import BadFrame
from aiorl.net.wire.compression import BLOCK_BYTES, compress_array, decompress

RNG = np.random.default_rng(0)


def screens(count: int) -> np.ndarray:
    """Pictures like a game's: a flat background, a few moving rectangles."""
    frames = np.full((count, 84, 84, 1), 87, np.uint8)
    for number, frame in enumerate(frames):
        frame[number % 70 : number % 70 + 6, 40:44] = 200
    return frames


def test_image_columns_shrink_by_ten_and_more_and_come_back() -> None:
    column = screens(128)
    compressed = compress_array(column)
    assert compressed is not None
    assert len(compressed) * 10 < column.nbytes
    assert bytes(decompress(memoryview(compressed), column.nbytes)) == column.tobytes()


def test_floats_shrink_if_most_are_equal() -> None:
    column = np.eye(48, dtype=np.float32)[RNG.integers(0, 48, 512)]
    compressed = compress_array(column)
    assert compressed is not None
    assert len(compressed) * 20 < column.nbytes
    assert bytes(decompress(memoryview(compressed), column.nbytes)) == column.tobytes()
    assert compress_array(RNG.standard_normal(1 << 18).astype(np.float32)) is None


def test_noise_is_recognised_by_its_first_bytes() -> None:
    assert compress_array(RNG.integers(0, 256, 1 << 20, np.uint8)) is None


def test_data_that_shrinks_only_at_its_start_is_sent_raw() -> None:
    column = RNG.integers(0, 256, 1 << 20, np.uint8)
    column[: 1 << 15] = 0
    assert compress_array(column) is None


@pytest.mark.parametrize(
    "size", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 7]
)
def test_block_borders_come_out_right(size: int) -> None:
    column = (np.arange(size) // 1000 % 256).astype(np.uint8)
    compressed = compress_array(column)
    assert compressed is not None
    assert bytes(decompress(memoryview(compressed), size)) == column.tobytes()


@pytest.mark.parametrize(
    ("frame", "raw_bytes"),
    [
        (b"", 10),
        (b"\0\0\0", 10),
        (struct.pack("<I", 5) + b"1234", 10),
        (struct.pack("<I", 4) + b"\xff\xff\xff\xff", 10),
        (struct.pack("<I", 5) + lz4.block.compress(b"abcd", store_size=False), 10),
        (struct.pack("<I", 5) + lz4.block.compress(b"abcd", store_size=False), 3),
        (struct.pack("<I", 1) + b"\0", 1 << 28),
        (b"\0" * 4096, 1 << 28),
    ],
)
def test_damaged_or_lying_frames_are_refused(frame: bytes, raw_bytes: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            decompress(memoryview(frame), raw_bytes)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
