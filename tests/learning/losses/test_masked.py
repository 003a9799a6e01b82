"""Means over valid rows: against NumPy on the rows that are kept."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses.policy_gradient import explained_variance, masked_mean, masked_normalise

RNG = np.random.default_rng(3)
X = RNG.normal(size=(5, 4)).astype(np.float32)
Y = RNG.normal(size=(5, 4)).astype(np.float32)
KEEP = RNG.random((5, 4)) < 0.7
VALID = KEEP.astype(np.float32)


def test_mean_takes_the_valid_rows_only() -> None:
    assert masked_mean(tf.constant(X), tf.constant(VALID)).numpy() == pytest.approx(X[KEEP].mean(), abs=1e-6)


def test_mean_of_no_row_is_zero() -> None:
    assert masked_mean(tf.constant(X), tf.zeros_like(X)).numpy() == 0.0


def test_normalised_rows_have_mean_0_and_deviation_1_and_the_others_are_0() -> None:
    normalised = masked_normalise(tf.constant(X), tf.constant(VALID)).numpy()
    expected = (X[KEEP] - X[KEEP].mean()) / X[KEEP].std()
    np.testing.assert_allclose(normalised[KEEP], expected, rtol=1e-5)
    assert (normalised[~KEEP] == 0).all()


def test_normalising_equal_numbers_gives_zeros() -> None:
    assert (masked_normalise(tf.ones([6]), tf.ones([6])).numpy() == 0).all()


def test_explained_variance_is_1_for_perfect_0_for_constant_and_at_least_minus_1_for_bad_predictions() -> None:
    valid = tf.constant(VALID)
    assert explained_variance(tf.constant(X), tf.constant(X), valid).numpy() == pytest.approx(1.0)
    assert explained_variance(tf.constant(X), tf.ones_like(X), valid).numpy() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(tf.constant(X), tf.constant(-9 * X), valid).numpy() == -1.0


def test_explained_variance_equals_numpys_on_the_valid_rows() -> None:
    got = explained_variance(tf.constant(X), tf.constant(0.5 * X + 0.1 * Y), tf.constant(VALID)).numpy()
    expected = 1 - (X - 0.5 * X - 0.1 * Y)[KEEP].var() / X[KEEP].var()
    assert got == pytest.approx(expected, abs=1e-5)
