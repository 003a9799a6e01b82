"""Proximal policy optimisation: several epochs over one train batch of the newest policy
(docs/algorithms/ppo.md).
"""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.config.worker import MAX_ROWS
from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_algorithm import rows_forward
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import (
    OnPolicy,
    OnPolicyConfig,
    Surrogate,
    SurrogateConfig,
    surrogate_spec,
)
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import (
    approximate_kl,
    clipped_value_loss,
    masked_normalise,
    ppo_loss,
)

_ppo = partial(key, group="PPO")
_LEAST_STEPS = 64  # in a minibatch
_LEAST_SEQUENCES = 4  # in a minibatch of a recurrent network


class PPOConfig(SurrogateConfig, OnPolicyConfig):
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
        least = (
            _LEAST_SEQUENCES * self.rollout_fragment_length
            if self.model.is_recurrent
            else _LEAST_STEPS
        )
        return min(max(least, self.train_batch_size // 32), self.train_batch_size)

    def clips(self) -> dict[str, tuple[float, list[tuple[float, float]] | None]]:
        """See `SurrogateConfig.clips`; includes the limit of the values if these are clipped."""
        if not self.clips_values:
            return super().clips()
        return super().clips() | {
            "vf_clip_param": (self.vf_clip_param or 0.0, self.vf_clip_param_schedule)
        }


class PPO(Surrogate[PPOConfig], OnPolicy[PPOConfig]):
    """Proximal policy optimisation with clipping (Schulman et al. 2017)."""

    config_class = PPOConfig

    @classmethod
    def columns(cls, config: PPOConfig) -> tuple[str, ...]:
        """Return the columns that the loss needs; old values only for clipping, old logits only for
        the KL penalty.
        """
        names = [c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]
        if config.clips_values:
            names.append(c.VF_PREDS)
        if config.kl_coeff > 0:
            names.append(c.ACTION_DIST_INPUTS)
        return tuple(names)

    @property
    def shuffles(self) -> bool:
        """True if rows are visited in random order."""
        return self.config.shuffle_sequences

    def update_spec(self) -> UpdateSpec:
        """Return the clipped surrogate over rows, or over sequences for recurrent models."""
        config = self.config
        model = self.model
        buffers = self.buffers
        distribution = self.distribution
        has_penalty = config.kl_coeff > 0

        def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
            valid = columns[c.VALID]
            logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
            log_ratio = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
            advantages = columns[c.ADVANTAGES]
            targets = columns[c.VALUE_TARGETS]
            if config.normalize_advantages:
                advantages = masked_normalise(advantages, valid)
            errors = None
            if config.clips_values:
                limit = coefficients["vf_clip_param"]
                errors = clipped_value_loss(values, targets, columns[c.VF_PREDS], clip_param=limit)
            kls = (
                distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs)
                if has_penalty
                else approximate_kl(log_ratio)
            )
            return ppo_loss(
                log_ratio,
                advantages,
                kls,
                values,
                targets,
                distribution.entropy(dist_inputs),
                valid,
                clip_param=coefficients["clip_param"],
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=coefficients["entropy_coeff"],
                kl_coeff=coefficients["kl_coeff"] if has_penalty else None,
                errors=errors,
            )

        return surrogate_spec(config, loss)
