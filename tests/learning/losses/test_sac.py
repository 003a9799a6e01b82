"""SAC: hand-worked numbers, slow expectations, gradients, masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients

from aiorl.learning.losses import critics as sac

MASK = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1]], np.float32)


def test_hand_worked_targets() -> None:
    """The lower critic says 3, log pi is -2, alpha 0.5: the state is worth 4, and the target 1 + 0.5 * 4."""
    values = sac.soft_values(tf.constant([[3.0], [5.0]]), tf.constant([-2.0]), 0.5)
    assert values.numpy().tolist() == [4.0]
    assert sac.soft_targets(tf.constant([1.0]), tf.constant([0.5]), values).numpy().tolist() == [3.0]
    assert sac.soft_targets(tf.constant([1.0]), tf.constant([0.0]), values).numpy().tolist() == [1.0]
    assert sac.actor_losses(tf.constant([[3.0], [5.0]]), tf.constant([-2.0]), 0.5).numpy().tolist() == [-4.0]


@pytest.mark.parametrize(("entropy", "rises"), [(0.5, True), (2.0, False)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target(entropy: float, rises: bool) -> None:
    log_alpha = tf.Variable(0.3)
    with tf.GradientTape(persistent=True) as tape:
        by_samples = sac.temperature_losses(log_alpha, tf.constant([-entropy]), 1.0)
        logits = tf.constant([[0.0] * 8]) * entropy
        discrete = sac.discrete_temperature_losses(log_alpha, logits, math.log(8) - entropy + 1.0)
    assert (float(tape.gradient(by_samples, log_alpha)) < 0) == rises
    assert (float(tape.gradient(discrete, log_alpha)) < 0) == rises
    np.testing.assert_allclose(by_samples, [0.3 * (entropy - 1.0)], rtol=1e-6)


def slow_values(q: Any, logits: Any, alpha: float, mask: Any) -> list[float]:
    """Expectations over the legal actions alone, in float64."""
    values = []
    for row in range(len(logits)):
        legal = [a for a in range(logits.shape[1]) if mask is None or mask[row, a]]
        weights = [math.exp(float(logits[row, a])) for a in legal]
        p = [weight / sum(weights) for weight in weights]
        values.append(sum(pi * (min(float(one[row, a]) for one in q) - alpha * math.log(pi))
                          for pi, a in zip(p, legal, strict=True)))  # fmt: skip
    return values


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", [None, MASK])
def test_discrete_values_equal_slow_expectations(mask: Any, compiled: bool) -> None:
    rng = np.random.default_rng(0)
    q, logits = rng.normal(size=(2, 3, 3)).astype(np.float32), rng.normal(size=(3, 3)).astype(np.float32)
    if mask is not None:
        q[:, MASK == 0] = 1e6  # a critic may say anything of what is illegal

    def call(q: Any, logits: Any) -> Any:
        own = None if mask is None else tf.constant(mask)
        return sac.discrete_soft_values(q, logits, 0.3, own), sac.discrete_actor_losses(q, logits, 0.3, own)

    function = tf.function(call, jit_compile=True) if compiled else call
    values, losses = function(tf.constant(q), tf.constant(logits))
    expected = slow_values(q, logits, 0.3, mask)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_allclose(losses, np.negative(expected), rtol=1e-5)


def test_entropy_is_that_of_the_legal_actions() -> None:
    found = sac.discrete_entropy(tf.zeros((3, 3)), tf.constant(MASK))
    np.testing.assert_allclose(found, [math.log(2), 0.0, math.log(3)], atol=1e-6)
    found = sac.discrete_temperature_losses(
        tf.constant(2.0), tf.zeros((3, 3)), tf.constant([0.5, 0.0, 0.5]), tf.constant(MASK)
    )
    np.testing.assert_allclose(found, [2 * (math.log(2) - 0.5), 0.0, 2 * (math.log(3) - 0.5)], atol=1e-6)


def test_actions_of_no_probability_give_no_nan() -> None:
    logits = tf.Variable([[0.0, -1e4, 3e4]])
    with tf.GradientTape() as tape:
        losses = sac.discrete_actor_losses(tf.constant([[[1.0, 2.0, 3.0]]]), logits, 0.2)
    assert np.isfinite(losses).all()
    assert np.isfinite(tape.gradient(losses, logits)).all()


def test_a_row_without_legal_actions_gives_no_nan() -> None:
    """As after a terminal state, where the discount is 0."""
    values = sac.discrete_soft_values(tf.ones((2, 1, 3)), tf.ones((1, 3)), 0.2, tf.zeros((1, 3)))
    assert values.numpy().tolist() == [0.0]


def test_gradients_of_continuous_losses_flow_where_they_should() -> None:
    rng = np.random.default_rng(1)
    inputs = {"q": rng.normal(size=(2, 4)), "logp": rng.normal(size=4), "alpha": np.float64(0.3)}
    check_gradients(lambda q, logp, alpha: sac.actor_losses(q, logp, alpha), inputs, without=("alpha",))
    check_gradients(
        lambda log_alpha, logp: sac.temperature_losses(log_alpha, logp, -2.0),
        {"log_alpha": np.float64(0.3), "logp": rng.normal(size=4)},
        without=("logp",),
    )
    check_gradients(
        lambda values: sac.soft_targets(tf.ones(4, tf.float64), tf.ones(4, tf.float64), values) * 1.0,
        {"values": rng.normal(size=4)},
        without=("values",),
    )


@pytest.mark.parametrize("mask", [None, MASK])
def test_gradients_of_discrete_losses_flow_where_they_should(mask: Any) -> None:
    rng = np.random.default_rng(2)
    own = None if mask is None else tf.constant(mask)
    inputs = {"q": rng.normal(size=(2, 3, 3)), "logits": rng.normal(size=(3, 3)), "alpha": np.float64(0.3)}
    check_gradients(
        lambda q, logits, alpha: sac.discrete_actor_losses(q, logits, alpha, own), inputs, without=("q", "alpha")
    )
    check_gradients(
        lambda log_alpha, logits: sac.discrete_temperature_losses(log_alpha, logits, 0.5, own),
        {"log_alpha": np.float64(0.3), "logits": inputs["logits"]},
        without=("logits",),
    )


def test_the_best_policy_by_the_loss_is_the_softmax_of_the_values() -> None:
    """The gradient is 0 there: pi = softmax(Q / alpha), Haarnoja et al. 2018, eq. 4."""
    q = np.random.default_rng(3).normal(size=(1, 2, 4))
    logits = tf.Variable(q[0] / 0.4)
    with tf.GradientTape() as tape:
        losses = sac.discrete_actor_losses(tf.constant(q), logits, tf.constant(0.4, tf.float64))
    np.testing.assert_allclose(tape.gradient(losses, logits), np.zeros((2, 4)), atol=1e-12)
