"""Construction of networks from their settings, including custom Keras models.

`build_model` returns an `ActorCritic`: a network with two outputs, the inputs of an action
distribution and a value. Policy and value have separate networks unless ``vf_share_layers`` is set;
with recurrence each then has its own cell, and the recurrent state is the policy's components
followed by the value's. Cells can also see the previous action and reward.

A custom model (contract in `aiorl.learning.models.branch`) returns the inputs of the action
distribution ``[B, num_outputs]``, or these and values ``[B]`` or ``[B, 1]``. If it returns no
values, a built-in network with the other settings does, without memory. With ``custom_features`` it
returns features instead, which replace the hidden layers of a built-in network. It acts on workers
through its exported graph, so workers need neither Keras nor the user's module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import ActionDistribution, DiagGaussian
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.actor_critic import VALUE_GAIN, ActorCritic
from aiorl.learning.models.branch import (
    CUSTOM_MODEL,
    PROBE_ROWS,
    CustomNetwork,
    custom_branch,
    make_branch,
    make_custom_network,
)
from aiorl.learning.models.networks import dense, layer_variables


class CustomActorCritic(ActorCritic):
    """ActorCritic whose policy, and optionally value, is a custom Keras model.

    Attributes:
        network: the custom model.
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
        """Take over the custom model.

        Raises:
            ConfigError: its outputs are wrong.
        """
        self._describe(layout, obs_dtype, distribution, config)
        self.network = network
        self._branches = [custom_branch("custom", network, layout)]
        self._gives_values = self._check_outputs()
        variables = network.named_variables()
        if not self._gives_values:
            built_in = config.model_copy(update={"custom_model": None, "custom_state": ()})
            value_branch = make_branch("value", layout, obs_dtype, config=built_in, rng=rng)
            self._branches.append(value_branch)
            self._value_head = dense(rng, value_branch.num_outputs, 1, gain=VALUE_GAIN)
            variables |= value_branch.named_variables()
            variables |= layer_variables("value/head", self._value_head)
        self._take_variables(variables)

    def _heads(self, features: Sequence[Any]) -> tuple[Any, Any]:
        num_inputs = self.distribution.num_inputs
        dist_inputs = features[0][:, :num_inputs]
        if self._gives_values:
            return dist_inputs, features[0][:, num_inputs]
        return dist_inputs, tf.squeeze(self._value_head(features[1]), axis=-1)

    def _check_outputs(self) -> bool:
        """Return True if the model returns values; raise ConfigError if its outputs are wrong."""
        shapes = self.network.output_shapes
        rows = PROBE_ROWS
        expected = (rows, self.distribution.num_inputs)
        if shapes[:1] != [expected] or shapes[1:] not in ([], [(rows,)], [(rows, 1)]):
            raise ConfigError(
                f"the custom model gives outputs of shapes {shapes} for {rows} observations;"
                f" expected {expected}, alone or with values {(rows,)} or {(rows, 1)}.",
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
    """Return the network that `config.custom_model` names.

    Args:
        layout: layout of an observation in its array; the model gets it without the action mask.
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space.
        config: settings of the value network, used if the custom model returns no values.
        settings: all settings as given, for the user's function.
        seed: seed of the initial weights; None = random.

    Raises:
        ConfigError: the path can't be imported, or the result is not a Keras model with the right
            outputs.
    """
    network = make_custom_network(layout, distribution.num_inputs, config, settings, seed=seed)
    return CustomActorCritic(
        network,
        layout,
        obs_dtype,
        distribution=distribution,
        config=config,
        rng=np.random.default_rng(seed),
    )


def build_model(
    obs_shape: Sequence[int],
    obs_dtype: str,
    distribution: ActionDistribution,
    model_config: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    layout: ObsLayout | None = None,
    noise: SDESettings | None = None,
    custom_features: bool = False,
) -> ActorCritic:
    """Build the network for a kind of observation.

    Weights are orthogonal, with gain sqrt(2) in hidden layers, 0.01 in the policy's last layer and
    1 in the value's. uint8 observations are scaled by 1/255 inside the network.

    Args:
        obs_shape: shape of one observation as the model gets it (a preprocessor's output).
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space (`aiorl.acting.distributions`).
        model_config: settings, the keys of `model`; others are passed on to a custom model.
        seed: seed of the initial weights; None = random.
        layout: layout of an observation in its array, with its parts and action mask; None = the
            observation is the array.
        noise: settings of state-dependent noise of a built-in network; None = no such noise.
        custom_features: True if a custom model returns features that replace the hidden layers, not
            the outputs, whatever the settings are.

    Raises:
        ConfigError: the settings can't make a network for these observations.
    """
    settings = dict(model_config or {})
    config = ModelConfig.of(settings)
    if layout is None:
        layout = ObsLayout(tuple(int(size) for size in obs_shape))
    if config.free_log_std and not isinstance(distribution, DiagGaussian):
        raise ConfigError(
            f"free_log_std is for Gaussian actions, not {distribution.name}.",
            key="model.free_log_std",
            value=True,
        )
    if config.custom_model and not (custom_features or config.custom_features):
        config.check_outputs(use_sde=noise is not None)
        return make_custom_model(
            layout, str(obs_dtype), distribution, config=config, settings=settings, seed=seed
        )
    return ActorCritic(
        layout,
        str(obs_dtype),
        distribution,
        config=config,
        rng=np.random.default_rng(seed),
        noise=noise,
    )
