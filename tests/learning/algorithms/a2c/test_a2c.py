"""A2C: its plans, and its loss against the same formula in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from update_losses import LossCase, standardised

from aiorl.data import columns as c
from aiorl.learning.algorithms.a2c import A2C, A2CConfig

COEFFICIENTS = {"lr": 0.0, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03}


def test_wants_leases_for_exactly_one_batch_and_takes_one_step_on_it() -> None:
    config = A2CConfig(env="x", num_envs_per_worker=4, rollout_fragment_length=8, train_batch_size=64, gamma=0.9)
    plan = A2C.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag) == ("on_policy", 2, 0)
    assert (config.minibatch_steps(), config.num_sgd_iter) == (64, 1)
    columns = A2C.sample_plan(config)
    assert list(columns.columns) == [c.OBS, c.ACTIONS, c.ADVANTAGES, c.VALUE_TARGETS]
    assert (columns.postprocess, columns.postprocess_params) == ("gae", {"gamma": 0.9, "lam": 1.0})


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
@pytest.mark.parametrize("normalize_advantages", [True, False])
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, normalize_advantages: bool
) -> None:
    config = A2CConfig(env="x", normalize_advantages=normalize_advantages)
    model = make_model(space)
    case = LossCase(A2C, config, model, make_fragment)
    total, metrics = case.of_rows(COEFFICIENTS)
    row = case.transitions()
    inputs, values = (output.numpy() for output in model.forward(tf.constant(row[c.OBS])))
    advantages = standardised(row[c.ADVANTAGES]) if normalize_advantages else row[c.ADVANTAGES]
    policy_loss = -(model.distribution.logp(inputs, row[c.ACTIONS]) * advantages).mean()
    vf_loss = ((values - row[c.VALUE_TARGETS]) ** 2).mean()
    entropy = model.distribution.entropy(inputs).mean()

    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"] == pytest.approx(vf_loss, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert total == pytest.approx(policy_loss + 0.7 * vf_loss - 0.03 * entropy, rel=1e-4, abs=1e-5)


def test_sequences_of_a_recurrent_model_give_the_same_loss_in_any_order(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    config = A2CConfig(env="x", model={"use_lstm": True})
    case = LossCase(A2C, config, make_model(use_lstm=True), make_fragment)
    one, other = (case.of_sequences(COEFFICIENTS, order) for order in ([0, 1, 2, 3], [2, 0, 3, 1]))
    assert one == pytest.approx(other, rel=1e-5)
