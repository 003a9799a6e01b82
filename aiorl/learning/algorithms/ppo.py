"""Proximal policy optimisation: several epochs over one train batch of the newest policy
(docs/algorithms/ppo.md).
"""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.config.worker import MAX_ROWS
from aiorl.data import columns as c
from aiorl.learning.actor_critic import rows_forward
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.surrogate import SurrogateKeys, surrogate_update
from aiorl.learning.compiled import adam
from aiorl.learning.experience import advantages, on_policy
from aiorl.learning.keys.actor_critic import OnPolicyConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import (
    approximate_kl,
    clipped_value_loss,
    masked_normalise,
    ppo_loss,
)
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.steps import descend, minibatches

_ppo = partial(key, group="PPO")
_LEAST_STEPS = 64  # in a minibatch
_LEAST_SEQUENCES = 4  # in a minibatch of a recurrent network


class PPOConfig(SurrogateKeys, OnPolicyConfig):
    """PPO's own keys, and its defaults of common keys."""

    algo: str = changed(OnPolicyConfig, "algo", "ppo")
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 2048)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 4)
    lr: float = changed(OnPolicyConfig, "lr", 3e-4)
    num_sgd_iter: int = changed(OnPolicyConfig, "num_sgd_iter", 10)
    sgd_minibatch_size: int | None = key(
        None, group="Learning", unit="env steps", ge=1, le=MAX_ROWS
    )
    """Env steps in one minibatch; null: a 32nd of the train batch, but at least 64, and for
    recurrent networks at least four fragments of one environment."""
    normalize_advantages: bool = changed(OnPolicyConfig, "normalize_advantages", True)

    vf_clip_param: float | None = _ppo(None, gt=0)
    """Largest move of a value in one update that still lowers the loss, in units of return (of
    scaled rewards with normalize_rewards); null: no limit."""
    vf_clip_param_schedule: list[tuple[float, float]] | None = _ppo(None)
    """vf_clip_param over env steps, as [[env step, value], ...]."""
    shuffle_sequences: bool = _ppo(True)
    """Visit rows in a new random order each epoch."""

    @property
    def clips_values(self) -> bool:
        """True if the value loss is clipped."""
        return self.vf_clip_param is not None or self.vf_clip_param_schedule is not None

    def minibatch_steps(self) -> int:
        """Return the env steps in one minibatch."""
        if self.sgd_minibatch_size is not None:
            return self.sgd_minibatch_size
        least = _LEAST_STEPS
        if self.model.is_recurrent:
            least = _LEAST_SEQUENCES * self.rollout_fragment_length
        return min(max(least, self.train_batch_size // 32), self.train_batch_size)

    def clips(self) -> dict[str, tuple[float, list[tuple[float, float]] | None]]:
        """See `SurrogateKeys.clips`; includes the limit of the values if these are clipped."""
        if not self.clips_values:
            return super().clips()
        return super().clips() | {
            "vf_clip_param": (self.vf_clip_param or 0.0, self.vf_clip_param_schedule)
        }


class PPO(Algorithm[PPOConfig]):
    """Proximal policy optimisation with clipping (Schulman et al. 2017)."""

    config_class = PPOConfig

    @staticmethod
    def experience(config: PPOConfig) -> Experience:
        """Return samples of the newest policy with advantages; old values only for clipping, old
        logits only for the KL penalty; see `Algorithm.experience`.
        """
        columns = [c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]
        if config.clips_values:
            columns.append(c.VF_PREDS)
        if config.kl_coeff > 0:
            columns.append(c.ACTION_DIST_INPUTS)
        return on_policy(config, advantages(config, config.lambda_, columns))

    @staticmethod
    def update(config: PPOConfig, networks: Networks) -> Update:
        """Return epochs of the clipped surrogate over rows, or over sequences for recurrent models;
        see `Algorithm.update`.
        """
        model = networks.model
        distribution = to_tf_distribution(model.distribution)
        has_penalty = config.kl_coeff > 0

        def loss(minibatch: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(model, minibatch)
            valid = columns[c.VALID]
            logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
            log_ratio = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
            advantages = columns[c.ADVANTAGES]
            targets = columns[c.VALUE_TARGETS]
            if config.normalize_advantages:
                advantages = masked_normalise(advantages, valid)
            errors = None
            if config.clips_values:
                limit = knobs["vf_clip_param"]
                errors = clipped_value_loss(values, targets, columns[c.VF_PREDS], clip_param=limit)
            if has_penalty:
                kls = distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs)
            else:
                kls = approximate_kl(log_ratio)
            return ppo_loss(
                log_ratio,
                advantages,
                kls=kls,
                values=values,
                targets=targets,
                entropies=distribution.entropy(dist_inputs),
                valid=valid,
                clip_param=knobs["clip_param"],
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=knobs["entropy_coeff"],
                kl_coeff=knobs["kl_coeff"] if has_penalty else None,
                errors=errors,
            )

        optimizer = adam(config, config.adam_epsilon)
        step = descend(model.trainable_variables, loss, optimizer, clip=config.grad_clip)
        parts = minibatches(config.minibatch_steps(), step, shuffles=config.shuffle_sequences)
        return surrogate_update(config, parts)
