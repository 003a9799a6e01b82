"""Losses of a policy and its values against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import (
    approximate_kl,
    clipped_surrogate,
    explained_variance,
    imitation_weights,
    masked_normalise,
)

RNG = np.random.default_rng(3)
X = RNG.normal(size=(5, 4)).astype(np.float32)
KEEP = RNG.random((5, 4)) < 0.7
VALID = KEEP.astype(np.float32)


def test_the_mean_of_no_rows_is_zero() -> None:
    assert masked_mean(tf.constant(X), tf.zeros_like(X)).numpy() == 0.0


def test_normalising_equal_numbers_gives_zeros() -> None:
    assert (masked_normalise(tf.ones([6]), tf.ones([6])).numpy() == 0).all()


def test_explained_variance_is_1_for_perfect_0_for_constant_and_at_least_minus_1_for_bad_predictions() -> (
    None
):
    valid = tf.constant(VALID)
    assert explained_variance(tf.constant(X), tf.constant(X), valid).numpy() == pytest.approx(1.0)
    assert explained_variance(tf.constant(X), tf.ones_like(X), valid).numpy() == pytest.approx(
        0.0, abs=1e-6
    )
    assert explained_variance(tf.constant(X), tf.constant(-9 * X), valid).numpy() == -1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"), [(1.0, 2.0, 2.0), (1.5, 2.0, 0.0), (0.5, 2.0, 1.0)]
)
def test_the_gradient_is_the_policy_gradient_inside_the_clip_and_0_beyond(
    ratio: float, advantage: float, slope: float
) -> None:
    log_ratio = tf.Variable([math.log(ratio)])
    with tf.GradientTape() as tape:
        objective = clipped_surrogate(log_ratio, tf.constant([advantage]), clip_param=0.2)
    assert tape.gradient(objective, log_ratio).numpy()[0] == pytest.approx(slope, abs=1e-6)


def test_approximate_kl_averages_to_the_true_divergence() -> None:
    old, new = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    estimates = approximate_kl(tf.constant(np.log(new / old), tf.float32)).numpy()
    assert (estimates >= 0).all()
    assert (old * estimates).sum() == pytest.approx((old * np.log(old / new)).sum(), abs=1e-6)


def test_no_gradient_flows_through_the_weights() -> None:
    advantages = tf.Variable([1.0, -1.0])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(imitation_weights(advantages, scale=1.0, beta=1.0, max_weight=20.0))
    assert tape.gradient(total, advantages) is None


def test_a_scale_of_0_does_not_divide_by_0() -> None:
    assert float(
        imitation_weights(tf.constant(0.0), scale=0.0, beta=1.0, max_weight=20.0)
    ) == pytest.approx(1.0)
