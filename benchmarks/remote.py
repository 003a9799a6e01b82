"""Slow environments in processes of their own: eight that take 20 ms for a step, in one worker process.

The baseline is the same worker with the same environments in turn.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from benchmarks.measure import alternate, learner_rate
from benchmarks.result import Figure

__all__ = ["SlowCartPole", "remote_lockstep", "remote_polled"]

STEP_S = 0.020
NUM_ENVS = 8
ROUNDS = 3
SECONDS = 4.0
TARGET_RATIO = 6.0


class SlowCartPole(CartPoleEnv):
    """CartPole that takes its time."""

    def step(self, action: Any) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Push, 20 ms later."""
        time.sleep(STEP_S)
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs, float(reward), terminated, truncated, info


def remote_lockstep() -> list[Figure]:
    """`vectorize: remote`: all environments step at once, and each turn waits for the last."""
    return _figure("lockstep", {"vectorize": "remote"})


def remote_polled() -> list[Figure]:
    """`remote_worker_envs`: each environment goes on as soon as it is ready."""
    return _figure("polled", {"remote-worker-envs": "true"})


def _figure(name: str, options: dict[str, str]) -> list[Figure]:
    value, baseline = alternate(lambda: _rate(options), lambda: _rate({"vectorize": "serial"}), ROUNDS)
    return [Figure(f"remote/{name}, 8 envs of 20 ms", value, "env steps/s", baseline, target_ratio=TARGET_RATIO)]


def _rate(options: dict[str, str]) -> float:
    common: dict[str, object] = {
        "env": "benchmarks.remote:SlowCartPole",
        "algo": "impala",
        "num-workers": 1,
        "num-envs-per-worker": NUM_ENVS,
        "rollout-fragment-length": 4,  # stepped in turn it takes 0.64 s, and results come with each
        "train-batch-size": 32,
    }
    return learner_rate({**common, **options}, SECONDS)
