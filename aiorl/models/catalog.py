"""From a model's settings to its network.

`build_model` gives an `ActorCritic`: a network with two outputs, the inputs of an action distribution and a
value. Policy and value have networks of their own unless ``vf_share_layers`` is set; with recurrence each
then has its own cell, and the recurrent state is the policy's components followed by the value's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.errors import ConfigError, PolicyError
from aiorl.models.networks import ConvFilter, Stack, dense, make_conv_stack, make_dense_stack
from aiorl.models.recurrent import GRUCell, LSTMCell, RecurrentCell, run_sequence
from aiorl.policy.distributions import ActionDistribution, DiagGaussian

__all__ = ["NATURE_FILTERS", "ActorCritic", "ModelConfig", "build_model"]

F32 = NDArray[np.float32]

NATURE_FILTERS: tuple[ConvFilter, ...] = ((32, (8, 8), (4, 4)), (64, (4, 4), (2, 2)), (64, (3, 3), (1, 1)))
"""Convolutions of Mnih et al. 2015, https://www.nature.com/articles/nature14236; 512 dense units follow."""
_NATURE_HIDDENS = (512,)
_NATURE_MIN_SIZE = 36
_SMALL_FILTERS: tuple[ConvFilter, ...] = ((16, (3, 3), (2, 2)), (32, (3, 3), (2, 2)))
_SMALL_HIDDENS = (256,)
_SMALL_MIN_SIZE = 7

_POLICY_GAIN = 0.01
_VALUE_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings that shape a built-in network.

    Attributes:
        fcnet_hiddens: units of each dense layer; for images, of those after the convolutions when
            `conv_filters` is given.
        fcnet_activation: activation of dense layers, a name Keras knows.
        conv_filters: convolutions over [H, W, C] observations; None = chosen by the image's size (the
            Nature network from 36x36 on), and none for observations that are no images.
        vf_share_layers: True = policy and value share all but their last layers.
        use_lstm: put an LSTM cell before the last layers.
        use_gru: put a GRU cell there instead.
        lstm_cell_size: units of the cell.
        free_log_std: for Gaussians, learn the logarithms of the standard deviations as weights of their
            own instead of outputs of the network.
    """

    fcnet_hiddens: tuple[int, ...] = (64, 64)
    fcnet_activation: str = "tanh"
    conv_filters: tuple[ConvFilter, ...] | None = None
    vf_share_layers: bool = False
    use_lstm: bool = False
    use_gru: bool = False
    lstm_cell_size: int = 64
    free_log_std: bool = False

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """From the keys of a model config; keys that don't shape a network are left to others.

        Args:
            settings: the keys named above; a filter of `conv_filters` is [channels, kernel, stride], kernel
                and stride a number or a pair.

        Raises: ConfigError for a value that makes no network.
        """
        chosen = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        if "fcnet_hiddens" in chosen:
            chosen["fcnet_hiddens"] = tuple(chosen["fcnet_hiddens"])
        if chosen.get("conv_filters") is not None:
            chosen["conv_filters"] = tuple(_to_filter(entry) for entry in chosen["conv_filters"])
        config = cls(**chosen)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for a value that makes no network."""
        for size in self.fcnet_hiddens:
            _check_positive("fcnet_hiddens", size, self.fcnet_hiddens)
        _check_positive("lstm_cell_size", self.lstm_cell_size, self.lstm_cell_size)
        if self.use_lstm and self.use_gru:
            raise ConfigError("use_lstm and use_gru exclude each other.", key="model.use_gru", value=True)

    @property
    def cell(self) -> type[RecurrentCell] | None:
        """The kind of recurrent cell, if any."""
        if self.use_lstm:
            return LSTMCell
        return GRUCell if self.use_gru else None


@dataclass(slots=True)
class _Branch:
    """Features for one or both outputs: a stack, then perhaps a cell."""

    name: str
    stack: Stack
    cell: RecurrentCell | None
    num_outputs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_outputs = self.stack.num_outputs if self.cell is None else self.cell.size

    @property
    def num_states(self) -> int:
        return 0 if self.cell is None else self.cell.num_states

    def named_variables(self) -> dict[str, Any]:
        variables = self.stack.named_variables()
        if self.cell is not None:
            variables |= self.cell.named_variables()
        return {f"{self.name}/{name}": variable for name, variable in variables.items()}

    def step(self, obs: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
        features = self.stack(obs)
        if self.cell is None:
            return features, []
        return self.cell.step(self.cell.project(features), state)

    def sequence(self, flat_obs: Any, state: Sequence[Any], resets: Any, steps: int) -> tuple[Any, list[Any]]:
        """Features [T * B, D] of observations [T * B, ...]."""
        features = self.stack(flat_obs)
        if self.cell is None:
            return features, []
        by_time = tf.reshape(features, [steps, -1, self.stack.num_outputs])
        by_time = tf.ensure_shape(by_time, [steps, resets.shape[1], self.stack.num_outputs])
        outputs, last = run_sequence(self.cell, by_time, state, resets)
        return tf.reshape(outputs, [-1, self.num_outputs]), last


class ActorCritic:
    """A network that gives the inputs of an action distribution, and a value.

    All of its methods but `get_weights` and `set_weights` may be traced into a tf.function, compiled by XLA
    or not, and read the variables as they are at that moment.

    Attributes:
        obs_shape: shape of one observation.
        obs_dtype: "float32" or "uint8".
        distribution: the NumPy distribution the outputs are meant for.
        config: the settings it was built from.
        variables: tf.Variables by name, in a fixed order; the names depend on nothing but the settings.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
    ) -> None:
        self.obs_shape = obs_shape
        self.obs_dtype = obs_dtype
        self.distribution = distribution
        self.config = config
        names = ["shared"] if config.vf_share_layers else ["policy", "value"]
        self._branches = [_make_branch(name, obs_shape, obs_dtype, config, rng) for name in names]
        num_outputs = distribution.num_inputs // 2 if config.free_log_std else distribution.num_inputs
        self._policy_head = dense(rng, self._branches[0].num_outputs, num_outputs, gain=_POLICY_GAIN)
        self._value_head = dense(rng, self._branches[-1].num_outputs, 1, gain=_VALUE_GAIN)
        self._log_std = keras.Variable(np.zeros(num_outputs, np.float32)) if config.free_log_std else None
        self._keras_variables: dict[str, Any] = {}
        for branch in self._branches:
            self._keras_variables |= branch.named_variables()
        for name, head in (("policy", self._policy_head), ("value", self._value_head)):
            self._keras_variables |= {f"{name}/head/{item.name}": item for item in head.trainable_variables}
        if self._log_std is not None:
            self._keras_variables["policy/log_std"] = self._log_std
        self.variables: dict[str, tf.Variable] = {name: item.value for name, item in self._keras_variables.items()}

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """The variables in order, for optimisers and gradients."""
        return list(self.variables.values())

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each recurrent state component of one row; empty without recurrence."""
        return tuple((branch.cell.size,) for branch in self._branches if branch.cell for _ in range(branch.num_states))

    @property
    def is_recurrent(self) -> bool:
        """Whether the network has state."""
        return bool(self.state_shapes)

    @property
    def has_convolutions(self) -> bool:
        """Whether the network looks at images; compiled by XLA on a CPU, convolutions are slower."""
        return any(name.rsplit("/", 2)[-2].startswith("conv_") for name in self.variables)

    def initial_state(self, num_rows: int) -> list[F32]:
        """State of B rows at the start of their episodes: zeros [B, ...] for each component."""
        return [np.zeros((num_rows, *shape), np.float32) for shape in self.state_shapes]

    def forward(self, obs: Any, *, weights: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Outputs for B observations, for networks without recurrence.

        Args:
            obs: [B, *obs_shape].
            weights: tensors by name to be used in place of all variables.
        Returns: inputs of the action distribution [B, P] and values [B], float32.
        Raises: PolicyError if the network is recurrent.
        """
        if self.is_recurrent:
            raise PolicyError("a recurrent network needs its state: use forward_step or forward_sequence")
        dist_inputs, values, _ = self.forward_step(obs, [], weights=weights)
        return dist_inputs, values

    def forward_step(
        self, obs: Any, state: Sequence[Any], *, weights: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any, list[Any]]:
        """Outputs of one step for B observations.

        Args:
            obs: [B, *obs_shape].
            state: recurrent state, [B, ...] for each component.
            weights: tensors by name to be used in place of all variables.
        Returns: inputs of the action distribution [B, P], values [B], and the state after the step.
        """
        with self._using(weights):
            features, state_out = [], []
            for branch, part in self._split(state):
                outputs, following = branch.step(obs, part)
                features.append(outputs)
                state_out += following
            return *self._heads(features), state_out

    def forward_sequence(
        self, obs: Any, state: Sequence[Any], resets: Any, *, weights: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Outputs for sequences of T steps.

        Args:
            obs: [T, B, *obs_shape]; T is known when the function is traced.
            state: recurrent state before the first step, [B, ...] for each component.
            resets: [T, B] bool; where True the state is zeroed before that step.
            weights: tensors by name to be used in place of all variables.
        Returns: inputs of the action distribution [T, B, P] and values [T, B], float32.
        """
        obs, resets = tf.convert_to_tensor(obs), tf.convert_to_tensor(resets)
        steps = obs.shape[0]
        with self._using(weights):
            flat_obs = tf.reshape(obs, [-1, *self.obs_shape])
            features = [
                branch.sequence(flat_obs, [tf.convert_to_tensor(item) for item in part], resets, steps)[0]
                for branch, part in self._split(state)
            ]
            dist_inputs, values = self._heads(features)
        return (
            tf.reshape(dist_inputs, [steps, -1, self.distribution.num_inputs]),
            tf.reshape(values, [steps, -1]),
        )

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """Copies of all weights by name, in order."""
        return {name: np.array(variable.numpy()) for name, variable in self.variables.items()}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Assign all weights.

        Raises: PolicyError if a weight is missing, unknown, of another shape or not finite; none is then set.
        """
        missing, unknown = self.variables.keys() - weights.keys(), weights.keys() - self.variables.keys()
        if missing or unknown:
            raise PolicyError(
                f"weights don't fit the model: missing {sorted(missing)[:10]}, unknown {sorted(unknown)[:10]}"
            )
        for name, variable in self.variables.items():
            if tuple(weights[name].shape) != tuple(variable.shape):
                raise PolicyError(
                    f"weight {name!r} has shape {list(weights[name].shape)}; expected {list(variable.shape)}"
                )
            if not np.isfinite(weights[name]).all():
                raise PolicyError(f"weight {name!r} holds values that are not finite")
        for name, variable in self.variables.items():
            variable.assign(weights[name])

    def _using(self, weights: Mapping[str, Any] | None) -> Any:
        if weights is None:
            return nullcontext()
        return keras.StatelessScope(
            state_mapping=[(item, weights[name]) for name, item in self._keras_variables.items()]
        )

    def _split(self, state: Sequence[Any]) -> list[tuple[_Branch, Sequence[Any]]]:
        expected = sum(branch.num_states for branch in self._branches)
        if len(state) != expected:
            raise PolicyError(f"{len(state)} recurrent state components; the network has {expected}")
        parts, start = [], 0
        for branch in self._branches:
            parts.append((branch, state[start : start + branch.num_states]))
            start += branch.num_states
        return parts

    def _heads(self, features: Sequence[Any]) -> tuple[Any, Any]:
        dist_inputs = self._policy_head(features[0])
        if self._log_std is not None:
            log_std = tf.convert_to_tensor(self._log_std)
            dist_inputs = tf.concat([dist_inputs, tf.zeros_like(dist_inputs) + log_std], axis=-1)
        return dist_inputs, tf.squeeze(self._value_head(features[-1]), axis=-1)


def build_model(
    obs_shape: Sequence[int],
    obs_dtype: str,
    distribution: ActionDistribution,
    model_config: Mapping[str, Any] | ModelConfig | None = None,
    *,
    seed: int | None = None,
) -> ActorCritic:
    """The built-in network for a kind of observation.

    Weights are orthogonal with gain sqrt(2) in hidden layers, 0.01 in the policy's last and 1 in the value's
    last layer. uint8 observations are scaled by 1/255 inside the network.

    Args:
        obs_shape: shape of one observation as the model gets it (a preprocessor's output).
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution of the action space (`aiorl.policy.distributions`).
        model_config: settings; see `ModelConfig`.
        seed: seed of the initial weights; None = a different one each time.

    Raises: ConfigError for settings that make no network for these observations.
    """
    config = model_config if isinstance(model_config, ModelConfig) else ModelConfig.from_mapping(model_config or {})
    shape = tuple(int(size) for size in obs_shape)
    if str(obs_dtype) not in ("float32", "uint8"):
        raise ConfigError(f"models take float32 or uint8 observations, not {obs_dtype}.", value=obs_dtype)
    if config.free_log_std and not isinstance(distribution, DiagGaussian):
        raise ConfigError(
            f"free_log_std is for Gaussian actions; these are {distribution.name}.",
            key="model.free_log_std",
            value=True,
        )
    return ActorCritic(shape, str(obs_dtype), distribution, config, np.random.default_rng(seed))


def _make_branch(
    name: str, obs_shape: tuple[int, ...], obs_dtype: str, config: ModelConfig, rng: np.random.Generator
) -> _Branch:
    scale = 1.0 / 255.0 if obs_dtype == "uint8" else 1.0
    filters, hiddens, activation = _choose_filters(obs_shape, config)
    if filters:
        stack = make_conv_stack(rng, obs_shape, filters, hiddens, activation, scale=scale)
    else:
        stack = make_dense_stack(rng, obs_shape, hiddens, activation, scale=scale)
    cell = None if config.cell is None else config.cell(rng, stack.num_outputs, config.lstm_cell_size)
    return _Branch(name, stack, cell)


def _choose_filters(
    obs_shape: tuple[int, ...], config: ModelConfig
) -> tuple[tuple[ConvFilter, ...], tuple[int, ...], str]:
    """Convolutions (none for what is no image), dense layers after them, and their activation."""
    if config.conv_filters is not None:
        if len(obs_shape) != 3:
            raise ConfigError(
                f"conv_filters need observations [H, W, C]; these are {list(obs_shape)}.",
                key="model.conv_filters",
                value=config.conv_filters,
                hint="Leave conv_filters out.",
            )
        return config.conv_filters, config.fcnet_hiddens, config.fcnet_activation
    if len(obs_shape) == 3 and math.prod(obs_shape) > 0:
        smaller_side = min(obs_shape[:2])
        if smaller_side >= _NATURE_MIN_SIZE:
            return NATURE_FILTERS, _NATURE_HIDDENS, "relu"
        if smaller_side >= _SMALL_MIN_SIZE:
            return _SMALL_FILTERS, _SMALL_HIDDENS, "relu"
    return (), config.fcnet_hiddens, config.fcnet_activation


def _to_filter(entry: Any) -> ConvFilter:
    try:
        channels, kernel, stride = entry
        sizes = (channels, *_to_pair(kernel), *_to_pair(stride))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a filter of conv_filters must be [channels, kernel, stride], not {entry!r}.",
            key="model.conv_filters",
            value=entry,
        ) from error
    for size in sizes:
        _check_positive("conv_filters", size, entry)
    return sizes[0], (sizes[1], sizes[2]), (sizes[3], sizes[4])


def _to_pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second


def _check_positive(key: str, size: object, value: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"model.{key} needs positive whole numbers, not {value!r}.", key=f"model.{key}", value=value)
