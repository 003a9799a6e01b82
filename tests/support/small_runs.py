"""Settings of PPO runs that are over in a moment, all in the process that asks for them.

Their updates are one step each, and not traced: that takes as long as ten of them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SMALL"]

SMALL: dict[str, Any] = {
    "num_workers": 0, "num_envs_per_worker": 2, "rollout_fragment_length": 16, "train_batch_size": 64,
    "sgd_minibatch_size": 64, "num_sgd_iter": 1, "eager": True, "seed": 1, "model": {"fcnet_hiddens": [8]},
    "compilation_cache": "off", "lr": 0.01,
}  # fmt: skip
