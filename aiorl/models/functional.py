"""A policy's network as a functional Keras model, made of Keras's own layers and operations alone.

So a file of it can be opened where there is no aiorl. It acts one step, as `ActorCritic.forward_step` does. There are
the networks of `aiorl.models.catalog.build_model`, and those of action values (`aiorl.algorithms.q_network`).
"""

from __future__ import annotations

import itertools
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
    Greedy,
    MultiCategorical,
)

__all__ = ["FunctionalNetwork", "FunctionalQNetwork"]

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

        Raises: ConfigError for a custom model that can't be made any more, and networks of another kind.
        """
        self._distribution = distribution
        self._config = ModelConfig.of(model_config)
        self._weights = weights
        self._layers = _Layers(layout, obs_dtype, distribution, self._config, weights)
        self._custom = None
        if not self._config.custom_model and f"{_POLICY}/head/kernel" not in weights:
            raise _without_form(weights)
        if self._config.custom_model:
            self._custom = make_custom_model(layout, obs_dtype, distribution, self._config, model_config, seed=0)
            self._custom.set_weights(weights)

    def __call__(
        self, obs: Any, state: Sequence[Any], prev_actions: Any = None, prev_rewards: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        """Outputs of one step for B observations, all symbolic; see `ActorCritic.forward_step`.

        Raises: ConfigError if the weights are not those of such a network.
        """
        obs, mask = self._layers.without_mask(obs)
        if self._custom is not None:
            dist_inputs, *own = self._custom.call_model(obs)
            values = own[0] if own else self._layers.head("value", self._layers.stack("value", obs))
            state_out: list[Any] = []
        else:
            previous = self._layers.previous(prev_actions, prev_rewards)
            dist_inputs, values, state_out = self._built_in(obs, list(state), previous)
        dist_inputs = self._layers.masked(ops.cast(dist_inputs, "float32"), mask)
        return dist_inputs, ops.reshape(ops.cast(values, "float32"), [-1]), state_out

    def _built_in(self, obs: Any, state: list[Any], previous: Any) -> tuple[Any, Any, list[Any]]:
        has_value = "value/head/kernel" in self._weights  # else critics stayed with the learner
        names = ["shared"] if self._config.vf_share_layers else [_POLICY, "value"] if has_value else [_POLICY]
        size = len(state) // len(names)
        features, state_out = [], []
        for index, name in enumerate(names):
            found, after = self._layers.branch(name, obs, state[index * size : (index + 1) * size], previous)
            features.append(found)
            state_out += after
        dist_inputs = self._layers.head(_POLICY, features[0])
        if dist_inputs.shape[-1] != self._distribution.num_inputs:  # means alone
            log_std = self._weights.get(f"{_POLICY}/log_std", np.array(LOG_STD_MIN, np.float32))
            if self._distribution.num_features:
                rest = log_deviations(features[0], log_std)
            else:
                rest = ops.add(ops.zeros_like(dist_inputs), log_std)
            dist_inputs = ops.concatenate([dist_inputs, rest], axis=-1)
        values = self._layers.head("value", features[-1]) if has_value else ops.zeros_like(dist_inputs[:, :1])
        return dist_inputs, values, state_out


class FunctionalQNetwork:
    """Applies a network of action values, whose weights are given by the names that `QNetwork.variables` has.

    Whether it has streams, their hidden layers and the number of atoms are what the weights say.
    """

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        model_config: Mapping[str, Any],
        weights: Mapping[str, NDArray[Any]],
        returns: tuple[float, float] | None = None,
    ) -> None:
        """Take what the network was built from (see `aiorl.algorithms.q_network.QNetwork`), and its weights.

        Args:
            layout: how an observation lies in its array.
            obs_dtype: "float32" or "uint8".
            distribution: of the actions.
            model_config: settings of the hidden layers, the keys of `model`.
            weights: by name.
            returns: those of the first and the last atom; a network of expected returns needs none.

        Raises: ConfigError for networks of another kind, and one with atoms whose returns are not known.
        """
        self._config = ModelConfig.of(model_config)
        self._weights = weights
        self._layers = _Layers(layout, obs_dtype, distribution, self._config, weights)
        if not self.is_form_of(distribution, weights):
            raise _without_form(weights)
        _, _, self._activation = choose_layers(layout.shape, self._config)
        self._is_dueling = "advantage/head/kernel" in weights
        head = weights["advantage/head/kernel" if self._is_dueling else "q/head/kernel"]
        self._num_atoms = head.shape[1] // distribution.num_inputs
        self._atoms = None
        if self._num_atoms > 1:
            if returns is None:
                raise ConfigError(
                    f"which returns its {self._num_atoms} atoms stand for (v_min, v_max) is not known.",
                    hint="Export it as onnx.",
                )
            self._atoms = np.linspace(*returns, self._num_atoms, dtype=np.float32)

    @staticmethod
    def is_form_of(distribution: ActionDistribution, weights: Mapping[str, NDArray[Any]]) -> bool:
        """Whether a network with such actions and weights is one of action values."""
        is_dueling = "advantage/head/kernel" in weights and "value/head/kernel" in weights
        return isinstance(distribution, Greedy) and (is_dueling or "q/head/kernel" in weights)

    def __call__(
        self, obs: Any, state: Sequence[Any], prev_actions: Any = None, prev_rewards: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        """Outputs of one step for B observations, all symbolic; see `ActorCritic.forward_step`.

        Raises: ConfigError if the weights are not those of such a network.
        """
        obs, mask = self._layers.without_mask(obs)
        previous = self._layers.previous(prev_actions, prev_rewards)
        features, state_out = self._layers.branch("q", obs, list(state), previous)
        values = ops.cast(self._dueling(features, mask) if self._is_dueling else self._head("q", features), "float32")
        if self._atoms is not None:
            values = ops.sum(ops.multiply(ops.softmax(values), self._atoms), axis=-1)
        values = self._layers.masked(values, mask)
        return values, ops.max(values, axis=-1), state_out

    def _dueling(self, features: Any, mask: Any) -> Any:
        """See `aiorl.losses.q_learning.dueling`."""
        values, advantages = (self._stream(name, features) for name in ("value", "advantage"))
        if mask is None:
            mean = ops.mean(advantages, axis=1, keepdims=True)
        else:
            legal = ops.cast(ops.greater(mask, 0), advantages.dtype)
            if self._atoms is not None:
                legal = ops.expand_dims(legal, -1)
            total = ops.sum(ops.multiply(advantages, legal), axis=1, keepdims=True)
            mean = ops.divide(total, ops.maximum(ops.sum(legal, axis=1, keepdims=True), 1.0))
        return ops.subtract(ops.add(values, advantages), mean)

    def _stream(self, name: str, features: Any) -> Any:
        hiddens = (f"{name}/dense_{index}" for index in itertools.count())
        for hidden in itertools.takewhile(lambda hidden: f"{hidden}/kernel" in self._weights, hiddens):
            features = self._layers.dense(hidden, features, self._activation)
        return self._head(name, features)

    def _head(self, name: str, features: Any) -> Any:
        """What a stream gives: [B, A], or with atoms [B, A, Z]; for the value A is 1."""
        outputs = self._layers.head(name, features)
        if self._atoms is None:
            return outputs
        return ops.reshape(outputs, [-1, outputs.shape[-1] // self._num_atoms, self._num_atoms])


class _Layers:
    """Layers of Keras's own with given weights, and what is between them."""

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        weights: Mapping[str, NDArray[Any]],
    ) -> None:
        self._layout = layout
        self._obs_dtype = obs_dtype
        self._distribution = distribution
        self._config = config
        self._weights = weights

    def without_mask(self, obs: Any) -> tuple[Any, Any]:
        """Observations [B, *layout.shape] and masks [B, M] (None without) of arrays [B, *layout.array_shape]."""
        num_mask = self._layout.num_mask
        if not num_mask:
            return obs, None
        return ops.reshape(obs[:, num_mask:], [-1, *self._layout.shape]), obs[:, :num_mask]

    def previous(self, actions: Any, rewards: Any) -> Any:
        """Previous actions and rewards as rows of numbers [B, E + 1]; None for networks that don't look back."""
        if not self._config.lstm_use_prev_action_reward:
            return None
        return ops.concatenate([_features(self._distribution, actions), ops.reshape(rewards, [-1, 1])], axis=-1)

    def branch(self, name: str, obs: Any, state: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        """Features [B, D] of observations [B, ...], and the next state; see `aiorl.models.branch.Branch.step`."""
        features = self.stack(name, obs)
        if previous is not None:
            features = ops.concatenate([features, previous], axis=-1)
        return self._cell(name, features, state) if self._config.is_recurrent else (features, [])

    def stack(self, name: str, obs: Any) -> Any:
        """Features [B, D] of observations [B, ...], before a cell."""
        features = ops.cast(obs, "float32")
        if self._obs_dtype == "uint8":
            features = ops.multiply(features, 1.0 / 255.0)
        filters, hiddens, activation = choose_layers(self._layout.shape, self._config)
        for index, (size, kernel, stride) in enumerate(filters):
            layer = keras.layers.Conv2D(size, kernel, stride, activation="relu", **_named(f"{name}/conv_{index}"))
            features = self._apply(layer, f"{name}/conv_{index}", features)
        if len(features.shape) != 2:
            features = keras.layers.Flatten()(features)
        for index in range(len(hiddens)):
            features = self.dense(f"{name}/dense_{index}", features, activation)
        return features

    def head(self, name: str, features: Any) -> Any:
        """Outputs [B, P] of the last layer of a stream."""
        return self.dense(f"{name}/head", features)

    def dense(self, name: str, features: Any, activation: str | None = None) -> Any:
        """Outputs [B, P] of a dense layer."""
        size = self._given(name, "bias")[0].shape[0]
        return self._apply(keras.layers.Dense(size, activation=activation, **_named(name)), name, features)

    def masked(self, dist_inputs: Any, mask: Any) -> Any:
        """Inputs of the distribution [B, P], those of forbidden actions MASKED_LOGIT."""
        if mask is None:
            return dist_inputs
        entries = np.full(self._distribution.num_inputs, self._layout.num_mask)
        entries[self._distribution.choice_inputs] = np.arange(self._layout.num_mask)
        padded = ops.pad(mask, [[0, 0], [0, 1]], constant_values=1)
        return ops.where(ops.greater(ops.take(padded, entries, axis=1), 0), dist_inputs, MASKED_LOGIT)

    def _cell(self, name: str, inputs: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        """Outputs and state of Keras's own cell, whose gates are in the same order."""
        is_lstm = self._config.use_lstm
        kind, name = (keras.layers.LSTMCell, f"{name}/lstm") if is_lstm else (keras.layers.GRUCell, f"{name}/gru")
        kernel, recurrent_kernel, bias = self._given(name, "kernel", "recurrent_kernel", "bias")
        if not is_lstm:
            bias = np.stack([bias, *self._given(name, "recurrent_bias")])
        cell = kind(self._config.lstm_cell_size, recurrent_initializer="zeros", seed=0, **_named(name))
        outputs, after = cell(inputs, state)
        cell.set_weights([kernel, recurrent_kernel, bias])
        return outputs, list(after)

    def _apply(self, layer: Any, name: str, inputs: Any) -> Any:
        outputs = layer(inputs)
        layer.set_weights(self._given(name, "kernel", "bias"))
        return outputs

    def _given(self, name: str, *parts: str) -> list[NDArray[Any]]:
        try:
            return [self._weights[f"{name}/{part}"] for part in parts]
        except KeyError as error:
            raise _without_form(self._weights) from error


def _without_form(weights: Mapping[str, NDArray[Any]]) -> ConfigError:
    return ConfigError(
        f"networks with weights such as {next(iter(weights), '')!r} have no Keras form.", hint="Export it as onnx."
    )


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
