"""Scaled rewards, from the environment to the learner: both ways of sampling, and several
workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from in_process import LENGTH, NUM_ENVS, InProcess, with_settings
from units import POLLED, entry, make_unit, network

from aiorl.acting.filters import ReturnFilter, returns_of
from aiorl.acting.postprocess import gae
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.run.worker.sampler_unit import SamplerUnit

COLUMNS = (c.REWARDS, c.VF_PREDS, c.TERMINATEDS, c.TRUNCATEDS, c.ADVANTAGES, c.OBS)
PLAN = SamplePlan("gae", {"gamma": 0.9, "lam": 0.8}, COLUMNS, return_discount=0.9)
RETURNS = returns_of(DEFAULT_POLICY_ID)


def make(plan: SamplePlan = PLAN, **settings: Any) -> SamplerUnit:
    size = {"num_envs_per_worker": 3, "rollout_fragment_length": 40, "vectorize": "serial"}
    return make_unit(
        {DEFAULT_POLICY_ID: entry(plan)}, network(4), env="CartPole-v1", **size, **settings
    )


def sampled(**settings: Any) -> tuple[dict[str, np.ndarray], dict[str, Any], Any]:
    unit = make(**settings)
    produced = [unit.sample(), unit.sample()][-1]
    deltas = unit.take_deltas(1)
    unit.close()
    return dict(produced.batches[DEFAULT_POLICY_ID]), deltas, produced


def test_rewards_are_scaled_before_advantages_are_computed_and_sent() -> None:
    rows, deltas, produced = sampled()
    assert set(rows) == set(COLUMNS)
    state = deltas[RETURNS]
    assert state["n"] == 240
    deviation = np.sqrt(state["m2"] / state["n"])
    assert not np.isclose(deviation, 1.0, rtol=0.1)
    np.testing.assert_allclose(rows[c.REWARDS], 1.0 / deviation[0], rtol=1e-6)
    unit = make(dataclasses.replace(PLAN, return_discount=None))
    plain = dict([unit.sample(), unit.sample()][-1].batches[DEFAULT_POLICY_ID])
    unit.close()
    np.testing.assert_array_equal(plain[c.OBS], rows[c.OBS])
    np.testing.assert_array_equal(plain[c.REWARDS], 1.0)
    arguments = (np.zeros(3, np.float32), rows[c.TERMINATEDS], rows[c.TRUNCATEDS])
    difference = gae(rows[c.REWARDS] - 1, rows[c.VF_PREDS] * 0, *arguments, gamma=0.9, lam=0.8)[0]
    np.testing.assert_allclose(rows[c.ADVANTAGES] - plain[c.ADVANTAGES], difference, atol=1e-4)
    assert (produced.episodes["rewards"] == produced.episodes["lengths"]).all(), (
        "returns that users see are as they were"
    )


def test_polled_turn_by_turn_rewards_are_scaled_as_in_lockstep() -> None:
    in_lockstep, delta, _ = sampled()
    polled, other, _ = sampled(
        observation_filter="NoFilter", sample_async=False, no_done_at_end=False, **POLLED
    )
    assert other[RETURNS]["n"] == delta[RETURNS]["n"]
    np.testing.assert_allclose(other[RETURNS]["m2"], delta[RETURNS]["m2"], rtol=1e-9)
    assert set(polled) == set(COLUMNS)
    np.testing.assert_allclose(polled[c.REWARDS].max(), in_lockstep[c.REWARDS].max(), rtol=1e-2)


def test_rows_have_both_the_environments_rewards_and_the_scaled_ones() -> None:
    unit = make(**POLLED)
    rows = unit.worker.sample()
    unit.close()
    np.testing.assert_array_equal(rows[c.REWARDS], 1.0)
    assert (rows[c.SCALED_REWARDS] != 1.0).all()


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
async def test_the_learners_statistic_equals_one_that_saw_the_returns_of_all_workers(
    mode: str,
) -> None:
    def plan(cls: type, config: CommonConfig) -> SamplePlan:
        return SamplePlan(
            "none", {}, (c.OBS, c.ACTIONS, c.REWARDS, c.LAST_OBS), return_discount=0.5
        )

    merged: list[Any] = []

    both = InProcess(with_settings(mode=mode, sample_plan=classmethod(plan)))
    both.start(2)
    publisher = both.core.publisher
    merge = publisher.merge_deltas

    def noting(incarnation: str, sequence: int, deltas: Any) -> None:
        merged.append(deltas[RETURNS])
        merge(incarnation, sequence, deltas)

    publisher.merge_deltas = noting  # type: ignore[method-assign]
    assert await both.source.wait_for_workers(2, 10)
    both.go_on()
    await both.updates_done(4)
    await both.close()
    alone = ReturnFilter()
    for delta in merged:
        alone.merge_delta(delta)
    state = both.core.publisher.filter_states()[RETURNS]
    np.testing.assert_array_equal(state["m2"], alone.state()["m2"])
    assert state["n"] == alone.state()["n"] >= 4 * 4 * LENGTH * NUM_ENVS
    # returns of CartPole tend to 2 and differ only at the beginning of episodes
    sent = both.algorithm.batches[-1][-1][c.REWARDS]
    np.testing.assert_allclose(sent, 1.0 / np.sqrt(state["m2"][0] / state["n"]), rtol=0.3)
    assert sent.mean() > 1.5
