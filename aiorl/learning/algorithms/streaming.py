"""Parts of algorithms whose workers don't wait for the learner: their keys, and V-trace to correct
for older policies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import BROADCAST_INTERVAL, KeyTable, SDEKeys
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.actor_critic import sequence_forward_with_last
from aiorl.learning.algorithm import Adaptation, LeasePlan
from aiorl.learning.compiled import adam, keras_optimizer
from aiorl.learning.experience import Fragments, with_scaled_rewards
from aiorl.learning.keys.actor_critic import ActorCriticKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.vtrace import VTraceReturns, vtrace
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.rows import flattened, previous_columns, state_columns

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_log = logging.getLogger(__name__)

_learning = partial(key, group="Learning")


if TYPE_CHECKING:
    _OfActorCritic = ActorCriticKeys
else:
    _OfActorCritic = KeyTable


class StreamingKeys(_OfActorCritic):
    """Keys of algorithms that train on fragments as they arrive, from slightly older policies.

    They are about the optimiser, the largest policy lag, the fragments under way and the
    publication of weights.
    """

    opt_type: Literal["adam", "rmsprop"] = _learning("adam")
    """Optimizer."""
    epsilon: float = _learning(1e-5, gt=0)
    """The optimizer's epsilon. With rmsprop the papers use 0.1 for losses that are sums over rows;
    here losses are means over the n rows of a minibatch, so that the equivalent is 0.1 / n^2."""
    decay: float = _learning(0.99, ge=0, lt=1)
    """rmsprop: decay of the mean square."""
    momentum: float = _learning(0.0, ge=0, lt=1)
    """rmsprop: momentum."""
    max_policy_lag: int | None = _learning(10, unit="versions", ge=0)
    """Maximum age of a fragment in policy versions; older ones are discarded; null: no limit."""
    outstanding_fragments_per_worker: int = _learning(3, unit="fragments", ge=1)
    """Maximum number of fragments that a worker owes or has under way at a time, within the budget
    of the whole run."""
    broadcast_updates: int = _learning(1, unit="updates", ge=1)
    """Updates after which weights are sent to workers."""
    broadcast_interval_ms: float = _learning(50.0, BROADCAST_INTERVAL, unit="ms", gt=0)

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.refuse_unless(
            self.opt_type == "rmsprop",
            ("decay", "momentum"),
            "rmsprop",
            hint="Set opt_type: rmsprop, or leave it out.",
        )


class StreamingConfig(StreamingKeys, ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of algorithms that train on fragments of slightly older policies as they arrive."""


def streamed(config: StreamingKeys, plan: SamplePlan) -> Fragments:
    """Return experience of slightly older policies, which is trained on as it arrives; leases are
    kept topped up.

    Args:
        config: config of the algorithm.
        plan: columns that workers send, for example those of `transitions`.
    """
    leases = LeasePlan(
        "streaming",
        config.fragments_per_batch(),
        outstanding_per_worker=config.outstanding_fragments_per_worker,
        max_policy_lag=config.max_policy_lag,
        publish_every=config.broadcast_updates,
        publish_interval_s=config.broadcast_interval_ms / 1000,
    )
    return Fragments(config, with_scaled_rewards(config, plan), leases)


def transitions(config: StreamingKeys) -> SamplePlan:
    """Return a plan of raw transitions for V-trace with this `config`, with values only where an
    episode was truncated.

    A network that sees previous rewards sees them unscaled, including the last one of a sequence,
    so they are sent in addition to the scaled rewards to learn from.
    """
    previous = previous_columns(config)
    scaled = (c.SCALED_REWARDS,) if previous and config.normalize_rewards else ()
    columns = (
        c.OBS,
        c.ACTIONS,
        c.ACTION_LOGP,
        c.REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.BOOTSTRAP_VALUES,
        *previous,
        *scaled,
        c.LAST_OBS,
        *state_columns(config),
    )
    return SamplePlan("none", {}, columns)


def adam_or_rmsprop(config: StreamingKeys) -> Any:  # Any: a Keras optimiser
    """Return the optimiser of the config."""
    if config.opt_type == "adam":
        return adam(config, config.epsilon)
    return keras_optimizer(
        "RMSprop",
        config.optimizer,
        learning_rate=config.lr,
        epsilon=config.epsilon,
        rho=config.decay,
        momentum=config.momentum,
    )


_vtrace = partial(key, group="V-trace")


class VTraceConfig(StreamingKeys, ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of streaming algorithms that correct for older policies with V-trace.

    Its own keys are the limits of the importance ratios and the decay of the trace.
    """

    vtrace: bool = _vtrace(True)
    """Correct for older policies with V-trace; false treats all importance ratios as 1."""
    vtrace_clip_rho_threshold: float = _vtrace(1.0, gt=0, needs="vtrace")
    """Maximum importance ratio in the value targets (rho bar)."""
    vtrace_clip_pg_rho_threshold: float = _vtrace(1.0, gt=0, needs="vtrace")
    """Maximum importance ratio in the policy gradient."""
    lambda_: float = _vtrace(1.0, ge=0, le=1)
    """Decay of the trace: 1 is V-trace as published; lower values trust the value estimates
    more."""


class Judgement(NamedTuple):
    """Outputs of a network over M sequences of T steps.

    Attributes:
        dist_inputs: [T * M, P] float32, inputs of the action distribution.
        logp: [T, M] float32, log probabilities of the actions taken.
        values: [T, M] float32.
        last_values: [M] float32, values of the observations after the last step.
    """

    dist_inputs: tf.Tensor
    logp: tf.Tensor
    values: tf.Tensor
    last_values: tf.Tensor


class VTrace:
    """Judgement of whole sequences of raw transitions that older policies sampled.

    Attributes:
        distribution: action distribution.
    """

    def __init__(self, config: VTraceConfig, model: ActorCritic) -> None:
        """Judge by a network, `model`, with the limits of a `config`."""
        self._config = config
        self._model = model
        self.distribution = to_tf_distribution(model.distribution)

    def judge(self, columns: Tensors, weights: Mapping[str, Any] | None = None) -> Judgement:
        """Run the network over time-major columns.

        Args:
            columns: [T, M, ...] by name; columns of sequences are [M, ...].
            weights: tensors by name to use instead of the network's own weights.

        Returns:
            The outputs of the network.
        """
        dist_inputs, values, last_values = sequence_forward_with_last(self._model, columns, weights)
        flat_inputs = flattened(dist_inputs)
        logp = self.distribution.logp(flat_inputs, flattened(columns[c.ACTIONS]))
        return Judgement(
            dist_inputs=flat_inputs,
            logp=tf.reshape(logp, columns[c.VALID].shape),
            values=values,
            last_values=last_values,
        )

    def returns(self, columns: Tensors, judged: Judgement) -> tuple[VTraceReturns, tf.Tensor]:
        """Return V-trace targets, without a gradient, and log importance ratios, 0 for padding; all
        [T, M].

        Args:
            columns: time-major columns [T, M, ...] that another policy sampled.
            judged: outputs of the policy and the values that are learning.
        """
        config = self._config
        valid = columns[c.VALID]
        log_rhos = tf.where(valid > 0, judged.logp - columns[c.ACTION_LOGP], 0.0)
        corrections = tf.stop_gradient(log_rhos)
        if not config.vtrace:
            corrections = tf.zeros_like(log_rhos)
        targets = vtrace(
            tf.stop_gradient(judged.values),
            tf.stop_gradient(judged.last_values),
            rewards=columns.get(c.SCALED_REWARDS, columns[c.REWARDS]),
            terminateds=columns[c.TERMINATEDS],
            truncateds=columns[c.TRUNCATEDS],
            bootstrap_values=columns[c.BOOTSTRAP_VALUES],
            log_rhos=corrections,
            gamma=config.gamma,
            lam=config.lambda_,
            rho_bar=config.vtrace_clip_rho_threshold,
            rho_bar_pg=config.vtrace_clip_pg_rho_threshold,
            valid=valid,
        )
        return targets, log_rhos

    def ratio_metrics(self, log_rhos: tf.Tensor, valid: tf.Tensor) -> Tensors:
        """Return metrics of log importance ratios, all scalars.

        Args:
            log_rhos: float32 of any shape.
            valid: float32 of the same shape, 1 where a row is a transition, else 0.
        """
        rhos = tf.exp(log_rhos)
        rho_bar = self._config.vtrace_clip_rho_threshold
        return {
            "mean_rho": masked_mean(tf.minimum(rhos, rho_bar), valid),
            "clipped_rhos": masked_mean(tf.cast(rhos > rho_bar, tf.float32), valid),
        }


_LEAST_RHO = 0.3
"""Mean of the clipped ratios below which almost nothing is learned from the samples."""


class DriftWarning(Adaptation):
    """Warns, once, that the policy has moved far from the policies that sampled."""

    def __init__(self, config: VTraceConfig, remedies: str) -> None:
        """Warn with advice.

        Args:
            config: config of the algorithm.
            remedies: advice besides fewer passes and a smaller lag.
        """
        self._config = config
        self._remedies = remedies
        self._has_warned = False

    def after_update(self, metrics: dict[str, float], updates: int) -> None:
        """See `Adaptation`."""
        config = self._config
        least = _LEAST_RHO * min(1.0, config.vtrace_clip_rho_threshold)
        if metrics["mean_rho"] >= least or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mean_rho was %(mean_rho).2f in an update (1: same policy): the policy is far from"
            " those that sampled and learns little from their samples. Set a smaller num_sgd_iter"
            " (now %(num_sgd_iter)d) or max_policy_lag (now %(max_policy_lag)s), or %(remedies)s",
            {
                "mean_rho": metrics["mean_rho"],
                "num_sgd_iter": config.num_sgd_iter,
                "max_policy_lag": config.max_policy_lag,
                "remedies": self._remedies,
            },
        )
