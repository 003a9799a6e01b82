"""APPO: PPO's epochs over train batches of workers that don't wait for the learner
(docs/algorithms/appo.md).
"""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.actor_critic import rows_forward
from aiorl.learning.algorithm import Adaptation, Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.streaming import (
    DriftWarning,
    VTrace,
    VTraceConfig,
    adam_or_rmsprop,
    streamed,
    transitions,
)
from aiorl.learning.algorithms.surrogate import SurrogateKeys, surrogate_update
from aiorl.learning.keys.batch_sizes import divisors
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import ppo_loss
from aiorl.learning.losses.vtrace import impact_log_ratio, pg_advantages
from aiorl.learning.rows import by_time, flattened
from aiorl.learning.steps import TargetNetwork, descend, minibatches

_TARGET_LOGP = "target_logp"
_LOG_RHOS = "log_rhos"
_CLIPPED_RHOS = "clipped_rhos"
"""Columns that the target network adds to a batch."""

_appo = partial(key, group="APPO")


class APPOConfig(SurrogateKeys, VTraceConfig):
    """APPO's own keys, and its defaults of common keys."""

    algo: str = changed(VTraceConfig, "algo", "appo")
    num_sgd_iter: int = changed(VTraceConfig, "num_sgd_iter", 4)
    entropy_coeff: float = changed(VTraceConfig, "entropy_coeff", 0.01)

    target_update_freq: int = _appo(1, unit="updates", ge=1)
    """Updates after which the target network becomes a copy of the online network."""
    target_worker_clipping: float = _appo(2.0, gt=0)
    """Maximum ratio of the sampling policy's to the target policy's probability of an action;
    larger ratios are clipped."""


class APPO(Algorithm[APPOConfig]):
    """Asynchronous proximal policy optimisation with a target network (IMPACT; Luo et al. 2020).

    The target network doesn't change during an update, so it judges each batch once, before
    minibatches are taken.
    """

    config_class = APPOConfig

    @staticmethod
    def experience(config: APPOConfig) -> Experience:
        """Return raw transitions of slightly older policies; see `Algorithm.experience`."""
        return streamed(config, transitions(config))

    @staticmethod
    def update(config: APPOConfig, networks: Networks) -> Update:
        """Return epochs of the clipped surrogate over rows, or over sequences for recurrent models;
        see `Algorithm.update`.

        Minibatches are of rows if the model isn't recurrent: the target network judges whole
        sequences before they are split.
        """
        model = networks.model
        target = TargetNetwork(model)
        vtrace = VTrace(config, model)
        distribution = vtrace.distribution

        def begin(batch: Tensors, knobs: Tensors) -> Tensors:
            return _with_judgement(config, vtrace, target, batch)

        def loss(minibatch: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(model, minibatch)
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
                    columns[c.ADVANTAGES],
                    columns[_CLIPPED_RHOS],
                    normalize=config.normalize_advantages,
                ),
                kls=distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs),
                values=values,
                targets=columns[c.VALUE_TARGETS],
                entropies=distribution.entropy(dist_inputs),
                valid=valid,
                clip_param=knobs["clip_param"],
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=knobs["entropy_coeff"],
                kl_coeff=knobs["kl_coeff"] if config.kl_coeff > 0 else None,
            )
            return total, {**parts, **vtrace.ratio_metrics(columns[_LOG_RHOS], valid)}

        optimizer = adam_or_rmsprop(config)
        step = descend(model.trainable_variables, loss, optimizer, clip=config.grad_clip)
        of_rows = not model.is_recurrent
        return surrogate_update(
            config,
            minibatches(config.minibatch_steps(), step, of_rows=of_rows),
            begin=begin,
            adaptations=(
                DriftWarning(config, "a kl_stop"),
                _TargetCopies(target, config.target_update_freq),
            ),
            targets={"target": target},
        )


class _TargetCopies(Adaptation):
    """Makes the target network a copy of the online network after some updates."""

    def __init__(self, target: TargetNetwork, period: int) -> None:
        self._target = target
        self._period = period

    def after_update(self, metrics: dict[str, float], updates: int) -> None:
        if updates % self._period == 0:
            self._target.take_over()


def _with_judgement(
    config: APPOConfig, vtrace: VTrace, target: TargetNetwork, batch: Tensors
) -> Tensors:
    """Return a batch of sequences [M, T, ...] with the target network's judgement of each row; the
    rows themselves [M * T, ...] unless the model is recurrent.
    """
    num_sequences, length = batch[c.VALID].shape
    weights = target.tensors()
    # no more rows at a time than in a minibatch, so that it needs no more memory than a step
    limit = max(1, config.minibatch_steps() // length)
    size = max(divisor for divisor in divisors(num_sequences) if divisor <= limit)
    parts = {name: tf.reshape(x, [-1, size, *x.shape[1:]]) for name, x in batch.items()}

    def judge(part: Tensors) -> Tensors:
        columns = {
            name: column if c.is_of_sequences(name) else by_time(column)
            for name, column in part.items()
        }
        old = vtrace.judge(columns, weights)
        returns, log_rhos = vtrace.returns(columns, old)
        judged = {
            _TARGET_LOGP: old.logp,
            _LOG_RHOS: log_rhos,
            _CLIPPED_RHOS: returns.weights,
            c.ADVANTAGES: returns.advantages,
            c.VALUE_TARGETS: returns.vs,
            c.ACTION_DIST_INPUTS: tf.reshape(old.dist_inputs, [length, size, -1]),
        }
        return {name: by_time(column) for name, column in judged.items()}

    names = (_TARGET_LOGP, _LOG_RHOS, _CLIPPED_RHOS, c.ADVANTAGES, c.VALUE_TARGETS)
    signature = dict.fromkeys((*names, c.ACTION_DIST_INPUTS), tf.float32)
    # in an eager update, map_fn would convert it with AutoGraph, which it doesn't need
    judge = tf.autograph.experimental.do_not_convert(judge)
    judged = tf.map_fn(judge, parts, fn_output_signature=signature, parallel_iterations=1)
    columns = dict(batch)
    for name, column in judged.items():
        columns[name] = tf.reshape(column, [num_sequences, *column.shape[2:]])
    if config.model.is_recurrent:
        return columns
    return {
        name: flattened(column) for name, column in columns.items() if not c.is_of_sequences(name)
    }
