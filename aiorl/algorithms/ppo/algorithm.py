"""PPO: leases for exactly one train batch at one policy version, then several epochs over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from aiorl.algorithms.algorithm import Array, Batch, LeasePlan, SamplePlan
from aiorl.algorithms.batch_buffers import BatchBuffers, ColumnSpec, rounded_up
from aiorl.algorithms.compiled_algorithm import CompiledAlgorithm, model_columns, previous_columns, state_columns
from aiorl.algorithms.compiled_update import CompiledUpdate
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.algorithms.ppo.update import ppo_spec
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import CheckpointError, InternalError
from aiorl.policy.schedules import Schedule

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["PPO"]


class PPO(CompiledAlgorithm):
    """Proximal policy optimisation with clipping (Schulman et al. 2017)."""

    config_class = PPOConfig

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Exactly one train batch of each version."""
        return LeasePlan("on_policy", _own(config).fragments_per_batch(), max_policy_lag=0)

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Rows with advantages; flags and states only for recurrent models, old logits only for a penalty on them."""
        own = _own(config)
        names = [c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]
        if own.vf_clip_param is not None:
            names.append(c.VF_PREDS)
        if own.kl_coeff > 0:
            names.append(c.ACTION_DIST_INPUTS)
        extras: tuple[str, ...] = ()
        if own.model.use_lstm or own.model.use_gru:
            names += [c.TERMINATEDS, c.TRUNCATEDS, *previous_columns(own)]
            extras = state_columns(own)
        return SamplePlan("gae", {"gamma": own.gamma, "lam": own.lambda_}, tuple(names), extras)

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
        self._kl_coeff = own.kl_coeff
        optimizer = keras.optimizers.Adam(own.lr, epsilon=own.adam_epsilon)
        spec = ppo_spec(own, model, self.buffers)
        self.compiled = CompiledUpdate(spec, model.trainable_variables, optimizer, grad_clip=own.grad_clip, xla=own.xla)

    @property
    def minibatch_size(self) -> int:
        """Rows in a minibatch, or sequences if the model is recurrent."""
        steps = self._config.minibatch_steps()
        return max(1, steps // self._config.sequence_length()) if self.model.is_recurrent else steps

    @property
    def num_epochs(self) -> int:
        """Passes over each train batch."""
        return self._config.num_sgd_iter

    @property
    def shuffles(self) -> bool:
        """Whether rows are visited in a random order."""
        return self._config.shuffle_sequences

    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Rows of all fragments one after the other, or their sequences if the model is recurrent.

        Fragments of whole episodes differ in length; such batches are padded to one of few sizes.

        Raises: BatchError if a column is missing or does not fit.
        """
        shapes = [self.buffers.shape_of(fragment) for fragment in fragments]
        if self.model.is_recurrent:
            num_sequences = self.fitted(sum(num_envs for _, num_envs in shapes), self._nominal_sequences())
            length = rounded_up(max(steps for steps, _ in shapes), self._config.sequence_length())
            return self.buffers.sequences(fragments, num_sequences, length)
        rows = sum(steps * num_envs for steps, num_envs in shapes)
        return self.buffers.rows(fragments, self.fitted(rows, self._config.train_batch_size))

    def nominal_batch(self) -> Batch:
        """A batch of zeros of the usual shape."""
        if self.model.is_recurrent:
            size = self.fitted(self._nominal_sequences(), self._nominal_sequences())
            return self.buffers.zeros(size, self._config.sequence_length())
        size = self._config.train_batch_size
        return self.buffers.zeros(self.fitted(size, size))

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return {
            "lr": self._lr.value(env_steps_total),
            "clip_param": own.clip_param,
            "vf_loss_coeff": own.vf_loss_coeff,
            "entropy_coeff": self._entropy.value(env_steps_total),
            "kl_coeff": self._kl_coeff,
            "kl_stop": float("inf") if own.kl_stop is None else own.kl_stop,
        }

    def after_update(self, metrics: dict[str, float]) -> None:
        """Adapt the penalty's weight: more where the policy moved more than twice as far as wanted, and back."""
        metrics["cur_kl_coeff"] = self._kl_coeff
        if metrics["kl"] > 2.0 * self._config.kl_target:
            self._kl_coeff *= 1.5
        elif metrics["kl"] < 0.5 * self._config.kl_target:
            self._kl_coeff *= 0.5

    def extra_state(self) -> dict[str, Any]:
        """The adaptive penalty."""
        return {"kl_coeff": self._kl_coeff}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take the adaptive penalty up again.

        Raises: CheckpointError if it is missing.
        """
        if "kl_coeff" not in values:
            raise CheckpointError("values", "kl_coeff is missing")
        self._kl_coeff = float(values["kl_coeff"])

    def _nominal_sequences(self) -> int:
        own = self._config
        return own.fragments_per_batch() * (1 if own.batch_mode == "complete_episodes" else own.num_envs_per_worker)


def _own(config: CommonConfig) -> PPOConfig:
    if not isinstance(config, PPOConfig):
        raise InternalError(f"PPO was given a {type(config).__name__}")
    return config
