"""CQL: soft maxima by hand and by an integral, what the penalty costs, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients

from aiorl.learning.losses import critics as cql


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", [None, np.array([[1, 1, 0], [0, 1, 0]], np.float32)])
def test_a_soft_maximum_is_the_logarithm_of_the_sum_over_legal_actions(mask: Any, compiled: bool) -> None:
    q = np.random.default_rng(0).normal(size=(2, 2, 3)).astype(np.float32)
    legal = np.ones((2, 3), bool) if mask is None else mask > 0
    expected = [[np.log(np.exp(one[row][legal[row]]).sum()) for row in range(2)] for one in q]
    function = tf.function(cql.soft_maximum, jit_compile=True) if compiled else cql.soft_maximum
    found = function(tf.constant(q), None if mask is None else tf.constant(mask))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_hand_worked_importance_weights() -> None:
    """Actions drawn with density 1/2 count twice, those with density 2 half: log((2 e^0 + e^1 / 2) / 2)."""
    found = cql.sampled_soft_maximum(tf.constant([[[0.0, 1.0]]]), tf.constant([[np.log(0.5), np.log(2.0)]], tf.float32))
    np.testing.assert_allclose(found, [[np.log((2 + np.e / 2) / 2)]], rtol=1e-6)


@pytest.mark.parametrize("way", ["uniform", "normal"])
def test_however_actions_are_drawn_the_estimate_is_that_of_the_integral(way: str) -> None:
    """Of exp(-a^2) from -1 to 1, which is sqrt(pi) erf(1)."""
    rng, num = np.random.default_rng(1), 200_000
    if way == "uniform":
        actions, log_densities = rng.uniform(-1, 1, num), np.full(num, np.log(0.5))
        q = -(actions**2)
    else:  # those beyond the bounds are none of the integral
        actions = rng.normal(size=num)
        log_densities = -0.5 * actions**2 - 0.5 * np.log(2 * np.pi)
        q = np.where(np.abs(actions) <= 1, -(actions**2), -1e9)
    found = cql.sampled_soft_maximum(tf.constant(q[None, None]), tf.constant(log_densities[None]))
    assert np.exp(float(found[0, 0])) == pytest.approx(1.493648, rel=0.01)


def test_gaps_beyond_the_target_cost_and_raise_the_weight() -> None:
    gaps = tf.constant([[3.0, 1.0], [5.0, 0.0]])
    np.testing.assert_allclose(cql.conservative_losses(gaps, 2.0), [16.0, 2.0])
    np.testing.assert_allclose(cql.conservative_losses(gaps, 2.0, 1.0), [12.0, -2.0])
    log_weight = tf.Variable(np.log(2.0), dtype=tf.float32)
    with tf.GradientTape() as tape:
        losses = cql.multiplier_losses(log_weight, gaps, 1.0)
    np.testing.assert_allclose(losses, [-2.0 * 3.0, 2.0 * 0.5], rtol=1e-6)
    assert float(tape.gradient(losses, log_weight)) < 0, "descent raises it: the mean gap is 2.25"


def test_gradients_flow_to_q_values_and_to_the_weight_alone() -> None:
    rng = np.random.default_rng(2)
    q, gaps = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3))
    check_gradients(cql.soft_maximum, {"q": q})
    check_gradients(
        cql.sampled_soft_maximum, {"q": q, "log_densities": rng.normal(size=(3, 4))}, without=("log_densities",)
    )
    check_gradients(cql.conservative_losses, {"gaps": gaps, "weight": np.float64(3.0)}, without=("weight",))
    check_gradients(
        lambda log_weight, gaps: cql.multiplier_losses(log_weight, gaps, 0.5),
        {"log_weight": np.float64(0.3), "gaps": gaps},
        without=("gaps",),
    )
