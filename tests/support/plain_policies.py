"""Policies in plain Python, made by RolloutWorker from their class."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_POLICY_ID


class PlainPolicy(Policy):
    """Policy that acts with its only weight (0 at first), and notes all calls."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.weight = np.zeros(1, np.float32)
        self.notes = []
        self.obs = []

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        self.obs.append(obs.copy())
        self.notes.append(("act", len(obs), float(self.weight[0])))
        space = self.action_space
        actions = np.zeros((len(obs), *(space.shape or ())), space.dtype)
        if isinstance(space, spaces.Discrete):
            actions[:] = int(self.weight[0]) % int(space.n)
        return actions, [], {}

    def get_weights(self):
        return {"w": self.weight.copy()}

    def set_weights(self, weights):
        self.weight = np.array(weights["w"], np.float32)
        self.notes.append(("weights", float(self.weight[0])))

    def on_global_var_update(self, global_vars):
        super().on_global_var_update(global_vars)
        self.notes.append(("global_vars", dict(global_vars)))

    def compute_gradients(self, batch):
        return {"w": np.full(1, batch.count, np.float32)}, {"rows": batch.count}

    def apply_gradients(self, gradients):
        self.weight = self.weight + gradients["w"]
        return {"applied": float(gradients["w"][0])}

    def learn_on_batch(self, batch):
        self.notes.append(("learn", batch.count))
        self.last_learned = batch
        return {"rows": batch.count, "mean_reward": float(batch["rewards"].mean())}


class RandomPolicy(PlainPolicy):
    """Policy with its own random generator, seeded by its config."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.rng = np.random.default_rng(config.get("seed"))

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return self.rng.integers(self.action_space.n, size=len(obs)), [], {}


def spec(observation_space, action_space, policy_class=PlainPolicy, **config):
    """Return an entry of the argument ``policy``."""
    return (policy_class, observation_space, action_space, config)


VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DEFAULT = DEFAULT_POLICY_ID
