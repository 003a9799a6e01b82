"""Base classes of algorithms whose workers sample without waiting for the learner, and V-trace for how old they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import LeasePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm, sequence_forward_with_last
from aiorl.learning.algorithms.compiled_update import keras_optimizer
from aiorl.learning.algorithms.rows import flattened, previous_columns, state_columns
from aiorl.learning.algorithms.shared_config import BROADCAST_INTERVAL
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.vtrace import VTraceReturns, vtrace

_log = logging.getLogger(__name__)

_learning = partial(key, group="Learning")


class StreamingConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    opt_type: Literal["adam", "rmsprop"] = _learning("adam")
    """Optimizer."""
    epsilon: float = _learning(1e-5, gt=0)
    """The optimizer's epsilon. With rmsprop the papers take 0.1, for losses that are sums over rows; here they are
    means over the n rows of a minibatch, for which that is 0.1 / n^2."""
    decay: float = _learning(0.99, ge=0, lt=1)
    """rmsprop: decay of the mean square."""
    momentum: float = _learning(0.0, ge=0, lt=1)
    """rmsprop: momentum."""
    max_policy_lag: int | None = _learning(10, unit="versions", ge=0)
    """A fragment sampled more policy versions ago than this is discarded; null: never."""
    outstanding_fragments_per_worker: int = _learning(3, unit="fragments", ge=1)
    """Fragments that a worker may owe or have under way at a time, within the budget of the whole run."""
    broadcast_updates: int = _learning(1, unit="updates", ge=1)
    """Weights go to workers after so many updates."""
    broadcast_interval_ms: float = _learning(50.0, BROADCAST_INTERVAL, unit="ms", gt=0)

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        hint = "Set opt_type: rmsprop, or leave it out."
        self.refuse_unless(self.opt_type == "rmsprop", ("decay", "momentum"), "rmsprop", hint=hint)


StreamingT = TypeVar("StreamingT", bound=StreamingConfig)


class Streaming(CompiledAlgorithm[StreamingT]):
    """Trains on fragments as they come, of policies that are a little old."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Leases that are kept topped up."""
        own = cls.own_config(config)
        return LeasePlan(
            "streaming",
            own.fragments_per_batch(),
            own.outstanding_fragments_per_worker,
            own.max_policy_lag,
            publish_every=own.broadcast_updates,
            publish_interval_s=own.broadcast_interval_ms / 1000,
        )

    def make_optimizer(self) -> Any:  # Any: a Keras optimiser
        """Make an Adam, or RMSprop."""
        own = self.config
        if own.opt_type == "adam":
            return self.adam(own.epsilon)
        options = {"learning_rate": own.lr, "epsilon": own.epsilon, "rho": own.decay, "momentum": own.momentum}
        return keras_optimizer("RMSprop", own.optimizer, **options)


_vtrace = partial(key, group="V-trace")


class VTraceConfig(StreamingConfig):
    """The settings of such algorithms."""

    vtrace: bool = _vtrace(True)
    """Correct for old policies by V-trace; false takes all importance ratios as 1."""
    vtrace_clip_rho_threshold: float = _vtrace(1.0, gt=0, needs="vtrace")
    """Cut of the importance ratios in the value targets."""
    vtrace_clip_pg_rho_threshold: float = _vtrace(1.0, gt=0, needs="vtrace")
    """Cut of the importance ratios of the policy gradient."""
    lambda_: float = _vtrace(1.0, ge=0, le=1)
    """Decay of the trace; 1 is V-trace as published, less trusts the values more."""


class Judgement(NamedTuple):
    """What a network says of sequences, T steps of M.

    Attributes:
        dist_inputs: [T * M, P] float32, inputs of the action distribution.
        logp: [T, M] float32, of the actions that were taken.
        values: [T, M] float32.
        last_values: [M] float32, of the observations behind the last step.
    """

    dist_inputs: tf.Tensor
    logp: tf.Tensor
    values: tf.Tensor
    last_values: tf.Tensor


VTraceT = TypeVar("VTraceT", bound=VTraceConfig)

_LEAST_RHO = 0.3
"""With less as the mean of the cut ratios, next to nothing is learned from the samples."""


class VTraceStreaming(Streaming[VTraceT]):
    """Trains on whole sequences of raw transitions; see `aiorl.learning.algorithms.streaming`."""

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Raw transitions; values only where an episode was cut from outside.

        A network that looks back sees rewards as they are, also the last one of a sequence: so they are sent beside
        those that are learned from.
        """
        own = cls.own_config(config)
        previous = previous_columns(own)
        scaled = (c.SCALED_REWARDS,) if previous and own.normalize_rewards else ()
        columns = (
            c.OBS, c.ACTIONS, c.ACTION_LOGP, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES,
            *previous, *scaled, c.LAST_OBS, *state_columns(own),
        )  # fmt: skip
        return SamplePlan("none", {}, columns)

    remedies = "a kl_stop"
    """What to set where the policy runs away from its samples, other than a smaller number of passes and lag."""
    _has_warned = False

    def after_update(self, metrics: dict[str, float]) -> None:
        """Warn, once, if the policy has moved far from those that sampled."""
        super().after_update(metrics)
        if metrics["mean_rho"] >= _LEAST_RHO * min(1.0, self.config.vtrace_clip_rho_threshold) or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mean_rho was %.2f in an update: the policy is far from those that sampled (1: it is theirs), and learns "
            "little from their samples. Set a smaller num_sgd_iter (now %d) or max_policy_lag (now %s), or %s",
            metrics["mean_rho"], self.config.num_sgd_iter, self.config.max_policy_lag, self.remedies,
        )  # fmt: skip

    metric_names = ("mean_rho", "clipped_rhos")
    """Names of the metrics of `ratio_metrics`."""

    def judge(self, columns: Tensors, weights: Mapping[str, Any] | None = None) -> Judgement:
        """Run the network over time-major columns.

        Args:
            columns: [T, M, ...] by name; those of sequences [M, ...].
            weights: tensors by name to be used in place of its own.
        """
        dist_inputs, values, last_values = sequence_forward_with_last(self.model, columns, weights)
        flat_inputs = flattened(dist_inputs)
        logp = self.distribution.logp(flat_inputs, flattened(columns[c.ACTIONS]))
        return Judgement(flat_inputs, tf.reshape(logp, columns[c.VALID].shape), values, last_values)

    def vtrace_returns(self, columns: Tensors, judged: Judgement) -> tuple[VTraceReturns, tf.Tensor]:
        """Targets without a gradient, and log importance ratios, 0 in rows that are no transitions; all [T, M].

        Args:
            columns: time-major, of what another policy sampled.
            judged: by the policy and the values that are to be learned from.
        """
        own, valid = self.config, columns[c.VALID]
        log_rhos = tf.where(valid > 0, judged.logp - columns[c.ACTION_LOGP], 0.0)
        returns = vtrace(
            tf.stop_gradient(judged.values), tf.stop_gradient(judged.last_values),
            columns.get(c.SCALED_REWARDS, columns[c.REWARDS]), columns[c.TERMINATEDS], columns[c.TRUNCATEDS],
            columns[c.BOOTSTRAP_VALUES],
            tf.stop_gradient(log_rhos) if own.vtrace else tf.zeros_like(log_rhos),
            gamma=own.gamma, lam=own.lambda_, rho_bar=own.vtrace_clip_rho_threshold,
            rho_bar_pg=own.vtrace_clip_pg_rho_threshold, valid=valid,
        )  # fmt: skip
        return returns, log_rhos

    def ratio_metrics(self, log_rhos: tf.Tensor, valid: tf.Tensor) -> Tensors:
        """Metrics of log importance ratios of any shape."""
        rhos, rho_bar = tf.exp(log_rhos), self.config.vtrace_clip_rho_threshold
        return {
            "mean_rho": masked_mean(tf.minimum(rhos, rho_bar), valid),
            "clipped_rhos": masked_mean(tf.cast(rhos > rho_bar, tf.float32), valid),
        }
