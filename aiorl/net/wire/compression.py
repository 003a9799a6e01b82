"""LZ4 for the columns where it pays.

A compressed array is one buffer: a table of ``ceil(raw_bytes / BLOCK_BYTES)`` little-endian uint32 sizes,
then that many LZ4 blocks, each of ``BLOCK_BYTES`` once decompressed but the last. Blocks of moderate size
decompress several times faster than one large block. Float columns do not shrink and are never tried.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import lz4.block
import numpy as np

from aiorl.errors import BadFrame

if TYPE_CHECKING:
    from aiorl.net.wire.messages import AnyArray

__all__ = ["BLOCK_BYTES", "MIN_COLUMN_BYTES", "compress_array", "compress_blocks", "decompress"]

BLOCK_BYTES = 1 << 18
MIN_COLUMN_BYTES = 1 << 10
_PROBE_BYTES = 1 << 14
_WORTH = 0.8  # of the raw size; above it decompressing costs more than it saves
_MAX_EXPANSION = 255  # an LZ4 block cannot hold more than this many bytes per byte


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
