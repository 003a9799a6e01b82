"""Q-learning with expected returns and with distributions, against slow references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from aiorl.learning.losses.q_learning import (
    best_legal,
    categorical_targets,
    chosen,
    cross_entropy,
    dueling,
    huber,
    legal_q,
    project,
    q_targets,
    relative_entropy,
    rescaled,
    support,
    unrescaled,
)
from aiorl.learning.steps import weighted_mean


def example(seed: int, rows: int = 6, actions: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, actions)) < 0.5).astype(np.float32)
    mask[np.arange(rows), rng.integers(actions, size=rows)] = 1
    return {
        "rewards": rng.normal(size=rows).astype(np.float32),
        "discounts": (rng.random(rows) * (rng.random(rows) < 0.8)).astype(np.float32),
        "next_q": rng.normal(size=(rows, actions)).astype(np.float32),
        "next_q_online": rng.normal(size=(rows, actions)).astype(np.float32),
        "mask": mask,
    }


def slow_targets(
    rewards: Any, discounts: Any, next_q: Any, next_q_online: Any = None, mask: Any = None
) -> list[float]:
    """Compute targets row by row, over legal actions only."""
    targets = []
    for row in range(len(rewards)):
        legal = [a for a in range(next_q.shape[1]) if mask is None or mask[row, a]]
        by = next_q if next_q_online is None else next_q_online
        best = max(legal, key=lambda a: by[row, a])
        targets.append(float(rewards[row]) + float(discounts[row]) * float(next_q[row, best]))
    return targets


@pytest.mark.parametrize(
    ("left_out", "compiled"),
    [
        ((), True),
        ((), False),
        (("mask",), False),
        (("next_q_online",), False),
        (("next_q_online", "mask"), False),
    ],
)
def test_targets_equal_the_slow_reference(left_out: tuple[str, ...], compiled: bool) -> None:
    x = {name: array for name, array in example(1).items() if name not in left_out}
    function = tf.function(q_targets, jit_compile=True, autograph=False) if compiled else q_targets
    np.testing.assert_allclose(
        function(**{n: tf.constant(a) for n, a in x.items()}), slow_targets(**x), rtol=1e-6
    )


def test_an_illegal_action_never_wins_however_low_the_others_are() -> None:
    q = tf.constant([[-1e20, 5.0, -2e20]])
    mask = tf.constant([[1, 0, 1]], tf.uint8)
    assert best_legal(q, mask).numpy().tolist() == [0]
    assert np.isfinite(legal_q(q, mask)).all()
    assert legal_q(q, None) is q


def test_after_a_terminal_state_no_action_needs_to_be_legal() -> None:
    targets = q_targets(
        tf.constant([3.0]),
        tf.constant([0.0]),
        legal_q(tf.constant([[1.0, 2.0]]), tf.zeros((1, 2))),
        mask=tf.zeros((1, 2)),
    )
    assert targets.numpy().tolist() == [3.0]


@pytest.mark.parametrize(
    ("is_rescaled", "expected"), [(False, [3.0, 4.0]), (True, [1.003, 5**0.5 - 1 + 0.004])]
)
def test_after_a_truncation_without_legal_actions_only_the_reward_counts(
    is_rescaled: bool, expected: list[float]
) -> None:
    """Reward 3, discount 0.5; in the second row the second action is legal, of value 2, rescaled
    h(2).

    Targets 3 and 3 + 0.5 * 2 = 4; rescaled h(3) = sqrt(4) - 1 + 0.003 and h(4) = sqrt(5) - 1 +
    0.004.
    """
    value = 3**0.5 - 1 + 0.002 if is_rescaled else 2.0
    targets = q_targets(
        tf.constant([3.0, 3.0]),
        tf.constant([0.5, 0.5]),
        tf.constant([[8.0, value], [8.0, value]]),
        next_q_online=tf.constant([[9.0, 1.0], [9.0, 1.0]]),
        mask=tf.constant([[0.0, 0.0], [0.0, 1.0]]),
        is_rescaled=is_rescaled,
    )
    np.testing.assert_allclose(targets, expected, rtol=1e-5)


@pytest.mark.parametrize("is_masked", [False, True])
def test_dueling_of_atoms_is_that_of_each_atom(is_masked: bool) -> None:
    rng = np.random.default_rng(0)
    values, advantages = rng.normal(size=(5, 1, 3)), rng.normal(size=(5, 4, 3))
    mask = tf.constant(example(2, rows=5)["mask"]) if is_masked else None
    found = dueling(tf.constant(values), tf.constant(advantages), mask, axis=-2)
    for atom in range(3):
        expected = dueling(tf.constant(values[..., atom]), tf.constant(advantages[..., atom]), mask)
        np.testing.assert_allclose(found[..., atom], expected)


def test_gradients_are_those_of_finite_differences_and_targets_have_none() -> None:
    rng = np.random.default_rng(3)
    x = example(3)
    actions = tf.constant(rng.integers(4, size=6), tf.int32)

    def loss(values: Any, advantages: Any, next_q: Any, next_q_online: Any, weights: Any) -> Any:
        targets = q_targets(
            tf.constant(x["rewards"], tf.float64),
            tf.constant(x["discounts"], tf.float64),
            next_q,
            next_q_online=next_q_online,
            mask=tf.constant(x["mask"]),
        )
        q = dueling(values, advantages, tf.constant(x["mask"]))
        return weighted_mean(huber(targets - chosen(q, actions), delta=0.7), weights)

    inputs = {
        "values": rng.normal(size=(6, 1)),
        "advantages": rng.normal(size=(6, 4)),
        "next_q": x["next_q"],
        "next_q_online": x["next_q_online"],
        "weights": rng.random(6),
    }
    check_gradients(loss, inputs, without=("next_q", "next_q_online", "weights"))


def test_rescaling_is_inverted_for_returns_of_any_size() -> None:
    returns = np.concatenate([-np.logspace(-4, 6, 41), [0.0], np.logspace(-4, 6, 41)]).astype(
        np.float32
    )
    found = unrescaled(rescaled(tf.constant(returns))).numpy()
    np.testing.assert_allclose(found, returns, rtol=2e-5, atol=1e-6)


F64 = NDArray[np.float64]


def slow_projection(
    rewards: F64, discounts: F64, probabilities: F64, v_min: float, v_max: float
) -> F64:
    """Project by algorithm 1 of the paper as printed: floor, ceiling, and a share for each."""
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


def test_returns_beyond_the_ends_go_to_the_end_atoms() -> None:
    atoms, anything = support(-1.0, 1.0, 3), tf.constant([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    found = project(tf.constant([9.0, -9.0]), tf.constant([1.0, 1.0]), anything, atoms)
    np.testing.assert_allclose(found, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], atol=1e-6)


@settings(max_examples=25)
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
    # the first row's atoms stay in place, the second's move towards the middle
    discounts[:2] = (
        1.0,
        0.5,
    )
    probabilities = rng.dirichlet(np.ones(count), 4)
    found = project(
        tf.constant(rewards),
        tf.constant(discounts),
        tf.constant(probabilities),
        tf.linspace(*map(np.float64, bounds), count),
    )
    np.testing.assert_allclose(
        found, slow_projection(rewards, discounts, probabilities, *bounds), atol=1e-9
    )
    np.testing.assert_allclose(np.sum(found, axis=1), 1.0, rtol=1e-9)
    atoms = np.linspace(*bounds, count)
    moved = rewards[:, None] + discounts[:, None] * atoms
    # nothing is clipped, so the mean is kept too
    is_kept = ((moved >= bounds[0]) & (moved <= bounds[1])).all(axis=1)
    means = (moved * probabilities).sum(axis=1)
    np.testing.assert_allclose(
        (np.asarray(found) @ atoms)[is_kept], means[is_kept], atol=1e-9 * width
    )


def atoms_example(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    mask = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 1, 1]], np.float32)
    return {
        "rewards": rng.normal(size=4).astype(np.float32),
        "discounts": np.array([0.9, 0.0, 0.5, 0.9], np.float32),
        "next_logits": rng.normal(size=(4, 3, 11)).astype(np.float32),
        "next_logits_online": rng.normal(size=(4, 3, 11)).astype(np.float32),
        "mask": mask,
    }


@pytest.mark.parametrize(
    ("left_out", "compiled"),
    [
        ((), True),
        ((), False),
        (("mask",), False),
        (("next_logits_online",), False),
        (("next_logits_online", "mask"), False),
    ],
)
def test_distributions_equal_the_slow_reference(left_out: tuple[str, ...], compiled: bool) -> None:
    x = {name: array for name, array in atoms_example(1).items() if name not in left_out}
    atoms = np.linspace(-2.0, 2.0, 11)
    by = np.exp(x.get("next_logits_online", x["next_logits"]).astype(np.float64))
    q = (by / by.sum(-1, keepdims=True)) @ atoms
    legal = q if "mask" in left_out else np.where(x["mask"] > 0, q, -np.inf)
    p = np.exp(x["next_logits"].astype(np.float64))
    best = (p / p.sum(-1, keepdims=True))[np.arange(4), legal.argmax(axis=1)]
    expected = slow_projection(x["rewards"], x["discounts"], best, -2.0, 2.0)

    def call(inputs: dict[str, Any]) -> Any:
        return categorical_targets(**inputs, atoms=support(-2.0, 2.0, 11))

    function = tf.function(call, jit_compile=True, autograph=False) if compiled else call
    np.testing.assert_allclose(
        function({n: tf.constant(a) for n, a in x.items()}), expected, atol=1e-5
    )


def test_without_legal_actions_only_the_reward_counts_in_distributions() -> None:
    """Reward 1, discount 1, atoms 0, 1, 2; the first action's return is certainly 1, which with the
    reward makes 2.
    """
    logits = tf.constant([[[-99.0, 0.0, -99.0], [0.0, 0.0, 0.0]]] * 2)
    mask = tf.constant([[0.0, 0.0], [1.0, 0.0]])
    found = categorical_targets(tf.ones(2), tf.ones(2), logits, support(0.0, 2.0, 3), mask=mask)
    np.testing.assert_allclose(found, [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize("loss", [cross_entropy, relative_entropy])
def test_gradients_of_distributions_are_those_of_finite_differences(loss: Any) -> None:
    rng = np.random.default_rng(2)
    actions, mask = tf.constant([0, 1]), tf.constant([[1, 0], [1, 1]])

    def losses(logits: Any, next_logits: Any, next_logits_online: Any) -> Any:
        targets = categorical_targets(
            tf.constant([0.3, -0.4], tf.float64),
            tf.constant([0.9, 0.5], tf.float64),
            next_logits,
            tf.linspace(np.float64(-2), np.float64(2), 5),
            next_logits_online=next_logits_online,
            mask=mask,
        )
        return loss(chosen(logits, actions), targets)

    inputs = {
        name: rng.normal(size=(2, 2, 5)) for name in ("logits", "next_logits", "next_logits_online")
    }
    check_gradients(losses, inputs, without=("next_logits", "next_logits_online"))
