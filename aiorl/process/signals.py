"""Ctrl-C and SIGTERM: the first asks for an orderly end, a second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

__all__ = ["on_stop_signals"]

_TWICE_S = 0.5


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name at the first one; to be called on the running loop.

    ``timeout`` and some supervisors send a signal to the process and again to its group; so a second one counts
    only half a second after the first.
    """
    loop = asyncio.get_running_loop()
    first: float | None = None

    def handle(number: int) -> None:
        nonlocal first
        if first is None:
            first = loop.time()
            stop(signal.Signals(number).name)
        elif loop.time() - first > _TWICE_S:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
