"""IMPALA: workers don't wait for the learner;

V-trace corrects for their older policies (docs/algorithms/impala.md).
"""

from __future__ import annotations

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import unpacked
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.streaming import VTraceConfig, VTraceStreaming
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss, approximate_kl
from aiorl.learning.losses.vtrace import pg_advantages

_MAX_LOG_RHO = 20.0  # larger ratios would overflow the estimate of the divergence


class IMPALAConfig(VTraceConfig):
    """IMPALA's defaults of the keys of streaming algorithms."""

    algo: str = changed(VTraceConfig, "algo", "impala")
    entropy_coeff: float = changed(VTraceConfig, "entropy_coeff", 0.01)
    grad_clip: float | None = changed(VTraceConfig, "grad_clip", 1.0)

    kl_stop: float | None = key(None, group="V-trace", unit="nats", gt=0)
    """Divergence from the policies that sampled, above which an update ends after the current
    minibatch; null: never."""

    @property
    def has_whole_sequences(self) -> bool:
        """See `ActorCriticConfig.has_whole_sequences`; V-trace needs them in each minibatch."""
        return True


class IMPALA(VTraceStreaming[IMPALAConfig]):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig
    remedies = "a kl_stop; or use algo: appo, which limits how far an update moves the policy"

    def update_spec(self) -> UpdateSpec:
        """Return the loss over sequences."""
        config = self.config
        buffers = self.buffers
        distribution = self.distribution

        def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            columns = unpacked(minibatch, buffers, time_major=True)
            valid = columns[c.VALID]
            now = self.judge(columns)
            returns, log_rhos = self.vtrace_returns(columns, now)
            advantages = pg_advantages(
                returns.advantages, returns.weights, normalize=config.normalize_advantages
            )
            entropies = tf.reshape(distribution.entropy(now.dist_inputs), valid.shape)
            total, parts = actor_critic_loss(
                -masked_mean(now.logp * advantages, valid),
                now.values,
                returns.vs,
                entropies,
                valid,
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=coefficients["entropy_coeff"],
            )
            kl = masked_mean(approximate_kl(tf.minimum(log_rhos, _MAX_LOG_RHO)), valid)
            return total, {**parts, "kl": kl, **self.ratio_metrics(log_rhos, valid)}

        metrics = (
            "policy_loss",
            "vf_loss",
            "entropy",
            "kl",
            *self.metric_names,
            "vf_explained_var",
        )
        stop_when = None if config.kl_stop is None else ("kl", config.kl_stop)
        return UpdateSpec(loss, metrics, ("lr", "entropy_coeff"), stop_when)
