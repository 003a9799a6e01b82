"""Parts for an algorithm of your own; docs/new_algorithm.md builds one.

Importing this does not load TensorFlow.
"""

from aiorl.config.key import changed, key
from aiorl.data import columns
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.actor_replay import CriticReplayAlgorithm
from aiorl.learning.algorithms.algorithm import Algorithm, LeasePlan, Observations, UpdateResult
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm, rows_forward
from aiorl.learning.algorithms.compiled_update import Phase, TargetNetwork, UpdateSpec
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.algorithms.imitation import Imitation, ImitationConfig
from aiorl.learning.algorithms.on_policy import (
    OnPolicy,
    OnPolicyConfig,
    Surrogate,
    SurrogateConfig,
    surrogate_spec,
)
from aiorl.learning.algorithms.replay_algorithm import ReplayAlgorithm
from aiorl.learning.algorithms.replay_config import (
    ActorReplayConfig,
    OfflineReplayConfig,
    ReplayConfig,
)
from aiorl.learning.algorithms.rows import sequence_columns
from aiorl.learning.algorithms.streaming import (
    Streaming,
    StreamingConfig,
    VTraceConfig,
    VTraceStreaming,
)
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss, masked_normalise
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.replay.replay import Replay

__all__ = [
    "DQN",
    "ActorCriticConfig",
    "ActorReplayConfig",
    "Algorithm",
    "CompiledAlgorithm",
    "CriticReplayAlgorithm",
    "DQNConfig",
    "Imitation",
    "ImitationConfig",
    "LeasePlan",
    "Observations",
    "OfflineReplayConfig",
    "OnPolicy",
    "OnPolicyConfig",
    "Phase",
    "Replay",
    "ReplayAlgorithm",
    "ReplayConfig",
    "SamplePlan",
    "Streaming",
    "StreamingConfig",
    "Surrogate",
    "SurrogateConfig",
    "TargetNetwork",
    "UpdateResult",
    "UpdateSpec",
    "VTraceConfig",
    "VTraceStreaming",
    "actor_critic_loss",
    "changed",
    "columns",
    "key",
    "masked_mean",
    "masked_normalise",
    "rows_forward",
    "sequence_columns",
    "surrogate_spec",
    "to_tf_distribution",
]
