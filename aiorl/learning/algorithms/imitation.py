"""Base class of algorithms that imitate stored experience from any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.config.key import changed, key, refuse
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import Array, Batch, LeasePlan, want_stored_experience
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm

_learning = partial(key, group="Learning")


class ImitationConfig(ActorCriticConfig):
    """Settings of algorithms that imitate stored experience as it arrives.

    Its own keys are Adam's epsilon and the number of fragments under way.
    """

    is_offline: ClassVar[bool] = True
    why_no_exploration = "it learns from stored experience"

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
        refuse(
            self,
            (
                self.is_filtered and self.gradients == "workers",
                "observation_filter",
                (
                    f"{self.algo} filters stored observations on the learner, but workers compute"
                    " the gradients."
                ),
                "Set gradients: learner, or observation_filter: NoFilter.",
            ),
            (
                self.model.is_recurrent and not self.postprocess_inputs,
                "postprocess_inputs",
                "stored rows don't contain the states of this recurrent model.",
                (
                    "Set postprocess_inputs: true, so that workers run the model over the stored"
                    " episodes."
                ),
            ),
        )


ImitationT = TypeVar("ImitationT", bound=ImitationConfig)


class Imitation(CompiledAlgorithm[ImitationT]):
    """Algorithm that trains on stored experience as it arrives."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Return a plan with leases that are kept topped up; experience of any age is used.

        Args:
            config: config of the run.

        Raises:
            ConfigError: there is no stored experience.
        """
        own = cls.own_config(config)
        want_stored_experience(own)
        return LeasePlan(
            "streaming", own.fragments_per_batch(), own.outstanding_fragments_per_worker
        )

    def lay_out(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """See `CompiledAlgorithm.lay_out`; stored observations are filtered here if there is a
        filter.
        """
        own = self.merged_filter
        if isinstance(own, MeanStdFilter):
            now = Normalisation.of(own)
            fragments = [{**fragment, c.OBS: now(fragment[c.OBS])} for fragment in fragments]
        return super().lay_out(fragments)

    def make_optimizer(self) -> Any:  # Any: a Keras optimiser
        """Return Adam."""
        return self.adam(self.config.adam_epsilon)
