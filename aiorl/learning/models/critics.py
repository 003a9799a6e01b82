"""Networks of algorithms with an actor and critics."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import (
    LOG_STD_MIN,
    ActionDistribution,
    DiagGaussian,
    SquashedGaussian,
)
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import choose_layers, make_trunk
from aiorl.learning.models.networks import (
    Layers,
    Network,
    Variables,
    Weights,
    dense,
    layer_variables,
    make_stack,
    prefixed,
)

_CRITIC_GAIN = 0.1


class Actor(ActorCritic):
    """Network that returns the inputs of an action distribution; its values are 0.

    A deterministic policy returns the means of a squashed Gaussian with the smallest possible
    deviations, so that acting and every export use the squashed means.
    """

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
        *,
        is_deterministic: bool = False,
        noise: SDESettings | None = None,
    ) -> None:
        """Build the actor.

        Args:
            layout: layout of an observation in its array.
            obs_dtype: "float32" or "uint8".
            distribution: distribution of the actions; a squashed Gaussian for a deterministic
                policy.
            config: settings of the hidden layers.
            rng: generator of the initial weights.
            is_deterministic: True if the network returns only means.
            noise: settings of state-dependent noise; None = no such noise.
        """
        self._is_deterministic = is_deterministic
        self._describe(layout, obs_dtype, distribution, config)
        self._branches = [self._make_branch("policy", rng)]
        self._make_policy_head(rng, noise, gives_means=is_deterministic)
        self._take_named(policy=self._policy_head)

    def outputs(self, obs: Any, *, weights: Weights | None = None) -> tuple[Any, Any]:
        """Return the outputs [B, P] of the last layer for observations [B, *obs_shape], and the
        mask [B, M] or None.

        A deterministic network returns only the means, [B, P / 2]. Inputs that the mask forbids are
        MASKED_LOGIT.

        Args:
            obs: [B, *obs_shape].
            weights: tensors by name to use instead of all variables.
        """
        obs, mask = self._without_mask(obs)
        with self._using(weights):
            outputs, _ = self._outputs(obs, mask)
        return outputs, mask

    def _outputs(self, obs: Any, mask: Any) -> tuple[Any, Any]:
        """Return the outputs of the last layer for observations, and their features."""
        features, _ = self._branches[0].step(obs, None, [])
        return self._masked(self._dist_inputs(features), mask), features

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts, noise: Any = None) -> Outputs:
        inputs, features = self._outputs(obs, mask)
        if self._is_deterministic:
            inputs = tf.concat([inputs, tf.zeros_like(inputs) + LOG_STD_MIN], axis=-1)
        values = tf.zeros_like(inputs[:, 0])
        return Outputs(inputs, values, state=[], features=features)


class Critics(Network):
    """Set of C critics with the same shape and separate weights.

    For a Box, each critic sees the observation, after any convolutions or custom model, along with
    the action scaled to [-1, 1]. For discrete actions, each returns the values of all actions. With
    Z outputs for each value, such as the quantiles of TQC, there are Z numbers in its place.
    """

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
        *,
        num_critics: int,
        num_outputs: int = 1,
    ) -> None:
        """Build the critics.

        Args:
            layout: layout of an observation in its array.
            obs_dtype: "float32" or "uint8".
            distribution: distribution of the actions: a Gaussian over a Box with bounds, squashed
                or not, or one over A choices.
            config: settings of the hidden layers.
            rng: generator of the initial weights.
            num_critics: C.
            num_outputs: Z, outputs for each value.

        Raises:
            UnsupportedSpaceError: a Box has no bounds.
        """
        self.layout = layout
        self._box: SquashedGaussian | None = None
        action_size = 0
        num_values = distribution.num_inputs
        if isinstance(distribution, DiagGaussian):
            self._box = SquashedGaussian(distribution.action_space)
            action_size = self._box.low.size
            num_values = 1
        self._num_outputs = num_outputs
        layers = Layers.of_dense(config)
        if not config.custom_model:
            # convolutions are part of the trunk
            layers = choose_layers(layout, obs_dtype, config)._replace(filters=())
        self._networks = []
        variables: Variables = {}
        for index in range(num_critics):
            trunk = make_trunk(layout, obs_dtype, config, rng, has_hiddens=False)
            hidden = make_stack(rng, (trunk.num_outputs + action_size,), layers)
            head = dense(rng, hidden.num_outputs, num_values * num_outputs, gain=_CRITIC_GAIN)
            self._networks.append((trunk, hidden, head))
            of_critic = trunk.named_variables() | hidden.named_variables()
            of_critic |= layer_variables("head", head)
            variables |= prefixed(f"critic_{index}", of_critic)
        self._take_variables(variables)

    def unit(self, actions: Any) -> Any:
        """Return `actions` [B, *action_shape] of a Box as numbers [B, D], -1 at the lower and 1 at
        the upper bounds.

        Actions beyond the bounds are clipped, as they are for an environment.
        """
        assert self._box is not None, "choices have no bounds"
        flat = tf.cast(tf.reshape(actions, [-1, self._box.low.size]), tf.float32)
        scaled = (flat - self._box.low) * (2.0 / self._box.span) - 1.0
        return tf.clip_by_value(scaled, -1.0, 1.0)

    @property
    def log_unit(self) -> float:
        """Log density over the Box minus the log density over the numbers of `unit`."""
        assert self._box is not None, "choices have no density"
        return float(np.log(0.5 * self._box.span).sum())

    def q(self, obs: Any, unit_actions: Any = None, *, weights: Weights | None = None) -> Any:
        """Return the critics' values of observations [B, *obs_shape]: [C, B] of `unit_actions`, or
        [C, B, A] of all choices; with Z outputs for each value, [C, B, Z] or [C, B, A, Z].

        Args:
            obs: [B, *obs_shape]; an action mask among the observations is ignored.
            unit_actions: [B, D], scaled by `unit`; for a Box only.
            weights: tensors by name to use instead of all variables.
        """
        obs, _ = self._without_mask(obs)
        values = []
        with self._using(weights):
            for trunk, hidden, head in self._networks:
                features = trunk(obs)
                if unit_actions is not None:
                    features = tf.concat([features, unit_actions], axis=-1)
                values.append(head(hidden(features)))
        stacked = tf.stack(values)
        if self._num_outputs > 1:
            num_critics, num_rows = stacked.shape[0], tf.shape(stacked)[1]
            stacked = tf.reshape(stacked, [num_critics, num_rows, -1, self._num_outputs])
            return stacked if self._box is None else tf.squeeze(stacked, axis=2)
        if self._box is None:
            return stacked
        return tf.squeeze(stacked, axis=-1)
