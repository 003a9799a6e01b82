"""Environments that workers step in lockstep, by import path."""

from __future__ import annotations

from typing import Any

from aiorl.testing.envs import CountingEnv


class SometimesUntrained(CountingEnv):
    """The fourth step of each episode is not to be trained on."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"training_enabled": int(obs[1]) != 4}
