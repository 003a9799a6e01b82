"""Work of two actors, and the figures of a program that calls them by whatever means.

`benchmarks.actors` compares `benchmarks.actors_aiorl`, `benchmarks.actors_ray` and
`benchmarks.actors_bare`. It also runs in Ray's virtual environment, so nothing of aiorl is imported here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

__all__ = ["ACTORS", "IN_FLIGHT", "KINDS", "AsyncWorker", "System", "Worker", "measure", "report"]

ACTORS = 2
IN_FLIGHT = 8
ROUND_S = 1.0
_ROWS = 100
_SHAPES = ((8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (3136, 512), (512, 6))
"""Layers of the usual network for Atari: 6.7 MB."""


class Worker:
    """Object of an actor, with plain methods that take no time themselves."""

    def __init__(self) -> None:
        """Make a batch of 100 rows of CartPole with the columns of PPO: 7 kB."""
        self._batch = {
            "obs": np.zeros((_ROWS, 4), np.float32),
            "new_obs": np.zeros((_ROWS, 4), np.float32),
            "actions": np.zeros(_ROWS, np.int64),
            "rewards": np.zeros(_ROWS, np.float32),
            "dones": np.zeros(_ROWS, np.bool_),
            "action_logp": np.zeros(_ROWS, np.float32),
            "action_dist_inputs": np.zeros((_ROWS, 2), np.float32),
            "vf_preds": np.zeros(_ROWS, np.float32),
            "advantages": np.zeros(_ROWS, np.float32),
            "value_targets": np.zeros(_ROWS, np.float32),
        }
        self._weights: Mapping[str, Any] = {}

    def nothing(self) -> None:
        """Return at once."""

    def sample(self) -> dict[str, Any]:
        """Return the batch."""
        return self._batch

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take weights."""
        self._weights = weights


class AsyncWorker(Worker):
    """The same with asynchronous methods, which need no thread."""

    async def nothing(self) -> None:  # type: ignore[override]
        """Return at once."""

    async def sample(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the batch."""
        return self._batch

    async def set_weights(self, weights: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take weights."""
        self._weights = weights


KINDS = {"plain": Worker, "asynchronous": AsyncWorker}
"""Classes of actors by the kind of their methods."""


class System(Protocol):
    """Program with two actors, each with a `Worker` or an `AsyncWorker`."""

    async def nothing(self) -> None:
        """Call an actor, and wait for its answer."""

    async def sample(self) -> Mapping[str, Any]:
        """Return the batch of an actor."""

    async def stream(self, until: float) -> int:
        """Return how many batches of both actors arrive until a time of ``time.perf_counter``, with
        eight calls in flight.
        """

    async def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Send weights to both actors, and wait for their answers."""


async def measure(system: System, round_s: float = ROUND_S) -> dict[str, float]:
    """Return a system's figures: medians in milliseconds, and batches per second.

    Args:
        system: the actors.
        round_s: time for each figure, seconds.
    """
    rng = np.random.default_rng(0)
    weights = {
        f"layer{number}": rng.standard_normal(shape, np.float32)
        for number, shape in enumerate(_SHAPES)
    }
    figures = {
        "round_trip_ms": await _median_ms(system.nothing, round_s),
        "batch_ms": await _median_ms(system.sample, round_s),
    }
    began = time.perf_counter()
    count = await system.stream(began + round_s)
    figures["batches_per_s"] = count / (time.perf_counter() - began)
    figures["broadcast_ms"] = await _median_ms(lambda: system.set_weights(weights), round_s)
    return figures


async def _median_ms(act: Callable[[], Awaitable[object]], round_s: float) -> float:
    """Return the median time of an act that is repeated; the first tenth only warms up."""
    times: list[float] = []
    until = time.perf_counter() + round_s
    while not times or time.perf_counter() < until:
        began = time.perf_counter()
        await act()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[len(times) // 10 :])


async def report(started: Callable[[type[Worker]], AbstractAsyncContextManager[System]]) -> None:
    """Start a system, with methods of the kind that the command line names, and print "ready" once
    both actors have answered a call, then the figures as JSON; end with the standard input.
    """
    (kind,) = sys.argv[1:]
    async with started(KINDS[kind]) as system:
        await system.set_weights({})
        print("ready", flush=True)
        print(json.dumps(await measure(system)), flush=True)
        sys.stdin.read()  # meanwhile, the memory of all processes is read
