"""Cells against Keras's own layers, and sequences against single steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.models.branch import GRUCell, LSTMCell, run_sequence

T, B, D, H = 6, 3, 4, 5


def data(seed=0):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((T, B, D)).astype(np.float32)
    resets = rng.random((T, B)) < 0.3
    resets[0, 0] = True
    return features, resets


def shuffled(cell):
    """Return biases other than the initial zeros, so that a forgotten one is noticed."""
    rng = np.random.default_rng(9)
    for variable in cell.trainable_variables:
        variable.assign(rng.standard_normal(variable.shape).astype(np.float32))
    return cell


@pytest.mark.parametrize(
    ("kind", "layer"), [(LSTMCell, keras.layers.LSTM), (GRUCell, keras.layers.GRU)]
)
def test_a_sequence_without_resets_equals_that_of_the_keras_layer(kind, layer):
    cell = shuffled(kind(np.random.default_rng(0), D, H))
    features, _ = data()
    state = [
        np.random.default_rng(1).standard_normal((B, H)).astype(np.float32)
        for _ in range(cell.num_states)
    ]
    keras_layer = layer(H, return_sequences=True)
    keras_layer.build((B, T, D))
    weights = [cell.kernel.numpy(), cell.recurrent_kernel.numpy(), cell.bias.numpy()]
    if kind is GRUCell:
        weights[2] = np.stack([weights[2], cell.recurrent_bias.numpy()])
    keras_layer.set_weights(weights)
    wanted = keras_layer(
        features.swapaxes(0, 1), initial_state=[tf.constant(item) for item in state]
    )
    outputs, last = run_sequence(cell, tf.constant(features), state, tf.zeros((T, B), tf.bool))
    np.testing.assert_allclose(outputs, np.swapaxes(wanted, 0, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last[0], outputs[-1], rtol=1e-6)
