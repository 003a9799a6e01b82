"""Distributed reinforcement learning for CPUs, without a cluster framework.

Public names are imported on first use, so ``import aiorl`` is fast and never loads TensorFlow.
"""

from __future__ import annotations

from aiorl.process.early import begin, is_command

if is_command():
    begin()  # before imports that take a second

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from aiorl.config import registry
from aiorl.learning.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from aiorl.acting.acting_state import LoadedPolicy as LoadedPolicy, load_policy as load_policy
    from aiorl.acting.exploration import Exploration as Exploration
    from aiorl.acting.policy import Policy as Policy
    from aiorl.acting.policy_map import PolicyMap as PolicyMap
    from aiorl.acting.preprocessors import Preprocessor as Preprocessor
    from aiorl.actors.calls import ActorHandle as ActorHandle
    from aiorl.actors.hub import Actors as Actors
    from aiorl.actors.references import (
        ObjectRef as ObjectRef,
        get as get,
        method as method,
        wait as wait,
    )
    from aiorl.client import PolicyClient as PolicyClient
    from aiorl.compat.metrics import collect_metrics as collect_metrics
    from aiorl.compat.optimizers import (
        AsyncGradientsOptimizer as AsyncGradientsOptimizer,
        AsyncSamplesOptimizer as AsyncSamplesOptimizer,
        PolicyOptimizer as PolicyOptimizer,
        SyncReplayOptimizer as SyncReplayOptimizer,
        SyncSamplesOptimizer as SyncSamplesOptimizer,
    )
    from aiorl.compat.remote import (
        init as init,
        is_initialized as is_initialized,
        kill as kill,
        put as put,
        remote as remote,
        shutdown as shutdown,
    )
    from aiorl.compat.rollout_worker import (
        EvaluatorInterface as EvaluatorInterface,
        RolloutWorker as RolloutWorker,
    )
    from aiorl.compat.worker_set import WorkerSet as WorkerSet
    from aiorl.config import with_base_config as with_base_config
    from aiorl.config.built_trainer import BuiltTrainer
    from aiorl.config.schema import CommonConfig, with_common_config as with_common_config
    from aiorl.data.columns import (
        DEFAULT_AGENT_ID as DEFAULT_AGENT_ID,
        DEFAULT_POLICY_ID as DEFAULT_POLICY_ID,
    )
    from aiorl.data.fragment import Fragment as Fragment
    from aiorl.data.sample_batch import (
        MultiAgentBatch as MultiAgentBatch,
        SampleBatch as SampleBatch,
    )
    from aiorl.env.base_env import (
        ASYNC_RESET_RETURN as ASYNC_RESET_RETURN,
        BaseEnv as BaseEnv,
        Poll as Poll,
    )
    from aiorl.env.env_maker import to_base_env as to_base_env
    from aiorl.env.external_env import (
        ExternalEnv as ExternalEnv,
        ExternalMultiAgentEnv as ExternalMultiAgentEnv,
    )
    from aiorl.env.multi_agent_env import MultiAgentEnv as MultiAgentEnv
    from aiorl.env.registry import EnvContext as EnvContext, register_env as register_env
    from aiorl.env.vector_env import VectorEnv as VectorEnv
    from aiorl.learning.algorithms.a2c import A2CConfig as A2CConfig
    from aiorl.learning.algorithms.a3c import A3CConfig as A3CConfig
    from aiorl.learning.algorithms.apex import ApexConfig as ApexConfig
    from aiorl.learning.algorithms.appo import APPOConfig as APPOConfig
    from aiorl.learning.algorithms.bc import BCConfig as BCConfig
    from aiorl.learning.algorithms.cql import CQLConfig as CQLConfig
    from aiorl.learning.algorithms.dqn import DQNConfig as DQNConfig
    from aiorl.learning.algorithms.impala import IMPALAConfig as IMPALAConfig
    from aiorl.learning.algorithms.iql import IQLConfig as IQLConfig
    from aiorl.learning.algorithms.marwil import MARWILConfig as MARWILConfig
    from aiorl.learning.algorithms.pg import PGConfig as PGConfig
    from aiorl.learning.algorithms.ppo import PPOConfig as PPOConfig
    from aiorl.learning.algorithms.sac import SACConfig as SACConfig
    from aiorl.learning.algorithms.td3 import TD3Config as TD3Config
    from aiorl.learning.models.tf_policy import TFPolicy as TFPolicy
    from aiorl.learning.policies import (
        A3CTFPolicy as A3CTFPolicy,
        AsyncPPOTFPolicy as AsyncPPOTFPolicy,
        DQNTFPolicy as DQNTFPolicy,
        PGTFPolicy as PGTFPolicy,
        PPOTFPolicy as PPOTFPolicy,
        SACTFPolicy as SACTFPolicy,
        VTraceTFPolicy as VTraceTFPolicy,
    )
    from aiorl.offline.estimators import (
        OffPolicyEstimate as OffPolicyEstimate,
        OffPolicyEstimator as OffPolicyEstimator,
    )
    from aiorl.offline.io import (
        InputReader as InputReader,
        IOContext as IOContext,
        OutputWriter as OutputWriter,
        SamplerInput as SamplerInput,
    )
    from aiorl.run.evaluation import Evaluation as Evaluation, evaluate as evaluate
    from aiorl.run.export.writing import export_policy as export_policy
    from aiorl.run.trainer import AlgorithmTrainer as AlgorithmTrainer, Trainer as Trainer
    from aiorl.run.trainer.whole_run import train as train
    from aiorl.sampling.async_sampler import AsyncSampler as AsyncSampler
    from aiorl.sampling.callbacks import DefaultCallbacks as DefaultCallbacks
    from aiorl.sampling.episode import MultiAgentEpisode as MultiAgentEpisode
    from aiorl.sampling.sampler import SyncSampler as SyncSampler
    from aiorl.sampling.worker import Worker, get_global_worker as get_global_worker

__version__ = "0.1.0"

# TensorFlow reads it on import: log only fatal errors
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_HOMES = {
    "aiorl.acting.exploration": "Exploration",
    "aiorl.acting.acting_state": "LoadedPolicy load_policy",
    "aiorl.acting.policy": "Policy",
    "aiorl.acting.policy_map": "PolicyMap",
    "aiorl.acting.preprocessors": "Preprocessor",
    "aiorl.actors.calls": "ActorHandle",
    "aiorl.actors.hub": "Actors",
    "aiorl.actors.references": "ObjectRef get method wait",
    "aiorl.client": "PolicyClient",
    "aiorl.compat.metrics": "collect_metrics",
    "aiorl.compat.optimizers": (
        "AsyncGradientsOptimizer AsyncSamplesOptimizer PolicyOptimizer SyncReplayOptimizer"
        " SyncSamplesOptimizer"
    ),
    "aiorl.compat.remote": "init is_initialized kill put remote shutdown",
    "aiorl.compat.rollout_worker": "EvaluatorInterface RolloutWorker",
    "aiorl.compat.worker_set": "WorkerSet",
    "aiorl.config": "with_base_config",
    "aiorl.config.schema": "with_common_config",
    "aiorl.data.columns": "DEFAULT_AGENT_ID DEFAULT_POLICY_ID",
    "aiorl.data.fragment": "Fragment",
    "aiorl.data.sample_batch": "MultiAgentBatch SampleBatch",
    "aiorl.env.base_env": "ASYNC_RESET_RETURN BaseEnv Poll",
    "aiorl.env.env_maker": "to_base_env",
    "aiorl.env.external_env": "ExternalEnv ExternalMultiAgentEnv",
    "aiorl.env.multi_agent_env": "MultiAgentEnv",
    "aiorl.env.registry": "EnvContext register_env",
    "aiorl.env.vector_env": "VectorEnv",
    "aiorl.learning.models.tf_policy": "TFPolicy",
    "aiorl.learning.policies": (
        "A3CTFPolicy AsyncPPOTFPolicy DQNTFPolicy PGTFPolicy PPOTFPolicy SACTFPolicy VTraceTFPolicy"
    ),
    "aiorl.offline.estimators": "OffPolicyEstimate OffPolicyEstimator",
    "aiorl.offline.io": "IOContext InputReader OutputWriter SamplerInput",
    "aiorl.run.evaluation": "Evaluation evaluate",
    "aiorl.run.export.writing": "export_policy",
    "aiorl.run.trainer": "AlgorithmTrainer Trainer",
    "aiorl.run.trainer.whole_run": "train",
    "aiorl.sampling.async_sampler": "AsyncSampler",
    "aiorl.sampling.callbacks": "DefaultCallbacks",
    "aiorl.sampling.episode": "MultiAgentEpisode",
    "aiorl.sampling.sampler": "SyncSampler",
    "aiorl.sampling.worker": "get_global_worker",
}
"""Public names by the module that they are imported from on first use."""

_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
for _algo, _kind in ALGORITHMS.items():
    _HOME |= {
        f"{_kind}Config": f"aiorl.learning.algorithms.{_algo}",
        f"{_kind}Trainer": "aiorl.run.trainer",
    }

# without TFPolicy and its like, so that `from aiorl import *` works without TensorFlow and never
# loads it
__all__ = sorted({*_HOME, "__version__"} - {name for name in _HOME if name.endswith("TFPolicy")})


def _build_trainer(config: CommonConfig) -> BuiltTrainer:
    from aiorl.run.trainer import trainer_class

    return trainer_class(config.algo)(config)


def _translate_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    from aiorl.compat.old_keys import translate_old_keys

    return translate_old_keys(values)


def _wrap_worker(worker: Worker) -> RolloutWorker:
    from aiorl.compat.rollout_worker import WrappedWorker

    return WrappedWorker(worker)


def _worker_class() -> type[RolloutWorker]:
    from aiorl.compat.rollout_worker import RolloutWorker

    return RolloutWorker


registry.register(
    build_trainer=_build_trainer,
    translate_old_keys=_translate_old_keys,
    wrap_worker=_wrap_worker,
    worker_class=_worker_class,
)


# Any, because type checkers know the algorithms' trainers only from this function
def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise _missing(name, sys._getframe(1))


def _missing(name: str, caller: FrameType) -> Exception:
    """Return the error for an unknown name, with a hint if another library has it."""
    import dis  # here, so that `import aiorl` stays cheap

    from aiorl.config.rllib_file import attribute_hint

    message = f"module 'aiorl' has no attribute {name!r}"
    hint = attribute_hint("aiorl", name)
    if not hint:
        return AttributeError(message, name=name)
    message = f"{message}. {hint}"
    if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
        # `from aiorl import NAME` would drop the text of an AttributeError
        return ImportError(message, name=__name__)
    return AttributeError(message, name=name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
