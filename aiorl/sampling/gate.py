"""TurnGate: lets another thread change weights or filters where neither of them is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["TurnGate"]


class TurnGate:
    """Held by the sampling thread while it works on a turn; others ask for a pause.

    A pause begins as soon as the sampling thread leaves the gate, and that thread waits before it enters
    again: it cannot overtake those who asked before. The sampling thread itself is never held up by a pause that
    it asks for, as a callback does in the middle of a turn.
    """

    def __init__(self) -> None:
        """Open."""
        self._lock = threading.RLock()  # entered by itself: twice as fast as by way of the condition
        self._condition = threading.Condition(self._lock)
        self._inside: int | None = None  # the thread that is, by its identifier
        self._pausing: list[int] = []  # threads that pause, or wait to

    def __enter__(self) -> None:
        """Enter, after every pause that others asked for is over."""
        me = threading.get_ident()
        with self._lock:
            while self._pausing and any(thread != me for thread in self._pausing):
                self._condition.wait()
            self._inside = me

    def __exit__(self, *error: object) -> None:
        """Leave."""
        with self._lock:
            self._inside = None
            if self._pausing:
                self._condition.notify_all()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No turn is worked on inside this block, but those of the thread that asks for it."""
        me = threading.get_ident()
        if self._inside == me:
            yield
            return
        with self._lock:
            self._pausing.append(me)
        try:  # Ctrl-C ends the wait, too
            with self._lock:
                while self._inside is not None:
                    self._condition.wait()
            yield
        finally:
            with self._lock:
                self._pausing.remove(me)
                self._condition.notify_all()
