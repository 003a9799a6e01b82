"""IQL: only stored actions are valued, and better ones are imitated more strongly
(docs/algorithms/iql.md).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gymnasium import spaces

from aiorl.acting.distributions import Categorical, make_distribution
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_replay import ACTOR_LR, CriticReplayAlgorithm, critic_loss_of
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.compiled_update import Phase, UpdateSpec
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.replay_config import OfflineReplayConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.critics import expectile_losses, imitation_weights
from aiorl.learning.losses.q_learning import weighted_mean

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_LEAST_Q = "least_q"

_iql = partial(key, group="IQL")


class IQLConfig(OfflineReplayConfig):
    """IQL's own keys, and its defaults of common keys."""

    other_model_keys: ClassVar[tuple[str, ...]] = ("vf_share_layers",)

    algo: str = changed(OfflineReplayConfig, "algo", "iql")

    expectile: float = _iql(0.7, gt=0, lt=1)
    """Expectile of the stored actions' Q values that a value learns: 0.5 is the mean, values near 1
    almost the maximum."""
    beta: float = _iql(3.0, ge=0)
    """Strength of the preference for better actions: weights grow exponentially with beta times the
    advantage over the value. 0: all have the same weight, as in behaviour cloning."""
    max_weight: float = _iql(100.0, gt=0)
    """Maximum weight of an action."""


class IQL(CriticReplayAlgorithm[IQLConfig]):
    """Implicit Q-learning (Kostrikov et al. 2021) for bounded Boxes and discrete actions.

    The model is a policy with values, as in BC and PPO.
    """

    config_class = IQLConfig

    @classmethod
    def build_model(
        cls,
        config: CommonConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the policy and the values, in separate branches even if a custom model computes
        their features.
        """
        from aiorl.learning.models.catalog import build_model

        shape = observations.shape
        dtype = observations.dtype
        layout = observations.layout
        settings = config.model.model_dump()
        distribution = make_distribution(action_space, scale=config.normalize_actions)
        return build_model(
            shape, dtype, distribution, settings, seed=seed, layout=layout, custom_features=True
        )

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Return settings for sampled actions, and uniform ones at the start, if the run samples at
        all.
        """
        own = cls.own_config(config)
        return {
            "exploration": {"type": "StochasticSampling", "random_timesteps": own.random_timesteps}
        }

    def update_spec(self) -> UpdateSpec:
        """Return the critics' loss, followed by phases for the values and the policy."""
        config = self.config
        model = self.model
        critics = self.critics
        distribution = self.distribution
        is_discrete = isinstance(model.distribution, Categorical)

        def q_of_stored(minibatch: Tensors, weights: Tensors | None = None) -> tf.Tensor:
            if is_discrete:
                return self.q_of_stored_choices(minibatch, weights)[0]
            return critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]), weights=weights)

        def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            _, next_values = model.forward(minibatch[c.NEW_OBS])
            return critic_loss_of(minibatch, q_of_stored(minibatch), next_values)

        def value_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            q = q_of_stored(minibatch, self.target_critics.tensors())
            least_q = tf.stop_gradient(tf.reduce_min(q, axis=0))
            _, values = model.forward(minibatch[c.OBS])
            loss = weighted_mean(
                expectile_losses(least_q - values, config.expectile), minibatch[WEIGHTS]
            )
            return loss, {"mean_value": tf.reduce_mean(values), _LEAST_Q: least_q}

        def policy_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            inputs, values = model.forward(minibatch[c.OBS])
            weights = imitation_weights(
                minibatch[_LEAST_Q] - values,
                scale=1.0,
                beta=config.beta,
                max_weight=config.max_weight,
            )
            loss = -weighted_mean(
                weights * distribution.logp(inputs, minibatch[c.ACTIONS]), minibatch[WEIGHTS]
            )
            entropy = tf.reduce_mean(distribution.entropy(inputs))
            return loss, {"entropy": entropy, "mean_weight": tf.reduce_mean(weights)}

        value, policy = (
            [variable for name, variable in model.trainable.items() if name.startswith(branch)]
            for branch in ("value/", "policy/")
        )
        adam_of_value = self.adam(config.adam_epsilon)
        adam_of_policy = self.adam(config.adam_epsilon)
        return self.critics_spec(
            critic_loss,
            Phase("value", value_loss, ("mean_value",), value, adam_of_value),
            Phase(
                "policy", policy_loss, ("entropy", "mean_weight"), policy, adam_of_policy, ACTOR_LR
            ),
        )
