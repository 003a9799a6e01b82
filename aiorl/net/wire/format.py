"""How a message lies in its frames, and what a peer may ask of our memory.

Frame 0 is a msgpack list ``[version, type, scalars, layout, storage, shapes]``:

- *scalars*: the message's fields that are no arrays, by name;
- *layout*: msgpack bytes of ``[nodes, columns]``, the names the arrays hang under: ``nodes`` are maps as
  ``[parent, key]`` (node 0 is the message), ``columns`` are arrays as ``[node, name, dtype]``. It is the
  same from one message of a worker to the next, so the decoder keeps parsed layouts in a small cache;
- *storage*: one byte for each column, *shapes*: one list for each column.

Storage 0 lies in frame 1 together with all other small arrays, each starting at a multiple of 8 bytes: a
frame costs microseconds, copying a few KiB does not. Storage 1 begins a raw frame, storage 4 goes on in the
raw frame begun last, at the next multiple of 8 bytes: arrays that lie so in the sender's memory leave without a
copy, in one frame. Storage 2 is an LZ4 frame of its own (``compression``), storage 3 another in which pictures that
overlap as stacks do are there once (``frame_stacks``). Arrays are C-contiguous and little-endian; decoded ones are
read-only views.
Every size is checked against `Limits` before memory is taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from aiorl.config.worker import TransportConfig
from aiorl.text import MAX_NAME

PACKED: Final = 0
RAW: Final = 1
LZ4: Final = 2
STACKED: Final = 3
CONTINUED: Final = 4
PACK_MAX_BYTES: Final = 1 << 18
"""Arrays up to this size share frame 1: to copy them costs less than to send and track a frame for each."""
PACK_TOTAL_BYTES: Final = 1 << 22
"""Frame 1 is not filled beyond this; what comes then has frames of its own."""
SHARE_MIN_BYTES: Final = 1 << 16
"""Arrays of one allocation of at least this size travel in one raw frame where they lie one behind the other."""
SHARE_FROM_BYTES: Final = 1 << 14
"""An array smaller than this begins no such frame: it goes on in one, or shares frame 1."""
ALIGN: Final = 8
ARRAY_REF: Final = 1
"""msgpack extension type: an array of a Call or a Reply, its number as 4 bytes."""
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    dtype.str: dtype
    for dtype in (
        np.dtype(name).newbyteorder("<")
        for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
    )
}
"""The dtypes that travel, by their little-endian code."""

MAX_WORKERS: Final = 4096
"""Workers of one run, whatever its headers could hold."""
ACK_BYTES: Final = 2 + MAX_NAME + 9
"""What one worker adds to the header of a snapshot: its incarnation and a number, as msgpack packs them."""
MAX_HELLO_BYTES: Final = 4096
"""A Hello's one frame: four names, the host's, four numbers and the fields' names are half of it."""
MAX_STRANGER_BYTES: Final = 1 << 16
"""A larger message from somebody who is not registered is a violation at once; smaller ones are counted first."""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Upper bounds for one message; the same on both sides unless a test says otherwise.

    Attributes:
        max_frames: frames of one multipart message, the header included.
        max_header_bytes: bytes of frame 0.
        max_array_bytes: bytes of one array once decompressed.
        max_message_bytes: bytes of all frames together, and of all arrays together once decompressed.
        max_arrays: arrays in one message.
        max_ndim: dimensions of one array.
        max_string: bytes of one string in the header (names, reasons, tracebacks).
        max_map: entries of one map or list in the header.
        max_depth: nesting of maps and lists in the header.
    """

    max_frames: int = 1024
    max_header_bytes: int = 1 << 20
    max_array_bytes: int = 1 << 28
    max_message_bytes: int = 1 << 28
    max_arrays: int = 4096
    max_ndim: int = 8
    max_string: int = 1 << 16
    max_map: int = 4096
    max_depth: int = 16


DEFAULT_LIMITS = Limits()


def max_workers_of(limits: Limits) -> int:
    """How many workers a run may have so that what they make a snapshot's header grow by is half of it at most."""
    return min(MAX_WORKERS, limits.max_map, limits.max_header_bytes // 2 // ACK_BYTES)


def limits_of(transport: TransportConfig) -> Limits:
    """The bounds that a configuration sets; the others are the default ones."""
    return Limits(
        max_header_bytes=transport.max_header_bytes,
        max_array_bytes=transport.max_message_bytes,
        max_message_bytes=transport.max_message_bytes,
    )
