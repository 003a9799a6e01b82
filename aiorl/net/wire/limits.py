"""What a peer may ask of our memory: every bound the codec checks before it takes any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from aiorl.text import MAX_NAME

__all__ = [
    "ACK_BYTES",
    "DEFAULT_LIMITS",
    "MAX_HELLO_BYTES",
    "MAX_STRANGER_BYTES",
    "MAX_WORKERS",
    "Limits",
    "limits_of",
    "max_workers_of",
]

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


class SizeSettings(Protocol):
    """The sizes that a configuration sets."""

    @property
    def max_header_bytes(self) -> int:
        """Largest message header."""

    @property
    def max_message_bytes(self) -> int:
        """Largest message, after decompression."""


def max_workers_of(limits: Limits) -> int:
    """How many workers a run may have so that what they make a snapshot's header grow by is half of it at most."""
    return min(MAX_WORKERS, limits.max_map, limits.max_header_bytes // 2 // ACK_BYTES)


def limits_of(settings: SizeSettings) -> Limits:
    """The bounds that a configuration sets; the others are the default ones."""
    return Limits(
        max_header_bytes=settings.max_header_bytes,
        max_array_bytes=settings.max_message_bytes,
        max_message_bytes=settings.max_message_bytes,
    )
