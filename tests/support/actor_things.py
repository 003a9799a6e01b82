"""Classes of actors for tests; the processes of actors import them by this module's name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.actors.calls import ActorHandle


class WithoutText(Exception):
    def __str__(self) -> str:
        raise ValueError("its text fails, too")


class Counter:
    """Number that methods of all kinds change."""

    def __init__(self, number: int = 0) -> None:
        if number < 0:
            raise ValueError("a counter begins at 0 or above")
        self.begin(number)

    def begin(self, number: int) -> None:
        """Begin again, as a new counter does."""
        self.number = number
        self.cancelled = 0
        self.array = np.zeros(50_000)

    def add(self, delta: int) -> int:
        self.number += delta
        return self.number

    async def add_on_loop(self, delta: int) -> int:
        self.number += delta
        return self.number

    def same(self, value: Any) -> Any:
        return value

    def divide(self, number: int) -> int:
        return number // self.number

    def stop_iteration(self) -> Any:
        return next(iter(()))

    def add_in_thread(self, other: ActorHandle) -> None:
        other.add(1)

    def fail(self) -> None:
        raise KeyError("missing")

    def fail_without_text(self) -> None:
        raise WithoutText

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def die(self, status: int = 7) -> None:
        os._exit(status)

    def die_and_leave_a_fork(self) -> None:
        if os.fork():
            os._exit(7)
        time.sleep(100)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    async def wait_for_ever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def num_cancelled(self) -> int:
        return self.cancelled

    def count_to(self, end: int) -> Iterator[int]:
        for number in range(end):
            self.number = number
            yield number

    async def arrays(self, count: int) -> AsyncIterator[np.ndarray[Any, Any]]:
        try:
            for number in range(count):
                self.number = number
                yield np.full(1000, number, np.float32)
        finally:
            self.cancelled += 1

    async def add_to(self, other: ActorHandle, delta: int) -> Any:
        return await other.add(delta)

    async def sum_of(self, other: ActorHandle, end: int) -> int:
        return sum([number async for number in other.count_to(end)])

    def call(self, function: Any, value: Any) -> Any:
        return function(value)

    async def zeros(self, count: int) -> AsyncIterator[Any]:
        yield 0
        yield [np.zeros(1)] * count
        yield 0

    def add_to_array(self, delta: float) -> np.ndarray[Any, Any]:
        """Return an array that the next call changes."""
        self.array += delta
        return self.array

    def sums(self, count: int) -> Iterator[np.ndarray[Any, Any]]:
        for _ in range(count):
            yield self.add_to_array(1.0)

    def sum(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    def big(self, size: int) -> list[int]:
        return list(range(size))


def double(number: int) -> int:
    return 2 * number


def make_counter(number: int) -> Counter:
    return Counter(number)


def make_never(file: str) -> None:
    """Begin to make an object, and never end."""
    Path(file).touch()
    time.sleep(60)
