"""How a message lies in its frames.

Frame 0 is a msgpack list ``[version, type, scalars, layout, storage, shapes]``:

- *scalars*: the message's fields that are no arrays, by name;
- *layout*: msgpack bytes of ``[nodes, columns]``, the names the arrays hang under: ``nodes`` are maps as
  ``[parent, key]`` (node 0 is the message), ``columns`` are arrays as ``[node, name, dtype]``. It is the
  same from one message of a worker to the next, so the decoder keeps parsed layouts in a small cache;
- *storage*: one byte for each column, *shapes*: one list for each column.

Storage 0 lies in frame 1 together with all other small arrays, each starting at a multiple of 8 bytes: a
frame costs microseconds, copying a few KiB does not. Storage 1 is a raw frame of its own, storage 2 an LZ4
one (``compression``). Arrays are C-contiguous and little-endian; decoded ones are read-only views.
Every size is checked against ``Limits`` before memory is taken for it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["ALIGN", "ARRAY_REF", "DTYPES", "LZ4", "PACKED", "PACK_MAX_BYTES", "PACK_TOTAL_BYTES", "RAW"]

PACKED: Final = 0
RAW: Final = 1
LZ4: Final = 2
PACK_MAX_BYTES: Final = 1 << 18
"""Arrays up to this size share frame 1: to copy them costs less than to send and track a frame for each."""
PACK_TOTAL_BYTES: Final = 1 << 22
"""Frame 1 is not filled beyond this; what comes then has frames of its own."""
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
