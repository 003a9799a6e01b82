from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque

import pytest

from aiorl.compat.rollout_worker import SampleStream


def test_the_event_loop_runs_on_and_the_next_caller_gets_the_batch_of_a_cancelled_wait():
    go_on, numbers = threading.Event(), itertools.count()

    def sample():
        assert go_on.wait(10)
        return next(numbers)

    stream = SampleStream(sample)

    async def give_up():
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    async def take():
        return [await anext(stream) for _ in range(2)]

    asyncio.run(give_up())
    go_on.set()
    assert asyncio.run(take()) == [0, 1]
    asyncio.run(give_up())
    assert next(stream) == 2


def test_an_error_reaches_its_caller_and_the_next_call_works():
    def sample():
        number = next(numbers)
        if number == 1:
            raise ValueError("one")
        return number

    for take in (lambda stream: asyncio.run(take_async(stream)), next):
        numbers, stream = itertools.count(), SampleStream(sample)
        assert take(stream) == 0
        with pytest.raises(ValueError, match="one"):
            take(stream)
        assert take(stream) == 2


async def take_async(stream):
    return await anext(stream)


def test_each_batch_is_returned_once_even_to_concurrent_callers():
    lock, numbers, ahead = threading.Lock(), itertools.count(), deque()

    def sample():
        with lock:
            time.sleep(0.01)
            return next(numbers)

    async def take(count):
        stream = SampleStream(sample, ahead)
        return [await anext(stream) for _ in range(count)]

    async def several():
        given_up = asyncio.ensure_future(take(1))
        await asyncio.sleep(0.005)
        given_up.cancel()
        return list(itertools.chain(*await asyncio.gather(*(take(5) for _ in range(3)))))

    assert sorted(asyncio.run(several())) == list(range(15))
