"""Weights of imitation, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses.policy_gradient import imitation_weights


def test_an_action_counts_by_the_exponential_of_its_scaled_advantage_up_to_a_bound() -> None:
    advantages = tf.constant([0.0, 2.0, -2.0, 100.0])
    weights = imitation_weights(advantages, scale=4.0, beta=2.0, max_weight=20.0).numpy()
    np.testing.assert_allclose(weights, [1.0, np.e, 1 / np.e, 20.0], rtol=1e-6)
    np.testing.assert_array_equal(imitation_weights(advantages, scale=4.0, beta=0.0, max_weight=20.0), np.ones(4))


def test_no_gradient_flows_through_the_weights() -> None:
    advantages = tf.Variable([1.0, -1.0])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(imitation_weights(advantages, scale=1.0, beta=1.0, max_weight=20.0))
    assert tape.gradient(total, advantages) is None


def test_a_scale_of_zero_is_no_division_by_zero() -> None:
    assert float(imitation_weights(tf.constant(0.0), scale=0.0, beta=1.0, max_weight=20.0)) == pytest.approx(1.0)
