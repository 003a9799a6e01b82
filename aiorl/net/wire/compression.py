"""What makes columns smaller on the wire: LZ4 where it pays, and stacks of frames with each frame once.

A compressed array is one buffer: a table of ``ceil(raw_bytes / BLOCK_BYTES)`` little-endian uint32 sizes,
then that many LZ4 blocks, each of ``BLOCK_BYTES`` once decompressed but the last. Blocks of moderate size
decompress several times faster than one large block. Float columns do not shrink and are never tried.

A column of stacked frames is uint8 ``[T, N, H, W, K]``, T steps of N environments, the last axis a stack of K frames,
oldest first: of two consecutive rows of an environment the later one repeats K - 1 frames of the earlier one. It is
sent as:

- a bit for each row, time-major, highest bit first, padded with zeros to whole bytes: 1 where the whole stack is sent.
  That is so for all rows of the first step, and for every row that does not go on from the one before it;
- LZ4 blocks of one frame ``[H, W]`` for each row that goes on, in the order of rows, XORed with the newest frame of the
  row before it, since most of a picture stays as it was; then of all whole stacks ``[H, W, K]``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import lz4.block
import numpy as np
from numpy.typing import NDArray

from aiorl.data.fragment import goes_on
from aiorl.errors import BadFrame
from aiorl.net.wire.messages import AnyArray

BLOCK_BYTES = 1 << 18
MIN_COLUMN_BYTES = 1 << 10
_PROBE_BYTES = 1 << 14
_WORTH = 0.8  # of the raw size; above it decompressing costs more than it saves
_MAX_EXPANSION = 255  # an LZ4 block cannot hold more than this many bytes per byte
MIN_STACK_BYTES = 1 << 10
"""Smaller stacks are not worth it, and would let a peer have us walk through a column in tiny steps."""
_MIN_FRAMES, _MAX_FRAMES = 2, 16
_UINT8 = np.dtype(np.uint8)


def compress_array(array: AnyArray) -> bytes | None:
    """The compressed form of an array, or None where sending it raw is better.

    Args:
        array: C-contiguous, any shape.

    Returns: Table and blocks as this module describes, smaller than 0.8 of the raw bytes; None for float
        arrays, for arrays under ``MIN_COLUMN_BYTES`` and for those whose first 16 KiB do not shrink.
    """
    if array.dtype.kind == "f" or array.nbytes < MIN_COLUMN_BYTES:
        return None
    raw = array.data.cast("B")
    probe = raw[:_PROBE_BYTES]
    if len(lz4.block.compress(probe, store_size=False)) > _WORTH * len(probe):
        return None
    compressed = compress_blocks(raw)
    return compressed if len(compressed) <= _WORTH * len(raw) else None


def compress_blocks(raw: memoryview) -> bytes:
    """The compressed form of bytes, even where it is larger: table and blocks as this module describes."""
    blocks = [
        lz4.block.compress(raw[start : start + BLOCK_BYTES], store_size=False)
        for start in range(0, len(raw), BLOCK_BYTES)
    ]
    sizes = [len(block) for block in blocks]
    return b"".join([struct.pack(f"<{len(sizes)}I", *sizes), *blocks])


def decompress(frame: memoryview, raw_bytes: int) -> memoryview:
    """The raw bytes of a compressed array, read-only.

    Args:
        frame: what ``compress_array`` or ``compress_blocks`` returned.
        raw_bytes: size to come out, already checked against the limits.

    Raises: BadFrame if the frame cannot hold that many bytes (found before memory is taken) or a block is
        damaged.
    """
    num_blocks = -(-raw_bytes // BLOCK_BYTES)
    table_bytes = 4 * num_blocks
    if len(frame) < table_bytes:
        raise BadFrame(f"{len(frame)} bytes are too few for the sizes of {num_blocks} blocks")
    if (len(frame) - table_bytes) * _MAX_EXPANSION < raw_bytes:
        raise BadFrame(f"{len(frame)} compressed bytes cannot hold {raw_bytes} bytes")
    sizes = struct.unpack_from(f"<{num_blocks}I", frame)
    if sum(sizes) != len(frame) - table_bytes:
        raise BadFrame(f"block sizes add up to {sum(sizes)}, not to {len(frame) - table_bytes} bytes")
    if num_blocks == 1:
        return memoryview(_block(frame[table_bytes:], raw_bytes))
    out = np.empty(raw_bytes, np.uint8)
    position = table_bytes
    for start, size in zip(range(0, raw_bytes, BLOCK_BYTES), sizes, strict=True):
        expected = min(BLOCK_BYTES, raw_bytes - start)
        block = _block(frame[position : position + size], expected)
        out[start : start + expected] = np.frombuffer(block, np.uint8)
        position += size
    return out.data.toreadonly()


def _block(block: memoryview, raw_bytes: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(block, uncompressed_size=raw_bytes)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise BadFrame(f"damaged LZ4 block: {error}") from error
    if len(raw) != raw_bytes:
        raise BadFrame(f"an LZ4 block of {len(raw)} bytes where {raw_bytes} were due")
    return raw


def is_shape_of_stacks(dtype: np.dtype[Any], shape: Sequence[int]) -> bool:
    """Whether a column of this kind may be sent so: uint8 [T, N, H, W, K], K from 2 to 16, stacks of 1 KiB or more."""
    return (
        len(shape) == 5
        and dtype == _UINT8
        and _MIN_FRAMES <= shape[4] <= _MAX_FRAMES
        and shape[2] * shape[3] * shape[4] >= MIN_STACK_BYTES
        and shape[0] > 0
        and shape[1] > 0
    )


def compress_stacks(array: AnyArray) -> bytes | None:
    """The frames of a column, each once; None where that does not help.

    Args:
        array: C-contiguous, any shape and dtype.

    Returns: bits and blocks as this module describes; None unless the column may be sent so and at least half of its
        rows go on from the row before them.
    """
    if not is_shape_of_stacks(array.dtype, array.shape):
        return None
    steps, envs, height, width, count = array.shape
    rows = array.reshape(steps, envs, -1)
    # The first pixel alone finds out most columns that are no stacks.
    may_go_on = (rows[1:, :, : count - 1] == rows[:-1, :, 1:count]).all(axis=2)
    if 2 * np.count_nonzero(may_go_on) < steps * envs:
        return None
    is_whole = np.ones((steps, envs), np.bool_)
    same = np.empty((envs, rows.shape[2] - 1), np.bool_)
    packed = np.empty(rows.size, np.uint8)  # all of it is never needed, and what is not costs nothing
    frames = packed[: steps * envs * height * width].reshape(-1, height * width)
    newest_before = rows[0, :, count - 1 :: count].copy()
    num_frames = 0
    for before, row, whole in zip(rows[:-1], rows[1:], is_whole[1:], strict=True):
        follows = goes_on(before, row, count, same)
        np.logical_not(follows, out=whole)
        newest = row[:, count - 1 :: count].copy()
        newest_before ^= newest
        changed = newest_before if follows.all() else newest_before[follows]
        frames[num_frames : num_frames + len(changed)] = changed
        num_frames += len(changed)
        newest_before = newest
    if 2 * num_frames < steps * envs:
        return None
    frame_bytes = num_frames * height * width
    end = frame_bytes + (steps * envs - num_frames) * rows.shape[2]
    stacks = packed[frame_bytes:end].reshape(-1, rows.shape[2])
    np.compress(is_whole.reshape(-1), rows.reshape(-1, rows.shape[2]), axis=0, out=stacks)
    return np.packbits(is_whole).tobytes() + compress_blocks(packed[:end].data)


def decompress_stacks(frame: memoryview, dtype: np.dtype[Any], shape: Sequence[int]) -> memoryview:
    """The raw bytes of a column that ``compress_stacks`` has compressed, read-only.

    Args:
        frame: what it returned.
        dtype: of the column.
        shape: of the column; its bytes are already checked against the limits.

    Raises: BadFrame if such a column is not sent so, the frame cannot hold it (found before memory is taken) or is
        damaged.
    """
    if not is_shape_of_stacks(dtype, shape):
        raise BadFrame(f"{dtype} {list(shape)} is no column of stacked frames")
    steps, envs, height, width, count = shape
    pixels = height * width
    mask_bytes = -(-steps * envs // 8)
    if len(frame) < mask_bytes:
        raise BadFrame(f"{len(frame)} bytes are too few for a bit for each of {steps * envs} rows")
    bits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(frame[:mask_bytes], np.uint8))
    is_whole = bits[: steps * envs].reshape(steps, envs).view(np.bool_)
    if bits[steps * envs :].any() or not is_whole[0].all():
        raise BadFrame("its first rows are not whole, or there are more bits than rows")
    num_whole = is_whole.sum(axis=1).tolist()
    frame_bytes = (steps * envs - sum(num_whole)) * pixels
    packed_bytes = frame_bytes + sum(num_whole) * pixels * count
    packed = np.frombuffer(decompress(frame[mask_bytes:], packed_bytes), np.uint8)
    frames = packed[:frame_bytes].reshape(-1, pixels)
    stacks = packed[frame_bytes:].reshape(-1, pixels * count)
    rows = np.empty((steps, envs, pixels * count), np.uint8)
    newest = np.empty((envs, pixels), np.uint8)
    stacks_used = frames_used = 0
    for step, (row, whole) in enumerate(zip(rows, num_whole, strict=True)):
        if whole < envs:
            changed = frames[frames_used : frames_used + envs - whole]
            frames_used += envs - whole
            if whole:
                newest[~is_whole[step]] ^= changed
            else:
                newest ^= changed
            row[:, :-1] = rows[step - 1, :, 1:]
            row[:, count - 1 :: count] = newest
        if whole:
            row[is_whole[step]] = stack = stacks[stacks_used : stacks_used + whole]
            newest[is_whole[step]] = stack[:, count - 1 :: count]
            stacks_used += whole
    return rows.reshape(-1).data.toreadonly()
