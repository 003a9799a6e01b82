"""What a peer may ask of our memory: every bound the codec checks before it takes any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["DEFAULT_LIMITS", "Limits", "limits_of"]


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
    max_message_bytes: int = 1 << 29
    max_arrays: int = 4096
    max_ndim: int = 8
    max_string: int = 1 << 16
    max_map: int = 4096
    max_depth: int = 16


DEFAULT_LIMITS = Limits()


class SizeSettings(Protocol):
    """The sizes that a configuration sets."""

    @property
    def max_header_bytes(self) -> int:
        """Largest message header."""

    @property
    def max_message_bytes(self) -> int:
        """Largest message, after decompression."""


def limits_of(settings: SizeSettings) -> Limits:
    """The bounds that a configuration sets; the others are the default ones."""
    return Limits(
        max_header_bytes=settings.max_header_bytes,
        max_array_bytes=settings.max_message_bytes,
        max_message_bytes=settings.max_message_bytes,
    )
