"""A parameter server: workers send gradients when they have them, and wait for no other worker.

    python -m examples.parameter_server

A linear policy learns CartPole-v1 to a mean return of 475 by REINFORCE (Williams 1992).
"""

import asyncio

import gymnasium
import numpy as np

import aiorl


class Server:
    """The weights, which each gradient changes when it arrives."""

    def __init__(self):
        self.weights = np.zeros(4)
        self.log = []

    def push(self, gradient, episode_return, version):
        """Add a gradient; return weights, their version, and the means of 100 returns and delays."""
        self.weights += 0.1 * gradient
        self.log.append((episode_return, len(self.log) - version))
        return self.weights, len(self.log), *np.mean(self.log[-100:], axis=0)


class Worker:
    """A loop that is one long call. It gets the handle of the server, and calls it."""

    async def work(self, server):
        """Send gradients until the mean return is 475; return the last answer without weights."""
        env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
        weights, version, *means = await server.push(np.zeros(4), 0.0, 0)
        while means[0] < 475:
            scores = []  # gradients of the log-probabilities of the actions
            obs, info = env.reset()
            while "episode" not in info:
                probability = 1 / (1 + np.exp(-obs @ weights))
                action = int(np.random.random() < probability)
                scores.append((action - probability) * obs)
                obs, *_, info = env.step(action)
            to_go = np.arange(len(scores), 0.0, -1.0)  # each reward is 1
            gradient = (to_go - to_go.mean()) / to_go.std() @ scores
            weights, version, *means = await server.push(gradient, len(scores), version)
        return version, *means


async def main():
    async with aiorl.Actors() as actors:
        server = await actors.start(Server)
        workers = await actors.start(Worker, count=2)
        count, mean, delay = max(await asyncio.gather(*(one.work(server) for one in workers)))
        print(f"mean return {mean:.1f} after {count} gradients, each {delay:.1f} updates late")


if __name__ == "__main__":
    asyncio.run(main())
