"""What workers send passes the learner's checks, however they sample."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.learning.algorithms.registry import config_class
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Snapshot
from aiorl.run.build import build_learning
from aiorl.run.ingest import check_samples
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
    snapshot = Snapshot(0, learning.group.get_weights(), {}, {}, {"timestep": 0})
    unit = SamplerUnit(learning.worker_part, learning.graphs, snapshot, UnitPlace(1, "ab12", num_workers=1))
    try:
        for seq in range(1, 6):
            frames = encode(unit.sample().to_samples(seq, 1, unit.take_deltas(seq)))
            message: Any = decode([memoryview(frame) for frame in frames])
            check_samples(message)
            learning.group.check_fragment(message.batches)
    finally:
        unit.close()
