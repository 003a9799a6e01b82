"""IMPACT's ratio: hand-worked numbers, its two limits, its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses.vtrace import impact_log_ratio


def log_ratio(new: float, target: float, behaviour: float, max_ratio: float = 2.0) -> float:
    logs = (tf.constant([math.log(p)]) for p in (new, target, behaviour))
    return float(impact_log_ratio(*logs, max_ratio=max_ratio)[0])


@pytest.mark.parametrize(
    ("new", "target", "behaviour", "expected"),
    [
        (0.6, 0.5, 0.5, 1.2),  # the target policy sampled: PPO's ratio
        (0.6, 0.5, 0.9, 1.2),  # 0.9 / 0.5 is below 2: to the target policy, whoever sampled
        (0.6, 0.5, 0.1, 1.2),
        (0.2, 0.1, 0.8, 0.5),  # 0.8 / 0.1 is cut at 2: 2 * 0.2 / 0.8
        (0.4, 0.1, 0.2, 4.0),  # just not cut
    ],
)
def test_is_the_ratio_to_the_target_policy_unless_that_gave_the_action_up(
    new: float, target: float, behaviour: float, expected: float
) -> None:
    assert math.exp(log_ratio(new, target, behaviour)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("max_ratio", [0.5, 1.0, 2.0, math.inf])
def test_equals_the_product_of_the_paper(max_ratio: float) -> None:
    """min(mu / pi_target, rho) pi / mu, in double precision."""
    rng = np.random.default_rng(0)
    new, target, behaviour = np.log(rng.uniform(1e-4, 1.0, (3, 50)))
    expected = np.minimum(np.exp(behaviour - target), max_ratio) * np.exp(new - behaviour)
    got = impact_log_ratio(*(tf.constant(x, tf.float32) for x in (new, target, behaviour)), max_ratio=max_ratio)
    np.testing.assert_allclose(np.exp(got.numpy()), expected, rtol=1e-4)


def test_a_gradient_flows_to_the_policy_that_learns_alone() -> None:
    logs = [tf.Variable([math.log(p)]) for p in (0.2, 0.1, 0.8)]
    with tf.GradientTape() as tape:
        ratio = tf.exp(impact_log_ratio(*(tf.convert_to_tensor(x) for x in logs)))
    new, target, behaviour = tape.gradient(ratio, logs)
    assert float(new[0]) == pytest.approx(0.5, rel=1e-5)
    assert target is None
    assert behaviour is None
