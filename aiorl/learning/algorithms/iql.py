"""IQL: only stored actions are valued, and better ones are imitated more strongly
(docs/algorithms/iql.md).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gymnasium import spaces

from aiorl.acting.distributions import Categorical, make_distribution
from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Observations, Update
from aiorl.learning.algorithms.critic_update import (
    ACTOR_LR,
    critic_step,
    descend_with_adam,
    make_critics,
    q_of_stored_choices,
    update_with_critics,
)
from aiorl.learning.keys.replay import OfflineReplayConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.off_policy_actor_critic import expectile_losses
from aiorl.learning.losses.policy_gradient import imitation_weights
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.replayed import replayed
from aiorl.learning.steps import WEIGHTS, TargetNetwork, weighted_mean

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


class IQL(Algorithm[IQLConfig]):
    """Implicit Q-learning (Kostrikov et al. 2021) for bounded Boxes and discrete actions.

    The model is a policy with values, as in BC and PPO.
    """

    config_class = IQLConfig

    @staticmethod
    def experience(config: IQLConfig) -> Experience:
        """Return rows of a replay, which stored experience fills; see `Algorithm.experience`."""
        return replayed(config)

    @staticmethod
    def acting_settings(config: IQLConfig) -> dict[str, Any]:
        """Return settings for sampled actions, and uniform ones at the start, if the run samples at
        all; see `Algorithm.acting_settings`.
        """
        return {
            "exploration": {
                "type": "StochasticSampling",
                "random_timesteps": config.random_timesteps,
            }
        }

    @staticmethod
    def build_model(
        config: IQLConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the policy and the values, in separate branches even if a custom model computes
        their features; see `Algorithm.build_model`.
        """
        from aiorl.learning.models.catalog import build_model

        return build_model(
            observations.shape,
            observations.dtype,
            make_distribution(action_space, scale=config.normalize_actions),
            config.model.model_dump(),
            seed=seed,
            layout=observations.layout,
            custom_features=True,
        )

    @staticmethod
    def update(config: IQLConfig, networks: Networks) -> Update:
        """Return steps of the critics, the values and the policy; see `Algorithm.update`."""
        model = networks.model
        critics = make_critics(config, model)
        target = TargetNetwork(critics)
        distribution = to_tf_distribution(model.distribution)
        is_discrete = isinstance(model.distribution, Categorical)

        def q_of_stored(columns: Tensors, weights: Tensors | None = None) -> tf.Tensor:
            if is_discrete:
                return q_of_stored_choices(critics, model, columns, weights)[0]
            return critics.q(columns[c.OBS], critics.unit(columns[c.ACTIONS]), weights=weights)

        def judge(columns: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
            _, next_values = model.forward(columns[c.NEW_OBS])
            return q_of_stored(columns), next_values, {}

        def value_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            q = q_of_stored(columns, target.tensors())
            least_q = tf.stop_gradient(tf.reduce_min(q, axis=0))
            _, values = model.forward(columns[c.OBS])
            losses = expectile_losses(least_q - values, config.expectile)
            loss = weighted_mean(losses, columns[WEIGHTS])
            return loss, {"mean_value": tf.reduce_mean(values), _LEAST_Q: least_q}

        def policy_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            inputs, values = model.forward(columns[c.OBS])
            weights = imitation_weights(
                columns[_LEAST_Q] - values,
                scale=1.0,
                beta=config.beta,
                max_weight=config.max_weight,
            )
            logp = distribution.logp(inputs, columns[c.ACTIONS])
            loss = -weighted_mean(weights * logp, columns[WEIGHTS])
            entropy = tf.reduce_mean(distribution.entropy(inputs))
            return loss, {"entropy": entropy, "mean_weight": tf.reduce_mean(weights)}

        branches = {
            branch: [item for name, item in model.trainable.items() if name.startswith(branch)]
            for branch in ("value/", "policy/")
        }
        steps = [
            critic_step(config, critics, judge),
            descend_with_adam(config, branches["value/"], value_loss, name="value"),
            descend_with_adam(config, branches["policy/"], policy_loss, lr=ACTOR_LR, name="policy"),
        ]
        return update_with_critics(config, critics, *steps, targets={"target/critics": target})
