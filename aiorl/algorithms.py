"""Parts for an algorithm of your own; docs/new_algorithm.md builds one.

Importing this does not load TensorFlow. Networks do when they are first asked for, by name.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aiorl.acting.distributions import ActionDistribution, Greedy, make_distribution
from aiorl.acting.exploration import Schedule
from aiorl.config.key import changed, key
from aiorl.data import columns
from aiorl.data.fragment import SamplePlan
from aiorl.learning.actor_critic import (
    likelihood_loss,
    rows_forward,
    schedules,
    sequence_forward,
    update_by_loss,
)
from aiorl.learning.algorithm import (
    Adaptation,
    Algorithm,
    Experience,
    Feed,
    LeasePlan,
    Networks,
    Observations,
    Round,
    Update,
    UpdateResult,
)
from aiorl.learning.algorithms.a2c import A2C, A2CConfig
from aiorl.learning.algorithms.a3c import A3C, A3CConfig
from aiorl.learning.algorithms.apex import Apex, ApexConfig
from aiorl.learning.algorithms.appo import APPO, APPOConfig
from aiorl.learning.algorithms.bc import BC, BCConfig
from aiorl.learning.algorithms.cql import CQL, CQLConfig
from aiorl.learning.algorithms.critic_update import (
    build_actor,
    critic_step,
    make_critics,
    update_with_critics,
)
from aiorl.learning.algorithms.dqn import DQN, DQNConfig, build_q_network, q_update
from aiorl.learning.algorithms.imitation import ImitationConfig, stored
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.algorithms.iql import IQL, IQLConfig
from aiorl.learning.algorithms.marwil import MARWIL, MARWILConfig
from aiorl.learning.algorithms.pg import PG, PGConfig
from aiorl.learning.algorithms.ppo import PPO, PPOConfig
from aiorl.learning.algorithms.sac import SAC, SACConfig
from aiorl.learning.algorithms.streaming import (
    StreamingConfig,
    VTrace,
    VTraceConfig,
    adam_or_rmsprop,
    streamed,
    transitions,
)
from aiorl.learning.algorithms.surrogate import SurrogateKeys, surrogate_update
from aiorl.learning.algorithms.td3 import TD3, TD3Config
from aiorl.learning.compiled import CompiledUpdate, adam, adam_of_multiplier
from aiorl.learning.experience import advantages, on_policy, returns
from aiorl.learning.keys.actor_critic import ActorCriticConfig, OnPolicyConfig
from aiorl.learning.keys.replay import (
    ActorReplayConfig,
    OfflineReplayConfig,
    ReplayConfig,
)
from aiorl.learning.learner import Learner
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss, masked_normalise
from aiorl.learning.losses.q_learning import QHead, best_legal, chosen
from aiorl.learning.losses.vtrace import vtrace
from aiorl.learning.models.distributions import Distribution, to_tf_distribution
from aiorl.learning.optimised import Part
from aiorl.learning.replay.episodes import EpisodeReplay
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec
from aiorl.learning.replayed import replay_knobs, replayed
from aiorl.learning.rows import by_time, flattened, sequence_columns
from aiorl.learning.steps import (
    Loss,
    Step,
    TargetNetwork,
    chain,
    descend,
    drawn,
    epochs,
    every,
    follow,
    guarded,
    minibatches,
    of_policy,
    per_row,
    prepare,
)

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.catalog import build_model
    from aiorl.learning.models.critics import Actor, Critics
    from aiorl.learning.models.networks import Network
    from aiorl.learning.models.q_network import NoisyDense, QNetwork

__all__ = [
    "A2C",
    "A3C",
    "APPO",
    "BC",
    "CQL",
    "DQN",
    "IMPALA",
    "IQL",
    "MARWIL",
    "PG",
    "PPO",
    "SAC",
    "TD3",
    "A2CConfig",
    "A3CConfig",
    "APPOConfig",
    "ActionDistribution",
    "Actor",
    "ActorCritic",
    "ActorCriticConfig",
    "ActorReplayConfig",
    "Adaptation",
    "Algorithm",
    "Apex",
    "ApexConfig",
    "BCConfig",
    "CQLConfig",
    "CompiledUpdate",
    "Critics",
    "DQNConfig",
    "Distribution",
    "EpisodeReplay",
    "Experience",
    "Feed",
    "Greedy",
    "IMPALAConfig",
    "IQLConfig",
    "ImitationConfig",
    "Learner",
    "LeasePlan",
    "Loss",
    "MARWILConfig",
    "Network",
    "Networks",
    "NoisyDense",
    "Observations",
    "OfflineReplayConfig",
    "OnPolicyConfig",
    "PGConfig",
    "PPOConfig",
    "Part",
    "Prioritised",
    "QHead",
    "QNetwork",
    "Replay",
    "ReplayConfig",
    "ReplaySpec",
    "Round",
    "SACConfig",
    "SamplePlan",
    "Schedule",
    "Step",
    "StreamingConfig",
    "SurrogateKeys",
    "TD3Config",
    "TargetNetwork",
    "Update",
    "UpdateResult",
    "VTrace",
    "VTraceConfig",
    "actor_critic_loss",
    "adam",
    "adam_of_multiplier",
    "adam_or_rmsprop",
    "advantages",
    "best_legal",
    "build_actor",
    "build_model",
    "build_q_network",
    "by_time",
    "chain",
    "changed",
    "chosen",
    "columns",
    "critic_step",
    "descend",
    "drawn",
    "epochs",
    "every",
    "flattened",
    "follow",
    "guarded",
    "key",
    "likelihood_loss",
    "make_critics",
    "make_distribution",
    "masked_mean",
    "masked_normalise",
    "minibatches",
    "of_policy",
    "on_policy",
    "per_row",
    "prepare",
    "q_update",
    "replay_knobs",
    "replayed",
    "returns",
    "rows_forward",
    "schedules",
    "sequence_columns",
    "sequence_forward",
    "stored",
    "streamed",
    "surrogate_update",
    "to_tf_distribution",
    "transitions",
    "update_by_loss",
    "update_with_critics",
    "vtrace",
]

_FORMER = {
    "CompiledAlgorithm": "Algorithm, whose update returns an Update",
    "CriticReplayAlgorithm": "update_with_critics, with replayed",
    "Imitation": "stored and likelihood_loss",
    "OnPolicy": "on_policy",
    "Phase": "descend, every and follow",
    "ReplayAlgorithm": "replayed and drawn",
    "Streaming": "streamed",
    "Surrogate": "surrogate_update",
    "SurrogateConfig": "SurrogateKeys, before another config",
    "UpdateSpec": "Update",
    "VTraceStreaming": "streamed and VTrace",
    "surrogate_spec": "surrogate_update",
}
"""Names of former versions, and what takes their place."""

_NETWORKS = {
    "Actor": "critics",
    "ActorCritic": "actor_critic",
    "Critics": "critics",
    "Network": "networks",
    "NoisyDense": "q_network",
    "QNetwork": "q_network",
    "build_model": "catalog",
}
"""Modules of `aiorl.learning.models` by the names that load TensorFlow when they are imported."""


def __getattr__(name: str) -> Any:
    """Import a network; refuse names of former versions with those of today.

    Raises:
        ImportError: the name was in a former version.
        AttributeError: it never was.
    """
    if name in _NETWORKS:
        return getattr(importlib.import_module(f"aiorl.learning.models.{_NETWORKS[name]}"), name)
    if name in _FORMER:
        raise ImportError(
            f"aiorl.algorithms has no {name} any more: use {_FORMER[name]}. See docs/upgrades.md.",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
