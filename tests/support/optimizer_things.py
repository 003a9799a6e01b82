"""Environments, policies and functions for optimizers, which worker processes import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from plain_policies import PlainPolicy

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.testing.envs import CountingEnv


def cartpole(context: Any) -> Any:
    return gym.make("CartPole-v1")


def counting(context: Any) -> CountingEnv:
    return CountingEnv()


def pid_of(worker: Any) -> int:
    return os.getpid()


def weight_of(worker: Any) -> float:
    return float(worker.get_policy().weight[0])


def timestep_of(worker: Any) -> int:
    timestep: int = worker.get_policy().global_timestep
    return timestep


def index_and_seed_of(worker: Any, index: int) -> tuple[int, int, int, int]:
    seed = worker.creation_args()["seed"]
    return index, worker.worker_index, worker.num_workers, seed


def fail_elsewhere(worker: Any) -> None:
    if worker.worker_index:
        raise KeyError("no such thing")


def id_and_pid_of(policy: Any, policy_id: str) -> tuple[str, int]:
    return policy_id, os.getpid()


class StepPolicy(PlainPolicy):
    """Policy whose weight counts its updates; the TD error of a row is its time step."""

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        super().learn_on_batch(batch)
        self.weight = self.weight + 1
        figures = {"rows": batch.count, "weight": float(self.weight[0])}
        return {"learner_stats": figures, "td_error": batch["t"].astype(np.float32)}


class GradientPolicy(PlainPolicy):
    """Policy whose gradient is the weight with which it was computed, plus 1."""

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"w": np.ones(1, np.float32)}, {"computed_with": float(self.weight[0])}


class FailingOnceWorker(RolloutWorker):
    """Worker whose first sample fails, in one process of all that share the ``marker`` file."""

    def sample(self) -> Any:
        marker = Path(self.policy_config["marker"])
        if not marker.exists():
            marker.touch()
            if self.policy_config["failing"] == "exits":
                os._exit(1)
            raise ValueError("the first sample fails")
        return super().sample()


class StatePolicy(StepPolicy):
    """Policy with a recurrent state."""

    def get_initial_state(self) -> list[Any]:
        return [np.zeros(1, np.float32)]

    def compute_actions(self, obs: Any, state_batches: Any = (), *args: Any, **kwargs: Any) -> Any:
        actions, _, columns = super().compute_actions(obs, state_batches, *args, **kwargs)
        return actions, [state_batches[0] + 1], columns
