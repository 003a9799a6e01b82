"""Stacks of Keras layers: multi-layer perceptrons and convolutions.

Layers are built immediately, from a NumPy generator, so that a seed gives the same weights in every
process and nothing depends on the global state of TensorFlow or Keras. A stack has its own names
for weights ("dense_0/kernel"); the numbered names of Keras are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from aiorl.config.schema import ModelConfig
from aiorl.data.columns import F32
from aiorl.data.obs_layout import ObsLayout, Shape
from aiorl.errors import ConfigError

ConvFilter = tuple[int, tuple[int, int], tuple[int, int]]
"""Channels, kernel height and width, vertical and horizontal stride."""


class Layers(NamedTuple):
    """Layers over observations or features.

    Attributes:
        filters: convolutions, with ReLU.
        hiddens: widths of the dense layers after them.
        activation: activation of the dense layers.
    """

    filters: tuple[ConvFilter, ...]
    hiddens: tuple[int, ...]
    activation: str

    @classmethod
    def of_dense(cls, config: ModelConfig) -> Layers:
        """Return the dense layers of a config alone."""
        return cls((), config.fcnet_hiddens, config.fcnet_activation)


Variables = dict[str, Any]
"""Keras variables by name."""
Weights = Mapping[str, Any]
"""Tensors by the names of a network's variables, to use in their place."""
State = Sequence[Any]
"""Recurrent state of B rows, [B, ...] for each component."""

HIDDEN_GAIN = math.sqrt(2.0)


def orthogonal(rng: np.random.Generator, shape: Sequence[int], gain: float = 1.0) -> F32:
    """Return a matrix of the given shape with orthonormal rows or columns, multiplied by `gain`.

    Leading axes count as rows: a convolution's kernel [H, W, C, D] is one matrix [H W C, D].

    Source: Saxe et al. 2014, https://arxiv.org/abs/1312.6120.
    """
    rows = math.prod(shape[:-1])
    columns = shape[-1]
    longer = max(rows, columns)
    shorter = min(rows, columns)
    tall = rng.standard_normal((longer, shorter))
    if longer >= 2 * shorter:
        # same basis from a Cholesky factor: several times faster, and accurate enough for a tall
        # matrix
        basis = tall @ np.linalg.inv(np.linalg.cholesky(tall.T @ tall).T)
    else:
        basis, triangle = np.linalg.qr(tall)
        basis *= np.sign(np.diag(triangle))
    if rows < columns:
        basis = basis.T
    return (gain * basis).reshape(shape).astype(np.float32)


class Stack:
    """Layers applied one after the other.

    Attributes:
        num_outputs: number of features of the last layer.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, keras.layers.Layer]],
        num_outputs: int,
        scale: float = 1.0,
        *,
        has_channels_first: bool = False,
    ) -> None:
        """Take over named layers that are already built.

        Args:
            layers: layers with names that are unique within the stack.
            num_outputs: features of the last layer.
            scale: factor for inputs before the first layer.
            has_channels_first: True if inputs are images [B, C, H, W]; the layers process [B, H, W,
                C].
        """
        self._layers = list(layers)
        self._scale = scale
        self._has_channels_first = has_channels_first
        self.num_outputs = num_outputs

    def __call__(self, inputs: Any) -> Any:
        """Return features [B, num_outputs] float32 of inputs [B, ...]."""
        features = tf.cast(inputs, tf.float32)
        if self._scale != 1.0:
            features = features * self._scale
        if self._has_channels_first:
            features = tf.transpose(features, [0, 2, 3, 1])
        for _, layer in self._layers:
            features = layer(features)
        return features

    def named_variables(self) -> Variables:
        """Return the Keras variables by name, for instance ``dense_0/kernel``."""
        variables: Variables = {}
        for name, layer in self._layers:
            variables |= layer_variables(name, layer)
        return variables


class Network:
    """Network with named weights that processes observations, which can come with an action mask.

    Attributes:
        layout: layout of an observation in its array.
        variables: tf.Variables by name, in a fixed order; the names depend only on the settings.
    """

    layout: ObsLayout
    variables: dict[str, tf.Variable]

    @property
    def trainable(self) -> dict[str, tf.Variable]:
        """Trainable variables by name; custom layers can have others."""
        return {name: item.value for name, item in self._keras_variables.items() if item.trainable}

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """Trainable variables in order, for optimisers and gradients."""
        return list(self.trainable.values())

    def _take_variables(self, variables: Variables) -> None:
        """Take over Keras variables by name."""
        self._keras_variables = variables
        self.variables = {name: item.value for name, item in variables.items()}

    def _using(self, weights: Weights | None) -> Any:
        """Return a context in which tensors by name replace all variables; None changes nothing."""
        if weights is None:
            return nullcontext()
        return keras.StatelessScope(
            state_mapping=[(item, weights[name]) for name, item in self._keras_variables.items()]
        )

    def _without_mask(self, obs: Any) -> tuple[Any, Any]:
        """Split arrays [B, *layout.array_shape] into observations [B, *layout.shape] and masks [B,
        M], None without.
        """
        if not self.layout.num_mask:
            return obs, None
        size = self.layout.num_mask
        return tf.reshape(obs[:, size:], [-1, *self.layout.shape]), obs[:, :size]


def layer_variables(name: str, layer: keras.layers.Layer) -> Variables:
    """Return the Keras variables of a layer by name, for instance ``NAME/kernel``."""
    return {f"{name}/{variable.name}": variable for variable in layer.trainable_variables}


def prefixed(prefix: str, variables: Variables) -> Variables:
    """Return variables by their names with ``PREFIX/`` before them."""
    return {f"{prefix}/{name}": variable for name, variable in variables.items()}


def dense(
    rng: np.random.Generator,
    num_inputs: int,
    num_outputs: int,
    *,
    gain: float,
    activation: str | None = None,
) -> keras.layers.Layer:
    """Return a built dense layer with an orthogonal kernel and zero bias."""
    kernel = orthogonal(rng, (num_inputs, num_outputs), gain)
    function = _gelu if activation == "gelu" else activation
    layer = keras.layers.Dense(num_outputs, activation=function, kernel_initializer=_fixed(kernel))
    layer.build((None, num_inputs))
    return layer


def make_stack(
    rng: np.random.Generator,
    obs_shape: Shape,
    layers: Layers,
    *,
    scale: float = 1.0,
    has_channels_first: bool = False,
) -> Stack:
    """Return convolutions over [H, W, C] without padding, if there are any, flattened, then dense
    layers.

    Args:
        rng: generator of the initial weights.
        obs_shape: shape of the inputs for the layers: [H, W, C] for convolutions.
        layers: the layers to create.
        scale: see `Stack`.
        has_channels_first: see `Stack`.

    Raises:
        ConfigError: the image is smaller than a kernel.
    """
    shape = obs_shape
    built: list[tuple[str, keras.layers.Layer]] = []
    for index, (size, kernel, stride) in enumerate(layers.filters):
        height, width, channels = shape
        if height < kernel[0] or width < kernel[1]:
            raise ConfigError(
                f"conv_filters don't fit observations of {obs_shape}: filter {index} with a"
                f" {kernel[0]}x{kernel[1]} kernel meets an image of {height}x{width}.",
                key="model.conv_filters",
                value=layers.filters,
                hint="Use smaller kernels or strides, or fewer filters.",
            )
        weights = orthogonal(rng, (*kernel, channels, size), HIDDEN_GAIN)
        layer = keras.layers.Conv2D(
            size, kernel, stride, activation="relu", kernel_initializer=_fixed(weights)
        )
        layer.build((None, *shape))
        built.append((f"conv_{index}", layer))
        height = (height - kernel[0]) // stride[0] + 1
        width = (width - kernel[1]) // stride[1] + 1
        shape = (height, width, size)
    if len(shape) != 1:
        built.append(("flatten", keras.layers.Flatten()))
    features = math.prod(shape)
    for index, size in enumerate(layers.hiddens):
        layer = dense(rng, features, size, gain=HIDDEN_GAIN, activation=layers.activation)
        built.append((f"dense_{index}", layer))
        features = size
    return Stack(built, features, scale, has_channels_first=has_channels_first)


def _fixed(values: F32) -> Any:
    """Return an initializer with these values."""

    def initialize(shape: Any, dtype: Any = None) -> Any:
        return tf.constant(values, dtype=dtype)

    return initialize


def _gelu(values: Any) -> Any:
    """Compute Keras's exact GELU with erf, because Keras uses erfc, which ONNX doesn't have."""
    return 0.5 * values * (1.0 + tf.math.erf(values * math.sqrt(0.5)))
