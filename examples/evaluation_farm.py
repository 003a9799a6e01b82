"""A farm of evaluations: the policy of a run plays in many processes, here or on hosts that join.
They share no disk: the checkpoint is an argument. What a lost process played is played again.

    aiorl train --env CartPole-v1 --stop-timesteps 20000 --run-dir runs/farm
    python -m examples.evaluation_farm runs/farm 2                               # on this host
    python -m examples.evaluation_farm runs/farm 16 tcp://0.0.0.0:5557 keys      # on others
    aiorl worker --connect tcp://HOST:5557 --keys keys --slots 8                 # on each of them
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

import aiorl
from aiorl.errors import ActorLost


class Evaluator:
    """A checkpoint, which arrives as bytes: hosts share no disk."""

    def __init__(self, files):
        self.folder = tempfile.TemporaryDirectory()
        for name, content in files.items():
            path = Path(self.folder.name, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def evaluate(self, seed):
        """Return the returns of 10 episodes."""
        return aiorl.evaluate(self.folder.name, episodes=10, seed=seed).returns


async def work(evaluator, seeds, returns):
    while seeds:
        seed = seeds.pop()
        try:
            returns += await evaluator.evaluate(seed)
        except ActorLost as error:
            seeds.append(seed)  # for another process, or for this one after its restart
            if not error.is_restarting:
                return


async def main(files, num_processes, bind=None, keys=None):
    seeds = list(range(20))
    returns = []
    async with aiorl.Actors(bind, keys) as actors:
        where = "joined" if bind else "here"
        evaluators = await actors.start(Evaluator, files, count=num_processes, restarts=3, on=where)
        await asyncio.gather(*(work(evaluator, seeds, returns) for evaluator in evaluators))
    print(f"{np.mean(returns):.1f} ± {np.std(returns):.1f} over {len(returns)} episodes")


if __name__ == "__main__":
    checkpoint = Path(aiorl.load_policy(sys.argv[1]).path)
    contents = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in checkpoint.iterdir()}
    asyncio.run(main(contents, int(sys.argv[2]), *sys.argv[3:]))
