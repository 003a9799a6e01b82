"""A user's own Keras model, made and called as ``model.custom_model`` has it.

``model.custom_model`` is the import path of a function or class that is called with ``(obs_shape, num_outputs,
model_config)`` and returns a Keras model. That model takes observations ``[B, *obs_shape]`` as float32 (bytes keep
their values of 0 to 255). The algorithm decides what the model must return:

- Algorithms without a replay take the inputs of the action distribution ``[B, num_outputs]``, alone or with values
  ``[B]`` or ``[B, 1]`` (`aiorl.learning.models.catalog`).
- Algorithms with a replay take features ``[B, F]`` of any width F, in place of the hidden layers. ``num_outputs`` is
  then a suggestion: the width of the last layer of ``model.fcnet_hiddens``. The function is called once for each
  network, so that the policy and each critic have a model of their own.

The model runs in inference mode for acting and learning alike (Dropout and BatchNormalization do what they do there).

A Tuple or Dict observation comes as one flat vector. A function with a parameter called ``obs_parts`` asks for its
parts instead: it receives the shape of each by name, and its model takes a dict of parts by name: a functional model
of those that it has inputs for (``keras.Input(obs_parts["camera"], name="camera")``), a subclassed one of all. Names
are the keys and positions in the space, joined by dots, such as ``camera`` or ``arms.0``; Discrete parts are one-hot.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from aiorl.config.code import import_object, named_failures
from aiorl.config.schema import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.networks import Stack

__all__ = ["CUSTOM_MODEL", "PROBE_ROWS", "CustomModel", "CustomNetwork", "CustomStack", "make_custom_network"]

CustomModel = Callable[..., Any]
"""(obs_shape, num_outputs, model_config), and obs_parts where it asks for them -> Keras model."""

CUSTOM_MODEL = "model.custom_model"
_PARTS = "obs_parts"
_WHOLE = "obs"
PROBE_ROWS = 2
"""Observations that a model is run with to see what it gives."""
_DEFAULT_WIDTH = 256

_taken: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that are part of a network already."""


class CustomNetwork:
    """A Keras model that is called with observations as it wants them.

    Attributes:
        keras_model: the model.
        output_shapes: shapes of its outputs for PROBE_ROWS observations.
    """

    def __init__(self, keras_model: Any, layout: ObsLayout, *, takes_parts: bool = False) -> None:
        """Take a model that is built or can be built by a call, and run it once.

        Raises: ConfigError if it doesn't take these observations.
        """
        self.keras_model = keras_model
        self._layout = layout
        self._takes_parts = takes_parts
        try:
            self.output_shapes = [tuple(output.shape) for output in self(tf.zeros([PROBE_ROWS, *layout.shape]))]
        except Exception as error:
            # whatever a user's layers raise
            raise ConfigError(
                f"the custom model doesn't take observations of shape {list(layout.shape)}: {error!s:.500}",
                key=CUSTOM_MODEL,
            ) from error

    def __call__(self, obs: Any) -> list[Any]:
        """Outputs for observations [B, *layout.shape], which may be Keras's symbolic tensors."""
        inputs: Any = keras.ops.cast(obs, "float32")
        if self._takes_parts:
            inputs = self._parts(inputs)
        outputs = self.keras_model(inputs, training=False)
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    def named_variables(self) -> dict[str, Any]:
        """Keras variables by name, for instance ``custom/0/kernel``."""
        return {f"custom/{index}/{item.name}": item for index, item in enumerate(self.keras_model.weights)}

    def _parts(self, obs: Any) -> Any:
        """The parts of observations [B, ...] by name, as far as the model has inputs for them."""
        try:
            inputs = self.keras_model.input
        except (AttributeError, ValueError):  # no functional model: it takes all
            inputs = None
        if isinstance(self.keras_model, keras.Sequential) or (inputs is not None and not isinstance(inputs, dict)):
            return obs
        places, shapes = self._layout.slices(), self._layout.parts
        parts = {name: keras.ops.reshape(obs[:, places[name]], [-1, *shapes[name]]) for name in shapes} or {_WHOLE: obs}
        return {name: part for name, part in parts.items() if inputs is None or name in inputs}


class CustomStack(Stack):
    """A custom model in place of a stack of layers: it gives features."""

    def __init__(self, layout: ObsLayout, config: ModelConfig, seed: int | None) -> None:
        """Make it.

        Raises: ConfigError as `make_custom_network`, or if it gives anything but features.
        """
        width = config.fcnet_hiddens[-1] if config.fcnet_hiddens else _DEFAULT_WIDTH
        self._network = make_custom_network(layout, width, config, config.model_dump(), seed=seed)
        shapes = self._network.output_shapes
        if [len(shape) for shape in shapes] != [2] or shapes[0][0] != PROBE_ROWS:
            raise ConfigError(
                f"the custom model gives outputs of shapes {shapes} for {PROBE_ROWS} observations; algorithms with a "
                f"replay take one output, features ({PROBE_ROWS}, F) of any width F.",
                key=CUSTOM_MODEL, value=config.custom_model,
                hint="Return the last hidden layer: policy head, values and critics are built behind it.",
            )  # fmt: skip
        super().__init__([], shapes[0][1])

    def __call__(self, inputs: Any) -> Any:
        """See Stack."""
        return keras.ops.cast(self._network(inputs)[0], "float32")

    def named_variables(self) -> dict[str, Any]:
        """See Stack."""
        return self._network.named_variables()


def make_custom_network(
    layout: ObsLayout, num_outputs: int, config: ModelConfig, settings: Mapping[str, Any], *, seed: int | None
) -> CustomNetwork:
    """The model that `config.custom_model` names.

    Args:
        layout: how an observation lies in its array; the model gets it without its action mask.
        num_outputs: second argument of the user's function.
        config: names the function.
        settings: all settings as they were given, third argument of the function.
        seed: seed of the initial weights; None = a different one each time.

    Raises: ConfigError for a path that can't be imported, or if the function fails or gives no Keras model of its own.
    """
    path = str(config.custom_model)
    make: CustomModel = import_object(path, key=CUSTOM_MODEL)
    takes_parts = _takes_parts(make)
    asked = {_PARTS: dict(layout.parts) or {_WHOLE: layout.shape}} if takes_parts else {}
    with _keras_seed(seed):
        named = named_failures(make, f"{CUSTOM_MODEL} {path!r}", CUSTOM_MODEL)
        model = named(layout.shape, num_outputs, settings, **asked)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{CUSTOM_MODEL} {path!r} gave a {type(model).__name__}, expected a Keras model.",
                key=CUSTOM_MODEL, value=path,
            )  # fmt: skip
        if model in _taken:
            raise ConfigError(
                f"{CUSTOM_MODEL} {path!r} gave the same model twice; each network needs one of its own.",
                key=CUSTOM_MODEL, value=path, hint="Make a new model at each call.",
            )  # fmt: skip
        _taken.add(model)
        return CustomNetwork(model, layout, takes_parts=takes_parts)


def _takes_parts(make: CustomModel) -> bool:
    try:
        return _PARTS in inspect.signature(make).parameters
    except (TypeError, ValueError):  # not everything that can be called tells
        return False


@contextlib.contextmanager
def _keras_seed(seed: int | None) -> Iterator[None]:
    """Keras draws the seeds of initializers from Python's generator: seed it meanwhile."""
    if seed is None:
        yield
        return
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
