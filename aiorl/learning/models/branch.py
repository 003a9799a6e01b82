"""Branches of a network: the layers between observations and heads, or a custom Keras model in
their place.

``model.custom_model`` is the import path of a function or class that is called with ``(obs_shape,
num_outputs, model_config)`` and returns a Keras model. The model's input is observations ``[B,
*obs_shape]`` as float32 (bytes keep their values of 0 to 255). The algorithm determines its output:

- For algorithms without a replay, the inputs of the action distribution ``[B, num_outputs]``, alone
  or with values ``[B]`` or ``[B, 1]`` (`aiorl.learning.models.catalog`).
- With ``model.custom_features``, and for algorithms with a replay, features ``[B, F]`` of any width
  F, which replace the hidden layers.
  ``num_outputs`` is then a suggestion: the width of the last layer of ``model.fcnet_hiddens``. The
  function is called once for each network, so that the policy and each critic have their own model.

With ``model.custom_state``, the shapes of a recurrent state, the model is called with ``[obs,
*state]``, each component ``[B, *shape]``, and returns its outputs followed by the state after the
step. It is run step by step: the state begins with zeros at the start of each episode.

The model runs in inference mode for both acting and learning (Dropout and BatchNormalization behave
accordingly).

A Tuple or Dict observation comes as one flat vector. If the function has a parameter called
``obs_parts``, it receives the shape of each part by name, and its model is called with a dict of
the parts by name. A functional model gets the parts for which it has inputs
(``keras.Input(obs_parts["camera"], name="camera")``), a subclassed model gets all. Names are the
keys and positions in the space, joined by dots, such as ``camera`` or ``arms.0``; Discrete parts
are one-hot.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import random
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from aiorl.config.code import import_object, named_failures
from aiorl.config.schema import ModelConfig, Sizes
from aiorl.data.obs_layout import ObsLayout, Shape
from aiorl.errors import ConfigError
from aiorl.learning.models.networks import (
    ConvFilter,
    Layers,
    Stack,
    State,
    Variables,
    layer_variables,
    make_stack,
    orthogonal,
    prefixed,
)
from aiorl.process.log_once import log_once

logger = logging.getLogger(__name__)

CustomModel = Callable[..., Any]
"""Function that returns a Keras model; called with (obs_shape, num_outputs, model_config) and
optionally obs_parts."""

CUSTOM_MODEL = "model.custom_model"
_PARTS = "obs_parts"
_WHOLE = "obs"
PROBE_ROWS = 2
"""Number of observations with which a model is run to find its output shapes."""
_DEFAULT_WIDTH = 256
_BYTE_SCALE = 1.0 / 255.0

_taken: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that are already part of a network."""


class CustomNetwork:
    """Keras model that is called with observations in the form it expects.

    Attributes:
        keras_model: the Keras model.
        output_shapes: shapes of its outputs for PROBE_ROWS observations, without the state.
        state_shapes: shape of each component of its recurrent state of one row.
    """

    def __init__(
        self,
        keras_model: Any,
        layout: ObsLayout,
        *,
        takes_parts: bool = False,
        state_shapes: Sequence[Shape] = (),
    ) -> None:
        """Take over a model, built or not, and run it once.

        Raises:
            ConfigError: it can't process these observations, or returns another state.
        """
        self.keras_model = keras_model
        self.state_shapes = tuple(state_shapes)
        self._layout = layout
        self._takes_parts = takes_parts
        state = [tf.zeros([PROBE_ROWS, *shape]) for shape in self.state_shapes]
        try:
            outputs, following = self.step(tf.zeros([PROBE_ROWS, *layout.shape]), state)
            self.output_shapes = [tuple(output.shape) for output in outputs]
            shapes = [tuple(component.shape) for component in following]
        except Exception as error:
            # custom layers can raise anything
            raise ConfigError(
                f"the custom model can't process observations of shape {list(layout.shape)}:"
                f" {error!s:.500}",
                key=CUSTOM_MODEL,
            ) from error
        expected = [tuple(component.shape) for component in state]
        if not outputs or shapes != expected:
            raise ConfigError(
                f"the custom model gives outputs of shapes {[*self.output_shapes, *shapes]} for"
                f" {PROBE_ROWS} observations; with its custom_state the last ones must be"
                f" {expected}, after at least one output.",
                key="model.custom_state",
                value=self.state_shapes,
                hint="Return the outputs, then each component of the state after the step.",
            )

    def __call__(self, obs: Any) -> list[Any]:
        """Return the outputs for observations [B, *layout.shape], of a model without memory."""
        return self.step(obs, [])[0]

    def step(self, obs: Any, state: State) -> tuple[list[Any], list[Any]]:
        """Return the outputs for observations [B, *layout.shape] and the state [B, *shape], and the
        state after the step; all can be symbolic Keras tensors.
        """
        inputs: Any = keras.ops.cast(obs, "float32")
        if self._takes_parts:
            inputs = self._parts(inputs)
        if self.state_shapes:
            inputs = [inputs, *(keras.ops.cast(component, "float32") for component in state)]
        outputs = self.keras_model(inputs, training=False)
        if not isinstance(outputs, list | tuple):
            outputs = [outputs]
        num_outputs = max(0, len(outputs) - len(self.state_shapes))
        return list(outputs[:num_outputs]), list(outputs[num_outputs:])

    def named_variables(self) -> Variables:
        """Return the Keras variables by name, for instance ``custom/0/kernel``."""
        return {
            f"custom/{index}/{item.name}": item
            for index, item in enumerate(self.keras_model.weights)
        }

    def _parts(self, obs: Any) -> Any:
        """Return the parts of observations [B, ...] for which the model has inputs, by name."""
        try:
            inputs = self.keras_model.input
        except (AttributeError, ValueError):  # not a functional model: it gets all parts
            inputs = None
        if self.state_shapes and inputs is not None:
            inputs = inputs[0]
        if isinstance(self.keras_model, keras.Sequential):
            return obs
        if inputs is not None and not isinstance(inputs, dict):
            return obs
        parts = {}
        for name, place in self._layout.slices().items():
            parts[name] = keras.ops.reshape(obs[:, place], [-1, *self._layout.parts[name]])
        if not parts:
            parts[_WHOLE] = obs
        return {name: part for name, part in parts.items() if inputs is None or name in inputs}


class CustomStack(Stack):
    """Custom model that replaces a stack of layers and returns features."""

    def __init__(self, layout: ObsLayout, config: ModelConfig, seed: int | None) -> None:
        """Create the model.

        Raises:
            ConfigError: see `make_custom_features`.
        """
        self._network = make_custom_features(layout, config, seed=seed)
        super().__init__([], self._network.output_shapes[0][1])

    def __call__(self, inputs: Any) -> Any:
        """See `Stack.__call__`."""
        return keras.ops.cast(self._network(inputs)[0], "float32")

    def named_variables(self) -> Variables:
        """See `Stack.named_variables`."""
        return self._network.named_variables()


def make_custom_features(
    layout: ObsLayout, config: ModelConfig, *, seed: int | None
) -> CustomNetwork:
    """Return the model that `config.custom_model` names, whose output replaces hidden layers.

    Args:
        layout: layout of an observation in its array.
        config: config that names the function.
        seed: seed of the initial weights; None = random.

    Raises:
        ConfigError: see `make_custom_network`; or the model returns anything other than features.
    """
    width = config.fcnet_hiddens[-1] if config.fcnet_hiddens else _DEFAULT_WIDTH
    network = make_custom_network(layout, width, config, config.model_dump(), seed=seed)
    shapes = network.output_shapes
    if [len(shape) for shape in shapes] != [2] or shapes[0][0] != PROBE_ROWS:
        raise ConfigError(
            f"the custom model gives outputs of shapes {shapes} for {PROBE_ROWS} observations;"
            " with model.custom_features, and for algorithms with a replay, expected one output,"
            f" features ({PROBE_ROWS}, F) of any width F.",
            key=CUSTOM_MODEL,
            value=config.custom_model,
            hint="Return the last hidden layer: policy head, values and critics are built on it.",
        )
    return network


def make_custom_network(
    layout: ObsLayout,
    num_outputs: int,
    config: ModelConfig,
    settings: Mapping[str, Any],
    *,
    seed: int | None,
) -> CustomNetwork:
    """Return the model that `config.custom_model` names.

    Args:
        layout: layout of an observation in its array; the model gets it without the action mask.
        num_outputs: second argument of the function.
        config: config that names the function.
        settings: all settings as given, third argument of the function.
        seed: seed of the initial weights; None = random.

    Raises:
        ConfigError: the path can't be imported, or the function fails or doesn't return a new Keras
            model.
    """
    path = str(config.custom_model)
    make: CustomModel = import_object(path, key=CUSTOM_MODEL)
    takes_parts = _takes_parts(make)
    options = {}
    if takes_parts:
        options[_PARTS] = dict(layout.parts) or {_WHOLE: layout.shape}
    with _keras_seed(seed):
        checked_make = named_failures(make, f"{CUSTOM_MODEL} {path!r}", CUSTOM_MODEL)
        model = checked_make(layout.shape, num_outputs, settings, **options)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{CUSTOM_MODEL} {path!r} returned a {type(model).__name__}, expected a Keras"
                " model.",
                key=CUSTOM_MODEL,
                value=path,
            )
        if model in _taken:
            raise ConfigError(
                f"{CUSTOM_MODEL} {path!r} returned the same model twice; each network needs its"
                " own.",
                key=CUSTOM_MODEL,
                value=path,
                hint="Create a new model in each call.",
            )
        _taken.add(model)
        return CustomNetwork(
            model, layout, takes_parts=takes_parts, state_shapes=config.custom_state
        )


def _takes_parts(make: CustomModel) -> bool:
    try:
        return _PARTS in inspect.signature(make).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return False


@contextlib.contextmanager
def _keras_seed(seed: int | None) -> Iterator[None]:
    """Seed Python's generator, from which Keras draws the seeds of initializers, for the duration
    of the context.
    """
    if seed is None:
        yield
        return
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


class RecurrentCell(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Gated cell with `size` units; it is built on construction.

    Attributes:
        size: H, units and outputs.
        name_in_model: part of its weights' names.
        num_states: state components, each [B, H].
    """

    name_in_model: str
    num_states: int
    num_gates: int

    def __init__(self, rng: np.random.Generator, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.kernel = self._gates(rng, num_inputs, "kernel")
        self.recurrent_kernel = self._gates(rng, size, "recurrent_kernel")
        self.bias = self._bias("bias")
        self.built = True

    @property
    def state_shapes(self) -> tuple[Shape, ...]:
        """Shape of each state component of one row."""
        return ((self.size,),) * self.num_states

    def project(self, inputs: Any) -> Any:
        """Return the share [B, gates * H] of inputs [B, D] in the gates."""
        products = tf.matmul(inputs, tf.convert_to_tensor(self.kernel))
        return products + tf.convert_to_tensor(self.bias)

    @abstractmethod
    def step(self, projected: Any, state: State) -> tuple[Any, list[Any]]:
        """Return outputs [B, H] and the next state, from the result of `project` [B, gates * H] and
        the state.
        """

    def named_variables(self) -> Variables:
        """Return the Keras variables by name."""
        return layer_variables(self.name_in_model, self)

    def _gates(self, rng: np.random.Generator, num_inputs: int, name: str) -> Any:
        """Create one orthogonal matrix per gate, side by side."""
        gates = [orthogonal(rng, (num_inputs, self.size)) for _ in range(self.num_gates)]
        values = np.concatenate(gates, axis=1)
        return self.add_weight(
            shape=values.shape,
            initializer=lambda shape, dtype=None: tf.constant(values, dtype=dtype),
            name=name,
        )

    def _bias(self, name: str) -> Any:
        return self.add_weight(shape=(self.num_gates * self.size,), initializer="zeros", name=name)


class LSTMCell(RecurrentCell):
    """Long short-term memory; the state is (output, memory). The forget gate starts with bias 1.

    Source: Hochreiter and Schmidhuber 1997; gates in the order input, forget, candidate, output.
    """

    name_in_model = "lstm"
    num_states = 2
    num_gates = 4

    def __init__(self, rng: np.random.Generator, num_inputs: int, size: int) -> None:
        super().__init__(rng, num_inputs, size)
        bias = np.zeros(4 * size, np.float32)
        bias[size : 2 * size] = 1.0
        self.bias.assign(bias)

    def step(self, projected: Any, state: State) -> tuple[Any, list[Any]]:
        """See the base class."""
        output, memory = state
        gates = projected + tf.matmul(output, tf.convert_to_tensor(self.recurrent_kernel))
        write, keep, candidate, show = tf.split(gates, 4, axis=-1)
        memory = tf.sigmoid(keep) * memory + tf.sigmoid(write) * tf.tanh(candidate)
        output = tf.sigmoid(show) * tf.tanh(memory)
        return output, [output, memory]


class GRUCell(RecurrentCell):
    """Gated recurrent unit; the state is the output. The reset gate acts after the matrix product.

    Source: Cho et al. 2014, https://arxiv.org/abs/1406.1078; gates in the order update, reset,
    candidate.
    """

    name_in_model = "gru"
    num_states = 1
    num_gates = 3

    def __init__(self, rng: np.random.Generator, num_inputs: int, size: int) -> None:
        super().__init__(rng, num_inputs, size)
        self.recurrent_bias = self._bias("recurrent_bias")

    def step(self, projected: Any, state: State) -> tuple[Any, list[Any]]:
        """See the base class."""
        (output,) = state
        recurrent = tf.matmul(output, tf.convert_to_tensor(self.recurrent_kernel))
        recurrent += tf.convert_to_tensor(self.recurrent_bias)
        input_update, input_reset, input_candidate = tf.split(projected, 3, axis=-1)
        state_update, state_reset, state_candidate = tf.split(recurrent, 3, axis=-1)
        update = tf.sigmoid(input_update + state_update)
        reset = tf.sigmoid(input_reset + state_reset)
        candidate = tf.tanh(input_candidate + reset * state_candidate)
        output = update * output + (1.0 - update) * candidate
        return output, [output]


class CustomCell:
    """Custom model as the cell of a branch: its outputs side by side are the features [B, H].

    Attributes:
        size: H.
        state_shapes: shape of each component of its state of one row; empty without memory.
    """

    def __init__(self, network: CustomNetwork) -> None:
        """Take over the model."""
        self._network = network
        self.state_shapes = network.state_shapes
        self._widths = [math.prod(shape[1:]) for shape in network.output_shapes]
        self.size = sum(self._widths)

    def project(self, inputs: Any) -> Any:
        """Return the inputs, of which nothing can be computed without the state."""
        return inputs

    def step(self, inputs: Any, state: State) -> tuple[Any, list[Any]]:
        """Return outputs [B, H] for observations [B, ...], and the next state."""
        outputs, following = self._network.step(inputs, state)
        features = [
            tf.reshape(tf.cast(output, tf.float32), [-1, width])
            for output, width in zip(outputs, self._widths, strict=True)
        ]
        state_out = [
            tf.ensure_shape(tf.cast(after, tf.float32), before.shape)
            for before, after in zip(state, following, strict=True)
        ]
        return tf.concat(features, axis=-1), state_out

    def named_variables(self) -> Variables:
        """Return the Keras variables by name."""
        return self._network.named_variables()


Cell = RecurrentCell | CustomCell


def run_sequence(
    cell: Cell,
    features: Any,
    state: State,
    resets: Any,
) -> tuple[Any, list[Any]]:
    """Run a cell over T steps.

    Args:
        cell: cell to run.
        features: [T, B, ...] float32; T and the sizes after B are known when the function is
            traced.
        state: state before the first step, [B, ...] for each component.
        resets: [T, B] bool; where True the state is zeroed before that step.

    Returns:
        Outputs [T, B, H] and the state after the last step.
    """
    steps = features.shape[0]
    rows = features.shape[1]
    if rows is None:
        rows = tf.shape(features)[1]
    projected = cell.project(tf.reshape(features, [-1, *features.shape[2:]]))
    projected = tf.reshape(projected, [steps, rows, *projected.shape[1:]])
    continues = 1.0 - tf.cast(resets, tf.float32)
    outputs = tf.TensorArray(tf.float32, size=steps, element_shape=[features.shape[1], cell.size])

    def advance(step: Any, collected: Any, current: list[Any]) -> tuple[Any, Any, list[Any]]:
        current = [
            component * tf.reshape(continues[step], [-1, *[1] * (len(component.shape) - 1)])
            for component in current
        ]
        output, following = cell.step(projected[step], current)
        return step + 1, collected.write(step, output), following

    start = [tf.convert_to_tensor(component) for component in state]
    _, outputs, last = tf.while_loop(
        lambda step, *_: step < steps,
        advance,
        (tf.constant(0), outputs, start),
        maximum_iterations=steps,
    )
    return outputs.stack(), list(last)


@dataclass(slots=True)
class Branch:
    """Features for one or both outputs: a stack and, with recurrence, a cell.

    Attributes:
        name: first part of its weights' names.
        stack: layers that process observations first.
        cell: cell after the stack; None = each step is independent.
        num_outputs: number of features.
    """

    name: str
    stack: Stack
    cell: Cell | None
    num_outputs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_outputs = self.stack.num_outputs if self.cell is None else self.cell.size

    @property
    def state_shapes(self) -> tuple[Shape, ...]:
        """Shape of each state component of the cell, of one row."""
        return () if self.cell is None else self.cell.state_shapes

    def named_variables(self) -> Variables:
        """Return the Keras variables by name."""
        variables = self.stack.named_variables()
        if self.cell is not None:
            variables |= self.cell.named_variables()
        return prefixed(self.name, variables)

    def step(self, obs: Any, previous: Any, state: State) -> tuple[Any, list[Any]]:
        """Return features [B, D] of observations [B, ...] and previous steps [B, E + 1] or None,
        and the next state.
        """
        features = self._cell_inputs(obs, previous)
        if self.cell is None:
            return features, []
        return self.cell.step(self.cell.project(features), state)

    def sequence(
        self,
        flat_obs: Any,
        previous: Any,
        state: State,
        resets: Any,
        steps: int,
        *,
        burn_in: int = 0,
    ) -> Any:
        """Return features [T * B, D] of observations [T * B, ...] and previous steps [T * B, E + 1]
        or None.

        No gradient flows through the state that enters step `burn_in`.
        """
        features = self._cell_inputs(flat_obs, previous)
        if self.cell is None:
            return features
        sizes = features.shape[1:]
        by_time = tf.reshape(features, [steps, -1, *sizes])
        by_time = tf.ensure_shape(by_time, [steps, resets.shape[1], *sizes])
        resets = tf.convert_to_tensor(resets)
        parts = []
        if burn_in:
            outputs, state = run_sequence(self.cell, by_time[:burn_in], state, resets[:burn_in])
            parts = [outputs]
            state = [tf.stop_gradient(component) for component in state]
        outputs, _ = run_sequence(self.cell, by_time[burn_in:], state, resets[burn_in:])
        outputs = tf.concat([*parts, outputs], axis=0)
        return tf.reshape(outputs, [-1, self.num_outputs])

    def _cell_inputs(self, obs: Any, previous: Any) -> Any:
        features = self.stack(obs)
        if previous is None:
            return features
        return tf.concat([features, previous], axis=-1)


def make_branch(
    name: str,
    layout: ObsLayout,
    obs_dtype: str,
    config: ModelConfig,
    rng: np.random.Generator,
    num_previous: int = 0,
) -> Branch:
    """Create the branch for one or both outputs; its cell also sees `num_previous` numbers."""
    config = config_of_branch(name, config)
    if config.custom_state:
        seed = int(rng.integers(1 << 31))
        return custom_branch(name, make_custom_features(layout, config, seed=seed), layout)
    stack = make_trunk(layout, obs_dtype, config, rng)
    if not config.is_recurrent:
        return Branch(name, stack, None)
    kind = LSTMCell if config.use_lstm else GRUCell
    cell = kind(rng, stack.num_outputs + num_previous, config.lstm_cell_size)
    return Branch(name, stack, cell)


def custom_branch(name: str, network: CustomNetwork, layout: ObsLayout) -> Branch:
    """Return a branch whose features are the outputs of a custom model, side by side."""
    observations = Stack([], layout.size)
    return Branch(name, observations, CustomCell(network))


def config_of_branch(name: str, config: ModelConfig) -> ModelConfig:
    """Return the settings of a branch: the value function can have other hidden layers."""
    if name != "value" or config.vf_hiddens is None:
        return config
    return config.model_copy(update={"fcnet_hiddens": config.vf_hiddens})


def make_trunk(
    layout: ObsLayout,
    obs_dtype: str,
    config: ModelConfig,
    rng: np.random.Generator,
    *,
    has_hiddens: bool = True,
) -> Stack:
    """Create the first layers: a custom model, or convolutions and, if wanted, dense layers after
    them.
    """
    if config.custom_model:
        return CustomStack(layout, config, seed=int(rng.integers(1 << 31)))
    layers = choose_layers(layout, obs_dtype, config)
    if not has_hiddens:
        layers = layers._replace(hiddens=())
    parts = nested_parts(layout, config)
    if parts is not None:
        return _make_parts_stack(rng, parts, layers)
    has_channels_first = channels_first(layout.shape, obs_dtype)
    if has_channels_first and log_once("channels first"):
        logger.info(
            "observations %s are treated as images [C, H, W] and transposed", list(layout.shape)
        )
    return make_stack(
        rng,
        channels_last(layout.shape, obs_dtype),
        layers,
        scale=_BYTE_SCALE if obs_dtype == "uint8" else 1.0,
        has_channels_first=has_channels_first,
    )


class ImagePart(NamedTuple):
    """Image in a nested observation, and its layers.

    Attributes:
        place: its place in the flattened observation.
        shape: its shape in the observation.
        dtype: "uint8" or "float32", as in the observation.
        scale: factor for its numbers before the first layer.
        layers: its layers; convolutions are among them.
    """

    place: slice
    shape: Shape
    dtype: str
    scale: float
    layers: Layers


class NestedParts(NamedTuple):
    """Parts of a nested observation with images.

    Attributes:
        images: the images, in order.
        rest: places of all other parts in the flattened observation, in order.
    """

    images: tuple[ImagePart, ...]
    rest: tuple[slice, ...]


def nested_parts(layout: ObsLayout, config: ModelConfig) -> NestedParts | None:
    """Return the parts of a nested observation; None if it has no images, or they are to be
    flattened.
    """
    places = layout.slices()
    # names can be ambiguous, such as a.b: then a part is missing
    is_complete = sum(map(math.prod, layout.parts.values())) == layout.size
    if not config.conv_parts or not places or not is_complete:
        return None
    images: list[ImagePart] = []
    rest: list[slice] = []
    for name, place in places.items():
        image = _image_part(name, place, layout, config)
        if image is None:
            rest.append(place)
        else:
            images.append(image)
    if not images:
        return None
    return NestedParts(tuple(images), tuple(rest))


def _image_part(
    name: str,
    place: slice,
    layout: ObsLayout,
    config: ModelConfig,
) -> ImagePart | None:
    """Return the part of an observation with this name as an image; None if it is not one."""
    shape = layout.parts[name]
    if len(shape) != 3:
        return None
    dtype = "uint8" if name in layout.byte_parts else "float32"
    layers = _layers_of(shape, dtype, config)
    if not layers.filters:
        return None
    if config.conv_filters is not None:
        # fcnet_hiddens follow over the features of all parts only
        layers = layers._replace(hiddens=())
    is_scaled = dtype == "uint8" and not layout.is_filtered
    return ImagePart(
        place,
        shape,
        dtype,
        scale=_BYTE_SCALE if is_scaled else 1.0,
        layers=layers,
    )


class PartsStack(Stack):
    """Stacks of the images in nested observations, and layers over their features and all other
    parts.
    """

    def __init__(self, parts: NestedParts, stacks: Sequence[Stack], after: Stack) -> None:
        """Take over a stack for each image, and the layers after them."""
        super().__init__([], after.num_outputs)
        self._parts = parts
        self._stacks = list(stacks)
        self._after = after

    def __call__(self, inputs: Any) -> Any:
        """See `Stack.__call__`."""
        flat = tf.cast(inputs, tf.float32)
        images = zip(self._parts.images, self._stacks, strict=True)
        features = [
            stack(tf.reshape(flat[:, image.place], [-1, *image.shape])) for image, stack in images
        ]
        features += [flat[:, place] for place in self._parts.rest]
        return self._after(tf.concat(features, axis=-1))

    def named_variables(self) -> Variables:
        """See `Stack.named_variables`."""
        variables = self._after.named_variables()
        for index, stack in enumerate(self._stacks):
            variables |= prefixed(f"image_{index}", stack.named_variables())
        return variables


def _make_parts_stack(rng: np.random.Generator, parts: NestedParts, layers: Layers) -> PartsStack:
    """Create the stacks of images, and `layers` over the features of all parts."""
    if log_once("images in parts"):
        logger.info("%d parts of observations are treated as images", len(parts.images))
    stacks = [
        make_stack(
            rng,
            channels_last(image.shape, image.dtype),
            image.layers,
            scale=image.scale,
            has_channels_first=channels_first(image.shape, image.dtype),
        )
        for image in parts.images
    ]
    num_features = sum(stack.num_outputs for stack in stacks)
    num_features += sum(place.stop - place.start for place in parts.rest)
    return PartsStack(parts, stacks, make_stack(rng, (num_features,), layers))


def channels_first(obs_shape: Shape, obs_dtype: str) -> bool:
    """Return True if observations are byte images [C, H, W], as in PyTorch: few channels before
    larger sides.
    """
    if obs_dtype != "uint8" or len(obs_shape) != 3:
        return False
    return min(obs_shape[1:]) >= max(_SMALL_MIN_SIZE, 2 * obs_shape[0])


def channels_last(obs_shape: Shape, obs_dtype: str) -> Shape:
    """Return the shape of observations for convolutions: [H, W, C] for images."""
    if not channels_first(obs_shape, obs_dtype):
        return obs_shape
    return (*obs_shape[1:], obs_shape[0])


NATURE_FILTERS: tuple[ConvFilter, ...] = (
    (32, (8, 8), (4, 4)),
    (64, (4, 4), (2, 2)),
    (64, (3, 3), (1, 1)),
)
"""Convolutions of Mnih et al. 2015, https://www.nature.com/articles/nature14236."""
_NATURE_LAYERS = Layers(NATURE_FILTERS, hiddens=(512,), activation="relu")
_NATURE_MIN_SIZE = 36
"""Smaller side of the smallest images with these layers, in pixels."""
_SMALL_LAYERS = Layers(
    filters=((16, (3, 3), (2, 2)), (32, (3, 3), (2, 2))),
    hiddens=(256,),
    activation="relu",
)
_SMALL_MIN_SIZE = 7


def choose_layers(layout: ObsLayout, obs_dtype: str, config: ModelConfig) -> Layers:
    """Return the convolutions, for lone images only, and the dense layers after them.

    Images in nested observations have convolutions of their own (`nested_parts`), which these dense
    layers follow.
    """
    if nested_parts(layout, config) is not None:
        return Layers.of_dense(config)
    return _layers_of(layout.shape, obs_dtype, config)


def _layers_of(obs_shape: Shape, obs_dtype: str, config: ModelConfig) -> Layers:
    """Return the layers over observations of one array.

    Raises:
        ConfigError: there are conv_filters, and the observations are no images.
    """
    obs_shape = channels_last(obs_shape, obs_dtype)
    layers = Layers.of_dense(config)
    if config.conv_filters is not None:
        if len(obs_shape) != 3:
            raise ConfigError(
                f"conv_filters need observations [H, W, C], not {list(obs_shape)}.",
                key="model.conv_filters",
                value=config.conv_filters,
                hint="Leave conv_filters out.",
            )
        filters = tuple(
            (channels, _pair(kernel), _pair(stride))
            for channels, kernel, stride in config.conv_filters
        )
        return layers._replace(filters=filters)
    if len(obs_shape) == 3 and math.prod(obs_shape) > 0:
        smaller_side = min(obs_shape[:2])
        if smaller_side >= _NATURE_MIN_SIZE:
            return _NATURE_LAYERS
        if smaller_side >= _SMALL_MIN_SIZE:
            return _SMALL_LAYERS
    return layers


def _pair(size: Sizes) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
