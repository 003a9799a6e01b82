"""PPO: its plans, and what is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiorl.data import columns as c
from aiorl.errors import CheckpointError, ConfigError, InternalError
from aiorl.learning.algorithms.impala import IMPALAConfig
from aiorl.learning.algorithms.ppo import PPO, PPOConfig

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
