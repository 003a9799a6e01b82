"""Losses of TD3, SAC, CQL and IQL against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients

from aiorl.learning.losses import off_policy_actor_critic as off_policy


@pytest.mark.parametrize(("entropy", "rises"), [(0.5, True), (2.0, False)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target(
    entropy: float, rises: bool
) -> None:
    log_alpha = tf.Variable(0.3)
    with tf.GradientTape() as tape:
        losses = off_policy.temperature_losses(log_alpha, tf.constant([entropy]), 1.0)
    assert (float(tape.gradient(losses, log_alpha)) < 0) == rises
    np.testing.assert_allclose(losses, [0.3 * (entropy - 1.0)], rtol=1e-6)


def test_actions_with_probability_0_give_no_nan() -> None:
    logits = tf.Variable([[0.0, -1e4, 3e4]])
    with tf.GradientTape() as tape:
        losses = off_policy.discrete_soft_values(tf.constant([[[1.0, 2.0, 3.0]]]), logits, 0.2)
    assert np.isfinite(losses).all()
    assert np.isfinite(tape.gradient(losses, logits)).all()


def test_a_row_without_legal_actions_gives_no_nan() -> None:
    """As after a terminal state, where the discount is 0."""
    values = off_policy.discrete_soft_values(
        tf.ones((2, 1, 3)), tf.ones((1, 3)), 0.2, tf.zeros((1, 3))
    )
    assert values.numpy().tolist() == [0.0]


def test_the_optimal_policy_of_the_loss_is_the_softmax_of_the_values() -> None:
    """The gradient is 0 there: pi = softmax(Q / alpha), Haarnoja et al. 2018, eq. 4."""
    q = np.random.default_rng(3).normal(size=(1, 2, 4))
    logits = tf.Variable(q[0] / 0.4)
    with tf.GradientTape() as tape:
        losses = off_policy.discrete_soft_values(
            tf.constant(q), logits, tf.constant(0.4, tf.float64)
        )
    np.testing.assert_allclose(tape.gradient(losses, logits), np.zeros((2, 4)), atol=1e-12)


@pytest.mark.parametrize("way", ["uniform", "normal"])
def test_the_integral_is_estimated_with_any_distribution_of_actions(way: str) -> None:
    """The integral of exp(-a^2) from -1 to 1 is sqrt(pi) erf(1)."""
    rng, num = np.random.default_rng(1), 200_000
    if way == "uniform":
        actions, log_densities = rng.uniform(-1, 1, num), np.full(num, np.log(0.5))
        q = -(actions**2)
    else:  # actions beyond the bounds are not part of the integral
        actions = rng.normal(size=num)
        log_densities = -0.5 * actions**2 - 0.5 * np.log(2 * np.pi)
        q = np.where(np.abs(actions) <= 1, -(actions**2), -1e9)
    found = off_policy.sampled_soft_maximum(
        tf.constant(q[None, None]), tf.constant(log_densities[None])
    )
    assert np.exp(float(found[0, 0])) == pytest.approx(1.493648, rel=0.01)


def test_gradients_flow_only_to_q_values_and_the_weight() -> None:
    rng = np.random.default_rng(2)
    q, gaps = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3))
    check_gradients(off_policy.soft_maximum, {"q": q})
    check_gradients(
        off_policy.sampled_soft_maximum,
        {"q": q, "log_densities": rng.normal(size=(3, 4))},
        without=("log_densities",),
    )
    check_gradients(
        off_policy.conservative_losses,
        {"gaps": gaps, "weight": np.float64(3.0)},
        without=("weight",),
    )
    check_gradients(
        lambda log_weight, gaps: off_policy.multiplier_losses(log_weight, gaps, 0.5),
        {"log_weight": np.float64(0.3), "gaps": gaps},
        without=("gaps",),
    )


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.95])
def test_the_value_with_the_smallest_loss_is_the_expectile(expectile: float) -> None:
    """The positive errors outweigh the negative ones by (1 - tau) / tau."""
    found, values = np.random.default_rng(0).normal(size=500), np.linspace(-1, 2, 3001)
    least = values[
        np.argmin(
            tf.reduce_sum(
                off_policy.expectile_losses(tf.constant(found - values[:, None]), expectile), axis=1
            )
        )
    ]
    above, below = np.maximum(found - least, 0).sum(), np.maximum(least - found, 0).sum()
    assert expectile * above == pytest.approx((1 - expectile) * below, abs=0.5)
    if expectile == 0.5:
        assert least == pytest.approx(found.mean(), abs=0.001)
