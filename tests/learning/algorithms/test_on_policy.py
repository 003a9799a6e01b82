"""PPO, A2C and PG: settings, plans, and the loss against the same formula in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from update_losses import LossCase, standardised

from aiorl.data import columns as c
from aiorl.errors import CheckpointError, ConfigError, InternalError
from aiorl.learning.algorithms.a2c import A2C, A2CConfig
from aiorl.learning.algorithms.impala import IMPALAConfig
from aiorl.learning.algorithms.pg import PG, PGConfig
from aiorl.learning.algorithms.ppo import PPO, PPOConfig


def test_defaults_go_together() -> None:
    PPOConfig.from_mapping({"env": "CartPole-v1"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_batch_size": 4000, "rollout_fragment_length": 64}, "train_batch_size"),
        ({"train_batch_size": 2048, "sgd_minibatch_size": 4096}, "sgd_minibatch_size"),
        ({"model": {"use_lstm": True}, "sgd_minibatch_size": 100, "rollout_fragment_length": 64}, "sgd_minibatch_size"),
        ({"lr_schedule": [[10, 1e-3], [5, 1e-4]]}, "lr_schedule"),
        ({"entropy_coeff_schedule": []}, "entropy_coeff_schedule"),
        ({"clip_param": 0}, "clip_param"),
        ({"lambda_": 1.5}, "lambda_"),
        ({"num_sgd_iter": 0}, "num_sgd_iter"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.from_mapping({"env": "CartPole-v1", **settings})
    assert caught.value.key == key


@pytest.mark.parametrize(("batch", "minibatch"), [(4096, 128), (65_536, 2048), (32, 32), (2048, 64)])
def test_minibatches_grow_with_the_train_batch(batch: int, minibatch: int) -> None:
    config = PPOConfig(train_batch_size=batch, num_envs_per_worker=1, rollout_fragment_length=32)
    assert config.minibatch_steps() == minibatch
    assert config.fragments_per_batch() == batch // 32


@pytest.mark.parametrize(("batch", "minibatch"), [(4096, 400), (12_800, 400), (200, 200)])
def test_minibatches_of_a_recurrent_network_hold_four_sequences(batch: int, minibatch: int) -> None:
    sizes = {"train_batch_size": batch - batch % 100, "rollout_fragment_length": 100, "num_envs_per_worker": 1}
    assert PPOConfig(model={"use_lstm": True}, **sizes).minibatch_steps() == minibatch


SHAPE: dict[str, Any] = {
    "eager": True,
    "env": "x", "seed": 0, "rollout_fragment_length": 8, "num_envs_per_worker": 4, "train_batch_size": 64,
    "sgd_minibatch_size": 16,
}  # fmt: skip
ONE_STEP = {"num_sgd_iter": 1, "sgd_minibatch_size": 64}


def test_wants_leases_for_exactly_one_batch_of_the_current_version() -> None:
    plan = PPO.lease_plan(PPOConfig.from_mapping(SHAPE))
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag) == ("on_policy", 2, 0)


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({}, []),
        ({"vf_clip_param": 10.0}, [c.VF_PREDS]),
        ({"kl_coeff": 0.2}, [c.ACTION_DIST_INPUTS]),
        ({"model": {"use_lstm": True}}, [c.TERMINATEDS, c.TRUNCATEDS]),
    ],
)
def test_asks_workers_for_no_column_it_does_not_use(settings: dict[str, Any], columns: list[str]) -> None:
    plan = PPO.sample_plan(PPOConfig.from_mapping({**SHAPE, "gamma": 0.9, "lambda_": 0.8, **settings}))
    base = [c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]
    assert list(plan.of_rows) == base + columns
    assert (plan.postprocess, plan.postprocess_params) == ("gae", {"gamma": 0.9, "lam": 0.8})
    assert len(plan.of_sequences) == (4 if "model" in settings else 0)


def test_refuses_another_algorithms_config() -> None:
    with pytest.raises(InternalError, match="IMPALAConfig"):
        PPO.lease_plan(IMPALAConfig())


@pytest.fixture
def make(make_model: Callable[..., Any]) -> Callable[..., PPO]:
    return lambda **settings: PPO(PPOConfig.from_mapping({**SHAPE, **settings}), make_model())


@pytest.fixture
def train(make: Callable[..., PPO], make_fragment: Callable[..., Any]) -> Callable[..., Any]:
    def run(**settings: Any) -> tuple[PPO, dict[str, float]]:
        algorithm = make(**settings)
        plan = PPO.sample_plan(PPOConfig.from_mapping({**SHAPE, **settings}))
        fragments = [make_fragment(plan, algorithm.model, 8, 4, seed) for seed in range(2)]
        return algorithm, algorithm.update(algorithm.make_batch(fragments), 0).metrics

    return run


@pytest.mark.parametrize(("target", "factor"), [(1e-6, 1.5), (1e6, 0.5)])
def test_the_penalty_adapts_towards_its_target_and_is_kept(
    make: Callable[..., PPO], train: Callable[..., Any], target: float, factor: float
) -> None:
    algorithm, metrics = train(kl_coeff=0.2, kl_target=target, lr=1e-2, **ONE_STEP)
    assert metrics["cur_kl_coeff"] == pytest.approx(0.2)
    assert algorithm.coefficients(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    state = algorithm.get_state()
    other = make(kl_coeff=0.2)
    other.set_state(state)
    assert other.coefficients(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    del state.values["kl_coeff"]
    with pytest.raises(CheckpointError, match="kl_coeff"):
        other.set_state(state)


def test_the_penalty_goes_by_the_divergence_of_the_last_epoch(train: Callable[..., Any]) -> None:
    """Three times the mean over three epochs is twice that over the first two, and that of the third.

    These rows are of another policy, so the divergence falls. With a target between twice the one and twice the other,
    the mean over all would leave the weight as it was.
    """
    settings = {"kl_coeff": 0.2, "lr": 1e-2}
    two, three = (train(num_sgd_iter=epochs, **settings)[1]["kl"] for epochs in (2, 3))
    last = 3 * three - 2 * two
    assert last < 0.95 * three
    algorithm, metrics = train(num_sgd_iter=3, kl_target=last + three, **settings)
    assert metrics["kl"] == pytest.approx(three)
    assert algorithm.coefficients(0)["kl_coeff"] == pytest.approx(0.2 * 0.5)
    assert metrics["kl_last_epoch"] == pytest.approx(last, rel=1e-4)


def test_stops_early_once_the_policy_has_moved_too_far(train: Callable[..., Any]) -> None:
    _, metrics = train(num_sgd_iter=3)
    assert metrics["num_sgd_steps"] == 12
    _, metrics = train(num_sgd_iter=3, kl_stop=1e-9, lr=1e-2)
    assert metrics["num_sgd_steps"] == 1


def test_without_shuffling_rows_are_visited_in_order(
    make: Callable[..., PPO], make_fragment: Callable[..., Any]
) -> None:
    algorithm = make(shuffle_sequences=False, num_sgd_iter=2)
    plan = PPO.sample_plan(PPOConfig.from_mapping(SHAPE))
    batch = algorithm.make_batch([make_fragment(plan, algorithm.model, 8, 4, seed) for seed in range(2)])
    order, num_minibatches = algorithm._order(batch)
    np.testing.assert_array_equal(order.reshape(2, 64), np.tile(np.arange(64), (2, 1)))
    assert num_minibatches == len(order)
    shuffled = make(num_sgd_iter=2)
    order = shuffled._order(batch)[0].reshape(2, 64)
    assert not np.array_equal(order[0], order[1])
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(64), (2, 1)))


def test_clipping_follows_its_schedules_by_env_steps_and_says_where_it_is(
    make: Callable[..., PPO], make_fragment: Callable[..., Any]
) -> None:
    settings = {"clip_param_schedule": [[0, 0.3], [1000, 0.1]], "vf_clip_param_schedule": [[0, 5], [1000, 1]]}
    algorithm = make(**settings, **ONE_STEP)
    plan = PPO.sample_plan(PPOConfig.from_mapping({**SHAPE, **settings}))
    assert c.VF_PREDS in plan.columns
    fragments = [make_fragment(plan, algorithm.model, 8, 4, seed) for seed in range(2)]
    metrics = [algorithm.update(algorithm.make_batch(fragments), steps).metrics for steps in (0, 500, 1000)]
    assert [found["clip_param"] for found in metrics] == pytest.approx([0.3, 0.2, 0.1])
    assert [found["vf_clip_param"] for found in metrics] == pytest.approx([5.0, 3.0, 1.0])


def test_a_schedule_of_one_value_clips_as_that_value_does(
    make: Callable[..., PPO], make_fragment: Callable[..., Any]
) -> None:
    weights = []
    for settings in (
        {"clip_param": 0.05, "vf_clip_param": 0.1},
        {"clip_param": 0.7, "clip_param_schedule": [[0, 0.05]], "vf_clip_param_schedule": [[0, 0.1]]},
    ):
        algorithm = make(lr=0.01, **settings, **ONE_STEP)
        plan = PPO.sample_plan(PPOConfig.from_mapping({**SHAPE, **settings}))
        fragments = [make_fragment(plan, algorithm.model, 8, 4, seed) for seed in range(2)]
        algorithm.update(algorithm.make_batch(fragments), 0)
        weights.append(algorithm.get_weights())
    for name, array in weights[0].items():
        np.testing.assert_array_equal(weights[1][name], array)


@pytest.mark.parametrize("key", ["clip_param_schedule", "vf_clip_param_schedule"])
@pytest.mark.parametrize("points", [[[0, 0.2], [10, 0.0]], [[5, 0.2], [1, 0.1]], []])
def test_a_schedule_of_clipping_that_is_none_is_refused_by_name(key: str, points: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        PPOConfig.from_mapping({**SHAPE, key: points})


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
    entropy = entropies.entropy(distribution, inputs).mean()
    expected = policy_loss + 0.7 * errors.mean() - 0.03 * entropy
    kl = (ratio - 1 - log_ratio).mean()
    if config.kl_coeff > 0:
        kl = entropies.kl(distribution, row[c.ACTION_DIST_INPUTS], inputs).mean()
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


A2C_COEFFICIENTS = {"lr": 0.0, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03}


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
def test_a2c_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, normalize_advantages: bool
) -> None:
    config = A2CConfig(env="x", normalize_advantages=normalize_advantages)
    model = make_model(space)
    case = LossCase(A2C, config, model, make_fragment)
    total, metrics = case.of_rows(A2C_COEFFICIENTS)
    row = case.transitions()
    inputs, values = (output.numpy() for output in model.forward(tf.constant(row[c.OBS])))
    advantages = standardised(row[c.ADVANTAGES]) if normalize_advantages else row[c.ADVANTAGES]
    policy_loss = -(model.distribution.logp(inputs, row[c.ACTIONS]) * advantages).mean()
    vf_loss = ((values - row[c.VALUE_TARGETS]) ** 2).mean()
    entropy = entropies.entropy(model.distribution, inputs).mean()

    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"] == pytest.approx(vf_loss, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert total == pytest.approx(policy_loss + 0.7 * vf_loss - 0.03 * entropy, rel=1e-4, abs=1e-5)


def test_a2c_sequences_give_the_same_loss_in_any_order(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    config = A2CConfig(env="x", model={"use_lstm": True})
    case = LossCase(A2C, config, make_model(use_lstm=True), make_fragment)
    one, other = (case.of_sequences(A2C_COEFFICIENTS, order) for order in ([0, 1, 2, 3], [2, 0, 3, 1]))
    assert one == pytest.approx(other, rel=1e-5)


PG_COEFFICIENTS = {"lr": 0.0, "entropy_coeff": 0.03}


def test_wants_leases_for_exactly_one_batch_of_whole_episodes_and_takes_one_step_on_it() -> None:
    config = PGConfig(env="x", num_envs_per_worker=4, rollout_fragment_length=8, train_batch_size=64, gamma=0.9)
    plan = PG.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag) == ("on_policy", 2, 0)
    assert (config.minibatch_steps(), config.num_sgd_iter, config.batch_mode) == (64, 1, "complete_episodes")
    columns = PG.sample_plan(config)
    assert list(columns.columns) == [c.OBS, c.ACTIONS, c.ADVANTAGES]
    assert (columns.postprocess, columns.postprocess_params) == ("returns", {"gamma": 0.9})


@pytest.mark.parametrize(("name", "value"), [("lambda_", 0.9), ("vf_loss_coeff", 0.5)])
def test_settings_of_values_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        PGConfig(env="x", **{name: value})
    assert caught.value.key == name


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
@pytest.mark.parametrize("normalize_advantages", [True, False])
def test_pg_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, normalize_advantages: bool
) -> None:
    config = PGConfig(env="x", normalize_advantages=normalize_advantages)
    model = make_model(space)
    case = LossCase(PG, config, model, make_fragment)
    total, metrics = case.of_rows(PG_COEFFICIENTS)
    row = case.transitions()
    inputs = model.forward(tf.constant(row[c.OBS]))[0].numpy()
    returns = row[c.ADVANTAGES]
    weights = standardised(returns) if normalize_advantages else returns
    policy_loss = -(model.distribution.logp(inputs, row[c.ACTIONS]) * weights).mean()
    entropy = entropies.entropy(model.distribution, inputs).mean()

    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["mean_return"] == pytest.approx(returns.mean(), rel=1e-4)
    assert total == pytest.approx(policy_loss - 0.03 * entropy, rel=1e-4, abs=1e-5)


def test_pg_sequences_give_the_same_loss_in_any_order(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any]
) -> None:
    config = PGConfig(env="x", model={"use_lstm": True})
    case = LossCase(PG, config, make_model(use_lstm=True), make_fragment)
    one, other = (case.of_sequences(PG_COEFFICIENTS, order) for order in ([0, 1, 2, 3], [2, 0, 3, 1]))
    assert one == pytest.approx(other, rel=1e-5)
