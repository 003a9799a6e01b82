"""Choices drawn from the bytes of an input, so that a small change of the input changes the actions
only slightly.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    64,
    255,
    256,
    1000,
    65_536,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    -1,
    -2,
]
TEXTS = [
    "",
    "a",
    "w1",
    "i1",
    "L",
    "run",
    "default_policy",
    "obs",
    "x" * 70,
    "x" * 300,
    "\x1b[2J",
    "a\nb",
    "\u202e",
    "é",
]


class Source:
    """Reads bytes one after the other, then zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_empty(self) -> bool:
        return self._position >= len(self._data)

    def byte(self) -> int:
        self._position = position = self._position + 1
        try:
            return self._data[position - 1]
        except IndexError:
            return 0

    def below(self, count: int) -> int:
        self._position = position = self._position + 1
        try:
            return self._data[position - 1] % count
        except IndexError:
            return 0

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def take(self, count: int) -> bytes:
        position = self._position
        self._position = position + count
        return self._data[position : position + count]

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def number(self) -> int:
        """Return a small number more often than a strange one."""
        kind = self.byte()
        if kind < 128:
            return kind % 16
        if kind < 240:
            return NUMBERS[kind % len(NUMBERS)]
        return int.from_bytes(self.take(8), "little", signed=True)

    def real(self) -> float:
        special = (0.0, 1.0, -1.0, 0.5, 1e300, float("nan"), float("inf"), -float("inf"))
        kind = self.byte()
        return (
            special[kind % 8]
            if kind < 240
            else struct.unpack("<d", self.take(8).ljust(8, b"\0"))[0]
        )

    def text(self) -> str:
        kind = self.byte()
        return (
            TEXTS[kind % len(TEXTS)]
            if kind < 240
            else self.take(self.below(16)).decode("utf-8", "replace")
        )

    def plain(self, depth: int = 3) -> Any:
        """Return any value that msgpack and JSON can represent."""
        match self.below(10 if depth else 7):
            case 0:
                return None
            case 1:
                return bool(self.below(2))
            case 2 | 3:
                return self.number()
            case 4:
                return self.real()
            case 5:
                return self.text()
            case 6:
                return self.take(self.below(32))
            case 7:
                return [self.plain(depth - 1) for _ in range(self.below(5))]
            case 8:
                return {self.text(): self.plain(depth - 1) for _ in range(self.below(5))}
            case _:
                nested: Any = self.plain(0)
                for _ in range(4 * self.byte()):
                    nested = [nested]
                return nested


def as_json(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return (
        {str(name): as_json(item) for name, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def edit(place: Any, source: Source) -> None:
    """Change one thing somewhere in nested dicts and lists."""
    while isinstance(place, dict | list) and place:
        name = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[name]
        if isinstance(inner, dict | list) and inner and source.below(5):
            place = inner
            continue
        if isinstance(inner, bytes) and source.below(2):
            at = source.number() % max(len(inner), 1)
            place[name] = inner[:at] + source.take(2) + inner[at + 2 :]
        elif source.below(8) == 7:
            del place[name]
        else:
            place[name] = source.plain()
        return
    source.byte()
