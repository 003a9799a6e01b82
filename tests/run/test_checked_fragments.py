"""Fragments of workers pass the learner's checks in all ways of sampling."""

from __future__ import annotations

from typing import Any

import pytest
from units import sent, unit_of

from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import build_learning
from aiorl.run.ingest import check_samples

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 3,
    "rollout_fragment_length": 8,
    "seed": 3,
    "horizon": 5,
    "model": {"fcnet_hiddens": [8], "lstm_cell_size": 8},
    "eager": True,
    "compilation_cache": "off",
    "observation_filter": "ConcurrentMeanStdFilter",
}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"train_batch_size": 24, "sgd_minibatch_size": 24},
    "impala": {"train_batch_size": 24},
    "dqn": {"observation_filter": "NoFilter", "replay_capacity": 500, "learning_starts": 100},
}

LSTM = {"fcnet_hiddens": [8], "lstm_cell_size": 8, "use_lstm": True}


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {"vectorize": "native", "horizon": None}),
        pytest.param("ppo", {"remote_worker_envs": True}, marks=pytest.mark.slow),
        ("ppo", {"soft_horizon": True, "no_done_at_end": True}),
        pytest.param(
            "ppo",
            {"model": LSTM, "batch_mode": "complete_episodes", "sample_async": True},
            marks=pytest.mark.slow,
        ),
        ("ppo", {"model": {**LSTM, "lstm_use_prev_action_reward": True}}),
        ("ppo", {"env": "general_runs:Poles", "batch_mode": "complete_episodes", "model": LSTM}),
        ("ppo", {"callbacks": "general_runs:Watching"}),
        ("dqn", {"n_step": 3, "sample_async": True}),
        ("dqn", {"batch_mode": "complete_episodes"}),
    ],
)
def test_fragments_of_honest_workers_are_accepted(algo: str, settings: dict[str, Any]) -> None:
    learning = build_learning(config_class(algo).from_mapping({**SMALL, **OWN[algo], **settings}))
    unit = unit_of(learning)
    try:
        for seq in range(1, 6):
            message = sent(unit, seq)
            check_samples(message)
            learning.group.check_fragment(message.batches)
    finally:
        unit.close()
