"""PPO's terms: hand-worked numbers and special cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from aiorl.learning.losses.policy_gradient import approximate_kl, clipped_surrogate, clipped_value_loss, ppo_loss


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
