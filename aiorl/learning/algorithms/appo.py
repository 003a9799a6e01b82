"""APPO: PPO's epochs over train batches of workers that don't wait for the learner
(docs/algorithms/appo.md).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.learning.algorithms.actor_critic_config import divisors
from aiorl.learning.algorithms.batch_buffers import PACKED, BatchBuffers, unpacked
from aiorl.learning.algorithms.compiled_algorithm import rows_forward
from aiorl.learning.algorithms.compiled_update import TargetNetwork, UpdateSpec
from aiorl.learning.algorithms.on_policy import Surrogate, SurrogateConfig, surrogate_spec
from aiorl.learning.algorithms.rows import by_time
from aiorl.learning.algorithms.streaming import VTraceConfig, VTraceStreaming
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import ppo_loss
from aiorl.learning.losses.vtrace import impact_log_ratio, pg_advantages

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_TARGET_LOGP = "target_logp"
_LOG_RHOS = "log_rhos"
_WEIGHTS = "weights"
"""Columns that the target network adds to a batch."""

_appo = partial(key, group="APPO")


class APPOConfig(SurrogateConfig, VTraceConfig):
    """APPO's own keys, and its defaults of common keys."""

    algo: str = changed(VTraceConfig, "algo", "appo")
    num_sgd_iter: int = changed(VTraceConfig, "num_sgd_iter", 4)
    entropy_coeff: float = changed(VTraceConfig, "entropy_coeff", 0.01)

    target_update_freq: int = _appo(1, unit="updates", ge=1)
    """Updates after which the target network becomes a copy of the online network."""
    target_worker_clipping: float = _appo(2.0, gt=0)
    """Maximum ratio of the sampling policy's to the target policy's probability of an action;
    larger ratios are clipped."""


class APPO(Surrogate[APPOConfig], VTraceStreaming[APPOConfig]):
    """Asynchronous proximal policy optimisation with a target network (IMPACT; Luo et al. 2020).

    The target network doesn't change during an update, so it evaluates each batch once, before
    minibatches are taken.
    """

    config_class = APPOConfig

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch and copy the network; nothing is compiled yet."""
        self._target = TargetNetwork(model)
        self.targets = {"target": self._target}
        super().__init__(config, model)

    @property
    def visits_rows(self) -> bool:
        """True if a minibatch consists of rows: the target network evaluates whole sequences before
        they are split.
        """
        return not self.config.model.is_recurrent

    def after_update(self, metrics: dict[str, float]) -> None:
        """See `CompiledAlgorithm.after_update`; also updates the target network."""
        super().after_update(metrics)
        if self.updates % self.config.target_update_freq == 0:
            self._target.take_over()

    def update_spec(self) -> UpdateSpec:
        """Return the clipped surrogate over rows, or over sequences for recurrent models."""
        config = self.config
        model = self.model
        buffers = self.buffers
        distribution = self.distribution
        judged = (
            *(
                ColumnSpec(name)
                for name in (_TARGET_LOGP, _LOG_RHOS, _WEIGHTS, c.ADVANTAGES, c.VALUE_TARGETS)
            ),
            ColumnSpec(c.ACTION_DIST_INPUTS, (model.distribution.num_inputs,)),
        )
        layout = BatchBuffers(
            (*buffers.columns, *judged, *(buffers.of_sequences if model.is_recurrent else ()))
        )

        def begin(batch: Tensors, coefficients: Tensors) -> Tensors:
            num_sequences, length = batch[PACKED].shape[:2]
            weights = self._target.tensors()
            # no more rows at a time than in a minibatch, so that it needs no more memory than a
            # step
            most = max(1, config.minibatch_steps() // length)
            size = max(divisor for divisor in divisors(num_sequences) if divisor <= most)
            parts = {name: tf.reshape(x, [-1, size, *x.shape[1:]]) for name, x in batch.items()}
            of_part = tf.autograph.experimental.do_not_convert(
                lambda part: self._judged(part, weights)
            )
            more = tf.map_fn(of_part, parts, fn_output_signature=tf.float32, parallel_iterations=1)
            packed = tf.concat(
                [batch[PACKED], tf.reshape(more, [num_sequences, length, -1])], axis=-1
            )
            judged_batch = {**batch, PACKED: packed}
            if model.is_recurrent:
                return judged_batch
            names = [PACKED, *(spec.name for spec in layout.columns if not spec.is_packed)]
            return {
                name: tf.reshape(judged_batch[name], [-1, *judged_batch[name].shape[2:]])
                for name in names
            }

        def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(model, minibatch, layout)
            valid = columns[c.VALID]
            log_ratio = impact_log_ratio(
                distribution.logp(dist_inputs, columns[c.ACTIONS]),
                columns[_TARGET_LOGP],
                columns[c.ACTION_LOGP],
                max_ratio=config.target_worker_clipping,
            )
            total, parts = ppo_loss(
                tf.where(valid > 0, log_ratio, 0.0),
                pg_advantages(
                    columns[c.ADVANTAGES], columns[_WEIGHTS], normalize=config.normalize_advantages
                ),
                distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs),
                values,
                columns[c.VALUE_TARGETS],
                distribution.entropy(dist_inputs),
                valid,
                clip_param=coefficients["clip_param"],
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=coefficients["entropy_coeff"],
                kl_coeff=coefficients["kl_coeff"] if config.kl_coeff > 0 else None,
            )
            return total, {**parts, **self.ratio_metrics(columns[_LOG_RHOS], valid)}

        spec = surrogate_spec(config, loss, metrics=self.metric_names)
        return dataclasses.replace(spec, begin=begin)

    def _judged(self, minibatch: Tensors, weights: Tensors) -> tf.Tensor:
        """Return the columns [M, T, ...] that the target network adds to sequences, in the order of
        the layout.
        """
        columns = unpacked(minibatch, self.buffers, time_major=True)
        old = self.judge(columns, weights)
        returns, log_rhos = self.vtrace_returns(columns, old)
        scalars = tf.stack(
            [old.logp, log_rhos, returns.weights, returns.advantages, returns.vs], axis=-1
        )
        inputs = tf.reshape(old.dist_inputs, [*old.logp.shape, -1])
        return by_time(tf.concat([scalars, inputs], axis=-1))
