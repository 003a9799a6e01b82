"""SAC: an actor rewarded for its entropy, critics, and a learned temperature
(docs/algorithms/sac.md).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gymnasium import spaces

from aiorl.acting.distributions import Categorical
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import SDEKeys
from aiorl.data import columns as c
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Observations, Update
from aiorl.learning.algorithms.critic_update import (
    ACTOR_LR,
    SEEDS_SHAPE,
    build_actor,
    descend_with_adam,
    make_critics,
    q_of_stored_choices,
    rate_of,
    td_loss,
    update_with_critics,
)
from aiorl.learning.compiled import adam_of_multiplier
from aiorl.learning.keys.replay import ActorReplayConfig, ActorReplayKeys, ReplayKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.off_policy_actor_critic import (
    discrete_entropy,
    discrete_soft_values,
    soft_values,
    temperature_losses,
)
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.replayed import replayed
from aiorl.learning.steps import SEEDS, Loss, Step, TargetNetwork, descend

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.critics import Critics

OF_CHOICES = "q_of_choices"
"""Tensor that the critics' loss hands on for discrete actions: the Q values [C, B, A] of all
actions."""
_ALPHA_LR = "alpha_lr"
_ENTROPIES = "entropies"
_TARGETS = "target_entropies"

_sac = partial(key, group="SAC")


class SACConfig(ActorReplayKeys, ReplayKeys, SDEKeys, CommonConfig):
    """SAC's own keys, and its defaults of common keys."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box", "Discrete")

    algo: str = changed(ActorReplayConfig, "algo", "sac")
    sde_initial_log_std: float = changed(SDEKeys, "sde_initial_log_std", -3.0)
    sde_learn_features: bool = changed(SDEKeys, "sde_learn_features", True)

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
        self.refuse_unless(
            self.alpha_lr != 0,
            ("target_entropy", "target_entropy_scale"),
            "a temperature that is learned",
            hint="With alpha_lr: 0 the temperature is constant. Leave out either alpha_lr or this"
            " key.",
        )


class SAC(Algorithm[SACConfig]):
    """Soft actor-critic (Haarnoja et al. 2018) for bounded Boxes and discrete actions."""

    config_class = SACConfig

    @staticmethod
    def experience(config: SACConfig) -> Experience:
        """Return rows of a replay; see `Algorithm.experience`."""
        return replayed(config)

    @staticmethod
    def acting_settings(config: SACConfig) -> dict[str, Any]:
        """Return settings for sampled actions, with state-dependent noise if set, and uniform ones
        at the start; see `Algorithm.acting_settings`.
        """
        return {"exploration": config.sampling(random_timesteps=config.random_timesteps)}

    @staticmethod
    def build_model(
        config: SACConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the actor; see `Algorithm.build_model`."""
        return build_actor(config, observations, action_space, seed)

    @staticmethod
    def update(config: SACConfig, networks: Networks) -> Update:
        """Return steps of the critics, the actor and the temperature; see `Algorithm.update`."""
        parts = SoftParts(config, networks.model)
        critic_loss, actor_loss = parts.losses()
        return parts.update(
            descend_with_adam(config, parts.critics.trainable_variables, critic_loss),
            *parts.policy_steps(actor_loss),
        )


class SoftParts:
    """Networks, losses and steps of soft actor-critic, which CQL shares.

    Attributes:
        actor: policy.
        critics: networks of Q values.
        target: target network of the critics.
        log_alpha: variable, logarithm of the temperature.
    """

    def __init__(self, config: SACConfig, actor: Any) -> None:
        """Create the networks that stay on the learner.

        Args:
            config: config of the algorithm.
            actor: policy, from `build_actor`.
        """
        self._config = config
        self.actor = actor
        self.critics: Critics = make_critics(config, actor)
        self.target = TargetNetwork(self.critics)
        self.log_alpha = tf.Variable(math.log(config.initial_alpha), dtype=tf.float32)

    @property
    def is_discrete(self) -> bool:
        """True for discrete actions, False for a Box."""
        return isinstance(self.actor.distribution, Categorical)

    def losses(self) -> tuple[Loss, Loss]:
        """Return the losses of the critics and of the actor.

        That of the actor hands on entropies and their targets, [B] each.
        """
        if self.is_discrete:
            return self._discrete_losses()
        return self._continuous_losses()

    def policy_steps(self, actor_loss: Loss) -> tuple[Step, Step]:
        """Return steps of the actor and of the temperature."""
        config = self._config

        def alpha_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            log_alpha = tf.convert_to_tensor(self.log_alpha)
            losses = temperature_losses(log_alpha, columns[_ENTROPIES], columns[_TARGETS])
            return tf.reduce_mean(losses), {"alpha": tf.exp(log_alpha)}

        variables = self.actor.trainable_variables
        actor_step = descend_with_adam(config, variables, actor_loss, lr=ACTOR_LR, name="actor")
        optimizer = adam_of_multiplier(config, config.adam_epsilon)
        alpha_step = descend(
            [self.log_alpha],
            alpha_loss,
            optimizer,
            clip=config.grad_clip,
            lr=_ALPHA_LR,
            name="alpha",
        )
        return actor_step, alpha_step

    def update(
        self,
        *steps: Step,
        knobs: dict[str, Any] | None = None,
        saved: dict[str, Any] | None = None,
    ) -> Update:
        """Return an update of these steps; see `update_with_critics`."""
        return update_with_critics(
            self._config,
            self.critics,
            *steps,
            targets={"target/critics": self.target},
            knobs={_ALPHA_LR: rate_of(self._config, self._config.alpha_lr), **(knobs or {})},
            saved={"log_alpha": self.log_alpha, **(saved or {})},
            seeds=SEEDS_SHAPE,
        )

    def _target_alpha(self) -> tf.Tensor | float:
        """Return the temperature in the critics' targets; 0 if they don't include the entropy."""
        if not self._config.entropy_backup:
            return 0.0
        return tf.exp(self.log_alpha)

    def _continuous_losses(self) -> tuple[Loss, Loss]:
        actor = self.actor
        critics = self.critics
        distribution: Any = to_tf_distribution(actor.distribution)  # a SquashedGaussian
        target_entropy = self._config.target_entropy
        if target_entropy == "auto":
            target_entropy = -float(distribution.num_features)

        def sampled(obs: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            inputs, _ = actor.outputs(obs)
            actions, logp = distribution.sample_with_logp(inputs, seed)
            return critics.unit(actions), logp + critics.log_unit

        def judge(columns: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
            next_obs = columns[c.NEW_OBS]
            next_actions, next_logp = sampled(next_obs, columns[SEEDS][0])
            next_q = critics.q(next_obs, next_actions, weights=self.target.tensors())
            alpha = self._target_alpha()
            q = critics.q(columns[c.OBS], critics.unit(columns[c.ACTIONS]))
            return q, soft_values(next_q, next_logp, alpha), {}

        def actor_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            actions, logp = sampled(columns[c.OBS], columns[SEEDS][1])
            alpha = tf.stop_gradient(tf.exp(self.log_alpha))
            losses = -soft_values(critics.q(columns[c.OBS], actions), logp, alpha)
            return tf.reduce_mean(losses), {
                "entropy": -tf.reduce_mean(logp),
                _ENTROPIES: -logp,
                _TARGETS: tf.fill(logp.shape, target_entropy),
            }

        return td_loss(judge), actor_loss

    def _discrete_losses(self) -> tuple[Loss, Loss]:
        actor = self.actor
        critics = self.critics

        def judge(columns: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
            next_obs = columns[c.NEW_OBS]
            next_logits, mask = actor.outputs(next_obs)
            next_q = critics.q(next_obs, weights=self.target.tensors())
            next_values = discrete_soft_values(next_q, next_logits, self._target_alpha(), mask)
            q, values = q_of_stored_choices(critics, actor, columns)
            return q, next_values, {OF_CHOICES: values}

        def actor_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            logits, mask = actor.outputs(columns[c.OBS])
            q = tf.stop_gradient(critics.q(columns[c.OBS]))
            alpha = tf.stop_gradient(tf.exp(self.log_alpha))
            losses = -discrete_soft_values(q, logits, alpha, mask)
            entropies = discrete_entropy(logits, mask)
            return tf.reduce_mean(losses), {
                "entropy": tf.reduce_mean(entropies),
                _ENTROPIES: entropies,
                _TARGETS: self._target_entropies(logits, mask),
            }

        return td_loss(judge), actor_loss

    def _target_entropies(self, logits: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        """Return the target entropy [B] of each row for discrete actions."""
        config = self._config
        if config.target_entropy != "auto":
            return tf.fill(logits.shape[:1], config.target_entropy)
        legal = tf.fill(tf.shape(logits)[:1], float(self.actor.distribution.num_inputs))
        if mask is not None:
            legal = tf.maximum(tf.reduce_sum(tf.cast(mask > 0, tf.float32), axis=-1), 1.0)
        return config.target_entropy_scale * tf.math.log(legal)
