r"""Demonstrations in a replay: SAC on Pendulum, with and without stored steps of a controller.

    python -m examples.demonstrations --env-steps 1500

It stores 20,000 steps (mean return -144), trains with 60 % of stored steps in the replay and for
1,500 steps of the environment, then for as many without stored ones, and prints the mean return of
10 episodes of each.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np

import aiorl
from aiorl.offline.writers import FileWriter

DIRECTORY = "runs/demonstrations"


def controller(cosine: float, sine: float, speed: float) -> np.ndarray:
    """Swing up by adding energy, then balance."""
    torque = (
        -10.0 * sine - 2.0 * speed
        if cosine > 0.9
        else speed * (10.0 - speed**2 / 3.0 - 10.0 * cosine)
    )
    return np.clip(np.array([torque], np.float32), -2.0, 2.0)


def record(num_episodes: int) -> None:
    """Store episodes; the observation after a step is that of the next row."""
    env = gymnasium.make("Pendulum-v1")
    rows: dict[str, list[Any]] = {
        name: [] for name in ("obs", "actions", "rewards", "truncateds", "eps_id", "t")
    }
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=episode)
        for t in range(200):
            action = controller(*obs)
            following, reward, _, is_truncated, _ = env.step(action)
            for name, value in zip(
                rows, (obs, action, reward, is_truncated, episode, t), strict=True
            ):
                rows[name].append(value)
            obs = following
    FileWriter(DIRECTORY).write(aiorl.SampleBatch(rows, terminateds=np.zeros(len(rows["t"]), bool)))


def train(share: float, env_steps: int, seed: int) -> float:
    """Train with a share of stored steps, which the run counts; return the mean return of 10
    episodes.
    """
    run = f"{DIRECTORY}/share-{share:g}-seed-{seed}"
    own: dict[str, Any] = {"input": {"sampler": 1.0 - share, DIRECTORY: share}} if share else {}
    own["stop_timesteps"] = round(env_steps / (1.0 - share))
    aiorl.train("Pendulum-v1", algo="sac", num_workers=0, seed=seed, run_dir=run, **own)
    return float(aiorl.evaluate(run, episodes=10, seed=1).mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-steps", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    record(num_episodes=100)
    for share in (0.6, 0.0):
        print(given.seed, share, f"{train(share, given.env_steps, given.seed):.1f}", flush=True)
