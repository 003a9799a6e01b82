"""A user's own Keras model as the network of a policy.

``model.custom_model`` is the import path of a function or class that is called with ``(obs_shape, num_outputs,
model_config)`` and gives a Keras model. That model takes observations ``[B, *obs_shape]`` as float32 (bytes keep their
values of 0 to 255) and gives the inputs of the action distribution ``[B, num_outputs]``, or these and values ``[B]`` or
``[B, 1]``. Where it gives no values, a built-in network of the other settings does. It runs in inference mode for
acting and learning alike (Dropout and BatchNormalization do what they do there), and it acts on workers through its
exported graph, so workers need neither Keras nor the user's module.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from aiorl.config.import_path import import_object
from aiorl.errors import ConfigError
from aiorl.models.actor_critic import ActorCritic
from aiorl.models.branch import make_branch
from aiorl.models.model_config import ModelConfig
from aiorl.models.networks import dense
from aiorl.policy.distributions import ActionDistribution

__all__ = ["CustomActorCritic", "CustomModel", "make_custom_model"]

CustomModel = Callable[[tuple[int, ...], int, Mapping[str, Any]], Any]
"""(obs_shape, num_outputs, model_config) -> Keras model."""

_KEY = "model.custom_model"


class CustomActorCritic(ActorCritic):
    """An ActorCritic whose policy, and perhaps value, is a given Keras model.

    Attributes:
        keras_model: the model.
    """

    def __init__(
        self,
        keras_model: Any,
        obs_shape: tuple[int, ...],
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
    ) -> None:
        """Take a model that is built or can be built by a call.

        Raises: ConfigError if it doesn't take these observations or gives something else than it should.
        """
        self.keras_model = keras_model
        self.obs_shape = obs_shape
        self.obs_dtype = obs_dtype
        self.distribution = distribution
        self.config = config
        self._branches = []
        self._looks_at = None
        self._gives_values = self._probe()
        named = {f"custom/{index}/{item.name}": item for index, item in enumerate(keras_model.weights)}
        trainable = [name for name, item in named.items() if item.trainable]
        if not self._gives_values:
            self._value_branch = make_branch("value", obs_shape, obs_dtype, config, rng)
            self._value_head = dense(rng, self._value_branch.num_outputs, 1, gain=1.0)
            own = self._value_branch.named_variables()
            own |= {f"value/head/{item.name}": item for item in self._value_head.trainable_variables}
            named |= own
            trainable += own
        self._keras_variables = named
        self._trainable = trainable
        self.variables = {name: item.value for name, item in named.items()}

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """See ActorCritic."""
        return [self.variables[name] for name in self._trainable]

    @property
    def has_convolutions(self) -> bool:
        """See ActorCritic."""
        layers = self.keras_model._flatten_layers()  # the only way to layers within layers
        return any("Conv" in type(layer).__name__ for layer in layers) or (
            not self._gives_values and super().has_convolutions
        )

    def forward_step(
        self,
        obs: Any,
        state: Sequence[Any],
        prev_actions: Any = None,
        prev_rewards: Any = None,
        *,
        weights: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any, list[Any]]:
        """See ActorCritic; without recurrence there is no state."""
        self._previous(prev_actions, prev_rewards)
        self._split(state)
        with self._using(weights):
            outputs = self._call(obs)
            if self._gives_values:
                dist_inputs, values = outputs
            else:
                dist_inputs = outputs[0]
                values = self._value_head(self._value_branch.step(obs, None, [])[0])
            return tf.cast(dist_inputs, tf.float32), tf.reshape(tf.cast(values, tf.float32), [-1]), []

    def forward_sequence(
        self,
        obs: Any,
        state: Sequence[Any],
        resets: Any,
        prev_actions: Any = None,
        prev_rewards: Any = None,
        *,
        weights: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """See ActorCritic; every step for itself."""
        obs = tf.convert_to_tensor(obs)
        steps = obs.shape[0]
        flat_obs = tf.reshape(obs, [-1, *self.obs_shape])
        dist_inputs, values, _ = self.forward_step(flat_obs, state, prev_actions, prev_rewards, weights=weights)
        return (
            tf.reshape(dist_inputs, [steps, -1, self.distribution.num_inputs]),
            tf.reshape(values, [steps, -1]),
        )

    def _call(self, obs: Any) -> list[Any]:
        outputs = self.keras_model(tf.cast(obs, tf.float32), training=False)
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    def _probe(self) -> bool:
        """Run it once, which also builds it; whether it gives values."""
        rows = 2
        try:
            outputs = self._call(tf.zeros([rows, *self.obs_shape]))
            shapes = [tuple(output.shape) for output in outputs]
        except Exception as error:
            # whatever a user's layers raise
            raise ConfigError(
                f"the custom model doesn't take observations of shape {list(self.obs_shape)}: {error!s:.500}", key=_KEY
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
    obs_shape: tuple[int, ...],
    obs_dtype: str,
    distribution: ActionDistribution,
    config: ModelConfig,
    settings: Mapping[str, Any],
    *,
    seed: int | None = None,
) -> CustomActorCritic:
    """The network that `config.custom_model` names.

    Args:
        obs_shape: shape of one observation as the model gets it.
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space.
        config: settings, for the values' network where the custom model gives none.
        settings: all settings as they were given, for the user's function.
        seed: seed of the initial weights; None = a different one each time.

    Raises: ConfigError for a path that can't be imported, or what is no Keras model of the right shape.
    """
    path = str(config.custom_model)
    make: CustomModel = import_object(path, key=_KEY)
    if config.cell is not None or config.free_log_std:
        raise ConfigError(
            "use_lstm, use_gru and free_log_std shape built-in networks; a custom model is used as it is.",
            key=_KEY,
            value=path,
        )
    with _keras_seed(seed):
        try:
            model = make(obs_shape, distribution.num_inputs, settings)
        except Exception as error:
            # whatever a user's function raises
            raise ConfigError(f"{_KEY} {path!r} failed: {error!r:.500}", key=_KEY, value=path) from error
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{_KEY} {path!r} gave a {type(model).__name__}, expected a Keras model.", key=_KEY, value=path
            )
        return CustomActorCritic(model, obs_shape, obs_dtype, distribution, config, np.random.default_rng(seed))


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
