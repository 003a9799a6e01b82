"""Timers of an endpoint, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    """Calls that are due later on the running loop, at most one of each name; none after `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def start(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        """Schedule ``call``; does nothing while one of this name is scheduled."""
        if name not in self._handles:
            self.restart(name, after_s, call)

    def restart(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        """Schedule ``call`` in place of the one of this name that is scheduled."""

        def run() -> None:
            del self._handles[name]
            call()

        if self._closed:
            return
        scheduled = self._handles.get(name)
        if scheduled is not None:
            scheduled.cancel()
        self._handles[name] = self._loop.call_later(after_s, run)

    def close(self) -> None:
        """Cancel everything that is scheduled."""
        self._closed = True
        for handle in self._handles.values():
            handle.cancel()
