"""A user's own Keras model as the whole network of a policy; the contract is in `aiorl.learning.models.custom_network`.

The model gives the inputs of the action distribution ``[B, num_outputs]``, or these and values ``[B]`` or ``[B, 1]``.
Where it gives no values, a built-in network of the other settings does. It acts on workers through its exported graph,
so workers need neither Keras nor the user's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import ActionDistribution
from aiorl.config.schema import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import make_branch
from aiorl.learning.models.custom_network import CUSTOM_MODEL, PROBE_ROWS, CustomNetwork, make_custom_network
from aiorl.learning.models.networks import dense, layer_variables

__all__ = ["CustomActorCritic", "make_custom_model"]


class CustomActorCritic(ActorCritic):
    """An ActorCritic whose policy, and perhaps value, is a given Keras model.

    Attributes:
        network: the model.
    """

    def __init__(
        self,
        network: CustomNetwork,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
    ) -> None:
        """Take the user's model.

        Raises: ConfigError if it gives something else than it should.
        """
        self._describe(layout, obs_dtype, distribution, config)
        self.network = network
        self._branches = []
        self._gives_values = self._check_outputs()
        named = network.named_variables()
        if not self._gives_values:
            built_in = config.model_copy(update={"custom_model": None})
            self._value_branch = make_branch("value", layout, obs_dtype, built_in, rng)
            self._value_head = dense(rng, self._value_branch.num_outputs, 1, gain=1.0)
            named |= self._value_branch.named_variables() | layer_variables("value/head", self._value_head)
        self._take_variables(named)

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts) -> Outputs:
        outputs = self.network(obs)
        if self._gives_values:
            dist_inputs, values = outputs
        else:
            dist_inputs = outputs[0]
            values = self._value_head(self._value_branch.step(obs, None, [])[0])
        dist_inputs = self._masked(tf.cast(dist_inputs, tf.float32), mask)
        return Outputs(dist_inputs, tf.reshape(tf.cast(values, tf.float32), [-1]), [])

    def _check_outputs(self) -> bool:
        """Return whether it gives values; raise ConfigError if it gives something else than it should."""
        shapes = self.network.output_shapes
        rows = PROBE_ROWS
        wanted = (rows, self.distribution.num_inputs)
        if shapes[:1] != [wanted] or shapes[1:] not in ([], [(rows,)], [(rows, 1)]):
            raise ConfigError(
                f"the custom model gives outputs of shapes {shapes} for {rows} observations; expected {wanted}, "
                f"alone or with values {(rows,)} or {(rows, 1)}.",
                key=CUSTOM_MODEL,
            )
        return len(shapes) == 2


def make_custom_model(
    layout: ObsLayout,
    obs_dtype: str,
    distribution: ActionDistribution,
    config: ModelConfig,
    settings: Mapping[str, Any],
    *,
    seed: int | None = None,
) -> CustomActorCritic:
    """The network that `config.custom_model` names.

    Args:
        layout: how an observation lies in its array; the model gets it without its action mask.
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space.
        config: settings, for the values' network where the custom model gives none.
        settings: all settings as they were given, for the user's function.
        seed: seed of the initial weights; None = a different one each time.

    Raises: ConfigError for a path that can't be imported, or what is no Keras model of the right shape.
    """
    if config.is_recurrent or config.free_log_std:
        raise ConfigError(
            "use_lstm, use_gru and free_log_std shape built-in networks; a custom model is used as it is.",
            key=CUSTOM_MODEL,
            value=config.custom_model,
        )
    network = make_custom_network(layout, distribution.num_inputs, config, settings, seed=seed)
    return CustomActorCritic(network, layout, obs_dtype, distribution, config, np.random.default_rng(seed))
