"""Recurrent cells: one step for acting, whole sequences for learning, the same numbers from both.

A cell is split in two: `project` depends on the inputs alone and runs over all steps of a sequence as one
matrix product; `step` is the recurrence. `run_sequence` loops over the steps inside the graph, so that it
compiles under XLA in a time that doesn't grow with the length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from aiorl.learning.models.networks import orthogonal

__all__ = ["GRUCell", "LSTMCell", "RecurrentCell", "run_sequence"]


class RecurrentCell(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A gated cell with `size` units, built.

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

    def project(self, inputs: Any) -> Any:
        """The inputs' part [B, gates * H] of the gates, for inputs [B, D]."""
        return tf.matmul(inputs, tf.convert_to_tensor(self.kernel)) + tf.convert_to_tensor(self.bias)

    @abstractmethod
    def step(self, projected: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Outputs [B, H] and the next state, for `project`'s result [B, gates * H] and the state."""

    def named_variables(self) -> dict[str, Any]:
        """Keras variables by name."""
        return {f"{self.name_in_model}/{variable.name}": variable for variable in self.trainable_variables}

    def _gates(self, rng: np.random.Generator, num_inputs: int, name: str) -> Any:
        """One orthogonal matrix per gate, side by side."""
        values = np.concatenate([orthogonal(rng, (num_inputs, self.size)) for _ in range(self.num_gates)], axis=1)
        return self.add_weight(
            shape=values.shape, initializer=lambda shape, dtype=None: tf.constant(values, dtype=dtype), name=name
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

    def step(self, projected: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
        """See the base class."""
        output, memory = state
        gates = projected + tf.matmul(output, tf.convert_to_tensor(self.recurrent_kernel))
        write, keep, candidate, show = tf.split(gates, 4, axis=-1)
        memory = tf.sigmoid(keep) * memory + tf.sigmoid(write) * tf.tanh(candidate)
        output = tf.sigmoid(show) * tf.tanh(memory)
        return output, [output, memory]


class GRUCell(RecurrentCell):
    """Gated recurrent unit; the state is the output. The reset gate acts after the matrix product.

    Source: Cho et al. 2014, https://arxiv.org/abs/1406.1078; gates in the order update, reset, candidate.
    """

    name_in_model = "gru"
    num_states = 1
    num_gates = 3

    def __init__(self, rng: np.random.Generator, num_inputs: int, size: int) -> None:
        super().__init__(rng, num_inputs, size)
        self.recurrent_bias = self._bias("recurrent_bias")

    def step(self, projected: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
        """See the base class."""
        (output,) = state
        recurrent = tf.matmul(output, tf.convert_to_tensor(self.recurrent_kernel))
        recurrent += tf.convert_to_tensor(self.recurrent_bias)
        input_update, input_reset, input_candidate = tf.split(projected, 3, axis=-1)
        own_update, own_reset, own_candidate = tf.split(recurrent, 3, axis=-1)
        update = tf.sigmoid(input_update + own_update)
        reset = tf.sigmoid(input_reset + own_reset)
        candidate = tf.tanh(input_candidate + reset * own_candidate)
        output = update * output + (1.0 - update) * candidate
        return output, [output]


def run_sequence(cell: RecurrentCell, features: Any, state: Sequence[Any], resets: Any) -> tuple[Any, list[Any]]:
    """A cell over T steps.

    Args:
        cell: the cell.
        features: [T, B, D] float32; T and D are known when the function is traced.
        state: state before the first step, [B, H] for each component.
        resets: [T, B] bool; where True the state is zeroed before that step.
    Returns: outputs [T, B, H] and the state after the last step.
    """
    steps, width = features.shape[0], features.shape[-1]
    rows = tf.shape(features)[1] if features.shape[1] is None else features.shape[1]
    projected = cell.project(tf.reshape(features, [-1, width]))
    projected = tf.reshape(projected, [steps, rows, cell.num_gates * cell.size])
    keep = 1.0 - tf.cast(resets, tf.float32)[:, :, None]
    outputs = tf.TensorArray(tf.float32, size=steps, element_shape=[features.shape[1], cell.size])

    def advance(step: Any, collected: Any, current: list[Any]) -> tuple[Any, Any, list[Any]]:
        kept = [component * keep[step] for component in current]
        output, following = cell.step(projected[step], kept)
        return step + 1, collected.write(step, output), following

    _, outputs, last = tf.while_loop(
        lambda step, *_: step < steps,
        advance,
        (tf.constant(0), outputs, list(state)),
        maximum_iterations=steps,
    )
    return outputs.stack(), list(last)
