"""Files of CartPole episodes, played by a rule that balances the pole or at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from aiorl.data.sample_batch import SampleBatch
from aiorl.offline.writers import FileWriter


def record(directory: Path, episodes: int, *, expert: bool = True) -> int:
    """Store episodes of a rule that balances the pole, or of a random policy; return the number of
    rows.
    """
    env, rng, rows = gymnasium.make("CartPole-v1"), np.random.default_rng(0), 0
    writer = FileWriter(str(directory))
    for episode in range(episodes):
        columns: dict[str, list[Any]] = {
            name: []
            for name in ("obs", "actions", "rewards", "new_obs", "terminateds", "truncateds")
        }
        obs, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            action = (
                int(obs[2] + 0.5 * obs[3] + 0.1 * obs[1] + 0.05 * obs[0] > 0)
                if expert
                else int(rng.integers(2))
            )
            new_obs, reward, terminated, truncated, _ = env.step(action)
            for name, value in zip(
                columns, (obs, action, reward, new_obs, terminated, truncated), strict=True
            ):
                columns[name].append(value)
            obs, ended = new_obs, terminated or truncated
        arrays = {name: np.array(values) for name, values in columns.items()}
        count = len(arrays["obs"])
        arrays["rewards"] = arrays["rewards"].astype(np.float32)
        arrays["eps_id"] = np.full(count, episode)
        arrays["dones"] = arrays["terminateds"] | arrays["truncateds"]
        writer.write(SampleBatch(arrays))
        rows += count
    writer.close()
    return rows
