"""SampleStream: a worker's batches as an endless iterator, plain or asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from aiorl.data.concat import Batch

__all__ = ["SampleStream"]


class SampleStream:
    """``for batch in stream`` samples in the caller's thread, ``async for batch in stream`` in another one.

    Each batch is given once, to whoever asks next. Use one of the two forms at a time.
    """

    def __init__(self, sample: Callable[[], Batch]) -> None:
        """Give what ``sample`` returns."""
        self._sample = sample
        self._ahead: Future[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead.result()
        return self._sample()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """The next batch; the event loop goes on meanwhile.

        Cancelled, it leaves sampling to go on; the batch is then given to whoever asks next.
        """
        if self._ahead is None:
            self._ahead = _in_thread(self._sample)
        try:
            batch = await asyncio.shield(asyncio.wrap_future(self._ahead))
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._ahead = None
            raise
        self._ahead = None
        return batch


def _in_thread(sample: Callable[[], Batch]) -> Future[Batch]:
    """What ``sample`` returns or raises, from a daemon thread: one that blocks does not keep the process alive."""
    future: Future[Batch] = Future()
    # it cannot be cancelled any more: whoever waits for it may be
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(sample())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="aiorl-sample", daemon=True).start()
    return future
