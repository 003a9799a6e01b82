"""How much a fragment may hold: exactly what was asked for, or more where others than aiorl decide."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.learner.fragment_bounds import FragmentBounds


def bounds(*, has_one_agent: bool = True, **settings: Any) -> FragmentBounds:
    part = WorkerPart(env="E", **{"rollout_fragment_length": 100, "num_envs_per_worker": 4, **settings})
    return FragmentBounds.of(part, has_one_agent=has_one_agent)


def test_where_nothing_of_the_users_own_makes_rows_there_are_as_many_as_were_asked_for() -> None:
    for settings in ({}, {"sample_async": True}, {"remote_worker_envs": True}, {"horizon": 30}):
        found = bounds(**settings)
        assert found.rows == 400
        assert found.has_one_row_a_step


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"callbacks": "my:Callbacks"}, 400 * 64),
        ({"policies": {"default_policy": PolicyPart(policy_class="my:Policy")}}, 400 * 64),
        ({"policies": {"default_policy": PolicyPart(layout="sequences", sequence_length=100)}}, 400 * 64),
        ({"batch_mode": "complete_episodes"}, 1 << 20),
        ({"batch_mode": "complete_episodes", "num_envs_per_worker": 32}, 32 << 17),
        ({"has_one_agent": False}, 400 * 1000),
        ({"input": "stored"}, 1 << 24),
    ],
)
def test_where_users_episodes_or_files_make_rows_there_may_be_far_more(settings: dict[str, Any], least: int) -> None:
    assert least <= bounds(**settings).rows <= 1 << 24


def test_a_horizon_bounds_whole_episodes() -> None:
    """Fewer than were asked for, and then one of each environment."""
    found = bounds(batch_mode="complete_episodes", horizon=50)
    assert 400 + 4 * (50 + 100) <= found.rows < 2000


def test_with_several_agents_or_policies_an_env_step_may_have_any_number_of_rows() -> None:
    two = {"a": PolicyPart(), "b": PolicyPart()}
    for found in (bounds(has_one_agent=False), bounds(policies=two), bounds(input="stored")):
        assert not found.has_one_row_a_step
        assert found.agent_steps == 1 << 24


def test_episodes_played_beside_stored_experience_may_have_been_seen_for_hours() -> None:
    found = bounds(input="stored", input_evaluation=["simulation"])
    assert found.observations >= 1 << 32
    assert found.values == 1 << 24
