from __future__ import annotations

import io
from pathlib import Path

import pytest

from aiorl.config.key import all_keys
from aiorl.config.layers import render_effective
from aiorl.learning.algorithms.ppo import PPOConfig


def described(config: PPOConfig) -> dict[str, str]:
    file = io.StringIO()
    config.describe(file)
    return {line.split()[0]: " ".join(line.split()[1:]) for line in file.getvalue().splitlines()}


def test_describe_prints_each_value_and_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: ppo-cartpole\nmodel:\n  use_lstm: true\ntf_session_args: {device_count: {GPU: 0}}\n")
    config = PPOConfig.from_file(path, seed=3, sgd_minibatch_size=64)
    config.describe()
    assert capsys.readouterr().out == render_effective(config)
    lines = described(config)
    assert lines.keys() == dict(all_keys(PPOConfig)).keys()
    assert lines["seed"] == "argument 3"
    assert lines["model.use_lstm"] == f"{path}, line 3 true"
    assert lines["gamma"] == "preset ppo-cartpole 0.98"
    assert lines["grad_clip"] == "default 0.5"
    assert lines["log_level"] == "default INFO"
    assert lines["tf_session_args"].startswith(f"default, {path}, line 4 ")


def test_where_values_come_from_survives_updates_and_copies(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("gamma: 0.5\nlr: 1.0e-3\n")
    config = PPOConfig.from_file(path).model_copy(update={"run_dir": "runs/x"}).updated({"lr": 2e-3})
    lines = described(config)
    assert lines["gamma"] == f"{path}, line 1 0.5"
    assert lines["lr"] == "argument 0.002"
    assert lines["run_dir"] == "default runs/x"


def test_what_only_a_users_own_model_knows_is_described_and_secrets_are_not() -> None:
    config = PPOConfig(
        model={"custom_model": "mine:make", "width": 7}, extra_python_environs_for_worker={"MY_TOKEN": "s3cr3t"}
    )
    lines = described(config)
    assert lines["model.width"] == "argument 7"
    assert lines["extra_python_environs_for_worker"] == 'argument {"MY_TOKEN": "<withheld>"}'
