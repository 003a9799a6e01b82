"""Construction of networks from their settings.

`build_model` gives an `ActorCritic`: a network with two outputs, the inputs of an action distribution and a
value. Policy and value have networks of their own unless ``vf_share_layers`` is set; with recurrence each
then has its own cell, and the recurrent state is the policy's components followed by the value's. Cells may also
look back at the previous action and reward. A user's own Keras model takes the place of all that
(`aiorl.learning.models.custom`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiorl.acting.distributions import ActionDistribution, DiagGaussian
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.branch import NATURE_FILTERS
from aiorl.learning.models.custom import make_custom_model

__all__ = ["NATURE_FILTERS", "ActorCritic", "build_model"]


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
    """The built-in network for a kind of observation.

    Weights are orthogonal with gain sqrt(2) in hidden layers, 0.01 in the policy's last and 1 in the value's
    last layer. uint8 observations are scaled by 1/255 inside the network.

    Args:
        obs_shape: shape of one observation as the model gets it (a preprocessor's output).
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space (`aiorl.acting.distributions`).
        model_config: settings, the keys of `model`; others are passed on to a custom model.
        seed: seed of the initial weights; None = a different one each time.
        layout: how an observation lies in its array, with its parts and action mask; None = it is the array.
        noise: how a built-in network makes noise of the state; None = it doesn't.
        custom_features: a custom model gives features in place of the hidden layers, not the outputs.

    Raises: ConfigError for settings that make no network for these observations.
    """
    settings = dict(model_config or {})
    config = ModelConfig.of(settings)
    shape = tuple(int(size) for size in obs_shape)
    layout = ObsLayout(shape) if layout is None else layout
    if layout.array_shape != shape:
        raise ConfigError(f"observations of shape {shape} can't be laid out as {layout}.", value=shape)
    if str(obs_dtype) not in ("float32", "uint8"):
        raise ConfigError(f"models take float32 or uint8 observations, not {obs_dtype}.", value=obs_dtype)
    if config.free_log_std and not isinstance(distribution, DiagGaussian):
        raise ConfigError(
            f"free_log_std is for Gaussian actions; these are {distribution.name}.",
            key="model.free_log_std",
            value=True,
        )
    if config.custom_model and not custom_features:
        if noise is not None:
            raise ConfigError(
                "use_sde makes deviations of a built-in network's features; a custom model is used as it is.",
                key="use_sde", value=True, hint="Leave out use_sde or model.custom_model.",
            )  # fmt: skip
        return make_custom_model(layout, str(obs_dtype), distribution, config, settings, seed=seed)
    return ActorCritic(layout, str(obs_dtype), distribution, config, np.random.default_rng(seed), noise)
