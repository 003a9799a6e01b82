"""Parts for an algorithm of your own; docs/new_algorithm.md builds one.

Importing this does not load TensorFlow.
"""

from typing import NoReturn

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
from aiorl.learning.algorithms.critic_update import (
    build_actor,
    critic_step,
    make_critics,
    update_with_critics,
)
from aiorl.learning.algorithms.dqn import DQN, DQNConfig, q_update
from aiorl.learning.algorithms.imitation import ImitationConfig, stored
from aiorl.learning.algorithms.streaming import (
    StreamingConfig,
    VTrace,
    VTraceConfig,
    adam_or_rmsprop,
    streamed,
    transitions,
)
from aiorl.learning.algorithms.surrogate import SurrogateKeys, surrogate_update
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
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.replay.episodes import EpisodeReplay
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec
from aiorl.learning.replayed import replay_knobs, replayed
from aiorl.learning.rows import sequence_columns
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

__all__ = [
    "DQN",
    "ActorCriticConfig",
    "ActorReplayConfig",
    "Adaptation",
    "Algorithm",
    "CompiledUpdate",
    "DQNConfig",
    "EpisodeReplay",
    "Experience",
    "Feed",
    "ImitationConfig",
    "Learner",
    "LeasePlan",
    "Loss",
    "Networks",
    "Observations",
    "OfflineReplayConfig",
    "OnPolicyConfig",
    "Prioritised",
    "Replay",
    "ReplayConfig",
    "ReplaySpec",
    "Round",
    "SamplePlan",
    "Schedule",
    "Step",
    "StreamingConfig",
    "SurrogateKeys",
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
    "build_actor",
    "chain",
    "changed",
    "columns",
    "critic_step",
    "descend",
    "drawn",
    "epochs",
    "every",
    "follow",
    "guarded",
    "key",
    "likelihood_loss",
    "make_critics",
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


def __getattr__(name: str) -> NoReturn:
    """Refuse names of former versions with those of today.

    Raises:
        ImportError: the name was in a former version.
        AttributeError: it never was.
    """
    if name in _FORMER:
        raise ImportError(
            f"aiorl.algorithms has no {name} any more: use {_FORMER[name]}. See docs/upgrades.md.",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
