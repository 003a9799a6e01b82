"""SAC: an actor rewarded for its entropy, critics, and a learned temperature
(docs/algorithms/sac.md).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from aiorl.acting.distributions import Categorical
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_replay import (
    ACTOR_LR,
    SEEDS,
    ActorReplayAlgorithm,
    critic_loss_of,
)
from aiorl.learning.algorithms.compiled_update import LossFunction, Phase, UpdateSpec
from aiorl.learning.algorithms.replay_config import ActorReplayConfig
from aiorl.learning.algorithms.shared_config import SDEConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.critics import (
    discrete_entropy,
    discrete_soft_values,
    soft_values,
    temperature_losses,
)
from aiorl.learning.models.distributions import SquashedGaussian

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

OF_CHOICES = "q_of_choices"
"""Name of an extra tensor that the critics' loss returns for discrete actions: the Q values [C, B,
A] of all actions."""
_ALPHA_LR = "alpha_lr"
_ENTROPIES = "entropies"
_TARGETS = "target_entropies"

_sac = partial(key, group="SAC")


class SACConfig(ActorReplayConfig, SDEConfig):
    """SAC's own keys, and its defaults of common keys."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box", "Discrete")

    algo: str = changed(ActorReplayConfig, "algo", "sac")
    sde_initial_log_std: float = changed(SDEConfig, "sde_initial_log_std", -3.0)
    sde_learn_features: bool = changed(SDEConfig, "sde_learn_features", True)

    initial_alpha: float = _sac(1.0, gt=0, allow_inf_nan=False)
    """Initial temperature: the value of one nat of entropy, in units of reward."""
    alpha_lr: float | None = _sac(None, ge=0, allow_inf_nan=False)
    """Constant learning rate of the logarithm of the temperature; null: lr with its lr_schedule; 0:
    the temperature is constant."""
    entropy_backup: bool = _sac(True)
    """Include the entropy of the next action in the critics' targets."""
    target_entropy: float | Literal["auto"] = _sac("auto", unit="nats")
    """Entropy that the temperature aims at, for a Box with actions scaled to [-1, 1]; auto: minus
    the number of action dimensions, or for discrete actions target_entropy_scale times the maximum
    entropy."""
    target_entropy_scale: float = _sac(0.98, ge=0, le=1)
    """For discrete actions with target_entropy auto: share of the entropy of a uniform choice among
    the legal actions."""

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.refuse_unless(
            self.target_entropy == "auto",
            ("target_entropy_scale",),
            "target_entropy auto",
            hint="Leave out either it or target_entropy.",
        )
        names = ("target_entropy", "target_entropy_scale")
        hint = (
            "With alpha_lr: 0 the temperature is constant. Leave out either alpha_lr or this key."
        )
        self.refuse_unless(self.alpha_lr != 0, names, "a temperature that is learned", hint=hint)


SACConfigT = TypeVar("SACConfigT", bound=SACConfig)


class SAC(ActorReplayAlgorithm[SACConfigT]):
    """Soft actor-critic (Haarnoja et al. 2018) for bounded Boxes and discrete actions."""

    config_class = SACConfig

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Return settings for sampled actions, with state-dependent noise if set, and uniform ones
        at the start.
        """
        own = cls.own_config(config)
        return {"exploration": own.sampling(random_timesteps=own.random_timesteps)}

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Allocate the replay, the critics and the temperature; nothing is compiled yet."""
        self._log_alpha = tf.Variable(
            math.log(self.own_config(config).initial_alpha), dtype=tf.float32
        )
        super().__init__(config, model)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See `ReplayAlgorithm.coefficients`; adds the learning rate of the temperature."""
        given = super().coefficients(env_steps_total)
        return {
            **given,
            _ALPHA_LR: given["lr"] if self.config.alpha_lr is None else self.config.alpha_lr,
        }

    def other_variables(self) -> dict[str, Any]:
        """See `CompiledBase.other_variables`; includes the temperature."""
        return super().other_variables() | {"log_alpha": self._log_alpha}

    def update_spec(self) -> UpdateSpec:
        """Return the critics' loss, followed by phases for the actor and the temperature."""
        own = self.config
        is_discrete = isinstance(self.actor.distribution, Categorical)
        critic_loss, actor_loss = (
            self._discrete_losses() if is_discrete else self._continuous_losses()
        )

        def alpha_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            log_alpha = tf.convert_to_tensor(self._log_alpha)
            losses = temperature_losses(log_alpha, minibatch[_ENTROPIES], minibatch[_TARGETS])
            return tf.reduce_mean(losses), {"alpha": tf.exp(log_alpha)}

        adam = self.adam(own.adam_epsilon)
        adam_of_alpha = self.adam_of_multiplier(own.adam_epsilon)
        return self.critics_spec(
            critic_loss,
            Phase(
                "actor", actor_loss, ("entropy",), self.actor.trainable_variables, adam, ACTOR_LR
            ),
            Phase("alpha", alpha_loss, ("alpha",), [self._log_alpha], adam_of_alpha, _ALPHA_LR),
            coefficients=(_ALPHA_LR,),
        )

    def _continuous_losses(self) -> tuple[LossFunction, LossFunction]:
        config = self.config
        actor = self.actor
        critics = self.critics
        log_alpha = self._log_alpha
        distribution = self.distribution
        assert isinstance(distribution, SquashedGaussian)
        target_entropy = config.target_entropy
        if target_entropy == "auto":
            target_entropy = -float(distribution.num_features)

        def drawn(obs: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            inputs, _ = actor.outputs(obs)
            actions, logp = distribution.sample_with_logp(inputs, seed)
            return critics.unit(actions), logp + critics.log_unit

        def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            next_actions, next_logp = drawn(minibatch[c.NEW_OBS], minibatch[SEEDS][0])
            next_q = critics.q(
                minibatch[c.NEW_OBS], next_actions, weights=self.target_critics.tensors()
            )
            next_values = soft_values(
                next_q, next_logp, tf.exp(log_alpha) if config.entropy_backup else 0.0
            )
            q = critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]))
            return critic_loss_of(minibatch, q, next_values)

        def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            actions, logp = drawn(minibatch[c.OBS], minibatch[SEEDS][1])
            alpha = tf.stop_gradient(tf.exp(log_alpha))
            losses = -soft_values(critics.q(minibatch[c.OBS], actions), logp, alpha)
            given = {
                "entropy": -tf.reduce_mean(logp),
                _ENTROPIES: -logp,
                _TARGETS: tf.convert_to_tensor(target_entropy),
            }
            return tf.reduce_mean(losses), given

        return critic_loss, actor_loss

    def _discrete_losses(self) -> tuple[LossFunction, LossFunction]:
        config = self.config
        actor = self.actor
        critics = self.critics
        log_alpha = self._log_alpha
        num_actions = actor.distribution.num_inputs

        def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            next_logits, mask = actor.outputs(minibatch[c.NEW_OBS])
            next_q = critics.q(minibatch[c.NEW_OBS], weights=self.target_critics.tensors())
            alpha = tf.exp(log_alpha) if config.entropy_backup else 0.0
            next_values = discrete_soft_values(next_q, next_logits, alpha, mask)
            q, values = self.q_of_stored_choices(minibatch)
            loss, given = critic_loss_of(minibatch, q, next_values)
            return loss, {**given, OF_CHOICES: values}

        def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            logits, mask = actor.outputs(minibatch[c.OBS])
            q = tf.stop_gradient(critics.q(minibatch[c.OBS]))
            alpha = tf.stop_gradient(tf.exp(log_alpha))
            losses = -discrete_soft_values(q, logits, alpha, mask)
            entropies = discrete_entropy(logits, mask)
            target_entropy: Any = config.target_entropy
            if target_entropy == "auto":
                legal = tf.fill(tf.shape(logits)[:1], float(num_actions))
                if mask is not None:
                    legal = tf.maximum(tf.reduce_sum(tf.cast(mask > 0, tf.float32), axis=-1), 1.0)
                target_entropy = config.target_entropy_scale * tf.math.log(legal)
            given = {
                "entropy": tf.reduce_mean(entropies),
                _ENTROPIES: entropies,
                _TARGETS: tf.convert_to_tensor(target_entropy),
            }
            return tf.reduce_mean(losses), given

        return critic_loss, actor_loss
