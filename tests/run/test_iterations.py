"""Iterations: what they look for beside their results."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.run.flow import Counters
from aiorl.run.iterations import Iteration


@pytest.mark.parametrize(
    ("settings", "episodes", "warns"),
    [({}, 3, True), ({}, 4, False), ({"horizon": 500}, 0, False), ({"input": "stored/*.json"}, 0, False)],
)
def test_a_horizon_is_asked_for_once_where_hardly_any_episode_ends(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], episodes: int, warns: bool
) -> None:
    counters = Counters()
    iteration = Iteration(CommonConfig(env="x", num_workers=2, num_envs_per_worker=8, **settings), counters)
    for env_steps in (47_999, 48_000, 60_000):
        counters.env_steps_sampled = env_steps
        iteration.look_at_episodes(episodes)
        if env_steps < 48_000:
            assert not caplog.records
    assert ["--horizon 1000" in record.getMessage() for record in caplog.records] == [True] * warns
