"""Policy network as a functional Keras model made only of Keras's own layers and operations.

A file of it can be opened without aiorl. It acts one step, as `ActorCritic.forward_step` does.
Supported are the networks of `aiorl.learning.models.catalog.build_model` and the networks of action
values (`aiorl.learning.models.q_network`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from aiorl.acting.distributions import (
    LOG_STD_MIN,
    MASKED_LOGIT,
    ActionDistribution,
    Categorical,
    Composite,
    Greedy,
    MultiCategorical,
    ScaledGaussian,
)
from aiorl.config.schema import ModelConfig
from aiorl.data.columns import F32, Array, Columns
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.actor_critic import log_deviations
from aiorl.learning.models.branch import (
    CustomStack,
    channels_first,
    choose_layers,
    config_of_branch,
    make_custom_features,
    nested_parts,
)
from aiorl.learning.models.catalog import make_custom_model
from aiorl.learning.models.networks import Layers


@dataclass(eq=False)
class FunctionalNetwork:
    """Network applied to Keras tensors, made of Keras layers with given weights and operations
    between them.

    The weights determine the structure of a network of action values.

    Attributes:
        layout: layout of an observation in its array.
        obs_dtype: "float32" or "uint8".
        distribution: distribution of the actions.
        model_config: settings of the hidden layers, the keys of `model`.
        weights: weights by the names in `ActorCritic.variables`.
        returns: returns of the first and the last atom, for a network of action values with atoms.

    Raises:
        ConfigError: a custom model can no longer be built, the network is of another kind, or the
            returns of its atoms are unknown.
    """

    layout: ObsLayout
    obs_dtype: str
    distribution: ActionDistribution
    model_config: Mapping[str, Any]
    weights: Columns
    returns: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._config = ModelConfig.of(self.model_config)
        self._custom = None
        self._atoms = None
        self._is_dueling = self._has("advantage") and self._has("value")
        self._has_q = isinstance(self.distribution, Greedy) and (self._is_dueling or self._has("q"))
        if self._has_q:
            self._atoms = self._returns_of_atoms()
        elif any(name.startswith("custom/") for name in self.weights):
            self._custom = make_custom_model(
                self.layout,
                self.obs_dtype,
                self.distribution,
                config=self._config,
                settings=self.model_config,
                seed=0,
            )
            self._custom.set_weights(self.weights)
        elif not self._has("policy"):
            raise _without_form(self.weights)

    def _returns_of_atoms(self) -> F32 | None:
        """Return the returns [Z] of the atoms; None if there are none.

        Raises:
            ConfigError: they are unknown.
        """
        stream = "advantage" if self._is_dueling else "q"
        num_outputs = self.weights[f"{stream}/head/kernel"].shape[1]
        num_atoms = num_outputs // self.distribution.num_inputs
        if num_atoms <= 1:
            return None
        if self.returns is None:
            raise ConfigError(
                f"the returns of its {num_atoms} atoms (v_min, v_max) are unknown.",
                hint="Export it as onnx.",
            )
        return np.linspace(*self.returns, num_atoms, dtype=np.float32)

    def __call__(
        self,
        obs: Any,
        state: Sequence[Any],
        prev_actions: Any = None,
        prev_rewards: Any = None,
    ) -> tuple[Any, Any, list[Any]]:
        """Return the outputs of one step for B observations, all symbolic; see
        `ActorCritic.forward_step`.

        Raises:
            ConfigError: the weights don't belong to such a network.
        """
        mask = None
        num_mask = self.layout.num_mask
        if num_mask:
            array = obs
            obs = ops.reshape(array[:, num_mask:], [-1, *self.layout.shape])
            mask = array[:, :num_mask]
        previous = None
        if self._config.lstm_use_prev_action_reward:
            actions = _features(self.distribution, prev_actions)
            rewards = ops.reshape(prev_rewards, [-1, 1])
            previous = ops.concatenate([actions, rewards], axis=-1)
        if self._has_q:
            values, state_out = self._q(obs, mask, list(state), previous)
            dist_inputs = self._masked(values, mask)
            return dist_inputs, ops.max(dist_inputs, axis=-1), state_out
        if self._custom is None:
            dist_inputs, values, state_out = self._policy_and_value(obs, list(state), previous)
        else:
            (dist_inputs, *further), state_out = self._custom.network.step(obs, state)
            if not further:
                further = [self._dense("value/head", self._stack("value", obs))]
            (values,) = further
        dist_inputs = self._masked(ops.cast(dist_inputs, "float32"), mask)
        return dist_inputs, ops.reshape(ops.cast(values, "float32"), [-1]), state_out

    def _policy_and_value(
        self,
        obs: Any,
        state: list[Any],
        previous: Any,
    ) -> tuple[Any, Any, list[Any]]:
        has_value = self._has("value")  # otherwise the critics are not part of the policy
        names = ["policy"]
        if self._config.vf_share_layers:
            names = ["shared"]
        elif has_value:
            names = ["policy", "value"]
        size = len(state) // len(names)
        features = []
        state_out = []
        for index, name in enumerate(names):
            start = index * size
            outputs, following = self._branch(name, obs, state[start : start + size], previous)
            features.append(outputs)
            state_out += following
        dist_inputs = self._dense("policy/head", features[0])
        if dist_inputs.shape[-1] != self.distribution.num_inputs:  # only means
            log_std = self.weights.get("policy/log_std", np.array(LOG_STD_MIN, np.float32))
            if self.distribution.num_features:
                log_stds = log_deviations(features[0], log_std)
            else:
                log_stds = ops.zeros_like(dist_inputs) + log_std
            dist_inputs = ops.concatenate([dist_inputs, log_stds], axis=-1)
        if not has_value:
            return dist_inputs, ops.zeros_like(dist_inputs[:, :1]), state_out
        return dist_inputs, self._dense("value/head", features[-1]), state_out

    def _q(self, obs: Any, mask: Any, state: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        """Return action values [B, A] and the next state; see
        `aiorl.learning.losses.q_learning.dueling`.
        """
        features, state_out = self._branch("q", obs, state, previous)
        values = ops.cast(self._q_of(features, mask), "float32")
        if self._atoms is not None:
            values = ops.sum(ops.multiply(ops.softmax(values), self._atoms), axis=-1)
        return values, state_out

    def _q_of(self, features: Any, mask: Any) -> Any:
        """Return action values [B, A] of features [B, D], or with atoms logits [B, A, Z]."""
        if not self._is_dueling:
            return self._stream("q", features)
        values = self._stream("value", features)
        advantages = self._stream("advantage", features)
        legal = ops.ones_like(advantages)
        if mask is not None:
            legal = ops.cast(ops.greater(mask, 0), advantages.dtype)
            if self._atoms is not None:
                legal = ops.expand_dims(legal, -1)
        total = ops.sum(ops.multiply(advantages, legal), axis=1, keepdims=True)
        count = ops.maximum(ops.sum(legal, axis=1, keepdims=True), 1.0)
        mean = ops.divide(total, count)
        return ops.subtract(ops.add(values, advantages), mean)

    def _stream(self, name: str, features: Any) -> Any:
        """Return the outputs of a stream: [B, A], or with atoms [B, A, Z]; A is 1 for the value."""
        activation = self._hidden_layers(name).activation
        index = 0
        # without two streams, hidden layers of this name are those of the branch
        while self._is_dueling and f"{name}/dense_{index}/kernel" in self.weights:
            features = self._dense(f"{name}/dense_{index}", features, activation)
            index += 1
        outputs = self._dense(f"{name}/head", features)
        if self._atoms is None:
            return outputs
        num_atoms = len(self._atoms)
        return ops.reshape(outputs, [-1, outputs.shape[-1] // num_atoms, num_atoms])

    def _branch(
        self,
        name: str,
        obs: Any,
        state: list[Any],
        previous: Any,
    ) -> tuple[Any, list[Any]]:
        """Return features [B, D] of observations [B, ...] and the next state, like
        `models.branch.Branch.step`.
        """
        if self._config.custom_state:
            network = make_custom_features(self.layout, self._config, seed=0)
            for part, variable in network.named_variables().items():
                variable.assign(*self._parts(name, part))
            (features,), state_out = network.step(obs, state)
            return features, state_out
        features = self._stack(name, obs)
        if previous is not None:
            features = ops.concatenate([features, previous], axis=-1)
        if not self._config.is_recurrent:
            return features, []
        return self._cell(name, features, state)

    def _hidden_layers(self, name: str) -> Layers:
        config = config_of_branch(name, self._config)
        return choose_layers(self.layout, self.obs_dtype, config)

    def _stack(self, name: str, obs: Any) -> Any:
        """Return features [B, D] of observations [B, ...], before a cell."""
        if any(weight.startswith(f"{name}/custom/") for weight in self.weights):
            stack = CustomStack(self.layout, config_of_branch(name, self._config), seed=0)
            for part, variable in stack.named_variables().items():
                variable.assign(*self._parts(name, part))
            return stack(obs)
        features = ops.cast(obs, "float32")
        parts = nested_parts(self.layout, self._config)
        if parts is not None:
            of_parts = []
            for index, image in enumerate(parts.images):
                pixels = ops.reshape(features[:, image.place], [-1, *image.shape])
                pixels = ops.multiply(pixels, image.scale)
                if channels_first(image.shape, image.dtype):
                    pixels = ops.transpose(pixels, [0, 2, 3, 1])
                of_parts.append(self._layers(f"{name}/image_{index}", pixels, image.layers))
            of_parts += [features[:, place] for place in parts.rest]
            features = ops.concatenate(of_parts, axis=-1)
            return self._layers(name, features, self._hidden_layers(name))
        if self.obs_dtype == "uint8":
            features = ops.multiply(features, 1.0 / 255.0)
        if channels_first(self.layout.shape, self.obs_dtype):
            features = ops.transpose(features, [0, 2, 3, 1])
        return self._layers(name, features, self._hidden_layers(name))

    def _layers(self, name: str, features: Any, layers: Layers) -> Any:
        """Return the features of convolutions, flattened, and of dense layers after them."""
        for index, (size, kernel, stride) in enumerate(layers.filters):
            part = f"{name}/conv_{index}"
            layer = keras.layers.Conv2D(size, kernel, stride, activation="relu", **_named(part))
            features = self._apply(layer, part, features)
        if len(features.shape) != 2:
            features = keras.layers.Flatten()(features)
        for index in range(len(layers.hiddens)):
            features = self._dense(f"{name}/dense_{index}", features, layers.activation)
        return features

    def _dense(self, name: str, features: Any, activation: str | None = None) -> Any:
        """Return the outputs [B, P] of a dense layer."""
        (bias,) = self._parts(name, "bias")
        layer = keras.layers.Dense(len(bias), activation=activation, **_named(name))
        return self._apply(layer, name, features)

    def _masked(self, dist_inputs: Any, mask: Any) -> Any:
        """Return distribution inputs [B, P] with MASKED_LOGIT for forbidden actions."""
        if mask is None:
            return dist_inputs
        entries = np.full(self.distribution.num_inputs, self.layout.num_mask)
        entries[self.distribution.choice_inputs] = np.arange(self.layout.num_mask)
        padded = ops.pad(mask, [[0, 0], [0, 1]], constant_values=1)
        is_legal = ops.greater(ops.take(padded, entries, axis=1), 0)
        return ops.where(is_legal, dist_inputs, MASKED_LOGIT)

    def _cell(self, name: str, inputs: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        """Return the outputs and the state of Keras's own cell, which has its gates in the same
        order.
        """
        kind = keras.layers.LSTMCell
        part = f"{name}/lstm"
        if not self._config.use_lstm:
            kind = keras.layers.GRUCell
            part = f"{name}/gru"
        kernel, recurrent_kernel, bias = self._parts(part, "kernel", "recurrent_kernel", "bias")
        if not self._config.use_lstm:
            bias = np.stack([bias, *self._parts(part, "recurrent_bias")])
        cell = kind(
            self._config.lstm_cell_size, recurrent_initializer="zeros", seed=0, **_named(part)
        )
        outputs, following = cell(inputs, state)
        cell.set_weights([kernel, recurrent_kernel, bias])
        return outputs, list(following)

    def _apply(self, layer: Any, name: str, inputs: Any) -> Any:
        outputs = layer(inputs)
        layer.set_weights(self._parts(name, "kernel", "bias"))
        return outputs

    def _has(self, head: str) -> bool:
        return f"{head}/head/kernel" in self.weights

    def _parts(self, name: str, *parts: str) -> list[Array]:
        """Return weights of a layer, such as its kernel.

        Raises:
            ConfigError: there is no such weight.
        """
        try:
            return [self.weights[f"{name}/{part}"] for part in parts]
        except KeyError as error:
            raise _without_form(self.weights) from error


def _without_form(weights: Columns) -> ConfigError:
    return ConfigError(
        f"networks with weights such as {next(iter(weights), '')!r} have no Keras form.",
        hint="Export it as onnx.",
    )


def _named(name: str) -> dict[str, Any]:
    """Return arguments of a layer.

    It starts with zeros, because random weights would use Python's own generator.
    """
    return {"name": name.replace("/", "_"), "kernel_initializer": "zeros"}


def _features(kind: ActionDistribution, actions: Any) -> Any:
    """Convert actions [B, ...] in column form to numbers [B, E], like
    `models.distributions.Distribution.features`.
    """
    match kind:
        case Categorical():
            return _one_hot(ops.reshape(actions, [-1, 1]), kind.start, kind.num_inputs)
        case MultiCategorical():
            index = ops.reshape(actions, [-1, len(kind.sizes)])
            choices = zip(kind.start.tolist(), kind.sizes.tolist(), strict=True)
            one_hots = [
                _one_hot(index[:, at : at + 1], start, size)
                for at, (start, size) in enumerate(choices)
            ]
            return ops.concatenate(one_hots, axis=-1)
        case Composite():
            parts = [_features(part.distribution, actions[:, part.actions]) for part in kind.parts]
            return ops.concatenate(parts, axis=-1)
    numbers = ops.cast(ops.reshape(actions, [-1, math.prod(kind.action_shape)]), "float32")
    if not isinstance(kind, ScaledGaussian):
        return numbers
    scale = kind.scale
    limits = np.where(scale.is_finite, 1.0, np.inf).astype(np.float32)
    distance = ops.subtract(numbers, scale.centre.astype(np.float32))
    units = ops.divide(distance, scale.half_range.astype(np.float32))
    return ops.minimum(ops.maximum(units, -limits), limits)


def _one_hot(index: Any, start: int, size: int) -> Any:
    """Return one-hot rows [B, size] of numbers [B, 1] from `start`; zeros for numbers out of
    range.
    """
    choices = np.arange(start, start + size, dtype=np.int32)
    return ops.cast(ops.equal(ops.cast(index, "int32"), choices), "float32")
