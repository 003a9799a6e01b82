"""Settings of a sampler in one line."""

from __future__ import annotations

import math
from typing import Any

from aiorl.config.worker import WorkerConfig


def sampler_settings(length: int | float = math.inf, **more: Any) -> WorkerConfig:
    """Batches of `length` steps over the ends of episodes, or one batch for each episode; more by their keys.

    Not checked, so that what a RolloutWorker or a config would refuse can be given too.
    """
    if math.isinf(length):
        return WorkerConfig().model_copy(update={"batch_mode": "complete_episodes", **more})
    return WorkerConfig().model_copy(update={"rollout_fragment_length": length, **more})
