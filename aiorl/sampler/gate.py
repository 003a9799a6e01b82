"""TurnGate: lets another thread change weights or filters where neither of them is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["TurnGate"]


class TurnGate:
    """Held by the sampling thread while it works on a turn; others ask for a pause.

    A pause begins as soon as the sampling thread leaves the gate, and that thread waits before it enters
    again: it cannot overtake those who asked before.
    """

    def __init__(self) -> None:
        """Open."""
        self._condition = threading.Condition()
        self._is_inside = False
        self._pauses = 0

    def __enter__(self) -> None:
        """Enter, after every pause asked for is over."""
        with self._condition:
            while self._pauses:
                self._condition.wait()
            self._is_inside = True

    def __exit__(self, *error: object) -> None:
        """Leave."""
        with self._condition:
            self._is_inside = False
            if self._pauses:
                self._condition.notify_all()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No turn is worked on inside this block. Any thread but the sampling one may ask."""
        with self._condition:
            self._pauses += 1
            while self._is_inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._pauses -= 1
                self._condition.notify_all()
