"""A user's own Keras model as the network of a policy.

``model.custom_model`` is the import path of a function or class that is called with ``(obs_shape, num_outputs,
model_config)`` and gives a Keras model. That model takes observations ``[B, *obs_shape]`` as float32 (bytes keep their
values of 0 to 255) and gives the inputs of the action distribution ``[B, num_outputs]``, or these and values ``[B]`` or
``[B, 1]``. Where it gives no values, a built-in network of the other settings does. It runs in inference mode for
acting and learning alike (Dropout and BatchNormalization do what they do there), and it acts on workers through its
exported graph, so workers need neither Keras nor the user's module.

A Tuple or Dict observation comes as one flat vector. A function with a parameter called ``obs_parts`` asks for its
parts instead: it is told the shape of each by name, and its model takes a dict of parts by name: a functional model
of those that it has inputs for (``keras.Input(obs_parts["camera"], name="camera")``), a subclassed one of all. Names
are the keys and positions in the space, joined by dots, such as ``camera`` or ``arms.0``; Discrete parts are one-hot.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from aiorl.config.import_path import import_object
from aiorl.config.parts import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.models.branch import make_branch
from aiorl.models.networks import dense, layer_variables
from aiorl.policy.distributions import ActionDistribution

__all__ = ["CustomActorCritic", "CustomModel", "make_custom_model"]

CustomModel = Callable[..., Any]
"""(obs_shape, num_outputs, model_config), and obs_parts where it asks for them -> Keras model."""

_KEY = "model.custom_model"
_PARTS = "obs_parts"
_WHOLE = "obs"


class CustomActorCritic(ActorCritic):
    """An ActorCritic whose policy, and perhaps value, is a given Keras model.

    Attributes:
        keras_model: the model.
    """

    def __init__(
        self,
        keras_model: Any,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
        *,
        takes_parts: bool = False,
    ) -> None:
        """Take a model that is built or can be built by a call.

        Raises: ConfigError if it doesn't take these observations or gives something else than it should.
        """
        self._describe(layout, obs_dtype, distribution, config)
        self.keras_model = keras_model
        self._takes_parts = takes_parts
        self._branches = []
        self._gives_values = self._probe()
        named = {f"custom/{index}/{item.name}": item for index, item in enumerate(keras_model.weights)}
        self._trainable = [name for name, item in named.items() if item.trainable]
        if not self._gives_values:
            self._value_branch = make_branch("value", layout.shape, obs_dtype, config, rng)
            self._value_head = dense(rng, self._value_branch.num_outputs, 1, gain=1.0)
            own = self._value_branch.named_variables() | layer_variables("value/head", self._value_head)
            named |= own
            self._trainable += own
        self._take_variables(named)

    @property
    def trainable(self) -> dict[str, tf.Variable]:
        """See ActorCritic."""
        return {name: self.variables[name] for name in self._trainable}

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts) -> Outputs:
        outputs = self.call_model(obs)
        if self._gives_values:
            dist_inputs, values = outputs
        else:
            dist_inputs = outputs[0]
            values = self._value_head(self._value_branch.step(obs, None, [])[0])
        dist_inputs = self._masked(tf.cast(dist_inputs, tf.float32), mask)
        return Outputs(dist_inputs, tf.reshape(tf.cast(values, tf.float32), [-1]), [])

    def call_model(self, obs: Any) -> list[Any]:
        """What the model gives for observations [B, *layout.shape], which may be Keras's symbolic tensors."""
        inputs: Any = keras.ops.cast(obs, "float32")
        if self._takes_parts:
            inputs = self._parts(inputs)
        outputs = self.keras_model(inputs, training=False)
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    def _parts(self, obs: Any) -> Any:
        """The parts of observations [B, ...] by name, as far as the model has inputs for them."""
        try:
            inputs = self.keras_model.input
        except (AttributeError, ValueError):  # no functional model: it takes all
            inputs = None
        if isinstance(self.keras_model, keras.Sequential) or (inputs is not None and not isinstance(inputs, dict)):
            return obs
        places, shapes = self.layout.slices(), self.layout.parts
        parts = {name: keras.ops.reshape(obs[:, places[name]], [-1, *shapes[name]]) for name in shapes} or {_WHOLE: obs}
        return {name: part for name, part in parts.items() if inputs is None or name in inputs}

    def _probe(self) -> bool:
        """Run it once, which also builds it; whether it gives values."""
        rows = 2
        try:
            outputs = self.call_model(tf.zeros([rows, *self.layout.shape]))
            shapes = [tuple(output.shape) for output in outputs]
        except Exception as error:
            # whatever a user's layers raise
            raise ConfigError(
                f"the custom model doesn't take observations of shape {list(self.layout.shape)}: {error!s:.500}",
                key=_KEY,
            ) from error
        wanted = (rows, self.distribution.num_inputs)
        if shapes[:1] != [wanted] or shapes[1:] not in ([], [(rows,)], [(rows, 1)]):
            raise ConfigError(
                f"the custom model gives outputs of shapes {shapes} for {rows} observations; expected {wanted}, "
                f"alone or with values {(rows,)} or {(rows, 1)}.",
                key=_KEY,
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
    path = str(config.custom_model)
    make: CustomModel = import_object(path, key=_KEY)
    if config.is_recurrent or config.free_log_std:
        raise ConfigError(
            "use_lstm, use_gru and free_log_std shape built-in networks; a custom model is used as it is.",
            key=_KEY,
            value=path,
        )
    takes_parts = _takes_parts(make)
    asked = {_PARTS: dict(layout.parts) or {_WHOLE: layout.shape}} if takes_parts else {}
    with _keras_seed(seed):
        try:
            model = make(layout.shape, distribution.num_inputs, settings, **asked)
        except Exception as error:
            # whatever a user's function raises
            raise ConfigError(f"{_KEY} {path!r} failed: {error!r:.500}", key=_KEY, value=path) from error
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{_KEY} {path!r} gave a {type(model).__name__}, expected a Keras model.", key=_KEY, value=path
            )
        rng = np.random.default_rng(seed)
        return CustomActorCritic(model, layout, obs_dtype, distribution, config, rng, takes_parts=takes_parts)


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
