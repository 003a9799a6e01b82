"""aiorl: distributed reinforcement learning for CPUs, without a cluster framework.

Public names are imported when first used, so that ``import aiorl`` is cheap and never loads TensorFlow.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import aiorl.config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType
    from typing import Any

    from aiorl.acting.exploration import Exploration as Exploration
    from aiorl.acting.loaded_policy import LoadedPolicy as LoadedPolicy
    from aiorl.acting.loaded_policy import load_policy as load_policy
    from aiorl.acting.observation.preprocessors import Preprocessor as Preprocessor
    from aiorl.acting.policy import Policy as Policy
    from aiorl.acting.policy_map import PolicyMap as PolicyMap
    from aiorl.compat.rollout_worker import EvaluatorInterface as EvaluatorInterface
    from aiorl.compat.rollout_worker import RolloutWorker as RolloutWorker
    from aiorl.config.merge import with_base_config as with_base_config
    from aiorl.config.schema import CommonConfig
    from aiorl.config.schema import with_common_config as with_common_config
    from aiorl.data.columns import DEFAULT_AGENT_ID as DEFAULT_AGENT_ID
    from aiorl.data.columns import DEFAULT_POLICY_ID as DEFAULT_POLICY_ID
    from aiorl.data.fragment import Fragment as Fragment
    from aiorl.data.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from aiorl.data.sample_batch import SampleBatch as SampleBatch
    from aiorl.env.base_env import ASYNC_RESET_RETURN as ASYNC_RESET_RETURN
    from aiorl.env.base_env import BaseEnv as BaseEnv
    from aiorl.env.base_env import Poll as Poll
    from aiorl.env.env_maker import to_base_env as to_base_env
    from aiorl.env.external_env import ExternalEnv as ExternalEnv
    from aiorl.env.external_env import ExternalMultiAgentEnv as ExternalMultiAgentEnv
    from aiorl.env.multi_agent_env import MultiAgentEnv as MultiAgentEnv
    from aiorl.env.registry import EnvContext as EnvContext
    from aiorl.env.registry import register_env as register_env
    from aiorl.env.vector_env import VectorEnv as VectorEnv
    from aiorl.learning.algorithms.a2c.config import A2CConfig as A2CConfig
    from aiorl.learning.algorithms.a3c.config import A3CConfig as A3CConfig
    from aiorl.learning.algorithms.apex.config import ApexConfig as ApexConfig
    from aiorl.learning.algorithms.appo.config import APPOConfig as APPOConfig
    from aiorl.learning.algorithms.bc.config import BCConfig as BCConfig
    from aiorl.learning.algorithms.cql.config import CQLConfig as CQLConfig
    from aiorl.learning.algorithms.dqn.config import DQNConfig as DQNConfig
    from aiorl.learning.algorithms.impala.config import IMPALAConfig as IMPALAConfig
    from aiorl.learning.algorithms.iql.config import IQLConfig as IQLConfig
    from aiorl.learning.algorithms.marwil.config import MARWILConfig as MARWILConfig
    from aiorl.learning.algorithms.pg.config import PGConfig as PGConfig
    from aiorl.learning.algorithms.ppo.config import PPOConfig as PPOConfig
    from aiorl.learning.algorithms.sac.config import SACConfig as SACConfig
    from aiorl.learning.algorithms.td3.config import TD3Config as TD3Config
    from aiorl.learning.models.tf_policy import TFPolicy as TFPolicy
    from aiorl.offline.estimators import OffPolicyEstimate as OffPolicyEstimate
    from aiorl.offline.estimators import OffPolicyEstimator as OffPolicyEstimator
    from aiorl.offline.io import InputReader as InputReader
    from aiorl.offline.io import IOContext as IOContext
    from aiorl.offline.io import OutputWriter as OutputWriter
    from aiorl.offline.io import SamplerInput as SamplerInput
    from aiorl.run.evaluation import Evaluation as Evaluation
    from aiorl.run.evaluation import evaluate as evaluate
    from aiorl.run.export.writing import export_policy as export_policy
    from aiorl.run.trainer import A2CTrainer as A2CTrainer
    from aiorl.run.trainer import A3CTrainer as A3CTrainer
    from aiorl.run.trainer import AlgorithmTrainer as AlgorithmTrainer
    from aiorl.run.trainer import ApexTrainer as ApexTrainer
    from aiorl.run.trainer import APPOTrainer as APPOTrainer
    from aiorl.run.trainer import BCTrainer as BCTrainer
    from aiorl.run.trainer import CQLTrainer as CQLTrainer
    from aiorl.run.trainer import DQNTrainer as DQNTrainer
    from aiorl.run.trainer import IMPALATrainer as IMPALATrainer
    from aiorl.run.trainer import IQLTrainer as IQLTrainer
    from aiorl.run.trainer import MARWILTrainer as MARWILTrainer
    from aiorl.run.trainer import PGTrainer as PGTrainer
    from aiorl.run.trainer import PPOTrainer as PPOTrainer
    from aiorl.run.trainer import SACTrainer as SACTrainer
    from aiorl.run.trainer import TD3Trainer as TD3Trainer
    from aiorl.run.trainer import Trainer as Trainer
    from aiorl.run.trainer.whole_run import train as train
    from aiorl.sampling.async_sampler import AsyncSampler as AsyncSampler
    from aiorl.sampling.callbacks import DefaultCallbacks as DefaultCallbacks
    from aiorl.sampling.episode import MultiAgentEpisode as MultiAgentEpisode
    from aiorl.sampling.sampler import SyncSampler as SyncSampler
    from aiorl.sampling.worker import get_global_worker as get_global_worker

__version__ = "0.1.0"

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read by TensorFlow when it is imported: only what ends the process

_HOME = {
    "A2CConfig": "aiorl.learning.algorithms.a2c.config",
    "A2CTrainer": "aiorl.run.trainer",
    "A3CConfig": "aiorl.learning.algorithms.a3c.config",
    "A3CTrainer": "aiorl.run.trainer",
    "APPOConfig": "aiorl.learning.algorithms.appo.config",
    "APPOTrainer": "aiorl.run.trainer",
    "ApexConfig": "aiorl.learning.algorithms.apex.config",
    "ApexTrainer": "aiorl.run.trainer",
    "ASYNC_RESET_RETURN": "aiorl.env.base_env",
    "AlgorithmTrainer": "aiorl.run.trainer",
    "AsyncSampler": "aiorl.sampling.async_sampler",
    "BCConfig": "aiorl.learning.algorithms.bc.config",
    "BCTrainer": "aiorl.run.trainer",
    "CQLConfig": "aiorl.learning.algorithms.cql.config",
    "CQLTrainer": "aiorl.run.trainer",
    "IQLConfig": "aiorl.learning.algorithms.iql.config",
    "IQLTrainer": "aiorl.run.trainer",
    "MARWILConfig": "aiorl.learning.algorithms.marwil.config",
    "MARWILTrainer": "aiorl.run.trainer",
    "BaseEnv": "aiorl.env.base_env",
    "DEFAULT_AGENT_ID": "aiorl.data.columns",
    "DEFAULT_POLICY_ID": "aiorl.data.columns",
    "DQNConfig": "aiorl.learning.algorithms.dqn.config",
    "DQNTrainer": "aiorl.run.trainer",
    "DefaultCallbacks": "aiorl.sampling.callbacks",
    "EnvContext": "aiorl.env.registry",
    "Evaluation": "aiorl.run.evaluation",
    "EvaluatorInterface": "aiorl.compat.rollout_worker",
    "Exploration": "aiorl.acting.exploration",
    "ExternalEnv": "aiorl.env.external_env",
    "ExternalMultiAgentEnv": "aiorl.env.external_env",
    "Fragment": "aiorl.data.fragment",
    "IMPALATrainer": "aiorl.run.trainer",
    "IMPALAConfig": "aiorl.learning.algorithms.impala.config",
    "IOContext": "aiorl.offline.io",
    "InputReader": "aiorl.offline.io",
    "LoadedPolicy": "aiorl.acting.loaded_policy",
    "MultiAgentBatch": "aiorl.data.multi_agent_batch",
    "MultiAgentEnv": "aiorl.env.multi_agent_env",
    "MultiAgentEpisode": "aiorl.sampling.episode",
    "OffPolicyEstimate": "aiorl.offline.estimators",
    "OffPolicyEstimator": "aiorl.offline.estimators",
    "OutputWriter": "aiorl.offline.io",
    "PGConfig": "aiorl.learning.algorithms.pg.config",
    "PGTrainer": "aiorl.run.trainer",
    "PPOTrainer": "aiorl.run.trainer",
    "PPOConfig": "aiorl.learning.algorithms.ppo.config",
    "Policy": "aiorl.acting.policy",
    "PolicyMap": "aiorl.acting.policy_map",
    "Poll": "aiorl.env.base_env",
    "Preprocessor": "aiorl.acting.observation.preprocessors",
    "RolloutWorker": "aiorl.compat.rollout_worker",
    "SACConfig": "aiorl.learning.algorithms.sac.config",
    "SACTrainer": "aiorl.run.trainer",
    "SampleBatch": "aiorl.data.sample_batch",
    "SamplerInput": "aiorl.offline.io",
    "SyncSampler": "aiorl.sampling.sampler",
    "TD3Config": "aiorl.learning.algorithms.td3.config",
    "TD3Trainer": "aiorl.run.trainer",
    "TFPolicy": "aiorl.learning.models.tf_policy",
    "Trainer": "aiorl.run.trainer",
    "VectorEnv": "aiorl.env.vector_env",
    "evaluate": "aiorl.run.evaluation",
    "export_policy": "aiorl.run.export.writing",
    "get_global_worker": "aiorl.sampling.worker",
    "load_policy": "aiorl.acting.loaded_policy",
    "register_env": "aiorl.env.registry",
    "train": "aiorl.run.trainer.whole_run",
    "to_base_env": "aiorl.env.env_maker",
    "with_base_config": "aiorl.config.merge",
    "with_common_config": "aiorl.config.schema",
}

# all but TFPolicy, so that `from aiorl import *` works without TensorFlow, and never loads it
__all__ = sorted({*_HOME, "__version__"} - {"TFPolicy"})


def _build_trainer(config: CommonConfig) -> AlgorithmTrainer:
    from aiorl.run.trainer import trainer_for

    return trainer_for(config)


def _translate_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    from aiorl.compat.old_keys import translate_old_keys

    return translate_old_keys(values)


aiorl.config.build_trainer = _build_trainer
aiorl.config.translate_old_keys = _translate_old_keys


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise _missing(name, sys._getframe(1))


def _missing(name: str, caller: FrameType) -> Exception:
    """Return the error for a name that is not here, with a hint where it is one of another library."""
    import dis  # here, so that `import aiorl` stays cheap

    from aiorl.config.check import attribute_hint

    said, hint = f"module 'aiorl' has no attribute {name!r}", attribute_hint("aiorl", name)
    if hint and dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
        # `from aiorl import NAME` would drop the text of an AttributeError
        return ImportError(f"{said}. {hint}", name=__name__)
    return AttributeError(f"{said}. {hint}" if hint else said, name=name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
