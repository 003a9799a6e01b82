"""Results written beside what they are results of."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aiorl.run.report.loggers import Logger

__all__ = ["BackgroundLogger"]

_MAX_WAITING = 64


class BackgroundLogger:
    """Writes with another logger, in a thread of its own: in order, and at once unless the disk is slow.

    What the other logger raises comes out of the next call of any method.
    """

    def __init__(self, logger: Logger) -> None:
        """Take a logger over; no thread is started before the first result."""
        self._logger = logger
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []

    def write(self, result: Mapping[str, Any]) -> None:
        """Have a result written as it is now; wait only where very many are still to be."""
        self._waiting = [one for one in self._waiting if not one.done() or one.exception()]
        if len(self._waiting) >= _MAX_WAITING or any(one.done() for one in self._waiting):
            self.flush()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "aiorl-results")
        copy = _copied(result)
        try:
            self._waiting.append(self._thread.submit(self._logger.write, copy))
        except RuntimeError:  # Python is ending, and has no threads any more
            self._logger.write(copy)

    def flush(self) -> None:
        """Wait until all is written."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.result()

    def close(self) -> None:
        """Write what is still to be written, end the thread and close the other logger."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._logger.close)
            if self._thread is not None:
                stack.callback(self._thread.shutdown)
            self.flush()


def _copied(value: Any) -> Any:
    """The same plain data, whatever its owner does with it from now on."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value
