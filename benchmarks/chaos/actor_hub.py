"""Program of actors that is struck by `actor_faults`, and writes down how each of its calls ends:
`python -m benchmarks.chaos.actor_hub FOLDER LIFE PORT`.

``calls-LIFE.jsonl`` has a line for the begin and one for the end of each call. Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np

import aiorl
from aiorl.errors import ActorError, ActorLost, RemoteError
from benchmarks.chaos.echo_actor import Echo

__all__ = ["NUM_HERE", "NUM_JOINED", "Ending"]

NUM_HERE = 3
NUM_JOINED = 2
_CALLERS = 4
"""Calls of each actor at a time."""
_STUCK_S = 60.0
_NO_END = 1_000_000
_BIG = 200_000


class Ending:
    """Ends of calls, as the journal names them."""

    OK = "ok"
    LOST = "lost"
    CANCELLED = "cancelled"
    OVER = "over"
    """The program itself ended meanwhile."""
    WRONG = "wrong"
    STUCK = "stuck"


class _Load:
    """Callers of all actors, and the journal of their calls."""

    def __init__(self, actors: aiorl.Actors, folder: Path, life: int) -> None:
        self._actors = actors
        self._life = life
        self._journal = (folder / f"calls-{life}.jsonl").open("a", buffering=1)
        self._numbers = itertools.count()
        self._random = random.Random(life)
        self._handles: list[Any] = []
        self.is_ending = False

    async def start(self, folder: Path) -> None:
        """Start the actors."""
        here, joined = await asyncio.gather(
            self._actors.start(Echo, str(folder), count=NUM_HERE, restarts=_NO_END, on="here"),
            self._actors.start(Echo, str(folder), count=NUM_JOINED, restarts=_NO_END, on="joined"),
        )
        self._handles = [*here, *joined]

    def callers(self) -> list[Coroutine[Any, Any, None]]:
        """Return what calls until ``is_ending``."""
        indices = range(len(self._handles))
        calling = [self._call_again_and_again(i) for i in indices for _ in range(_CALLERS)]
        return [*calling, self._broadcast_again_and_again()]

    def write(self, *line: Any) -> None:
        """Add a line to the journal."""
        self._journal.write(json.dumps(line) + "\n")

    async def _call_again_and_again(self, index: int) -> None:
        while not self.is_ending:
            kind = self._random.choice(
                ("echo", "big", "wait", "forward", "items", "items_of", "cut")
            )
            token = f"{self._life}-{next(self._numbers)}"
            self.write(token, "begin", kind, index)
            self.write(token, await self._ending_of(kind, index, token))
            await asyncio.sleep(self._random.uniform(0.0, 0.1))

    async def _ending_of(self, kind: str, index: int, token: str) -> str:
        """Make a call, and return how it ends."""
        limit_s = 0.01 if kind == "cut" else _STUCK_S
        try:
            async with asyncio.timeout(limit_s):
                is_right = await self._call(kind, index, token)
        except ActorLost:
            return Ending.LOST
        except RemoteError as error:
            return Ending.LOST if error.kind == ActorLost.__name__ else f"{Ending.WRONG}: {error}"
        except TimeoutError:
            return Ending.CANCELLED if kind == "cut" else Ending.STUCK
        except ActorError as error:
            return Ending.OVER if self.is_ending else f"{Ending.WRONG}: {error}"
        return Ending.OK if is_right else Ending.WRONG

    async def _call(self, kind: str, index: int, token: str) -> bool:
        """Make a call, and return whether its result is the right one."""
        handle = self._handles[index]
        other = self._random.choice([each for each in self._handles if each != handle])
        numbers = list(range(self._random.randrange(40)))
        match kind:
            case "echo":
                return bool(await handle.echo(token, [token, numbers]) == [token, numbers])
            case "big":
                values = np.full(_BIG, len(numbers), np.float32)
                return np.array_equal(await handle.echo(token, values), values)
            case "wait" | "cut":
                return bool(await handle.wait(token, self._random.uniform(0.0, 0.2)) == token)
            case "forward":
                return bool(await handle.forward(token, other, [token]) == [token])
            case "items":
                return [item async for item in handle.items(token, len(numbers))] == numbers
            case _:
                return bool(await handle.items_of(token, other, len(numbers)) == numbers)

    async def _broadcast_again_and_again(self) -> None:
        while not self.is_ending:
            token = f"{self._life}-{next(self._numbers)}"
            values = np.full(_BIG, self._random.random(), np.float32)
            self.write(token, "begin", "broadcast", -1)
            self.write(token, await self._ending_of_broadcast(token, values))
            await asyncio.sleep(0.3)

    async def _ending_of_broadcast(self, token: str, values: Any) -> str:
        try:
            async with asyncio.timeout(_STUCK_S):
                results = await self._actors.broadcast(self._handles, "echo", token, values)
        except ActorLost:
            return Ending.LOST
        except TimeoutError:
            return Ending.STUCK
        except ActorError as error:
            return Ending.OVER if self.is_ending else f"{Ending.WRONG}: {error}"
        is_right = all(np.array_equal(result, values) for result in results)
        return Ending.OK if is_right else Ending.WRONG


async def _main(folder: Path, life: int, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = f"tcp://127.0.0.1:{port}"
    async with aiorl.Actors(address, folder / "keys", silence_s=3.0) as actors:
        load = _Load(actors, folder, life)
        starting = asyncio.create_task(load.start(folder))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        starting.result()
        calling = asyncio.gather(*load.callers())
        ends: list[asyncio.Future[Any]] = [calling, stopping]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        load.is_ending = True
    await calling
    load.write("", "end")


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
