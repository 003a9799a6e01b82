"""Examples of RLlib's documentation run as they stand there, but for imports, class names of their
time, and functions for other processes, which stand at the top level of a module.

R254.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from optimizer_things import StepPolicy, cartpole

import aiorl
from aiorl import (
    MultiAgentBatch,
    RolloutWorker,
    SampleBatch,
    SyncSamplesOptimizer,
    WorkerSet,
)
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.learning.policies import PGTFPolicy

pytestmark = pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date")


@pytest.fixture(scope="module", autouse=True)
def end_of_actors() -> Iterator[None]:
    yield
    aiorl.shutdown()


class MultiAgentTrafficGrid(MultiAgentEnv):
    """Cars and a traffic light, each of which sees three numbers and chooses one of two actions."""

    def __init__(self, num_cars: int) -> None:
        self.agents = [*(f"car_{number}" for number in range(num_cars)), "light"]
        self.steps_left = 0

    def reset(self, **options: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        self.steps_left = 20
        return self._seen(), {}

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        assert actions.keys() == set(self.agents)
        self.steps_left -= 1
        rewards = {agent: float(action) for agent, action in actions.items()}
        return self._seen(), rewards, {"__all__": self.steps_left == 0}, {"__all__": False}, {}

    def _seen(self) -> dict[Any, Any]:
        return {agent: np.full(3, self.steps_left, np.float32) for agent in self.agents}


def Box(of_example: Any) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (3,), np.float32)


def Discrete(of_example: Any) -> spaces.Discrete:
    return spaces.Discrete(2)


def test_a_worker_collects_experience() -> None:
    worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v0"),
        policy=PGTFPolicy)  # fmt: skip
    batch = worker.sample()
    print(batch)
    assert isinstance(batch, SampleBatch)
    assert {"obs", "actions", "rewards", "dones", "new_obs"} <= batch.keys()
    worker.stop()


def test_a_worker_has_agents_with_several_policies() -> None:
    # fmt: off
    worker = RolloutWorker(
      env_creator=lambda _: MultiAgentTrafficGrid(num_cars=25),
      policy={
          # Use an ensemble of two policies for car agents
          "car_policy1":
            (PGTFPolicy, Box(...), Discrete(...), {"gamma": 0.99}),
          "car_policy2":
            (PGTFPolicy, Box(...), Discrete(...), {"gamma": 0.95}),
          # Use a single shared policy for all traffic lights
          "traffic_light_policy":
            (PGTFPolicy, Box(...), Discrete(...), {}),
      },
      policy_mapping_fn=lambda agent_id:
        random.choice(["car_policy1", "car_policy2"])
        if agent_id.startswith("car_") else "traffic_light_policy")
    # fmt: on
    batch = worker.sample()
    print(batch)
    assert isinstance(batch, MultiAgentBatch)
    assert batch.keys() == {"car_policy1", "car_policy2", "traffic_light_policy"}
    worker.stop()


@pytest.mark.nightly
def test_an_optimizer_makes_workers() -> None:
    # fmt: off
    optimizer = SyncSamplesOptimizer.make(
      evaluator_cls=RolloutWorker,
      evaluator_args={
        "env_creator": cartpole,
        "policy": PGTFPolicy,
      },
      num_workers=2)
    for _ in range(10): optimizer.step()  # noqa: E701
    # fmt: on
    assert optimizer.num_steps_trained == 10 * 2 * 100
    optimizer.stop()


@pytest.mark.slow
def test_policy_gradients_by_hand() -> None:
    """From "RLlib Concepts and Custom Algorithms"."""
    # Setup policy and rollout workers
    env = gym.make("CartPole-v0")
    policy = StepPolicy(env.observation_space, env.action_space, {})
    workers = WorkerSet(policy=StepPolicy, env_creator=cartpole, num_workers=2)
    for _ in range(3):
        # Gather a batch of samples
        # fmt: off
        T1 = SampleBatch.concat_samples(
            aiorl.get([w.sample.remote() for w in workers.remote_workers()]))
        # fmt: on

        # Improve the policy using the T1 batch
        policy.learn_on_batch(T1)

        # Broadcast weights to the policy evaluation workers
        weights = aiorl.put({"default_policy": policy.get_weights()})
        for w in workers.remote_workers():
            w.set_weights.remote(weights)
    for w in workers.remote_workers():
        assert aiorl.get(w.get_weights.remote()) == {"default_policy": {"w": 3}}
    workers.stop()
