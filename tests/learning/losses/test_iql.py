"""IQL: expectiles by hand, by what they are the least of, and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients

from aiorl.learning.losses.critics import expectile_losses


def test_errors_above_count_the_expectile_and_those_below_the_rest() -> None:
    found = expectile_losses(tf.constant([2.0, -2.0, 0.0]), 0.9)
    np.testing.assert_allclose(found, [3.6, 0.4, 0.0], rtol=1e-6)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.95])
def test_the_value_of_least_loss_is_the_expectile(expectile: float) -> None:
    """Of what was found, the part above it outweighs the part below by (1 - tau) / tau."""
    found, values = np.random.default_rng(0).normal(size=500), np.linspace(-1, 2, 3001)
    least = values[np.argmin(tf.reduce_sum(expectile_losses(tf.constant(found - values[:, None]), expectile), axis=1))]
    above, below = np.maximum(found - least, 0).sum(), np.maximum(least - found, 0).sum()
    assert expectile * above == pytest.approx((1 - expectile) * below, abs=0.5)
    if expectile == 0.5:
        assert least == pytest.approx(found.mean(), abs=0.001)


def test_gradients_are_those_of_differences() -> None:
    check_gradients(lambda errors: expectile_losses(errors, 0.8), {"errors": np.array([1.5, -0.5, 0.2])})
