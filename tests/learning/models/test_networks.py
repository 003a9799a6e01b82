"""Stacks of layers and their initial weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from aiorl.errors import ConfigError
from aiorl.learning.models.networks import Layers, dense, make_stack, orthogonal


@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8), (6, 5), (3, 3, 2, 4), (64, 64), (1, 1)])
@pytest.mark.parametrize("gain", [1.0, 0.01])
def test_orthogonal_weights_have_orthonormal_rows_or_columns(shape, gain):
    weights = orthogonal(np.random.default_rng(0), shape, gain)
    assert weights.shape == shape
    assert weights.dtype == np.float32
    matrix = weights.reshape(-1, shape[-1]) / gain
    product = matrix.T @ matrix if len(matrix) >= shape[-1] else matrix @ matrix.T
    np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-5)


def test_a_filter_larger_than_its_image_is_named():
    filters = ((4, (4, 4), (2, 2)), (4, (5, 5), (1, 1)))
    with pytest.raises(ConfigError, match=r" 1 .*5x5 .*3x3"):
        make_stack(np.random.default_rng(0), (8, 8, 1), Layers(filters, (), "relu"))


def test_gelu_is_the_exact_form_of_keras():
    layer = dense(np.random.default_rng(0), 1, 1, gain=1.0, activation="gelu")
    inputs = np.linspace(-5.0, 5.0, 101, dtype=np.float32)[:, None]
    np.testing.assert_allclose(
        layer(inputs), keras.activations.gelu(inputs @ layer.kernel), rtol=1e-5, atol=1e-6
    )
