"""Ape-X (Horgan et al. 2018) in small: samplers fill a replay actor, which feeds this program.
A table of values learns Taxi-v4 to a mean return of 7; the best policies reach 8.

    python -m examples.prioritised_replay
"""

import asyncio

import gymnasium
import numpy as np

from aiorl import Actors, algorithms

COLUMNS = ("obs", "actions", "rewards", "new_obs", "continues")


def make_replay():
    specs = tuple(algorithms.columns.ColumnSpec(name, dtype="int32") for name in COLUMNS)
    return algorithms.Replay(algorithms.ReplaySpec(specs, 50_000, algorithms.Prioritised()), seed=1)


class Sampler:
    """A process that plays, with more or less noise."""

    async def play(self, replay, q, noise):
        """Play an episode into the replay, and return its return."""
        env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("Taxi-v4"))
        obs, info = env.reset()
        steps = []
        while "episode" not in info:
            action = int(np.argmax(q[obs] + noise * np.random.standard_normal(6)))
            new_obs, reward, is_end, _, info = env.step(action)
            steps.append((obs, action, reward, new_obs, not is_end))
            obs = new_obs
        columns = np.array(steps, np.int32).T[..., None]  # each [T, 1]
        await replay.insert_fragment(dict(zip(COLUMNS, columns, strict=True)))
        return info["episode"]["r"]


async def main():
    q = np.zeros((500, 6))  # the value of each action in each state
    returns = []
    async with Actors() as actors:
        replay = await actors.start(make_replay)
        samplers = await actors.start(Sampler, count=3)
        while len(returns) < 100 or np.mean(returns[-100:]) < 7:
            calls = [sampler.play(replay, q, noise) for noise, sampler in enumerate(samplers)]
            for _ in range(4 if returns else 0):  # while they play
                rows, ids, weights = await replay.sample(256, beta=0.4)
                obs, actions, rewards, new_obs, continues = rows.values()
                errors = rewards + 0.99 * continues * q[new_obs].max(axis=1) - q[obs, actions]
                q[obs, actions] += 0.3 * weights * errors
                await replay.update_priorities(ids, errors)
            returns.append((await asyncio.gather(*calls))[0])  # of the one without noise
    print(f"mean return {np.mean(returns[-100:]):.2f} after {len(returns)} episodes")


if __name__ == "__main__":
    asyncio.run(main())
