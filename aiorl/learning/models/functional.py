"""Policy network as a functional Keras model made only of Keras's own layers and operations.

A file of it can be opened without aiorl. It acts one step, as `ActorCritic.forward_step` does.
Supported are the networks of `aiorl.learning.models.catalog.build_model` and the networks of action
values (`aiorl.learning.models.q_network`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

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
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.actor_critic import log_deviations
from aiorl.learning.models.branch import CustomStack, channels_first, choose_layers, nested_parts
from aiorl.learning.models.catalog import make_custom_model


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
    weights: Mapping[str, NDArray[Any]]
    returns: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._config = ModelConfig.of(self.model_config)
        self._custom = None
        self._atoms = None
        self._is_dueling = self._has("advantage") and self._has("value")
        self._has_q = isinstance(self.distribution, Greedy) and (self._is_dueling or self._has("q"))
        if self._has_q:
            head = self.weights[f"{'advantage' if self._is_dueling else 'q'}/head/kernel"]
            if (num_atoms := head.shape[1] // self.distribution.num_inputs) > 1:
                if self.returns is None:
                    raise ConfigError(
                        f"the returns of its {num_atoms} atoms (v_min, v_max) are unknown.",
                        hint="Export it as onnx.",
                    )
                self._atoms = np.linspace(*self.returns, num_atoms, dtype=np.float32)
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

    def __call__(
        self, obs: Any, state: Sequence[Any], prev_actions: Any = None, prev_rewards: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        """Return the outputs of one step for B observations, all symbolic; see
        `ActorCritic.forward_step`.

        Raises:
            ConfigError: the weights don't belong to such a network.
        """
        mask = None
        previous = None
        state_out = list[Any]()
        if num_mask := self.layout.num_mask:
            obs, mask = ops.reshape(obs[:, num_mask:], [-1, *self.layout.shape]), obs[:, :num_mask]
        if self._config.lstm_use_prev_action_reward:
            actions = _features(self.distribution, prev_actions)
            previous = ops.concatenate([actions, ops.reshape(prev_rewards, [-1, 1])], axis=-1)
        if self._has_q:
            values, state_out = self._q(obs, mask, list(state), previous)
            dist_inputs = self._masked(values, mask)
            return dist_inputs, ops.max(dist_inputs, axis=-1), state_out
        if self._custom is not None:
            dist_inputs, *own = self._custom.network(obs)
            values = own[0] if own else self._dense("value/head", self._stack("value", obs))
        else:
            dist_inputs, values, state_out = self._policy_and_value(obs, list(state), previous)
        dist_inputs = self._masked(ops.cast(dist_inputs, "float32"), mask)
        return dist_inputs, ops.reshape(ops.cast(values, "float32"), [-1]), state_out

    def _policy_and_value(
        self, obs: Any, state: list[Any], previous: Any
    ) -> tuple[Any, Any, list[Any]]:
        has_value = self._has("value")  # otherwise the critics are not part of the policy
        names = (
            ["shared"]
            if self._config.vf_share_layers
            else ["policy", "value"]
            if has_value
            else ["policy"]
        )
        size = len(state) // len(names)
        features = []
        state_out = []
        for index, name in enumerate(names):
            found, after = self._branch(
                name, obs, state[index * size : (index + 1) * size], previous
            )
            features.append(found)
            state_out += after
        dist_inputs = self._dense("policy/head", features[0])
        if dist_inputs.shape[-1] != self.distribution.num_inputs:  # only means
            log_std = self.weights.get("policy/log_std", np.array(LOG_STD_MIN, np.float32))
            has_features = self.distribution.num_features
            rest = (
                log_deviations(features[0], log_std)
                if has_features
                else ops.zeros_like(dist_inputs) + log_std
            )
            dist_inputs = ops.concatenate([dist_inputs, rest], axis=-1)
        values = (
            self._dense("value/head", features[-1])
            if has_value
            else ops.zeros_like(dist_inputs[:, :1])
        )
        return dist_inputs, values, state_out

    def _q(self, obs: Any, mask: Any, state: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        """Return action values [B, A] and the next state; see
        `aiorl.learning.losses.q_learning.dueling`.
        """
        features, state_out = self._branch("q", obs, state, previous)
        if self._is_dueling:
            values, advantages = (self._stream(name, features) for name in ("value", "advantage"))
            legal = ops.ones_like(advantages)
            if mask is not None:
                legal = ops.cast(ops.greater(mask, 0), advantages.dtype)
                legal = legal if self._atoms is None else ops.expand_dims(legal, -1)
            total = ops.sum(ops.multiply(advantages, legal), axis=1, keepdims=True)
            mean = ops.divide(total, ops.maximum(ops.sum(legal, axis=1, keepdims=True), 1.0))
            found = ops.subtract(ops.add(values, advantages), mean)
        else:
            found = self._stream("q", features)
        found = ops.cast(found, "float32")
        if self._atoms is not None:
            found = ops.sum(ops.multiply(ops.softmax(found), self._atoms), axis=-1)
        return found, state_out

    def _stream(self, name: str, features: Any) -> Any:
        """Return the outputs of a stream: [B, A], or with atoms [B, A, Z]; A is 1 for the value."""
        _, _, activation = choose_layers(self.layout, self.obs_dtype, self._config)
        numbers: Iterable[int] = (
            itertools.count() if self._is_dueling else ()
        )  # otherwise they are in the branch
        hiddens = (f"{name}/dense_{index}" for index in numbers)
        for hidden in itertools.takewhile(
            lambda hidden: f"{hidden}/kernel" in self.weights, hiddens
        ):
            features = self._dense(hidden, features, activation)
        outputs = self._dense(f"{name}/head", features)
        if self._atoms is None:
            return outputs
        return ops.reshape(outputs, [-1, outputs.shape[-1] // len(self._atoms), len(self._atoms)])

    def _branch(
        self, name: str, obs: Any, state: list[Any], previous: Any
    ) -> tuple[Any, list[Any]]:
        """Return features [B, D] of observations [B, ...] and the next state, like
        `models.branch.Branch.step`.
        """
        features = self._stack(name, obs)
        if previous is not None:
            features = ops.concatenate([features, previous], axis=-1)
        return self._cell(name, features, state) if self._config.is_recurrent else (features, [])

    def _stack(self, name: str, obs: Any) -> Any:
        """Return features [B, D] of observations [B, ...], before a cell."""
        if any(weight.startswith(f"{name}/custom/") for weight in self.weights):
            stack = CustomStack(self.layout, self._config, seed=0)
            for part, variable in stack.named_variables().items():
                variable.assign(*self._given(name, part))
            return stack(obs)
        features = ops.cast(obs, "float32")
        layers = choose_layers(self.layout, self.obs_dtype, self._config)
        parts = nested_parts(self.layout, self._config)
        if parts is not None:
            images = []
            for index, image in enumerate(parts.images):
                pixels = ops.multiply(
                    ops.reshape(features[:, image.place], [-1, *image.shape]), image.scale
                )
                if channels_first(image.shape, image.dtype):
                    pixels = ops.transpose(pixels, [0, 2, 3, 1])
                images.append(
                    self._layers(
                        f"{name}/image_{index}",
                        pixels,
                        image.filters,
                        hiddens=image.hiddens,
                        activation="relu",
                    )
                )
            others = [features[:, place] for place in parts.rest]
            features = ops.concatenate([*images, *others], axis=-1)
            return self._layers(name, features, *layers)
        if self.obs_dtype == "uint8":
            features = ops.multiply(features, 1.0 / 255.0)
        if channels_first(self.layout.shape, self.obs_dtype):
            features = ops.transpose(features, [0, 2, 3, 1])
        return self._layers(name, features, *layers)

    def _layers(
        self,
        name: str,
        features: Any,
        filters: Sequence[Any],
        hiddens: Sequence[int],
        activation: str,
    ) -> Any:
        """Return the features of convolutions, flattened, and of dense layers after them."""
        for index, (size, kernel, stride) in enumerate(filters):
            layer = keras.layers.Conv2D(
                size, kernel, stride, activation="relu", **_named(f"{name}/conv_{index}")
            )
            features = self._apply(layer, f"{name}/conv_{index}", features)
        if len(features.shape) != 2:
            features = keras.layers.Flatten()(features)
        for index in range(len(hiddens)):
            features = self._dense(f"{name}/dense_{index}", features, activation)
        return features

    def _dense(self, name: str, features: Any, activation: str | None = None) -> Any:
        """Return the outputs [B, P] of a dense layer."""
        size = self._given(name, "bias")[0].shape[0]
        return self._apply(
            keras.layers.Dense(size, activation=activation, **_named(name)), name, features
        )

    def _masked(self, dist_inputs: Any, mask: Any) -> Any:
        """Return distribution inputs [B, P] with MASKED_LOGIT for forbidden actions."""
        if mask is None:
            return dist_inputs
        entries = np.full(self.distribution.num_inputs, self.layout.num_mask)
        entries[self.distribution.choice_inputs] = np.arange(self.layout.num_mask)
        padded = ops.pad(mask, [[0, 0], [0, 1]], constant_values=1)
        return ops.where(
            ops.greater(ops.take(padded, entries, axis=1), 0), dist_inputs, MASKED_LOGIT
        )

    def _cell(self, name: str, inputs: Any, state: list[Any]) -> tuple[Any, list[Any]]:
        """Return the outputs and the state of Keras's own cell, which has its gates in the same
        order.
        """
        is_lstm = self._config.use_lstm
        kind, name = (
            (keras.layers.LSTMCell, f"{name}/lstm")
            if is_lstm
            else (keras.layers.GRUCell, f"{name}/gru")
        )
        kernel, recurrent_kernel, bias = self._given(name, "kernel", "recurrent_kernel", "bias")
        if not is_lstm:
            bias = np.stack([bias, *self._given(name, "recurrent_bias")])
        cell = kind(
            self._config.lstm_cell_size, recurrent_initializer="zeros", seed=0, **_named(name)
        )
        outputs, after = cell(inputs, state)
        cell.set_weights([kernel, recurrent_kernel, bias])
        return outputs, list(after)

    def _apply(self, layer: Any, name: str, inputs: Any) -> Any:
        outputs = layer(inputs)
        layer.set_weights(self._given(name, "kernel", "bias"))
        return outputs

    def _has(self, head: str) -> bool:
        return f"{head}/head/kernel" in self.weights

    def _given(self, name: str, *parts: str) -> list[NDArray[Any]]:
        try:
            return [self.weights[f"{name}/{part}"] for part in parts]
        except KeyError as error:
            raise _without_form(self.weights) from error


def _without_form(weights: Mapping[str, NDArray[Any]]) -> ConfigError:
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
            choices = enumerate(zip(kind.start.tolist(), kind.sizes.tolist(), strict=True))
            return ops.concatenate(
                [_one_hot(index[:, at : at + 1], start, size) for at, (start, size) in choices],
                axis=-1,
            )
        case Composite():
            return ops.concatenate(
                [_features(part.distribution, actions[:, part.actions]) for part in kind.parts],
                axis=-1,
            )
    numbers = ops.cast(ops.reshape(actions, [-1, math.prod(kind.action_shape)]), "float32")
    if not isinstance(kind, ScaledGaussian):
        return numbers
    scale = kind.scale
    limits = np.where(scale.is_finite, 1.0, np.inf).astype(np.float32)
    units = ops.divide(
        ops.subtract(numbers, scale.centre.astype(np.float32)), scale.half_range.astype(np.float32)
    )
    return ops.minimum(ops.maximum(units, -limits), limits)


def _one_hot(index: Any, start: int, size: int) -> Any:
    """Return one-hot rows [B, size] of numbers [B, 1] from `start`; zeros for numbers out of
    range.
    """
    return ops.cast(
        ops.equal(ops.cast(index, "int32"), np.arange(start, start + size, dtype=np.int32)),
        "float32",
    )
