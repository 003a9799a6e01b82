"""Compression of columns: LZ4 where it saves enough, and stacks of frames with each frame sent
once.

A compressed array is one buffer: a table of ``ceil(raw_bytes / BLOCK_BYTES)`` little-endian uint32
sizes, then as many LZ4 blocks. Each block has ``BLOCK_BYTES`` after decompression, except the last.
Blocks of moderate size decompress several times faster than one large block. Columns of any dtype
are tried: floats shrink if most of them are equal, as in one-hot observations, which preprocessing
makes floats.

A column of stacked frames is uint8 ``[T, N, H, W, K]``: T steps of N environments, with a stack of
K frames on the last axis, oldest first. Of two consecutive rows of an environment, the later one
repeats K - 1 frames of the earlier one. Instead of raw bytes, the following is sent:

- A bit for each row, time-major, highest bit first, padded with zeros to whole bytes: 1 if the
  whole stack is sent. All rows of the first step are whole, and every row that does not continue
  the one before it.
- LZ4 blocks. First comes one frame ``[H, W]`` for each continuing row, in row order, XORed with the
  newest frame of the row before it, because most of a picture stays the same. All whole stacks
  ``[H, W, K]`` follow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import lz4.block
import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import Array
from aiorl.data.fragment import continues_stack
from aiorl.errors import BadFrame

BLOCK_BYTES = 1 << 18
MIN_COLUMN_BYTES = 1 << 10
_PROBE_BYTES = 1 << 14
_WORTH = 0.8  # share of the raw size; above it, decompression costs more than is saved
_MAX_EXPANSION = 255  # the most bytes that one byte of an LZ4 block can expand to
MIN_STACK_BYTES = 1 << 10
"""Smaller stacks save too little, and would let a peer make us walk through a column in tiny
steps."""
_MIN_FRAMES = 2
_MAX_FRAMES = 16
_UINT8 = np.dtype(np.uint8)


def compress_array(array: Array) -> bytes | None:
    """Compress an array; return None if sending it raw is better.

    Args:
        array: C-contiguous, any shape.

    Returns:
        Table and blocks as described for this module, smaller than 0.8 of the raw bytes; None for
        arrays under ``MIN_COLUMN_BYTES`` and for those of which the first 16 KiB do not shrink.
    """
    if array.nbytes < MIN_COLUMN_BYTES:
        return None
    raw = array.data.cast("B")
    probe = raw[:_PROBE_BYTES]
    if len(lz4.block.compress(probe, store_size=False)) > _WORTH * len(probe):
        return None
    compressed = compress_blocks(raw)
    return compressed if len(compressed) <= _WORTH * len(raw) else None


def compress_blocks(raw: memoryview) -> bytes:
    """Compress bytes to table and blocks as described for this module, even if the result is
    larger.
    """
    blocks = [
        lz4.block.compress(raw[start : start + BLOCK_BYTES], store_size=False)
        for start in range(0, len(raw), BLOCK_BYTES)
    ]
    sizes = [len(block) for block in blocks]
    return b"".join([struct.pack(f"<{len(sizes)}I", *sizes), *blocks])


def decompress(frame: memoryview, raw_bytes: int) -> memoryview:
    """Return the raw bytes of a compressed array, read-only.

    Args:
        frame: a result of ``compress_array`` or ``compress_blocks``.
        raw_bytes: expected size, already checked against the limits.

    Raises:
        BadFrame: when the frame cannot contain that many bytes (detected before memory is
            allocated) or a block is damaged.
    """
    num_blocks = -(-raw_bytes // BLOCK_BYTES)
    table_bytes = 4 * num_blocks
    if len(frame) < table_bytes:
        raise BadFrame(f"{len(frame)} bytes are too few for the sizes of {num_blocks} blocks")
    if (len(frame) - table_bytes) * _MAX_EXPANSION < raw_bytes:
        raise BadFrame(f"{len(frame)} compressed bytes cannot hold {raw_bytes} bytes")
    sizes = struct.unpack_from(f"<{num_blocks}I", frame)
    if sum(sizes) != len(frame) - table_bytes:
        raise BadFrame(
            f"block sizes add up to {sum(sizes)}, not to {len(frame) - table_bytes} bytes"
        )
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
        raise BadFrame(f"an LZ4 block of {len(raw)} bytes instead of {raw_bytes}")
    return raw


def is_shape_of_stacks(dtype: np.dtype[Any], shape: Sequence[int]) -> bool:
    """Return whether a column can be sent as stacks: uint8 [T, N, H, W, K], K from 2 to 16, stacks
    of 1 KiB or more.
    """
    return (
        len(shape) == 5
        and dtype == _UINT8
        and _MIN_FRAMES <= shape[4] <= _MAX_FRAMES
        and shape[2] * shape[3] * shape[4] >= MIN_STACK_BYTES
        and shape[0] > 0
        and shape[1] > 0
    )


def compress_stacks(array: Array) -> bytes | None:
    """Compress a column with each frame sent once; return None if that does not help.

    Args:
        array: C-contiguous, any shape and dtype.

    Returns:
        Bits and blocks as described for this module; None unless the column has the shape of stacks
        and at least half of its rows continue the row before them.
    """
    if not is_shape_of_stacks(array.dtype, array.shape):
        return None
    steps, envs, height, width, count = array.shape
    rows = array.reshape(steps, envs, -1)
    # The first pixel alone rules out most columns that are not stacks.
    may_go_on = (rows[1:, :, : count - 1] == rows[:-1, :, 1:count]).all(axis=2)
    if 2 * np.count_nonzero(may_go_on) < steps * envs:
        return None
    is_whole = np.ones((steps, envs), np.bool_)
    same = np.empty((envs, rows.shape[2] - 1), np.bool_)
    # larger than ever needed, but untouched pages cost nothing
    packed = np.empty(rows.size, np.uint8)
    frames = packed[: steps * envs * height * width].reshape(-1, height * width)
    newest_before = rows[0, :, count - 1 :: count].copy()
    num_frames = 0
    for before, row, whole in zip(rows[:-1], rows[1:], is_whole[1:], strict=True):
        follows = continues_stack(before, row, count, same)
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
    """Return the raw bytes of a column compressed by ``compress_stacks``, read-only.

    Args:
        frame: a result of ``compress_stacks``.
        dtype: dtype of the column.
        shape: shape of the column; its size is already checked against the limits.

    Raises:
        BadFrame: when the column does not have the shape of stacks, or the frame is damaged or too
            small for it (the size is checked before memory is allocated).
    """
    if not is_shape_of_stacks(dtype, shape):
        raise BadFrame(f"{dtype} {list(shape)} is not a column of stacked frames")
    steps, envs, height, width, count = shape
    pixels = height * width
    mask_bytes = -(-steps * envs // 8)
    if len(frame) < mask_bytes:
        raise BadFrame(
            f"{len(frame)} bytes are too few for one bit for each of {steps * envs} rows"
        )
    bits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(frame[:mask_bytes], np.uint8))
    is_whole = bits[: steps * envs].reshape(steps, envs).view(np.bool_)
    if bits[steps * envs :].any() or not is_whole[0].all():
        raise BadFrame("its first rows are incomplete, or there are more bits than rows")
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
