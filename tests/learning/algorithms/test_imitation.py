"""BC and MARWIL: plans, and the loss against the same formula in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from update_losses import LossCase

from aiorl.acting.filters import MeanStdFilter
from aiorl.data import columns as c
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.bc import BC, BCConfig
from aiorl.learning.algorithms.marwil import MARWIL, MARWILConfig
from aiorl.learning.algorithms.rows import model_columns


def test_takes_experience_of_any_age_and_nothing_but_observations_and_actions() -> None:
    config = BCConfig(env="x", input="data", rollout_fragment_length=128, train_batch_size=512)
    plan = BC.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag) == ("streaming", 4, None)
    columns = BC.sample_plan(config)
    assert (columns.columns, columns.postprocess) == ((c.OBS, c.ACTIONS), "none")


def test_raw_rows_are_filtered_when_they_become_a_train_batch(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    config = BCConfig(
        env="x", input="data", observation_filter="MeanStdFilter", train_batch_size=8, rollout_fragment_length=8
    )
    algorithm = BC(config, model := make_model())
    algorithm.merged_filter = own = MeanStdFilter((3,))
    fragment = make_fragment(BC.sample_plan(config), model, 4, 2)
    own.learn(5.0 + fragment[c.OBS].reshape(-1, 3))
    assert BC.sample_plan(config).raw_obs
    found = algorithm.buffers.column(algorithm.make_batch([fragment]), c.OBS)[:8]
    np.testing.assert_allclose(found, own(fragment[c.OBS].reshape(-1, 3), update=False), atol=1e-5)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
@pytest.mark.parametrize("model_settings", [{}, {"use_lstm": True}])
def test_loss_is_that_of_maximum_likelihood(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, model_settings: dict[str, Any]
) -> None:
    config = BCConfig(env="x", input="data", model=model_settings, postprocess_inputs=bool(model_settings))
    model = make_model(space, **model_settings)
    plan = BC.sample_plan(config)
    fragment = make_fragment(plan, model, 5, 4, 3, invalid=True)
    if model_settings:  # one step, so that the network's own states are all that counts
        fragment = {name: column if c.is_of_sequences(name) else column[-1:] for name, column in fragment.items()}
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = buffers.sequences([fragment], 4, 1) if model_settings else buffers.rows([fragment], 20)
    total, metrics = (
        BC(config, model)
        .update_spec()
        .loss(
            {name: tf.constant(array) for name, array in batch.items()},
            {"lr": tf.constant(0.0), "entropy_coeff": tf.constant(0.05)},
        )
    )
    keep = fragment[c.VALID].reshape(-1)
    row = {
        name: column.reshape(len(keep), *column.shape[2:]) for name, column in fragment.items() if name[:5] != "state"
    }
    if model_settings:
        states = [fragment[c.state_in(index)] for index in range(len(model.state_shapes))]
        inputs, _ = model.forward_sequence(fragment[c.OBS], states, np.zeros((1, 4), bool))
        inputs = inputs.numpy()[0]
    else:
        inputs = model.forward(tf.constant(row[c.OBS]))[0].numpy()
    likelihood = model.distribution.logp(inputs, row[c.ACTIONS])[keep].mean()
    entropy = entropies.entropy(model.distribution, inputs)[keep].mean()
    assert metrics["policy_loss"].numpy() == pytest.approx(-likelihood, rel=1e-4, abs=1e-5)
    assert total.numpy() == pytest.approx(-likelihood - 0.05 * entropy, rel=1e-4, abs=1e-5)


SHAPE: dict[str, Any] = {
    "env": "x", "input": "data", "seed": 0, "eager": True, "rollout_fragment_length": 8, "num_envs_per_worker": 4,
    "train_batch_size": 64, "sgd_minibatch_size": 64,
}  # fmt: skip


def test_takes_experience_of_any_age_with_its_discounted_returns() -> None:
    config = MARWILConfig.from_mapping({**SHAPE, "gamma": 0.9})
    assert MARWIL.lease_plan(config).max_policy_lag is None
    plan = MARWIL.sample_plan(config)
    assert plan.columns == (c.OBS, c.ACTIONS, c.VALUE_TARGETS)
    assert (plan.postprocess, plan.postprocess_params) == ("gae", {"gamma": 0.9, "lam": 1.0})


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
@pytest.mark.parametrize("beta", [0.0, 1.5])
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, beta: float
) -> None:
    config = MARWILConfig(env="x", input="data", max_weight=1.3)
    model = make_model(space)
    case = LossCase(MARWIL, config, model, make_fragment)
    total, metrics = case.of_rows(
        {"lr": 0.0, "beta": beta, "advantage_scale": 2.0, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03}
    )
    row = case.transitions()
    inputs, values = (output.numpy() for output in model.forward(tf.constant(row[c.OBS])))
    errors = row[c.VALUE_TARGETS] - values
    weights = np.minimum(np.exp(beta * errors / 2.0), 1.3)
    policy_loss = -(weights * model.distribution.logp(inputs, row[c.ACTIONS])).mean()
    entropy = entropies.entropy(model.distribution, inputs).mean()

    assert metrics["mean_weight"] == pytest.approx(weights.mean(), rel=1e-4)
    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"] == pytest.approx((errors**2).mean(), rel=1e-4)
    assert total == pytest.approx(policy_loss + 0.7 * (errors**2).mean() - 0.03 * entropy, rel=1e-4, abs=1e-5)


def test_advantages_are_divided_by_the_root_of_their_mean_square_so_far_and_it_is_kept(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    settings = {
        **SHAPE, "moving_average_sqd_adv_norm_start": 9.0, "moving_average_sqd_adv_norm_update_rate": 0.5,
    }  # fmt: skip
    config = MARWILConfig.from_mapping(settings)
    algorithm = MARWIL(config, make_model())
    assert algorithm.coefficients(0)["advantage_scale"] == pytest.approx(3.0)
    fragments = [make_fragment(MARWIL.sample_plan(config), algorithm.model, 8, 4, seed) for seed in range(2)]
    metrics = algorithm.update(algorithm.make_batch(fragments), 0).metrics
    expected = (9.0 + metrics["vf_loss"]) / 2
    assert metrics["advantages_mean_square"] == pytest.approx(expected)
    state = algorithm.get_state()
    other = MARWIL(config, make_model())
    other.set_state(state)
    assert other.coefficients(0)["advantage_scale"] == pytest.approx(expected**0.5)
    del state.values["advantages_mean_square"]
    with pytest.raises(CheckpointError, match="advantages_mean_square"):
        other.set_state(state)
