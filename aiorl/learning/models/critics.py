"""Networks of algorithms with an actor and critics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import LOG_STD_MIN, ActionDistribution, DiagGaussian, SquashedGaussian
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import choose_layers, make_trunk
from aiorl.learning.models.networks import Network, dense, layer_variables, make_stack

_CRITIC_GAIN = 0.1


class Actor(ActorCritic):
    """A network that gives the inputs of an action distribution; its values are 0.

    A policy without chance gives the means of a squashed Gaussian whose deviations are the least there are: so all that
    acts, and all exports, take the squashed means.
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
        """Build it.

        Args:
            layout: how an observation lies in its array.
            obs_dtype: "float32" or "uint8".
            distribution: of the actions; a squashed Gaussian where there is no chance.
            config: settings of the hidden layers.
            rng: of the initial weights.
            is_deterministic: the network gives means only.
            noise: how it makes noise of the state; None = it doesn't.
        """
        self._is_deterministic = is_deterministic
        self._describe(layout, obs_dtype, distribution, config)
        self._branches = [self._make_branch("policy", rng)]
        self._make_policy_head(rng, noise, gives_means=is_deterministic)
        self._take_named(policy=self._policy_head)

    def outputs(self, obs: Any, *, weights: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """What the network itself gives for observations [B, *obs_shape], [B, P]; and the mask [B, M] or None.

        Without chance these are the means alone, [B, P / 2]. Inputs that the mask forbids are MASKED_LOGIT.

        Args:
            obs: the observations.
            weights: tensors by name to be used in place of all variables.
        """
        obs, mask = self._without_mask(obs)
        with self._using(weights):
            return self._outputs(obs, mask)[0], mask

    def _outputs(self, obs: Any, mask: Any) -> tuple[Any, Any]:
        """What the network itself gives for observations, and their features."""
        features, _ = self._branches[0].step(obs, None, [])
        return self._masked(self._dist_inputs(features), mask), features

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts, noise: Any = None) -> Outputs:
        inputs, features = self._outputs(obs, mask)
        if self._is_deterministic:
            inputs = tf.concat([inputs, tf.zeros_like(inputs) + LOG_STD_MIN], axis=-1)
        return Outputs(inputs, tf.zeros_like(inputs[:, 0]), [], features)


class Critics(Network):
    """C networks that have nothing in common but their shape.

    Over a Box each sees the observation and the action, scaled to [-1, 1], behind the convolutions or the custom model,
    if there are any.
    Over choices each gives the values of all actions.
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
    ) -> None:
        """Build them.

        Args:
            layout: how an observation lies in its array.
            obs_dtype: "float32" or "uint8".
            distribution: of the actions: a Gaussian over a Box with bounds, squashed or not, or one over A choices.
            config: settings of the hidden layers.
            rng: of the initial weights.
            num_critics: C.
        Raises: UnsupportedSpaceError for a Box without bounds.
        """
        self.layout = layout
        self._box = SquashedGaussian(distribution.action_space) if isinstance(distribution, DiagGaussian) else None
        num_actions, num_outputs = (0, distribution.num_inputs) if self._box is None else (self._box.low.size, 1)
        hiddens, activation = config.fcnet_hiddens, str(config.fcnet_activation)
        if not config.custom_model:
            _, hiddens, activation = choose_layers(layout.shape, obs_dtype, config)
        self._networks = []
        named: dict[str, Any] = {}
        for index in range(num_critics):
            sight = make_trunk(layout, obs_dtype, config, rng, has_hiddens=False)
            hidden = make_stack(rng, (sight.num_outputs + num_actions,), (), hiddens, activation)
            head = dense(rng, hidden.num_outputs, num_outputs, gain=_CRITIC_GAIN)
            self._networks.append((sight, hidden, head))
            own = sight.named_variables() | hidden.named_variables() | layer_variables("head", head)
            named |= {f"critic_{index}/{name}": item for name, item in own.items()}
        self._take_variables(named)

    def unit(self, actions: Any) -> Any:
        """Actions [B, *action_shape] of a Box as numbers [B, D] from -1 at its lower to 1 at its upper bounds.

        Those beyond count as on them, which is where an environment gets them.
        """
        assert self._box is not None, "choices have no bounds"
        flat = tf.cast(tf.reshape(actions, [-1, self._box.low.size]), tf.float32)
        return tf.clip_by_value((flat - self._box.low) * (2.0 / self._box.span) - 1.0, -1.0, 1.0)

    @property
    def log_unit(self) -> float:
        """What the logarithm of a density over a Box is more as one over the numbers of `unit`."""
        assert self._box is not None, "choices have no density"
        return float(np.log(0.5 * self._box.span).sum())

    def q(self, obs: Any, unit_actions: Any = None, *, weights: Mapping[str, Any] | None = None) -> Any:
        """Values of observations [B, *obs_shape] by each critic: [C, B] of actions given, else [C, B, A] of all.

        Args:
            obs: the observations; an action mask among them is not looked at.
            unit_actions: [B, D], of `unit`; for a Box only.
            weights: tensors by name to be used in place of all variables.
        """
        obs, _ = self._without_mask(obs)
        values = []
        with self._using(weights):
            for sight, hidden, head in self._networks:
                features = sight(obs)
                if unit_actions is not None:
                    features = tf.concat([features, unit_actions], axis=-1)
                values.append(head(hidden(features)))
        stacked = tf.stack(values)
        return stacked if self._box is None else tf.squeeze(stacked, axis=-1)
