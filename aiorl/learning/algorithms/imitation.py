"""Parts of algorithms that imitate stored experience from any policy."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import SDEKeys
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError
from aiorl.learning.algorithm import LeasePlan
from aiorl.learning.experience import Fragments, with_scaled_rewards
from aiorl.learning.keys.actor_critic import ActorCriticConfig, ActorCriticKeys

_learning = partial(key, group="Learning")


class ImitationConfig(ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of algorithms that imitate stored experience as it arrives.

    Its own keys are Adam's epsilon and the number of fragments under way.
    """

    is_offline: ClassVar[bool] = True
    why_no_exploration: ClassVar[str] = "it learns from stored experience"

    lr: float = changed(ActorCriticConfig, "lr", 1e-3)
    num_envs_per_worker: int = changed(ActorCriticConfig, "num_envs_per_worker", 1)
    rollout_fragment_length: int = changed(ActorCriticConfig, "rollout_fragment_length", 256)
    train_batch_size: int = changed(ActorCriticConfig, "train_batch_size", 2048)
    input_evaluation: list[Literal["is", "wis", "simulation"]] = changed(
        ActorCriticConfig, "input_evaluation", []
    )

    adam_epsilon: float = _learning(1e-7, gt=0)
    """Adam's epsilon."""
    outstanding_fragments_per_worker: int = _learning(8, unit="fragments", ge=1)
    """Maximum number of fragments that a worker owes or has under way at a time, within the budget
    of the whole run."""

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        if self.is_filtered and self.gradients == "workers":
            raise ConfigError(
                f"{self.algo} filters stored observations on the learner, but workers compute the"
                " gradients.",
                key="observation_filter",
                value=self.observation_filter,
                hint="Set gradients: learner, or observation_filter: NoFilter.",
            )
        if self.model.is_recurrent and not self.postprocess_inputs:
            raise ConfigError(
                "stored rows don't contain the states of this recurrent model.",
                key="postprocess_inputs",
                value=self.postprocess_inputs,
                hint="Set postprocess_inputs: true, so that workers run the model over the stored"
                " episodes.",
            )


def stored(config: ImitationConfig, plan: SamplePlan) -> Fragments:
    """Return experience that was stored before, by policies of any age.

    Args:
        config: config of the algorithm.
        plan: columns that workers read and send.
    """
    leases = LeasePlan(
        "streaming",
        config.fragments_per_batch(),
        outstanding_per_worker=config.outstanding_fragments_per_worker,
    )
    return Fragments(config, with_scaled_rewards(config, plan), leases, is_stored=True)
