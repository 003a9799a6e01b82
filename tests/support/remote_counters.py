"""Classes of remote actors that need no environments, so that their processes start quickly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aiorl


class Counter:
    """Number that calls change."""

    def __init__(self, number: int = 0) -> None:
        if number < 0:
            raise ValueError("a counter begins at 0 or above")
        self.number = number

    def begin(self, number: int) -> None:
        """Begin again at a number."""
        self.number = number

    def add(self, delta: int) -> int:
        self.number += delta
        return self.number

    async def add_on_loop(self, delta: int) -> int:
        return self.add(delta)

    async def add_to(self, other: Any, delta: int) -> Any:
        return await other.add(delta)

    def add_in_thread_to(self, other: Any, delta: int) -> Any:
        refs = [other.add.remote(delta), other.add.remote(delta=aiorl.put(delta))]
        ready, pending = aiorl.wait(refs, num_returns=2)
        return aiorl.get(ready), pending

    async def add_by_reference(self, other: Any) -> Any:
        return await other.add.remote(1)

    async def add_to_all(self, others: list[Any], delta: int) -> list[Any]:
        return [await other.add(delta) for other in others]

    def same(self, *values: Any, **named_values: Any) -> Any:
        return values, named_values

    def zero(self, array: np.ndarray[Any, Any]) -> float:
        total = float(array.sum())
        array[:] = 0.0
        return total

    def divide(self, number: int) -> float:
        return number / self.number

    def wait_for(self, path: str) -> int:
        """Wait until there is a file."""
        while not os.path.exists(path):
            time.sleep(0.01)
        return self.number

    @aiorl.method(num_returns=2)
    def pair(self) -> tuple[int, int]:
        return self.number, -self.number

    @aiorl.method(num_returns=2)
    def pair_of_lists(self) -> tuple[list[int], list[int]]:
        return [1], [-1]

    def count(self, limit: int) -> Iterator[int]:
        yield from range(limit)

    def start_another(self) -> Any:
        return aiorl.remote(Counter).remote()

    def as_it_is(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def die(self) -> None:
        os._exit(7)

    def take_memory(self, num_bytes: int) -> int:
        self.memory = np.ones(num_bytes, np.uint8)
        return int(self.memory[-1])

    def zeros(self, size: int) -> np.ndarray[Any, Any]:
        return np.zeros(size)


@aiorl.remote(num_cpus=3)
class Decorated(Counter):
    """Counter that has its options from the decorator."""
