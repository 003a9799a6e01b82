"""PPO: its plans, and what is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.ppo.algorithm import PPO
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.data import columns as c
from aiorl.errors import CheckpointError, InternalError

SHAPE: dict[str, Any] = {
    "xla": "off",
    "env": "x", "seed": 0, "rollout_fragment_length": 8, "num_envs_per_worker": 4, "train_batch_size": 64,
    "sgd_minibatch_size": 16,
}  # fmt: skip


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
    assert list(plan.columns) == base + columns
    assert (plan.postprocess, plan.postprocess_params) == ("gae", {"gamma": 0.9, "lam": 0.8})
    assert len(plan.extras) == (4 if "model" in settings else 0)


def test_refuses_another_algorithms_config() -> None:
    with pytest.raises(InternalError, match="IMPALAConfig"):
        PPO.lease_plan(IMPALAConfig())


@pytest.fixture
def train(make_model: Callable[..., Any], make_fragment: Callable[..., Any]) -> Callable[..., Any]:
    def run(**settings: Any) -> tuple[PPO, dict[str, float]]:
        config = PPOConfig.from_mapping({**SHAPE, **settings})
        model = make_model()
        algorithm = PPO(config, model)
        plan = PPO.sample_plan(config)
        fragments = [make_fragment(plan, model, 8, 4, seed) for seed in range(2)]
        return algorithm, algorithm.update(algorithm.make_batch(fragments), 0).metrics

    return run


@pytest.mark.parametrize(("target", "factor"), [(1e-6, 1.5), (1e6, 0.5)])
def test_the_penalty_adapts_towards_its_target_and_is_kept(
    train: Callable[..., Any], target: float, factor: float
) -> None:
    algorithm, metrics = train(kl_coeff=0.2, kl_target=target, lr=1e-2)
    assert metrics["cur_kl_coeff"] == pytest.approx(0.2)
    assert algorithm.coefficients(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    state = algorithm.get_state()
    other, _ = train(kl_coeff=0.2)
    other.set_state(state)
    assert other.coefficients(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    del state.values["kl_coeff"]
    with pytest.raises(CheckpointError, match="kl_coeff"):
        other.set_state(state)


def test_stops_early_once_the_policy_has_moved_too_far(train: Callable[..., Any]) -> None:
    _, metrics = train(num_sgd_iter=3)
    assert metrics["num_sgd_steps"] == 12
    _, metrics = train(num_sgd_iter=3, kl_stop=1e-9, lr=1e-2)
    assert metrics["num_sgd_steps"] == 1


def test_without_shuffling_rows_are_visited_in_order(train: Callable[..., Any]) -> None:
    algorithm, _ = train(shuffle_sequences=False, num_sgd_iter=2)
    order, num_minibatches = algorithm._order(64, 64)
    np.testing.assert_array_equal(order.reshape(2, 64), np.tile(np.arange(64), (2, 1)))
    assert num_minibatches == len(order)
    shuffled, _ = train(num_sgd_iter=2)
    order = shuffled._order(64, 64)[0].reshape(2, 64)
    assert not np.array_equal(order[0], order[1])
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(64), (2, 1)))
