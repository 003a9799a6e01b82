"""A policy's network as a functional Keras model, made of Keras's own layers and operations alone.

So a file of it can be opened where there is no aiorl. It acts one step, as `ActorCritic.forward_step` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from aiorl.config.parts import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.models.branch import choose_layers
from aiorl.models.custom import make_custom_model
from aiorl.models.state_dependent_noise import log_deviations
from aiorl.policy.distributions import (
    LOG_STD_MIN,
    MASKED_LOGIT,
    ActionDistribution,
    Categorical,
    Composite,
    MultiCategorical,
)

__all__ = ["FunctionalNetwork"]

_POLICY = "policy"


class FunctionalNetwork:
    """Applies a network, whose weights are given by the names that `ActorCritic.variables` has, to Keras's tensors."""

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        model_config: Mapping[str, Any],
        weights: Mapping[str, NDArray[Any]],
    ) -> None:
        """Take what the network was built from (see `aiorl.models.catalog.build_model`), and its weights.

        Raises: ConfigError for a custom model that can't be made any more, and networks of action values.
        """
        self._layout = layout
        self._obs_dtype = obs_dtype
        self._distribution = distribution
        self._config = ModelConfig.of(model_config)
        self._weights = weights
        self._custom = None
        if not self._config.custom_model and f"{_POLICY}/head/kernel" not in weights:
            raise ConfigError(
                f"networks with weights such as {next(iter(weights), '')!r} have no Keras form.",
                hint="Export it as onnx.",
            )
        if self._config.custom_model:
            self._custom = make_custom_model(layout, obs_dtype, distribution, self._config, model_config, seed=0)
            self._custom.set_weights(weights)

    def __call__(
        self, obs: Any, state: Sequence[Any], prev_actions: Any = None, prev_rewards: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        """Outputs of one step for B observations, all symbolic; see `ActorCritic.forward_step`."""
        mask = None
        if num_mask := self._layout.num_mask:
            obs, mask = ops.reshape(obs[:, num_mask:], [-1, *self._layout.shape]), obs[:, :num_mask]
        if self._custom is not None:
            dist_inputs, *own = self._custom.call_model(obs)
            values = own[0] if own else self._head("value", self._stack("value", obs), 1)
            state_out: list[Any] = []
        else:
            dist_inputs, values, state_out = self._built_in(obs, list(state), prev_actions, prev_rewards)
        dist_inputs = self._masked(ops.cast(dist_inputs, "float32"), mask)
        return dist_inputs, ops.reshape(ops.cast(values, "float32"), [-1]), state_out

    def _built_in(self, obs: Any, state: list[Any], prev_actions: Any, prev_rewards: Any) -> tuple[Any, Any, list[Any]]:
        config = self._config
        has_value = "value/head/kernel" in self._weights  # else critics stayed with the learner
        names = ["shared"] if config.vf_share_layers else [_POLICY, "value"] if has_value else [_POLICY]
        size = len(state) // len(names)
        features, state_out = [], []
        for index, name in enumerate(names):
            found = self._stack(name, obs)
            if config.lstm_use_prev_action_reward:
                previous = _features(self._distribution, prev_actions)
                found = ops.concatenate([found, previous, ops.reshape(prev_rewards, [-1, 1])], axis=-1)
            if config.is_recurrent:
                found, after = self._cell(name, found, state[index * size : (index + 1) * size])
                state_out += after
            features.append(found)
        num_outputs = self._distribution.num_inputs
        dist_inputs = self._head(_POLICY, features[0], self._weights[f"{_POLICY}/head/kernel"].shape[1])
        if dist_inputs.shape[-1] != num_outputs:  # means alone
            log_std = self._weights.get(f"{_POLICY}/log_std", np.array(LOG_STD_MIN, np.float32))
            if self._distribution.num_features:
                rest = log_deviations(features[0], log_std)
            else:
                rest = ops.add(ops.zeros_like(dist_inputs), log_std)
            dist_inputs = ops.concatenate([dist_inputs, rest], axis=-1)
        values = self._head("value", features[-1], 1) if has_value else ops.zeros_like(dist_inputs[:, :1])
        return dist_inputs, values, state_out

    def _stack(self, name: str, obs: Any) -> Any:
        features = ops.cast(obs, "float32")
        if self._obs_dtype == "uint8":
            features = ops.multiply(features, 1.0 / 255.0)
        filters, hiddens, activation = choose_layers(self._layout.shape, self._config)
        for index, (size, kernel, stride) in enumerate(filters):
            layer = keras.layers.Conv2D(size, kernel, stride, activation="relu", **_named(f"{name}/conv_{index}"))
            features = self._apply(layer, f"{name}/conv_{index}", features)
        if len(features.shape) != 2:
            features = keras.layers.Flatten()(features)
        for index, size in enumerate(hiddens):
            layer = keras.layers.Dense(size, activation=activation, **_named(f"{name}/dense_{index}"))
            features = self._apply(layer, f"{name}/dense_{index}", features)
        return features

    def _head(self, name: str, features: Any, size: int) -> Any:
        return self._apply(keras.layers.Dense(size, **_named(f"{name}/head")), f"{name}/head", features)

    def _apply(self, layer: Any, name: str, inputs: Any) -> Any:
        outputs = layer(inputs)
        layer.set_weights([self._weights[f"{name}/{part}"] for part in ("kernel", "bias")])
        return outputs

    def _cell(self, name: str, inputs: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        """Outputs and state of Keras's own cell, whose gates are in the same order."""
        given, is_lstm = self._weights, self._config.use_lstm
        kind, name = (keras.layers.LSTMCell, f"{name}/lstm") if is_lstm else (keras.layers.GRUCell, f"{name}/gru")
        cell = kind(self._config.lstm_cell_size, recurrent_initializer="zeros", seed=0, **_named(name))
        outputs, after = cell(inputs, state)
        bias = given[f"{name}/bias"]
        if not is_lstm:
            bias = np.stack([bias, given[f"{name}/recurrent_bias"]])
        cell.set_weights([given[f"{name}/kernel"], given[f"{name}/recurrent_kernel"], bias])
        return outputs, list(after)

    def _masked(self, dist_inputs: Any, mask: Any) -> Any:
        """Inputs of the distribution [B, P], those of forbidden actions MASKED_LOGIT."""
        if mask is None:
            return dist_inputs
        entries = np.full(self._distribution.num_inputs, self._layout.num_mask)
        entries[self._distribution.choice_inputs] = np.arange(self._layout.num_mask)
        padded = ops.pad(mask, [[0, 0], [0, 1]], constant_values=1)
        return ops.where(ops.greater(ops.take(padded, entries, axis=1), 0), dist_inputs, MASKED_LOGIT)


def _named(name: str) -> dict[str, Any]:
    """Arguments of a layer. Zeros to begin with: random ones would be drawn from Python's own generator."""
    return {"name": name.replace("/", "_"), "kernel_initializer": "zeros"}


def _features(kind: ActionDistribution, actions: Any) -> Any:
    """Actions [B, ...] in column form as numbers [B, E]; see `aiorl.models.distributions.Distribution.features`."""
    match kind:
        case Categorical():
            return _one_hot(ops.reshape(actions, [-1, 1]), kind.start, kind.num_inputs)
        case MultiCategorical():
            index = ops.reshape(actions, [-1, len(kind.sizes)])
            choices = enumerate(zip(kind.start.tolist(), kind.sizes.tolist(), strict=True))
            return ops.concatenate(
                [_one_hot(index[:, at : at + 1], start, size) for at, (start, size) in choices], axis=-1
            )
        case Composite():
            return ops.concatenate(
                [_features(part.distribution, actions[:, part.actions]) for part in kind.parts], axis=-1
            )
    return ops.cast(ops.reshape(actions, [-1, math.prod(kind.action_shape)]), "float32")


def _one_hot(index: Any, start: int, size: int) -> Any:
    """One-hot rows [B, size] of numbers [B, 1] from `start`; zeros for a number that is none of them."""
    return ops.cast(ops.equal(ops.cast(index, "int32"), np.arange(start, start + size, dtype=np.int32)), "float32")
