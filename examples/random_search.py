"""Augmented random search: workers answer with seeds and returns alone, never with directions.

    python -m examples.random_search

A linear policy learns CartPole-v1 to a mean return of 475 over 100 episodes, without TensorFlow.
A direction is drawn from its seed wherever it is needed: an answer is as small for four million
weights as for four. Source: Mania et al. 2018, https://arxiv.org/abs/1803.07055 (ARS V1).
"""

import asyncio
import sys

import gymnasium
import numpy as np

import aiorl


def direction(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(4)


class Explorer:
    """A worker with an environment of its own."""

    def __init__(self) -> None:
        self.env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    def play(self, weights: np.ndarray, seed: int) -> float:
        """Return the return of an episode."""
        obs, info = self.env.reset(seed=seed)
        while "episode" not in info:
            obs, *_, info = self.env.step(int(obs @ weights > 0))
        return float(info["episode"]["r"])

    def explore(self, weights: np.ndarray, seed: int) -> tuple[int, float, float]:
        """Return the seed of a direction, and the returns on both sides of it."""
        step = 0.5 * direction(seed)
        return seed, self.play(weights + step, seed), self.play(weights - step, seed)


async def main(seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    weights = np.zeros(4)
    mean = 0.0
    async with aiorl.Actors() as actors:
        workers = await actors.start(Explorer, count=2)
        while mean < 475:
            calls = [worker.explore(weights, int(rng.integers(2**31))) for worker in workers * 8]
            answers = await asyncio.gather(*calls)
            spread = np.std([answer[1:] for answer in answers]) + 1e-6
            steps = [(plus - minus) * direction(name) for name, plus, minus in answers]
            weights += np.mean(steps, axis=0) / spread
            calls = [worker.play(weights, int(rng.integers(2**31))) for worker in workers * 50]
            mean = np.mean(await asyncio.gather(*calls))
            print(f"mean return {mean:.1f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
