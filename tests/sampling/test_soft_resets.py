"""Episodes that a soft horizon cuts again and again, while an agent in them has nothing to do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import aiorl

BOX, THREE = gymnasium.spaces.Box(0.0, 99.0, (1,)), gymnasium.spaces.Discrete(3)
STEPS = 40


class OneFallsSilent(aiorl.MultiAgentEnv):
    """Agent "b" is observed once, "a" at each step."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = BOX, THREE

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.step_number = 0
        return {agent: np.zeros(1, np.float32) for agent in "ab"}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.step_number += 1
        is_over = self.step_number == STEPS
        obs = {"a": np.array([self.step_number], np.float32)}
        return obs, {"a": 1.0, "b": 1.0}, {"__all__": is_over}, {"__all__": False}, {}


class TakesTwo(aiorl.Policy):
    def compute_actions(self, obs: Any, state_batches: Any = (), *args: Any, **kwargs: Any) -> Any:
        return np.full(len(obs), 2), [], {}


def test_what_an_agent_did_last_is_remembered_through_any_number_of_soft_resets() -> None:
    """R84, also where its episode goes on without it and room for more rows is made meanwhile."""
    seen = []

    class Asking(aiorl.DefaultCallbacks):
        def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
            seen.append((int(episode.last_action_for("b")), int(episode.prev_action_for("b"))))

    with aiorl.RolloutWorker(
        env_creator=lambda context: OneFallsSilent(),
        policy=TakesTwo,
        callbacks=Asking,
        episode_horizon=1,
        soft_horizon=True,
        no_done_at_end=True,
        batch_mode="complete_episodes",
        rollout_fragment_length=STEPS,
    ) as worker:
        worker.sample()
    assert len(seen) >= STEPS - 1
    assert seen[0] == (0, 0)
    assert set(seen[1:]) == {(2, 0)}
