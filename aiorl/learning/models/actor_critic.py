"""ActorCritic: a network with two outputs, the inputs of an action distribution and a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from aiorl.acting.acting_graph import check_weights
from aiorl.acting.distributions import MASKED_LOGIT, ActionDistribution, DiagGaussian
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data.columns import F32, Array, Columns
from aiorl.data.obs_layout import ObsLayout, Shape
from aiorl.errors import ConfigError, PolicyError
from aiorl.learning.models.branch import Branch, make_branch
from aiorl.learning.models.distributions import Distribution, to_tf_distribution
from aiorl.learning.models.networks import (
    Network,
    State,
    Variables,
    Weights,
    dense,
    layer_variables,
)

Parts = Sequence[tuple[Branch, State]]
"""Branches of a network, each with its state."""

VALUE_GAIN = 1.0
"""Gain of the last layer of values."""
_POLICY_GAIN = 0.01
_EPSILON = 1e-6
"""Minimum of variances, for rows whose features are all 0."""


def log_deviations(features: Any, log_std: Any) -> Any:
    """Return the log standard deviations of a Gaussian with features, ``log sqrt(sum_f phi_f^2
    sigma_fa^2)``: [B, A].

    Args:
        features: [B, F] float32, phi.
        log_std: [F, A] float32, log sigma.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, eq. 8 and 9.
    """
    variances = ops.matmul(ops.square(features), ops.square(ops.exp(log_std)))
    return 0.5 * ops.log(variances + _EPSILON)


def shares(features: Any, log_std: Any) -> Any:
    """Return the shares of features [B, F] in the deviations: ``phi_f sigma_fa / sqrt(v_a)``, [B,
    F * A].

    Args:
        features: [B, F] float32, phi.
        log_std: [F, A] float32, log sigma.
    """
    inverse = ops.exp(-log_deviations(features, log_std))
    of_actions = ops.expand_dims(features, 2) * ops.exp(log_std) * ops.expand_dims(inverse, 1)
    return ops.reshape(of_actions, [-1, math.prod(log_std.shape)])


class Outputs(NamedTuple):
    """Outputs of a network for one step.

    Attributes:
        dist_inputs: [B, P] inputs of the action distribution.
        values: [B].
        state: recurrent state after the step, [B, ...] for each component.
        features: [B, F] of the policy's last hidden layer; None if only the other outputs use them.
    """

    dist_inputs: Any
    values: Any
    state: list[Any]
    features: Any = None


class ActorCritic(Network):
    """Network that returns the inputs of an action distribution and a value.

    All methods except `get_weights` and `set_weights` can be traced into a tf.function, with or
    without XLA, and read the variables when they run. In the shapes, B is the number of rows, T of
    steps, P of inputs of the distribution.

    An action mask that comes with the observations is not an input of the network, but forbids
    actions in its outputs: distribution inputs whose mask entry is 0 become MASKED_LOGIT, and no
    gradient flows through them.

    Attributes:
        obs_shape: shape of an observation's array.
        obs_dtype: "float32" or "uint8".
        distribution: NumPy distribution for the outputs.
        config: settings from which the network was built.
        noise_size: size of the noise that noisy layers need for one row; 0 without noisy layers.
    """

    noise_size = 0
    _log_std: keras.Variable | None = None
    _sde: SDESettings | None = None

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
        rng: np.random.Generator,
        noise: SDESettings | None = None,
    ) -> None:
        """Build the network.

        Args:
            layout: layout of an observation in its array.
            obs_dtype: "float32" or "uint8".
            distribution: distribution of the actions.
            config: settings of the network.
            rng: generator of the initial weights.
            noise: settings of state-dependent noise; None = no such noise.

        Raises:
            ConfigError: there is noise and actions are not numbers of one Box.
            PolicyError: the mask's entries don't match the distribution's choices.
        """
        self._describe(layout, obs_dtype, distribution, config)
        names = ["shared"] if config.vf_share_layers else ["policy", "value"]
        self._branches = [self._make_branch(name, rng) for name in names]
        self._make_policy_head(rng, noise, gives_means=config.free_log_std)
        self._value_head = dense(rng, self._branches[-1].num_outputs, 1, gain=VALUE_GAIN)
        if config.free_log_std:
            self._log_std = keras.Variable(
                np.full(distribution.num_inputs // 2, config.initial_log_std, np.float32)
            )
        self._take_named(policy=self._policy_head, value=self._value_head)

    def _describe(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: ActionDistribution,
        config: ModelConfig,
    ) -> None:
        """Set the attributes that every network has.

        Raises:
            PolicyError: the mask's entries don't match the distribution's choices.
        """
        self.layout = layout
        self.obs_shape = layout.array_shape
        self.obs_dtype = obs_dtype
        self.distribution = distribution
        self.config = config
        # converts previous actions for the network, if it sees them
        self._of_previous: Distribution | None = None
        if config.lstm_use_prev_action_reward:
            self._of_previous = to_tf_distribution(distribution)
        if layout.num_mask and layout.num_mask != len(distribution.choice_inputs):
            raise PolicyError(
                f"action masks have {layout.num_mask} entries; the {distribution.name} distribution"
                f" has {len(distribution.choice_inputs)} choices"
            )
        # mask entry of each input; inputs without one use an extra last entry, which always allows
        self._mask_entries = np.full(distribution.num_inputs, layout.num_mask, np.int32)
        if layout.num_mask:
            self._mask_entries[distribution.choice_inputs] = np.arange(layout.num_mask)

    def _make_branch(self, name: str, rng: np.random.Generator) -> Branch:
        num_previous = 0
        if self._of_previous is not None:
            num_previous = self._of_previous.num_features + 1  # the reward is the last
        return make_branch(
            name,
            self.layout,
            self.obs_dtype,
            config=self.config,
            rng=rng,
            num_previous=num_previous,
        )

    def _make_policy_head(
        self,
        rng: np.random.Generator,
        noise: SDESettings | None,
        *,
        gives_means: bool,
    ) -> None:
        """Create the policy's last layer and, with noise, the weights that turn features into
        deviations.

        Raises:
            ConfigError: there is noise and actions are not numbers of one Box.
        """
        kind = self.distribution
        features = self._branches[0].num_outputs
        num_outputs = kind.num_inputs
        if gives_means or noise is not None:
            num_outputs = kind.num_inputs // 2
        if noise is not None:
            if not isinstance(kind, DiagGaussian):
                raise ConfigError(
                    f"use_sde is for actions of a Box, not of {kind.action_space}.",
                    key="use_sde",
                    value=True,
                    hint="Leave use_sde out.",
                )
            self.distribution = kind.with_features(features)
            self._sde = noise
            self._log_std = keras.Variable(
                np.full((features, num_outputs), noise.initial_log_std, np.float32)
            )
        self._policy_head = dense(rng, features, num_outputs, gain=_POLICY_GAIN)

    def _take_named(self, **heads: keras.layers.Layer) -> None:
        """Take over the variables of branches, heads and deviations."""
        variables: Variables = {}
        for branch in self._branches:
            variables |= branch.named_variables()
        for name, head in heads.items():
            variables |= layer_variables(f"{name}/head", head)
        if self._log_std is not None:
            variables["policy/log_std"] = self._log_std
        self._take_variables(variables)

    def _dist_inputs(self, features: Any) -> Any:
        """Return distribution inputs [B, P] for the policy's features [B, F]; only means if there
        are no deviations.
        """
        outputs = self._policy_head(features)
        if self._log_std is None:
            return outputs
        log_std = tf.convert_to_tensor(self._log_std)
        if self._sde is None:
            return tf.concat([outputs, tf.zeros_like(outputs) + log_std], axis=-1)
        if not self._sde.learns_features:
            features = tf.stop_gradient(features)
        return tf.concat([outputs, log_deviations(features, log_std)], axis=-1)

    @property
    def state_shapes(self) -> tuple[Shape, ...]:
        """Shape of each recurrent state component of one row; empty without recurrence."""
        return tuple(shape for branch in self._branches for shape in branch.state_shapes)

    @property
    def is_recurrent(self) -> bool:
        """True if the network has recurrent state."""
        return bool(self.state_shapes)

    @property
    def uses_previous_step(self) -> bool:
        """True if the network sees the previous actions and rewards."""
        return self._of_previous is not None

    def initial_state(self, num_rows: int) -> list[F32]:
        """Return the state of B rows, `num_rows`, at the start of their episodes: zeros [B, ...] for
        each component.
        """
        return [np.zeros((num_rows, *shape), np.float32) for shape in self.state_shapes]

    def forward(self, obs: Any, *, weights: Weights | None = None) -> tuple[Any, Any]:
        """Return the outputs for B observations; only for networks without recurrence.

        Args:
            obs: [B, *obs_shape].
            weights: tensors by name to use instead of all variables.

        Returns:
            Inputs of the action distribution [B, P] and values [B], float32.

        Raises:
            PolicyError: the network is recurrent.
        """
        if self.is_recurrent:
            raise PolicyError(
                "a recurrent network needs its state: use forward_step or forward_sequence"
            )
        dist_inputs, values, _ = self.forward_step(obs, [], weights=weights)
        return dist_inputs, values

    def forward_step(
        self,
        obs: Any,
        state: State,
        prev_actions: Any = None,
        prev_rewards: Any = None,
        *,
        weights: Weights | None = None,
        for_acting: bool = False,
        noise: Any = None,
    ) -> tuple[Any, Any, list[Any]]:
        """Return the outputs of one step for B observations.

        Args:
            obs: [B, *obs_shape].
            state: recurrent state, [B, ...] for each component.
            prev_actions: [B, *action_shape] in column form, if the network looks back; zeros at the
                start of an episode.
            prev_rewards: [B], likewise.
            weights: tensors by name to use instead of all variables.
            for_acting: True to append the shares of features for state-dependent noise to the
                inputs, [B, P + F * A].
            noise: [B, K] of noisy layers; None = their means.

        Returns:
            Inputs of the action distribution [B, P], values [B], and the state after the step.
        """
        obs, mask = self._without_mask(obs)
        previous = self._previous(prev_actions, prev_rewards)
        parts = self._split(state)
        with self._using(weights):
            dist_inputs, values, state_out, features = self._step(
                obs, mask, previous, parts=parts, noise=noise
            )
            if for_acting and self._sde is not None:
                of_features = shares(features, tf.convert_to_tensor(self._log_std))
                dist_inputs = tf.concat([dist_inputs, of_features], axis=-1)
        return dist_inputs, values, state_out

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts, noise: Any = None) -> Outputs:
        """Compute one step for `forward_step`; subclasses override it.

        Args:
            obs: [B, *layout.shape].
            mask: [B, M], or None; inputs that it forbids must become MASKED_LOGIT.
            previous: previous actions and rewards, see `_previous`.
            parts: see `Parts`.
            noise: noise of noisy layers in subclasses.
        """
        features: list[Any] = []
        state_out: list[Any] = []
        for branch, part in parts:
            outputs, following = branch.step(obs, previous, part)
            features.append(outputs)
            state_out += following
        dist_inputs, values = self._heads(features)
        return Outputs(self._masked(dist_inputs, mask), values, state_out, features[0])

    def forward_sequence(
        self,
        obs: Any,
        state: State,
        resets: Any,
        prev_actions: Any = None,
        prev_rewards: Any = None,
        *,
        weights: Weights | None = None,
    ) -> tuple[Any, Any]:
        """Return the outputs for sequences of T steps; without recurrence each step is independent.

        Args:
            obs: [T, B, *obs_shape]; T is known when the function is traced.
            state: recurrent state before the first step, [B, ...] for each component.
            resets: [T, B] bool; where True the state is zeroed before that step.
            prev_actions: [T, B, *action_shape] in column form, if the network looks back; zeros at
                the start of episodes.
            prev_rewards: [T, B], likewise.
            weights: tensors by name to use instead of all variables.

        Returns:
            Inputs of the action distribution [T, B, P] and values [T, B], float32.
        """
        obs = tf.convert_to_tensor(obs)
        steps = obs.shape[0]
        flat_obs = tf.reshape(obs, [-1, *self.obs_shape])
        if self.is_recurrent:
            previous = self._previous(prev_actions, prev_rewards)
            flat_obs, mask = self._without_mask(flat_obs)
            with self._using(weights):
                features = [
                    branch.sequence(flat_obs, previous, part, resets=resets, steps=steps)
                    for branch, part in self._split(state)
                ]
                dist_inputs, values = self._heads(features)
            dist_inputs = self._masked(dist_inputs, mask)
        else:
            dist_inputs, values, _ = self.forward_step(
                flat_obs, state, prev_actions, prev_rewards, weights=weights
            )
        dist_inputs = tf.reshape(dist_inputs, [steps, -1, self.distribution.num_inputs])
        return dist_inputs, tf.reshape(values, [steps, -1])

    def get_weights(self) -> dict[str, Array]:
        """Return copies of all weights by name, in order, each of its variable's shape."""
        return {name: np.array(variable.numpy()) for name, variable in self.variables.items()}

    def set_weights(self, weights: Columns) -> None:
        """Assign all weights.

        Raises:
            PolicyError: a weight is missing, unknown, not finite or has another shape; no weight is
                changed then.
        """
        shapes = {name: tuple(variable.shape) for name, variable in self.variables.items()}
        check_weights(shapes, weights)
        for name, variable in self.variables.items():
            variable.assign(weights[name])

    def _masked(self, dist_inputs: Any, mask: Any) -> Any:
        """Return distribution inputs [B, P] with MASKED_LOGIT for forbidden actions."""
        if mask is None:
            return dist_inputs
        if not np.array_equal(self._mask_entries, np.arange(self.layout.num_mask)):
            padded = tf.concat([mask, tf.ones_like(mask[:, :1])], axis=1)
            mask = tf.gather(padded, self._mask_entries, axis=1)
        return tf.where(mask > 0, dist_inputs, tf.constant(MASKED_LOGIT, dist_inputs.dtype))

    def _previous(self, actions: Any, rewards: Any) -> Any:
        """Return previous actions [..., *action_shape] and rewards [...] as rows of numbers [R, E +
        1].

        Returns None for networks that don't look back.
        """
        if self._of_previous is None:
            if actions is not None or rewards is not None:
                raise PolicyError("the network takes no previous actions and rewards")
            return None
        if actions is None or rewards is None:
            raise PolicyError("the network takes previous actions and rewards; none were given")
        flat_actions = tf.reshape(actions, [-1, *self.distribution.action_shape])
        flat_rewards = tf.reshape(tf.cast(rewards, tf.float32), [-1, 1])
        return tf.concat([self._of_previous.features(flat_actions), flat_rewards], axis=-1)

    def _split(self, state: State) -> Parts:
        expected = len(self.state_shapes)
        if len(state) != expected:
            raise PolicyError(
                f"{len(state)} recurrent state components; the network has {expected}"
            )
        parts = []
        start = 0
        for branch in self._branches:
            end = start + len(branch.state_shapes)
            parts.append((branch, state[start:end]))
            start = end
        return parts

    def _heads(self, features: Sequence[Any]) -> tuple[Any, Any]:
        return self._dist_inputs(features[0]), tf.squeeze(self._value_head(features[-1]), axis=-1)
