"""Actor of `actor_hub`: its methods of all kinds return what they get, and write down that they run.

``ran-PID-RANDOM.txt`` of each process has a line for each call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

__all__ = ["Echo"]


class Echo:
    """Actor that returns what it gets, and writes down which calls it runs."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / f"ran-{os.getpid()}-{os.urandom(4).hex()}.txt"
        self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _ran(self, token: str) -> None:
        os.write(self._journal, f"{token}\n".encode())

    def echo(self, token: str, value: Any) -> Any:
        """Return the value, from the actor's thread."""
        self._ran(token)
        return value

    async def wait(self, token: str, seconds: float) -> str:
        """Return the token after a while, from the event loop."""
        self._ran(token)
        await asyncio.sleep(seconds)
        return token

    async def forward(self, token: str, other: Any, value: Any) -> Any:
        """Return the value from another actor."""
        self._ran(token)
        return await other.echo(f"{token}/other", value)

    async def items(self, token: str, count: int) -> AsyncIterator[int]:
        """Yield the numbers below ``count``."""
        self._ran(token)
        for number in range(count):
            yield number

    async def items_of(self, token: str, other: Any, count: int) -> list[int]:
        """Return the items of another actor."""
        self._ran(token)
        return [item async for item in other.items(f"{token}/other", count)]
