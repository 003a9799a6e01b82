"""Slow environments in separate processes: eight that take 20 ms per step, in one worker process.

The baseline is the same worker, which steps the same environments in turn.
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
    """CartPole with slow steps."""

    def step(self, action: Any) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Push the cart, 20 ms later."""
        time.sleep(STEP_S)
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs, float(reward), terminated, truncated, info


def remote_lockstep() -> list[Figure]:
    """Measure `vectorize: remote`: all environments step together, and each step waits for the
    slowest.
    """
    return _figure("lockstep", {"vectorize": "remote"})


def remote_polled() -> list[Figure]:
    """Measure `remote_worker_envs`: each environment continues as soon as it is ready."""
    return _figure("polled", {"remote-worker-envs": "true"})


def _figure(name: str, options: dict[str, str]) -> list[Figure]:
    value, baseline = alternate(
        lambda: _rate(options), lambda: _rate({"vectorize": "serial"}), ROUNDS
    )
    return [
        Figure(
            f"remote/{name}, 8 envs of 20 ms",
            value,
            "env steps/s",
            baseline,
            target_ratio=TARGET_RATIO,
        )
    ]


def _rate(options: dict[str, str]) -> float:
    common: dict[str, object] = {
        "env": "benchmarks.remote:SlowCartPole",
        "algo": "impala",
        "num-workers": 1,
        "num-envs-per-worker": NUM_ENVS,
        # a fragment stepped in turn takes 0.64 s, and each brings a result
        "rollout-fragment-length": 4,
        "train-batch-size": 32,
    }
    return learner_rate({**common, **options}, SECONDS)
