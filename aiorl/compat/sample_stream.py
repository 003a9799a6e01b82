"""SampleStream: a worker's batches as an endless iterator, plain or asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from aiorl.data.concat import Batch


@dataclass(slots=True)
class Ahead:
    """Batches that are sampled, or being sampled, but claimed by nobody; streams of one worker share them.

    Attributes:
        futures: get the batches, oldest first.
    """

    futures: deque[Future[Batch]] = field(default_factory=deque)


class SampleStream:
    """``for batch in stream`` samples in the caller's thread, ``async for batch in stream`` in another one.

    Each batch is given once, to whoever asks next. Use one of the two forms at a time.
    """

    def __init__(self, sample: Callable[[], Batch], ahead: Ahead | None = None) -> None:
        """Give what ``sample`` returns, but what is ``ahead`` first."""
        self._sample = sample
        self._ahead = ahead or Ahead()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        ahead = self._ahead.futures
        return ahead.popleft().result() if ahead else self._sample()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """The next batch; the event loop goes on meanwhile.

        Cancelled, it leaves sampling to go on; the batch is then given to whoever asks next.
        """
        ahead = self._ahead.futures
        future = ahead.popleft() if ahead else _in_thread(self._sample)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            ahead.appendleft(future)
            raise


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
