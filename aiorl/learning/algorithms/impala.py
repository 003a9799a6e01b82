"""IMPALA: workers don't wait for the learner, and V-trace corrects for their older policies
(docs/algorithms/impala.md).
"""

from __future__ import annotations

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.actor_critic import update_by_loss
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.streaming import (
    DriftWarning,
    VTrace,
    VTraceConfig,
    adam_or_rmsprop,
    streamed,
    transitions,
)
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


class IMPALA(Algorithm[IMPALAConfig]):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig

    @staticmethod
    def experience(config: IMPALAConfig) -> Experience:
        """Return raw transitions of slightly older policies; see `Algorithm.experience`."""
        return streamed(config, transitions(config))

    @staticmethod
    def update(config: IMPALAConfig, networks: Networks) -> Update:
        """Return the loss over sequences; see `Algorithm.update`."""
        model = networks.model
        vtrace = VTrace(config, model)

        def loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            valid = columns[c.VALID]
            now = vtrace.judge(columns)
            returns, log_rhos = vtrace.returns(columns, now)
            advantages = pg_advantages(
                returns.advantages, returns.weights, normalize=config.normalize_advantages
            )
            entropies = vtrace.distribution.entropy(now.dist_inputs)
            total, parts = actor_critic_loss(
                -masked_mean(now.logp * advantages, valid),
                now.values,
                returns.vs,
                entropies=tf.reshape(entropies, valid.shape),
                valid=valid,
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=knobs["entropy_coeff"],
            )
            kl = masked_mean(approximate_kl(tf.minimum(log_rhos, _MAX_LOG_RHO)), valid)
            return total, {**parts, "kl": kl, **vtrace.ratio_metrics(log_rhos, valid)}

        remedies = "a kl_stop; or use algo: appo, which limits how far an update moves the policy"
        return update_by_loss(
            config,
            model,
            loss,
            adam_or_rmsprop(config),
            stop_when=None if config.kl_stop is None else ("kl", config.kl_stop),
            adaptations=(DriftWarning(config, remedies),),
        )
