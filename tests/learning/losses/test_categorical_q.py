"""C51: hand-worked numbers, an oracle that follows each atom, gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiorl.learning.losses.q_learning import (
    categorical_targets,
    chosen,
    cross_entropy,
    expected_q,
    project,
    relative_entropy,
    support,
)

F64 = NDArray[np.float64]


def slow_projection(rewards: F64, discounts: F64, probabilities: F64, v_min: float, v_max: float) -> F64:
    """Algorithm 1 of the paper, as it is printed: floor, ceiling, and a share for each."""
    rows, count = probabilities.shape
    distance = (v_max - v_min) / (count - 1)
    result = np.zeros((rows, count))
    for row in range(rows):
        for j in range(count):
            moved = rewards[row] + discounts[row] * (v_min + j * distance)
            b = (min(max(moved, v_min), v_max) - v_min) / distance
            low, high = math.floor(b), math.ceil(b)
            if low == high:
                result[row, min(low, count - 1)] += probabilities[row, j]
            else:
                result[row, low] += probabilities[row, j] * (high - b)
                result[row, min(high, count - 1)] += probabilities[row, j] * (b - low)
    return result


def test_hand_worked_projection() -> None:
    """Atoms 0, 1, 2 with probabilities 0.2, 0.3, 0.5; reward 0.5, discount 0.5: they come to lie at 0.5, 1 and 1.5."""
    found = project(
        tf.constant([0.5]), tf.constant([0.5]), tf.constant([[0.2, 0.3, 0.5]]), tf.constant([0.0, 1.0, 2.0])
    )
    np.testing.assert_allclose(found, [[0.1, 0.1 + 0.3 + 0.25, 0.25]], rtol=1e-6)


def test_after_a_terminal_state_only_the_reward_is_left() -> None:
    atoms, anything = support(-1.0, 1.0, 5), tf.constant([[0.1, 0.2, 0.3, 0.2, 0.2]])
    found = project(tf.constant([0.25]), tf.constant([0.0]), anything, atoms)
    np.testing.assert_allclose(found, [[0.0, 0.0, 0.5, 0.5, 0.0]], atol=1e-6)


def test_returns_beyond_the_ends_go_to_these() -> None:
    atoms, anything = support(-1.0, 1.0, 3), tf.constant([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    found = project(tf.constant([9.0, -9.0]), tf.constant([1.0, 1.0]), anything, atoms)
    np.testing.assert_allclose(found, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 3, 11, 51]),
    st.sampled_from([(-10.0, 10.0), (0.0, 500.0), (-0.3, 0.1)]),
)
def test_projections_equal_the_papers_algorithm_and_lose_no_probability(
    seed: int, count: int, bounds: tuple[float, float]
) -> None:
    rng = np.random.default_rng(seed)
    width = bounds[1] - bounds[0]
    rewards = rng.normal(scale=width / 2, size=4)
    rewards[:2] = 0.0, np.mean(bounds) / 2
    discounts = rng.random(4) * (rng.random(4) < 0.7)
    discounts[:2] = 1.0, 0.5  # the first row's atoms stay where they are, the second's come nearer to the middle
    probabilities = rng.dirichlet(np.ones(count), 4)
    found = project(
        tf.constant(rewards),
        tf.constant(discounts),
        tf.constant(probabilities),
        tf.linspace(*map(np.float64, bounds), count),
    )
    np.testing.assert_allclose(found, slow_projection(rewards, discounts, probabilities, *bounds), atol=1e-9)
    np.testing.assert_allclose(np.sum(found, axis=1), 1.0, rtol=1e-9)
    atoms = np.linspace(*bounds, count)
    moved = rewards[:, None] + discounts[:, None] * atoms
    is_kept = ((moved >= bounds[0]) & (moved <= bounds[1])).all(axis=1)  # nothing is cut off: so is the mean
    means = (moved * probabilities).sum(axis=1)
    np.testing.assert_allclose((np.asarray(found) @ atoms)[is_kept], means[is_kept], atol=1e-9 * width)


def example(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    mask = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 1, 1]], np.float32)
    return {
        "rewards": rng.normal(size=4).astype(np.float32),
        "discounts": np.array([0.9, 0.0, 0.5, 0.9], np.float32),
        "next_logits": rng.normal(size=(4, 3, 11)).astype(np.float32),
        "next_logits_online": rng.normal(size=(4, 3, 11)).astype(np.float32),
        "mask": mask,
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("left_out", [(), ("mask",), ("next_logits_online",), ("next_logits_online", "mask")])
def test_targets_equal_the_slow_reference(left_out: tuple[str, ...], compiled: bool) -> None:
    x = {name: array for name, array in example(1).items() if name not in left_out}
    atoms = np.linspace(-2.0, 2.0, 11)
    by = np.exp(x.get("next_logits_online", x["next_logits"]).astype(np.float64))
    q = (by / by.sum(-1, keepdims=True)) @ atoms
    legal = q if "mask" in left_out else np.where(x["mask"] > 0, q, -np.inf)
    p = np.exp(x["next_logits"].astype(np.float64))
    best = (p / p.sum(-1, keepdims=True))[np.arange(4), legal.argmax(axis=1)]
    expected = slow_projection(x["rewards"], x["discounts"], best, -2.0, 2.0)

    def call(inputs: dict[str, Any]) -> Any:
        return categorical_targets(**inputs, atoms=support(-2.0, 2.0, 11))

    function = tf.function(call, jit_compile=True) if compiled else call
    np.testing.assert_allclose(function({n: tf.constant(a) for n, a in x.items()}), expected, atol=1e-5)


def test_behind_a_truncation_where_nothing_is_legal_only_the_reward_counts() -> None:
    """Reward 1, discount 1, atoms 0, 1, 2; the first action's return is surely 1, which with the reward makes 2."""
    logits = tf.constant([[[-99.0, 0.0, -99.0], [0.0, 0.0, 0.0]]] * 2)
    mask = tf.constant([[0.0, 0.0], [1.0, 0.0]])
    found = categorical_targets(tf.ones(2), tf.ones(2), logits, support(0.0, 2.0, 3), mask=mask)
    np.testing.assert_allclose(found, [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], atol=1e-6)


def test_the_mean_of_a_distribution_is_its_q_value() -> None:
    logits = tf.math.log(tf.constant([[[0.5, 0.25, 0.25], [0.0001, 0.0001, 0.9998]]]))
    np.testing.assert_allclose(expected_q(logits, tf.constant([-4.0, 0.0, 8.0])), [[0.0, 7.998]], rtol=1e-4, atol=1e-6)


def test_losses_of_a_distribution() -> None:
    """Prediction 1/2, 1/4, 1/4 against 1/2, 1/2, 0: cross entropy 3/2 ln 2, of which ln 2 is the targets' entropy."""
    logits, targets = tf.math.log(tf.constant([[0.5, 0.25, 0.25]])), tf.constant([[0.5, 0.5, 0.0]])
    np.testing.assert_allclose(cross_entropy(logits, targets), [1.5 * math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(relative_entropy(logits, targets), [0.5 * math.log(2)], rtol=1e-6)
    same = tf.constant([[0.2, 0.3, 0.5]])
    np.testing.assert_allclose(relative_entropy(tf.math.log(same), same), [0.0], atol=1e-6)


@pytest.mark.parametrize("loss", [cross_entropy, relative_entropy])
def test_gradients_are_those_of_finite_differences_and_targets_have_none(loss: Any) -> None:
    rng = np.random.default_rng(2)
    actions, mask = tf.constant([0, 1]), tf.constant([[1, 0], [1, 1]])

    def losses(logits: Any, next_logits: Any, next_logits_online: Any) -> Any:
        targets = categorical_targets(
            tf.constant([0.3, -0.4], tf.float64), tf.constant([0.9, 0.5], tf.float64), next_logits,
            tf.linspace(np.float64(-2), np.float64(2), 5), next_logits_online=next_logits_online, mask=mask,
        )  # fmt: skip
        return loss(chosen(logits, actions), targets)

    inputs = {name: rng.normal(size=(2, 2, 5)) for name in ("logits", "next_logits", "next_logits_online")}
    check_gradients(losses, inputs, without=("next_logits", "next_logits_online"))
