"""Actor: a policy alone, whose critics stay with the learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import LOG_STD_MIN, ActionDistribution
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import make_branch
from aiorl.learning.models.networks import dense, layer_variables

__all__ = ["Actor"]

_GAIN = 0.01


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
        branch = make_branch("policy", layout, obs_dtype, config, rng)
        self._branches = [branch]
        num_outputs = distribution.num_inputs // 2 if is_deterministic else distribution.num_inputs
        if noise is not None:
            num_outputs, distribution = self._add_deviations(distribution, branch.num_outputs, noise)
        self._describe(layout, obs_dtype, distribution, config)
        self._policy_head = dense(rng, branch.num_outputs, num_outputs, gain=_GAIN)
        own = {} if self._log_std is None else {"policy/log_std": self._log_std}
        self._take_variables(branch.named_variables() | layer_variables("policy/head", self._policy_head) | own)

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

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts) -> Outputs:
        inputs, features = self._outputs(obs, mask)
        if self._is_deterministic:
            inputs = tf.concat([inputs, tf.zeros_like(inputs) + LOG_STD_MIN], axis=-1)
        return Outputs(inputs, tf.zeros_like(inputs[:, 0]), [], features)
