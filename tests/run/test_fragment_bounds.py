"""How much a fragment may hold: exactly what was asked for, or more where others than aiorl decide."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.learning.algorithms.registry import config_class
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Snapshot
from aiorl.run.build import build_learning
from aiorl.run.ingest import FragmentBounds, check_samples
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace

SMALL: dict[str, Any] = {
    "env": "CartPole-v1", "num_envs_per_worker": 3, "rollout_fragment_length": 8, "seed": 3, "horizon": 5,
    "model": {"fcnet_hiddens": [8], "lstm_cell_size": 8}, "eager": True, "compilation_cache": "off",
    "observation_filter": "ConcurrentMeanStdFilter",
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"train_batch_size": 24, "sgd_minibatch_size": 24},
    "impala": {"train_batch_size": 24},
    "dqn": {"observation_filter": "NoFilter", "replay_capacity": 500, "learning_starts": 100},
}  # fmt: skip
LSTM = {"fcnet_hiddens": [8], "lstm_cell_size": 8, "use_lstm": True}


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


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {}),
        ("ppo", {"vectorize": "native", "horizon": None}),
        ("ppo", {"batch_mode": "complete_episodes"}),
        ("ppo", {"sample_async": True}),
        ("ppo", {"sample_async": True, "batch_mode": "complete_episodes"}),
        ("ppo", {"remote_worker_envs": True}),
        ("ppo", {"soft_horizon": True, "no_done_at_end": True}),
        ("ppo", {"model": LSTM}),
        ("ppo", {"model": LSTM, "sample_async": True}),
        ("ppo", {"model": LSTM, "soft_horizon": True, "no_done_at_end": True}),
        ("ppo", {"model": LSTM, "batch_mode": "complete_episodes"}),
        ("ppo", {"model": LSTM, "batch_mode": "complete_episodes", "sample_async": True}),
        ("ppo", {"model": {**LSTM, "lstm_use_prev_action_reward": True}}),
        ("ppo", {"env": "general_runs:Poles"}),
        ("ppo", {"env": "general_runs:Poles", "batch_mode": "complete_episodes", "model": LSTM}),
        ("ppo", {"callbacks": "general_runs:Watching"}),
        ("ppo", {"normalize_rewards": True}),
        ("impala", {}),
        ("impala", {"sample_async": True}),
        ("dqn", {"n_step": 3}),
        ("dqn", {"n_step": 3, "sample_async": True}),
        ("dqn", {"batch_mode": "complete_episodes"}),
        ("dqn", {"model": LSTM}),
        ("dqn", {"model": LSTM, "sample_async": True}),
    ],
)
def test_whatever_honest_workers_send_is_taken(algo: str, settings: dict[str, Any]) -> None:
    learning = build_learning(config_class(algo).from_mapping({**SMALL, **OWN[algo], **settings}))
    limits = FragmentBounds.of(learning.worker_part, has_one_agent=learning.has_one_agent)
    snapshot = Snapshot(0, learning.group.get_weights(), {}, {}, {"timestep": 0})
    unit = SamplerUnit(learning.worker_part, learning.graphs, snapshot, UnitPlace(1, "ab12", num_workers=1))
    try:
        for seq in range(1, 6):
            frames = encode(unit.sample().to_samples(seq, 1, unit.take_deltas(seq)))
            message: Any = decode([memoryview(frame) for frame in frames])
            check_samples(message, limits)
            learning.group.check_fragment(message.batches)
    finally:
        unit.close()
