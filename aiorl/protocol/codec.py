"""Messages to frames and back, without copying large arrays and without trusting a byte.

``encode`` is in ``encoding``, ``decode`` and ``peek_counts`` in ``decoding``; the format in ``wire_format``.
"""

from __future__ import annotations

from aiorl.protocol.decoding import Buffer, Counts, decode, peek_counts
from aiorl.protocol.encoding import Frame, encode

__all__ = ["Buffer", "Counts", "Frame", "decode", "encode", "peek_counts"]
