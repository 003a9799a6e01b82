"""IMPALA: workers sample without waiting for the learner; V-trace corrects for how old their policy is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras

from aiorl.algorithms.algorithm import Array, Batch, LeasePlan, SamplePlan
from aiorl.algorithms.batch_buffers import BatchBuffers, ColumnSpec, rounded_up
from aiorl.algorithms.compiled_algorithm import CompiledAlgorithm, model_columns, previous_columns, state_columns
from aiorl.algorithms.compiled_update import CompiledUpdate
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.impala.update import impala_spec
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import InternalError
from aiorl.policy.schedules import Schedule

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["IMPALA"]


class IMPALA(CompiledAlgorithm):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Leases that are kept topped up."""
        own = _own(config)
        return LeasePlan(
            "streaming", own.fragments_per_batch(), own.outstanding_fragments_per_worker, own.max_policy_lag
        )

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Raw transitions; values only where an episode was cut from outside."""
        own = _own(config)
        columns = (
            c.OBS, c.ACTIONS, c.ACTION_LOGP, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES,
            *previous_columns(own),
        )  # fmt: skip
        return SamplePlan("none", {}, columns, (c.LAST_OBS, *state_columns(own)))

    def __init__(self, config: CommonConfig, model: ActorCritic, *, sizes_vary: bool = False) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model, sizes_vary=sizes_vary)
        own = self._config = _own(config)
        plan = self.sample_plan(own)
        specs = model_columns(model)
        columns = [specs.get(name, ColumnSpec(name)) for name in plan.columns]
        self.buffers = BatchBuffers(columns, [specs[name] for name in plan.extras])
        self._lr = Schedule.of(own.lr, own.lr_schedule, key="lr_schedule")
        self._entropy = Schedule.of(own.entropy_coeff, own.entropy_coeff_schedule, key="entropy_coeff_schedule")
        if own.opt_type == "adam":
            optimizer = keras.optimizers.Adam(own.lr, epsilon=own.epsilon)
        else:
            optimizer = keras.optimizers.RMSprop(own.lr, rho=own.decay, momentum=own.momentum, epsilon=own.epsilon)
        spec = impala_spec(own, model, self.buffers)
        self.compiled = CompiledUpdate(spec, model.trainable_variables, optimizer, grad_clip=own.grad_clip, xla=own.xla)

    @property
    def minibatch_size(self) -> int:
        """Sequences in a minibatch."""
        return min(self._config.sequences_per_minibatch(), self._nominal_sequences())

    @property
    def num_epochs(self) -> int:
        """Passes over each train batch."""
        return self._config.num_sgd_iter

    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """The sequences of all fragments, one environment's after the other's.

        Raises: BatchError if a column is missing or does not fit.
        """
        shapes = [self.buffers.shape_of(fragment) for fragment in fragments]
        num_sequences = self.fitted(sum(num_envs for _, num_envs in shapes), self._nominal_sequences())
        length = rounded_up(max(steps for steps, _ in shapes), self._config.sequence_length())
        return self.buffers.sequences(fragments, num_sequences, length)

    def nominal_batch(self) -> Batch:
        """A batch of zeros of the usual shape."""
        return self.buffers.zeros(
            self.fitted(self._nominal_sequences(), self._nominal_sequences()), self._config.sequence_length()
        )

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return {
            "lr": self._lr.value(env_steps_total),
            "gamma": own.gamma,
            "rho_bar": own.vtrace_clip_rho_threshold,
            "rho_bar_pg": own.vtrace_clip_pg_rho_threshold,
            "vf_loss_coeff": own.vf_loss_coeff,
            "entropy_coeff": self._entropy.value(env_steps_total),
        }

    def _nominal_sequences(self) -> int:
        own = self._config
        return own.fragments_per_batch() * (1 if own.batch_mode == "complete_episodes" else own.num_envs_per_worker)


def _own(config: CommonConfig) -> IMPALAConfig:
    if not isinstance(config, IMPALAConfig):
        raise InternalError(f"IMPALA was given a {type(config).__name__}")
    return config
