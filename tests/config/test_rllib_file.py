from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from aiorl.config.layers import load_config
from aiorl.config.rllib_file import convert, is_rllib_file
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class

FILE = """\
my-experiment:
  env: CartPole-v1
  run: DQN
  stop:
    episode_reward_mean: 150
    timesteps_total: 100000
  config:
    framework: tf
    lr: 0.0003
    num_env_runners: 1
    rollout_fragment_length: auto
    target_network_update_freq: 500
    exploration_config: {epsilon_timesteps: 2000, final_epsilon: 0.05}
    replay_buffer_config: {type: MultiAgentPrioritizedReplayBuffer, capacity: 20000}
    model: {fcnet_hiddens: [32], custom_options: {a: 1}}
"""


def test_config_takes_an_experiment_of_rllib_train_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "dqn.yaml"
    file.write_text(FILE)
    with caplog.at_level(logging.WARNING):
        config: Any = load_config(config_class, file=file)
    assert (config.algo, config.env, config.lr, config.num_workers) == (
        "dqn",
        "CartPole-v1",
        0.0003,
        1,
    )
    assert (config.stop_return, config.stop_timesteps, config.replay_capacity) == (
        150,
        100_000,
        20_000,
    )
    assert config.prioritized_replay
    assert config.epsilon_schedule == [(0, 1.0), (2000, 0.05)]
    assert config.model.fcnet_hiddens == (32,)
    assert config.origin_of("stop_return") == f"{file}, line 5"
    left_out = [text.split()[0] for text in caplog.messages if str(file) not in text]
    assert left_out == [
        "framework",
        "target_network_update_freq",
        "replay_buffer_config.type",
        "model.custom_options",
    ]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("lr: {grid_search: [0.1, 0.2]}", "lr"),
        ("no_such_key: 3", "no_such_key"),
        ("lr: fast", "lr"),
    ],
)
def test_an_error_in_an_experiment_names_the_line(tmp_path: Path, config: str, key: str) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text(f"mine:\n  run: PPO\n  env: CartPole-v1\n  config:\n    {config}\n")
    with pytest.raises(ConfigError, match="line 5") as caught:
        load_config(config_class, file=file)
    assert caught.value.key == key


def test_a_file_of_several_experiments_is_refused() -> None:
    values = {name: {"run": "PPO", "env": "CartPole-v1"} for name in ("one", "two")}
    assert is_rllib_file(values)
    with pytest.raises(ConfigError, match="one, two"):
        convert(values, {})


@pytest.mark.parametrize(
    "values",
    [{}, {"env": "E", "lr": 1}, {"model": {"use_lstm": True}}, {"env_config": {"run": "fast"}}],
)
def test_files_of_aiorl_are_not_mistaken_for_experiments(values: dict[str, Any]) -> None:
    assert not is_rllib_file(values)


def test_a_command_prints_the_converted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dqn.yaml").write_text(FILE)
    monkeypatch.setattr(sys, "argv", ["it", str(tmp_path / "dqn.yaml")])
    monkeypatch.delitem(sys.modules, "aiorl.config.rllib_file")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("aiorl.config.rllib_file", run_name="__main__")
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "# framework " in output
    (tmp_path / "made.yaml").write_text(output)
    config = load_config(config_class, file=tmp_path / "made.yaml")
    assert config == load_config(config_class, file=tmp_path / "dqn.yaml")
