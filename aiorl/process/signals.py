"""Ctrl-C and SIGTERM: the first asks for an orderly end, a second one ends the process at once.

Loads next to nothing, since a signal may come while a program is still loading what it needs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["end_at_once_on_stop_signals", "on_stop_signals"]

_TWICE_S = 0.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once_on_stop_signals(program: str) -> None:
    """End this process with one line and status 0 when a stop signal comes, until ``on_stop_signals`` takes over.

    For the time in which there is nothing to save or to end yet; without it Python would show where it stood.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"{program}: ended by {_name(number)} before the run began\n".encode())
        os._exit(0)

    for number in _STOP_SIGNALS:
        signal.signal(number, end)


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call ``stop`` with what the first one is called; to be called on the running loop.

    ``timeout`` and some supervisors send a signal to the process and again to its group; so a second one counts
    only half a second after the first.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    first: float | None = None

    def handle(number: int) -> None:
        nonlocal first
        if first is None:
            first = loop.time()
            stop(_name(number))
        elif loop.time() - first > _TWICE_S:
            os._exit(128 + number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, handle, number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
