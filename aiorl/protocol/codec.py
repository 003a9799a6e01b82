"""Messages to frames and back, without copying large arrays and without trusting a byte.

``encode`` is in ``encoding``, ``decode``, ``decode_hello`` and ``peek_counts`` in ``decoding``; the format in
``wire_format``.
"""

from __future__ import annotations

from aiorl.protocol.decoding import Buffer, Counts, decode, decode_hello, peek_counts
from aiorl.protocol.encoding import Frame, encode

__all__ = ["Buffer", "Counts", "Frame", "decode", "decode_hello", "encode", "peek_counts"]
