"""Losses of a policy and its values against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses.policy_gradient import (
    approximate_kl,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    imitation_weights,
    masked_mean,
    masked_normalise,
    ppo_loss,
)

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


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, 2.0),  # on-policy: the advantage itself
        (1.5, 2.0, 2.4),  # gain is cut at 1.2
        (0.5, 2.0, 1.0),  # loss is not cut
        (0.5, -2.0, -1.6),  # gain is cut at 0.8
        (1.5, -2.0, -3.0),  # loss is not cut
        (1.1, 2.0, 2.2),  # inside, nothing is cut
    ],
)
def test_surrogate_cuts_what_would_be_gained_beyond_the_clip(ratio: float, advantage: float, expected: float) -> None:
    got = clipped_surrogate(tf.constant([math.log(ratio)]), tf.constant([advantage]), clip_param=0.2)
    assert got.numpy()[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("ratio", "advantage", "slope"), [(1.0, 2.0, 2.0), (1.5, 2.0, 0.0), (0.5, 2.0, 1.0)])
def test_gradient_is_the_policy_gradient_inside_and_none_beyond_the_clip(
    ratio: float, advantage: float, slope: float
) -> None:
    log_ratio = tf.Variable([math.log(ratio)])
    with tf.GradientTape() as tape:
        objective = clipped_surrogate(log_ratio, tf.constant([advantage]), clip_param=0.2)
    assert tape.gradient(objective, log_ratio).numpy()[0] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "target", "old", "expected"),
    [
        (3.0, 5.0, 2.5, 4.0),  # moved by 0.5: plain (3-5)^2
        (4.5, 5.0, 2.0, 4.0),  # moved by 2.5, counts as moved by 1: (3-5)^2
        (0.0, 5.0, 2.0, 25.0),  # moved the wrong way: plain, which is larger
    ],
)
def test_value_loss_is_the_larger_of_plain_and_clipped(
    value: float, target: float, old: float, expected: float
) -> None:
    got = clipped_value_loss(tf.constant([value]), tf.constant([target]), tf.constant([old]), clip_param=1.0)
    assert got.numpy()[0] == pytest.approx(expected)


def test_value_loss_with_an_infinite_clip_is_the_squared_error() -> None:
    values, targets, old = np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32) * 50
    got = clipped_value_loss(tf.constant(values), tf.constant(targets), tf.constant(old), clip_param=math.inf)
    np.testing.assert_allclose(got.numpy(), (values - targets) ** 2, rtol=1e-5)


def test_approximate_kl_averages_to_the_true_divergence() -> None:
    old, new = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    estimates = approximate_kl(tf.constant(np.log(new / old), tf.float32)).numpy()
    assert (estimates >= 0).all()
    assert (old * estimates).sum() == pytest.approx((old * np.log(old / new)).sum(), abs=1e-6)


@pytest.mark.parametrize("kl_coeff", [None, 2.0])
def test_loss_of_two_rows_and_one_that_is_no_transition_by_hand(kl_coeff: float | None) -> None:
    rows = {
        "log_ratio": [math.log(1.5), math.log(0.9), 0.0], "advantages": [2.0, -1.0, 7.0], "kls": [0.1, 0.3, 9.0],
        "values": [1.0, 4.0, 9.0], "targets": [3.0, 3.0, 0.0], "entropies": [0.5, 0.7, 5.0], "valid": [1.0, 1.0, 0.0],
    }  # fmt: skip
    total, parts = ppo_loss(
        **{name: tf.constant(row) for name, row in rows.items()},
        clip_param=0.2, vf_loss_coeff=0.5, entropy_coeff=0.1, kl_coeff=kl_coeff,
    )  # fmt: skip
    # surrogate: 1.2 * 2 and 0.9 * -1, mean 0.75; values: 4 and 1, mean 2.5; entropy 0.6; divergence 0.2
    assert float(parts["policy_loss"]) == pytest.approx(-0.75)
    assert float(parts["vf_loss"]) == pytest.approx(2.5)
    assert float(parts["kl"]) == pytest.approx(0.2)
    assert float(parts["clip_fraction"]) == pytest.approx(0.5)
    penalty = 0.0 if kl_coeff is None else 0.4
    assert float(total) == pytest.approx(-0.75 + 0.5 * 2.5 - 0.1 * 0.6 + penalty, rel=1e-5)


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
