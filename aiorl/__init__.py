"""aiorl: distributed reinforcement learning for CPUs, without a cluster framework.

Public names are imported when first used, so that ``import aiorl`` is cheap and never loads TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiorl.callbacks import DefaultCallbacks
    from aiorl.data.columns import DEFAULT_AGENT_ID, DEFAULT_POLICY_ID
    from aiorl.data.fragment import Fragment
    from aiorl.data.multi_agent_batch import MultiAgentBatch
    from aiorl.data.sample_batch import SampleBatch
    from aiorl.env.base_env import ASYNC_RESET_RETURN, BaseEnv, Poll
    from aiorl.env.env_maker import to_base_env
    from aiorl.env.external_env import ExternalEnv, ExternalMultiAgentEnv
    from aiorl.env.multi_agent_env import MultiAgentEnv
    from aiorl.env.registry import EnvContext, register_env
    from aiorl.env.vector_env import VectorEnv
    from aiorl.models.tf_policy import TFPolicy as TFPolicy
    from aiorl.observation.preprocessors import Preprocessor
    from aiorl.offline.estimators import OffPolicyEstimate, OffPolicyEstimator
    from aiorl.offline.io import InputReader, IOContext, OutputWriter, SamplerInput
    from aiorl.policy.exploration import Exploration
    from aiorl.policy.policy import Policy
    from aiorl.policy.policy_map import PolicyMap
    from aiorl.rollout.interface import EvaluatorInterface
    from aiorl.rollout.rollout_worker import RolloutWorker, get_global_worker
    from aiorl.sampler.async_sampler import AsyncSampler
    from aiorl.sampler.episode import MultiAgentEpisode
    from aiorl.sampler.sync_sampler import SyncSampler

__version__ = "0.1.0"

_HOME = {
    "ASYNC_RESET_RETURN": "aiorl.env.base_env",
    "AsyncSampler": "aiorl.sampler.async_sampler",
    "BaseEnv": "aiorl.env.base_env",
    "DEFAULT_AGENT_ID": "aiorl.data.columns",
    "DEFAULT_POLICY_ID": "aiorl.data.columns",
    "DefaultCallbacks": "aiorl.callbacks",
    "EnvContext": "aiorl.env.registry",
    "EvaluatorInterface": "aiorl.rollout.interface",
    "Exploration": "aiorl.policy.exploration",
    "ExternalEnv": "aiorl.env.external_env",
    "ExternalMultiAgentEnv": "aiorl.env.external_env",
    "Fragment": "aiorl.data.fragment",
    "IOContext": "aiorl.offline.io",
    "InputReader": "aiorl.offline.io",
    "MultiAgentBatch": "aiorl.data.multi_agent_batch",
    "MultiAgentEnv": "aiorl.env.multi_agent_env",
    "MultiAgentEpisode": "aiorl.sampler.episode",
    "OffPolicyEstimate": "aiorl.offline.estimators",
    "OffPolicyEstimator": "aiorl.offline.estimators",
    "OutputWriter": "aiorl.offline.io",
    "Policy": "aiorl.policy.policy",
    "PolicyMap": "aiorl.policy.policy_map",
    "Poll": "aiorl.env.base_env",
    "Preprocessor": "aiorl.observation.preprocessors",
    "RolloutWorker": "aiorl.rollout.rollout_worker",
    "SampleBatch": "aiorl.data.sample_batch",
    "SamplerInput": "aiorl.offline.io",
    "SyncSampler": "aiorl.sampler.sync_sampler",
    "TFPolicy": "aiorl.models.tf_policy",
    "VectorEnv": "aiorl.env.vector_env",
    "get_global_worker": "aiorl.rollout.rollout_worker",
    "register_env": "aiorl.env.registry",
    "to_base_env": "aiorl.env.env_maker",
}

# all but TFPolicy, so that `from aiorl import *` works without TensorFlow, and never loads it
__all__ = [
    "ASYNC_RESET_RETURN",
    "DEFAULT_AGENT_ID",
    "DEFAULT_POLICY_ID",
    "AsyncSampler",
    "BaseEnv",
    "DefaultCallbacks",
    "EnvContext",
    "EvaluatorInterface",
    "Exploration",
    "ExternalEnv",
    "ExternalMultiAgentEnv",
    "Fragment",
    "IOContext",
    "InputReader",
    "MultiAgentBatch",
    "MultiAgentEnv",
    "MultiAgentEpisode",
    "OffPolicyEstimate",
    "OffPolicyEstimator",
    "OutputWriter",
    "Policy",
    "PolicyMap",
    "Poll",
    "Preprocessor",
    "RolloutWorker",
    "SampleBatch",
    "SamplerInput",
    "SyncSampler",
    "VectorEnv",
    "__version__",
    "get_global_worker",
    "register_env",
    "to_base_env",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'aiorl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
