"""A training loop of a user's, as tests launch it: `launched_loop.py [WORDS]`, or by another name."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiorl

TURNS = Path(os.environ.get("AIORL_RUN_DIR", ".")) / "turns.txt"


class Place:
    """Knows where it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def where(self) -> tuple[int, str, int]:
        return self.number, os.uname().nodename, os.getpid()


async def main(words: list[str]) -> None:
    async with aiorl.Actors() as actors:
        numbers = [int(word[6:]) for word in words if word.startswith("count=")]
        count = await actors.wait_for_processes(*numbers)
        num_joined = actors.num_free
        places = await actors.start(Place, 7, count=count)
        found = await actors.broadcast(places, "where")
        assert {number for number, _, _ in found} == {7}
        assert len({(name, pid) for _, name, pid in found}) == count
        names = " ".join(sorted({name for _, name, _ in found}))
        print(f"{count} actors, {num_joined} joined, on {names}", flush=True)
        turn = len(TURNS.read_text().split())
        if "wait" in words or ("wait-once" in words and turn == 1):
            try:
                await asyncio.Event().wait()
            finally:
                print("ending in order", flush=True)
        if "fail" in words:
            raise RuntimeError("the loop failed")


if __name__ == "__main__":
    with TURNS.open("a") as file:
        file.write("turn\n")
    print("turn", len(TURNS.read_text().split()), *sys.argv[1:], flush=True)
    if "idle" not in sys.argv:
        asyncio.run(main(sys.argv[1:]))
    sys.exit(7 if "seven" in sys.argv else 0)
