"""IMPALA's loss against the same formula in NumPy, with the NumPy distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from aiorl.data import columns as c
from aiorl.data.layout import laid_out
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_algorithm import model_columns
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.losses.vtrace import pg_advantages, vtrace

COEFFICIENTS = {
    "lr": 0.0, "gamma": 0.9, "rho_bar": 1.1, "rho_bar_pg": 0.9, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03,
    "kl_stop": 1.0,
}  # fmt: skip
LENGTH, NUM = 5, 4


@pytest.mark.parametrize("settings", [{}, {"vtrace": False}, {"lambda_": 0.8}, {"normalize_advantages": True}])
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], settings: dict[str, Any]
) -> None:
    config = IMPALAConfig(env="x", **settings)
    model = make_model()
    for name, variable in model.variables.items():
        variable.assign(variable + 0.1 * tf.random.stateless_normal(variable.shape, [7, len(name)]))
    plan = IMPALA.sample_plan(config)
    x = make_fragment(plan, model, LENGTH, NUM, 3, invalid=True)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = {name: tf.constant(array) for name, array in buffers.sequences([x], NUM, LENGTH).items()}
    coefficients = {name: tf.constant(value) for name, value in COEFFICIENTS.items()}
    total, metrics = IMPALA(config, model).update_spec().loss(batch, coefficients)

    def flat(column: Any) -> Any:
        return column.reshape(LENGTH * NUM, *column.shape[2:])

    inputs, values = (output.numpy() for output in model.forward(tf.constant(flat(x[c.OBS]))))
    values = values.reshape(LENGTH, NUM)
    logp = model.distribution.logp(inputs, flat(x[c.ACTIONS])).reshape(LENGTH, NUM)
    valid = x[c.VALID]
    log_rhos = np.where(valid, logp - x[c.ACTION_LOGP], 0).astype(np.float32)
    returns = vtrace(  # itself held against a slow reference by its own test
        *(
            tf.constant(np.asarray(column, np.float32))
            for column in (
                values, model.forward(tf.constant(x[c.LAST_OBS]))[1], x[c.REWARDS], x[c.TERMINATEDS],
                x[c.TRUNCATEDS], x[c.BOOTSTRAP_VALUES], log_rhos if config.vtrace else 0 * log_rhos,
            )
        ),
        gamma=0.9, lam=config.lambda_, rho_bar=1.1, rho_bar_pg=0.9, valid=tf.constant(valid.astype(np.float32)),
    )  # fmt: skip
    weighted = pg_advantages(returns.advantages, returns.weights, normalize=config.normalize_advantages)
    vs, advantages = returns.vs.numpy()[valid], weighted.numpy()[valid]
    policy_loss = -(logp[valid] * advantages).mean()
    vf_loss = ((values[valid] - vs) ** 2).mean()
    entropy = model.distribution.entropy(inputs).reshape(LENGTH, NUM)[valid].mean()
    rhos = np.exp(log_rhos)[valid]
    assert metrics["policy_loss"].numpy() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"].numpy() == pytest.approx(vf_loss, rel=1e-4)
    assert metrics["entropy"].numpy() == pytest.approx(entropy, rel=1e-4)
    assert metrics["kl"].numpy() == pytest.approx((rhos - 1 - np.log(rhos)).mean(), rel=1e-3)
    assert metrics["mean_rho"].numpy() == pytest.approx(np.minimum(rhos, 1.1).mean(), rel=1e-4)
    assert metrics["clipped_rhos"].numpy() == pytest.approx((rhos > 1.1).mean(), abs=1e-6)
    assert total.numpy() == pytest.approx(policy_loss + 0.7 * vf_loss - 0.03 * entropy, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("cell", ["use_lstm", "use_gru"])
def test_a_cell_that_sees_rewards_sees_those_of_the_environment_where_scaled_ones_are_learned_from(
    make_model: Callable[..., Any], cell: str
) -> None:
    """Two steps with rewards 4 and -2, scaled 0.5 and -0.25: targets are vs_1 = -0.25 + 0.9 V, vs_0 = 0.5 + 0.9 vs_1.

    V is the value of the last observation, by a cell that sees -2 there.
    """
    settings = {cell: True, "vf_share_layers": True, "lstm_use_prev_action_reward": True}
    config = IMPALAConfig(env="x", normalize_rewards=True, vtrace=False, model=settings)
    model = make_model(**settings)
    obs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    actions, rewards = np.array([1, 0, 1], np.int32), np.array([0, 4, -2], np.float32)
    flags = dict.fromkeys((c.TERMINATEDS, c.TRUNCATEDS), np.zeros(2, np.bool_))
    states = {c.state_in(index): np.zeros((2, *shape), np.float32) for index, shape in enumerate(model.state_shapes)}
    zeros = np.zeros(2, np.float32)
    rows = {
        c.EPS_ID: np.zeros(2, np.int64), c.AGENT_INDEX: np.zeros(2, np.int32), c.OBS: obs[:2], c.NEW_OBS: obs[1:],
        c.ACTIONS: actions[1:], c.PREV_ACTIONS: actions[:2], c.REWARDS: rewards[1:], c.PREV_REWARDS: rewards[:2],
        c.SCALED_REWARDS: rewards[1:] / 8, c.ACTION_LOGP: zeros, c.BOOTSTRAP_VALUES: zeros, **flags, **states,
    }  # fmt: skip
    plan = dataclasses.replace(IMPALA.sample_plan(config), return_discount=0.9)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = buffers.sequences([laid_out(rows, plan, 2)], 1, 2)
    coefficients = {name: tf.constant(value) for name, value in COEFFICIENTS.items()}
    loss = IMPALA(config, model).update_spec().loss
    _, metrics = loss({name: tf.constant(array) for name, array in batch.items()}, coefficients)

    state = [component[:1] for component in states.values()]
    values = []
    for t in range(3):
        _, value, state = model.forward_step(obs[t : t + 1], state, actions[t : t + 1], rewards[t : t + 1])
        values.append(float(value[0]))
    later = -0.25 + 0.9 * values[2]
    expected = ((values[0] - (0.5 + 0.9 * later)) ** 2 + (values[1] - later) ** 2) / 2
    assert metrics["vf_loss"].numpy() == pytest.approx(expected, rel=1e-5)
