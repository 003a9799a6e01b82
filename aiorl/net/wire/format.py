"""Layout of a message in its frames, and limits of the memory that a peer can use.

Frame 0 is a msgpack list ``[version, type, scalars, layout, storage, shapes]``:

- *version*: `FORMAT_VERSION`;
- *scalars*: the message's fields that are not arrays, by name;
- *layout*: msgpack bytes of ``[nodes, columns]``, the tree of names of the arrays: ``nodes`` are
  maps as ``[parent, key]`` (node 0 is the message), ``columns`` are arrays as ``[node, name,
  dtype]``. It is the same for successive messages of a worker, so the decoder keeps parsed layouts
  in a small cache. The values of calls without any array have none;
- *storage*: one byte for each column, *shapes*: one list for each column.

Storage values:

- 0: in frame 1 with all other small arrays, each starting at a multiple of 8 bytes. A frame costs
  microseconds, copying a few KiB does not.
- 1: at the start of a new raw frame.
- 2: an LZ4 frame of its own (``compression``).
- 3: like 2, for stacks of pictures, with each repeated picture sent once (``compression``).
- 4: in the newest raw frame, at the next multiple of 8 bytes. Arrays that lie like this in the
  sender's memory leave in one frame without a copy.

Arrays are C-contiguous and little-endian; decoded ones are read-only views. Every size is checked
against `Limits` before memory is allocated for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiorl.text import MAX_NAME

if TYPE_CHECKING:  # pydantic takes a quarter of a second to load, and actors need none of it
    from aiorl.config.worker import TransportConfig

FORMAT_VERSION: Final = 3
"""Version of this layout, in each header; the messages have a version of their own,
`messages.PROTOCOL_VERSION`."""
PACKED: Final = 0
RAW: Final = 1
LZ4: Final = 2
STACKED: Final = 3
CONTINUED: Final = 4
PACK_MAX_BYTES: Final = 1 << 18
"""Arrays up to this size share frame 1, because copying them costs less than sending and tracking a
frame for each."""
PACK_TOTAL_BYTES: Final = 1 << 22
"""Limit of frame 1; further arrays get their own frames."""
SHARE_MIN_BYTES: Final = 1 << 16
"""Adjacent arrays of one allocation share a raw frame if the allocation has at least this size."""
SHARE_FROM_BYTES: Final = 1 << 14
"""A smaller array begins no shared frame: it continues one, or goes into frame 1."""
ALIGN: Final = 8
ARRAY_REF: Final = 1
"""msgpack extension type for an array of a Call or a Reply: its number as 4 bytes."""
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    dtype.str: dtype
    for dtype in (
        np.dtype(name).newbyteorder("<")
        for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
    )
}
"""Permitted dtypes by their little-endian code."""

MAX_WORKERS: Final = 4096
"""Limit of the workers of one run, even if headers could hold more."""
ACK_BYTES: Final = 2 + MAX_NAME + 9
"""Bytes that one worker adds to the header of a snapshot: its incarnation and a number, packed by
msgpack."""
MAX_HELLO_BYTES: Final = 4096
"""Limit of a Hello, which is one frame; four names, the host, four numbers and the field names take
half of it."""
MAX_STRANGER_BYTES: Final = 1 << 16
"""A larger message of an unregistered peer is an immediate violation; smaller ones are counted
first."""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Upper bounds for one message; equal on both sides except in tests.

    Attributes:
        max_frames: frames of one multipart message, the header included.
        max_header_bytes: bytes of frame 0.
        max_array_bytes: bytes of one array after decompression.
        max_message_bytes: bytes of all frames together, and of all arrays together after
            decompression.
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
    """Return the most workers a run can have if they may fill at most half of a snapshot's
    header.
    """
    return min(MAX_WORKERS, limits.max_map, limits.max_header_bytes // 2 // ACK_BYTES)


def limits_of(transport: TransportConfig) -> Limits:
    """Return the configured bounds, with defaults for all others."""
    return Limits(
        max_header_bytes=transport.max_header_bytes,
        max_array_bytes=transport.max_message_bytes,
        max_message_bytes=transport.max_message_bytes,
    )
