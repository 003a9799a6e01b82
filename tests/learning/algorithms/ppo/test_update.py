"""PPO's loss against the same formula in NumPy, with the NumPy distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from update_losses import LossCase, standardised

from aiorl.data import columns as c
from aiorl.learning.algorithms.ppo import PPO, PPOConfig

COEFFICIENTS = {
    "lr": 0.0, "clip_param": 0.1, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03, "kl_coeff": 0.4, "kl_stop": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vf_clip_param": 0.2},
        {"kl_coeff": 0.4},
        {"normalize_advantages": False},
        {"kl_coeff": 0.4, "vf_clip_param": 1.0},
    ],
)
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, settings: dict[str, Any]
) -> None:
    config = PPOConfig(env="x", **settings)
    model = make_model(space)
    for name, variable in model.variables.items():
        variable.assign(variable + 0.1 * tf.random.stateless_normal(variable.shape, [7, len(name)]))
    case = LossCase(PPO, config, model, make_fragment)
    total, metrics = case.of_rows({**COEFFICIENTS, "vf_clip_param": settings.get("vf_clip_param", 0.0)})
    row = case.transitions()
    inputs, values = (output.numpy() for output in model.forward(tf.constant(row[c.OBS])))
    distribution = model.distribution
    log_ratio = distribution.logp(inputs, row[c.ACTIONS]) - row[c.ACTION_LOGP]
    advantages = standardised(row[c.ADVANTAGES]) if config.normalize_advantages else row[c.ADVANTAGES]
    ratio = np.exp(log_ratio)
    policy_loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).mean()
    errors = (values - row[c.VALUE_TARGETS]) ** 2
    if config.vf_clip_param is not None:
        old = row[c.VF_PREDS]
        moved = old + np.clip(values - old, -config.vf_clip_param, config.vf_clip_param)
        errors = np.maximum(errors, (moved - row[c.VALUE_TARGETS]) ** 2)
    entropy = distribution.entropy(inputs).mean()
    expected = policy_loss + 0.7 * errors.mean() - 0.03 * entropy
    kl = (ratio - 1 - log_ratio).mean()
    if config.kl_coeff > 0:
        kl = distribution.kl(row[c.ACTION_DIST_INPUTS], inputs).mean()
        expected += 0.4 * kl

    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"] == pytest.approx(errors.mean(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-5)
    assert metrics["clip_fraction"] == pytest.approx((np.abs(ratio - 1) > 0.1).mean(), abs=1e-6)
    assert total == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_sequences_give_the_same_loss_in_any_order(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    """Each with its own state: the states travel with the sequences."""
    config = PPOConfig(env="x", model={"use_gru": True})
    case = LossCase(PPO, config, make_model(use_gru=True), make_fragment)
    in_order = case.of_sequences(COEFFICIENTS, [0, 1, 2, 3])
    assert in_order == pytest.approx(case.of_sequences(COEFFICIENTS, [2, 0, 3, 1]), rel=1e-5)
    shuffled_state = {c.state_in(0): [1, 2, 3, 0]}
    assert in_order != pytest.approx(case.of_sequences(COEFFICIENTS, [0, 1, 2, 3], **shuffled_state), rel=1e-5)
