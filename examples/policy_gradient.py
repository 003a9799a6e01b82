"""Policy gradient by hand: four workers sample with the newest weights, and this program learns.

    python -m examples.policy_gradient

It learns CartPole-v1 to a mean return of 475. Change `loss` for another algorithm. `aiorl train`
with PPO is faster, and continues when a host is lost.
"""

import asyncio
import sys

import numpy as np

import aiorl

import tensorflow as tf  # isort: skip  # after aiorl, which keeps its notices quiet

GAMMA = 0.99


class Reinforce(aiorl.TFPolicy):
    """Policy that learns by the gradient of Williams 1992."""

    def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
        """Add the discounted rewards from each row of an episode on."""
        to_go = np.zeros(len(batch) + 1, np.float32)
        for row in reversed(range(len(batch))):
            to_go[row] = batch["rewards"][row] + GAMMA * to_go[row + 1]
        batch["to_go"] = to_go[:-1]
        return batch

    def loss(self, batch):
        """Return the loss: the better an action did, the likelier it becomes."""
        dist_inputs, _ = self.model.forward(batch["obs"])
        logp = self.tf_distribution.logp(dist_inputs, batch["actions"])
        return -tf.reduce_mean(logp * batch["advantages"])


async def main(goal: float = 475.0) -> None:
    settings = {"env_creator": "CartPole-v1", "policy": Reinforce}
    settings |= {"batch_mode": "complete_episodes", "rollout_fragment_length": 500}
    learner = aiorl.RolloutWorker(**settings, policy_config={"lr": 0.01})
    async with aiorl.Actors() as actors:
        workers = await actors.start(aiorl.RolloutWorker, **settings, count=4)
        mean = 0.0
        while mean < goal:
            await actors.broadcast(workers, "set_weights", learner.get_weights())
            batches = await asyncio.gather(*(worker.sample() for worker in workers))
            batch = aiorl.SampleBatch.concat_samples(batches)
            batch["advantages"] = batch["to_go"] - batch["to_go"].mean()
            batch["advantages"] /= batch["advantages"].std()
            learner.learn_on_batch(batch)
            mean = batch["rewards"].sum() / batch["dones"].sum()
            print(f"mean return {mean:.1f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
