"""Stacks of layers and their initial weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from aiorl.errors import ConfigError
from aiorl.learning.models.networks import dense, make_stack, orthogonal


@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8), (6, 5), (3, 3, 2, 4), (64, 64), (1, 1)])
@pytest.mark.parametrize("gain", [1.0, 0.01])
def test_orthogonal_weights_have_orthonormal_rows_or_columns(shape, gain):
    weights = orthogonal(np.random.default_rng(0), shape, gain)
    assert weights.shape == shape
    assert weights.dtype == np.float32
    matrix = weights.reshape(-1, shape[-1]) / gain
    product = matrix.T @ matrix if len(matrix) >= shape[-1] else matrix @ matrix.T
    np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-5)


def test_a_dense_stack_is_matrix_products_with_the_activation_between():
    stack = make_stack(np.random.default_rng(0), (2, 3), (), (5, 4), "tanh")
    obs = np.random.default_rng(1).standard_normal((7, 2, 3)).astype(np.float32)
    variables = {name: item.numpy() for name, item in stack.named_variables().items()}
    assert list(variables) == ["dense_0/kernel", "dense_0/bias", "dense_1/kernel", "dense_1/bias"]
    hidden = np.tanh(obs.reshape(7, 6) @ variables["dense_0/kernel"] + variables["dense_0/bias"])
    wanted = np.tanh(hidden @ variables["dense_1/kernel"] + variables["dense_1/bias"])
    np.testing.assert_allclose(stack(obs), wanted, rtol=1e-5, atol=1e-6)
    assert stack.num_outputs == 4


def test_a_conv_stack_is_a_plain_convolution():
    stack = make_stack(np.random.default_rng(0), (7, 6, 2), [(3, (3, 2), (2, 1))], (5,), "linear", scale=1.0 / 255.0)
    obs = np.random.default_rng(1).integers(0, 256, (2, 7, 6, 2), dtype=np.uint8)
    variables = {name: item.numpy() for name, item in stack.named_variables().items()}
    assert list(variables) == ["conv_0/kernel", "conv_0/bias", "dense_0/kernel", "dense_0/bias"]
    image, out = obs / 255.0, np.zeros((2, 3, 5, 3))
    for i in range(3):
        for j in range(5):
            patch = image[:, 2 * i : 2 * i + 3, j : j + 2].reshape(2, -1)
            out[:, i, j] = np.maximum(patch @ variables["conv_0/kernel"].reshape(-1, 3), 0.0)
    np.testing.assert_allclose(stack(obs), out.reshape(2, -1) @ variables["dense_0/kernel"], rtol=1e-4, atol=1e-5)


def test_a_filter_larger_than_its_image_is_named():
    with pytest.raises(ConfigError, match="filter 1 with a 5x5 kernel meets an image of 3x3"):
        make_stack(np.random.default_rng(0), (8, 8, 1), [(4, (4, 4), (2, 2)), (4, (5, 5), (1, 1))], (), "relu")


def test_gelu_is_the_exact_form_of_keras():
    layer = dense(np.random.default_rng(0), 1, 1, gain=1.0, activation="gelu")
    inputs = np.linspace(-5.0, 5.0, 101, dtype=np.float32)[:, None]
    np.testing.assert_allclose(layer(inputs), keras.activations.gelu(inputs @ layer.kernel), rtol=1e-5, atol=1e-6)
