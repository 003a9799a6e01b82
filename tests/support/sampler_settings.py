"""Settings of a sampler in one line, and its other parts."""

from __future__ import annotations

import math
from typing import Any

from aiorl.acting.filters import NoFilter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.config.worker import WorkerConfig
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.settings import SamplerSetup


def sampler_settings(length: int | float = math.inf, **more: Any) -> WorkerConfig:
    """Return settings for batches of `length` steps, or with None of one episode each; more
    settings by their keys.

    They are not checked, so even values that a RolloutWorker or a config would refuse are possible.
    """
    if math.isinf(length):
        return WorkerConfig().model_copy(update={"batch_mode": "complete_episodes", **more})
    return WorkerConfig().model_copy(update={"rollout_fragment_length": length, **more})


def sampler_setup(
    env: Any,
    policies: Any,
    *,
    mapping: Any = None,
    length: int | float = math.inf,
    callbacks: Any = None,
    filters: Any = None,
    observation_fn: Any = None,
    **more: Any,
) -> SamplerSetup:
    """Return all parts of an environment's samplers, with one policy, or several by id; more
    settings by their keys.
    """
    policies = policies if isinstance(policies, dict) else {"default_policy": policies}
    return SamplerSetup(
        worker="the worker",
        base_env=env,
        policy_map=PolicyMap(policies, mapping),
        preprocessors={
            name: preprocessor_for(policy.observation_space) for name, policy in policies.items()
        },
        filters=filters or {name: NoFilter() for name in policies},
        settings=sampler_settings(length, **more),
        callbacks=callbacks or DefaultCallbacks(),
        observation_fn=observation_fn,
    )
