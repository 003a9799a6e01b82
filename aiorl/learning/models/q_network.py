"""QNetwork: the value of each action, or a return distribution for each action."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import Greedy
from aiorl.config.schema import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.losses.q_learning import QHead, dueling, expected_q, support
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import choose_layers
from aiorl.learning.models.networks import (
    HIDDEN_GAIN,
    State,
    Variables,
    Weights,
    dense,
    layer_variables,
)

_GAIN = 0.1


class NoisyDense:
    """Dense layer whose weights have factorised Gaussian noise; without noise, its weights are the
    means.

    Source: Fortunato et al. 2018, Noisy Networks for Exploration, https://arxiv.org/abs/1706.10295,
    eq. 8 to 11.

    Attributes:
        noise_size: size of the noise, one number for each input and each output.
    """

    def __init__(self, mean: keras.layers.Layer, sigma0: float) -> None:
        """Add noise to a layer.

        Args:
            mean: dense layer with the means.
            sigma0: initial standard deviation, multiplied by the root of the number of inputs.
        """
        self._mean = mean
        num_inputs, num_outputs = mean.kernel.shape
        self._num_inputs = num_inputs
        self.noise_size = num_inputs + num_outputs
        deviation = sigma0 / np.sqrt(num_inputs)
        self._kernel = keras.Variable(np.full((num_inputs, num_outputs), deviation, np.float32))
        self._bias = keras.Variable(np.full(num_outputs, deviation, np.float32))

    def __call__(self, inputs: Any, noise: Any) -> Any:
        """Return features [B, Q] of inputs [B, P].

        Args:
            inputs: float32.
            noise: standard normal, [B, P + Q], or [1, P + Q] for the same noise in all rows; None =
                the means.
        """
        if noise is None:
            return self._mean(inputs)
        scaled = tf.sign(noise) * tf.sqrt(tf.abs(noise))
        of_inputs = scaled[:, : self._num_inputs]
        of_outputs = scaled[:, self._num_inputs :]
        means = inputs @ self._mean.kernel + self._mean.bias
        deviations = (inputs * of_inputs) @ self._kernel.value + self._bias
        return self._mean.activation(means + deviations * of_outputs)

    def named_variables(self, name: str) -> Variables:
        """Return the Keras variables by name, each with ``NAME/`` before it."""
        return {
            **layer_variables(name, self._mean),
            f"{name}/kernel_sigma": self._kernel,
            f"{name}/bias_sigma": self._bias,
        }


class QNetwork(ActorCritic):
    """Network whose distribution inputs are action values and whose value is the largest of them.

    Attributes:
        atoms: [Z] float32, returns of the atoms; None without distributions.
        head: outputs for each action; None if they are values.
    """

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: Greedy,
        config: ModelConfig,
        rng: np.random.Generator,
        *,
        is_dueling: bool = False,
        dueling_hiddens: Sequence[int] = (),
        atoms: tuple[float, float, int] | None = None,
        head: QHead | None = None,
        sigma0: float | None = None,
    ) -> None:
        """Build the network.

        Args:
            layout: layout of an observation in its array.
            obs_dtype: "float32" or "uint8".
            distribution: distribution of the actions.
            config: settings of the hidden layers.
            rng: generator of the initial weights.
            is_dueling: True for separate streams for the value and the advantages.
            dueling_hiddens: widths of the hidden layers of each stream, after the shared layers.
            atoms: smallest return, largest return and number of atoms; None = expected returns
                only.
            head: outputs for each action that are neither values nor atoms; None = values, or
                atoms.
            sigma0: see `NoisyDense`, used for the layers of the streams; None = no noise.
        """
        self._describe(layout, obs_dtype, distribution, config)
        self._is_dueling = is_dueling
        self.atoms = None
        # a head of another kind has another name, so that nothing takes its weights for values
        last = "head" if head is None else "outputs"
        if atoms is not None:
            self.atoms = support(*atoms).numpy()
            head = QHead(len(self.atoms), partial(expected_q, atoms=self.atoms))
        self.head = head
        num_outputs = 1 if head is None else head.num_outputs
        branch = self._make_branch("q", rng)
        self._branches = [branch]
        widths = {"q": distribution.num_inputs}
        hiddens: Sequence[int] = ()
        if is_dueling:
            widths = {"advantage": distribution.num_inputs, "value": 1}
            hiddens = dueling_hiddens
        activation = choose_layers(layout, obs_dtype, config).activation
        variables = branch.named_variables()
        self._streams: dict[str, list[Any]] = {}
        for stream, width in widths.items():
            num_inputs = branch.num_outputs
            layers: dict[str, Any] = {}
            for index, size in enumerate(hiddens):
                layers[f"{stream}/dense_{index}"] = dense(
                    rng, num_inputs, size, gain=HIDDEN_GAIN, activation=activation
                )
                num_inputs = size
            layers[f"{stream}/{last}"] = dense(rng, num_inputs, width * num_outputs, gain=_GAIN)
            for name, layer in layers.items():
                if sigma0 is None:
                    variables |= layer_variables(name, layer)
                else:
                    layers[name] = NoisyDense(layer, sigma0)
                    self.noise_size += layers[name].noise_size
                    variables |= layers[name].named_variables(name)
            self._streams[stream] = list(layers.values())
        self._take_variables(variables)

    def q(self, obs: Any, *, weights: Weights | None = None, noise: Any = None) -> tuple[Any, Any]:
        """Return values [B, A] of observations [B, *obs_shape], or the Z outputs of a `QHead` for
        each action, such as logits of atoms, [B, A, Z]; and the mask.

        Args:
            obs: [B, *obs_shape]; the mask, [B, A] or None, is not applied. The network must not be
                recurrent.
            weights: tensors by name to use instead of all variables.
            noise: [B or 1, K] of noisy layers; None = their means.
        """
        obs, mask = self._without_mask(obs)
        with self._using(weights):
            features, _ = self._branches[0].step(obs, None, [])
            values = self._q(features, mask, noise)
        return values, mask

    def q_sequence(
        self,
        obs: Any,
        state: State,
        previous: Sequence[Any] = (),
        *,
        burn_in: int = 0,
        weights: Weights | None = None,
        noise: Any = None,
    ) -> tuple[Any, Any]:
        """Return the result of `q` for the steps of sequences: [T * B, A], or with atoms [T * B, A,
        Z]; and the mask.

        Args:
            obs: [T, B, *obs_shape]; no episode ends within a sequence. The network must be
                recurrent.
            state: recurrent state before the first step, [B, H] for each component.
            previous: actions [T, B] and rewards [T, B] of the previous steps, if the network looks
                back.
            burn_in: number of first steps, behind which no gradient flows back through the state.
            weights: tensors by name to use instead of all variables.
            noise: [1, K] of noisy layers, the same at all steps; None = their means.
        """
        steps, rows = obs.shape[:2]
        flat_obs, mask = self._without_mask(tf.reshape(obs, [-1, *self.obs_shape]))
        resets = tf.zeros([steps, rows], tf.bool)
        previous_rows = self._previous(*(previous or (None, None)))
        with self._using(weights):
            features = self._branches[0].sequence(
                flat_obs, previous_rows, state, resets=resets, steps=steps, burn_in=burn_in
            )
            values = self._q(features, mask, noise)
        return values, mask

    def _q(self, features: Any, mask: Any, noise: Any) -> Any:
        outputs: dict[str, Any] = {}
        start = 0
        for name, layers in self._streams.items():
            values = features
            for layer in layers:
                if isinstance(layer, NoisyDense):
                    end = start + layer.noise_size
                    values = layer(values, None if noise is None else noise[:, start:end])
                    start = end
                else:
                    values = layer(values)
            if self.head is not None:
                num_outputs = self.head.num_outputs
                values = tf.reshape(values, [-1, values.shape[-1] // num_outputs, num_outputs])
            outputs[name] = values
        if not self._is_dueling:
            return outputs["q"]
        axis = -1 if self.head is None else -2
        return dueling(outputs["value"], outputs["advantage"], mask, axis=axis)

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts, noise: Any = None) -> Outputs:
        ((branch, state),) = parts
        features, state_out = branch.step(obs, previous, state)
        values = self._q(features, mask, noise)
        if self.head is not None:
            values = self.head.values(values)
        values = self._masked(values, mask)
        return Outputs(values, tf.reduce_max(values, axis=-1), state_out)
