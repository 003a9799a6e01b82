"""Results in MLflow and Weights & Biases."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aiorl.run.report.loggers import make_loggers
from aiorl.tracking import WandB

CONFIG: dict[str, Any] = {
    "algo": "ppo",
    "env": "ALE/Pong-v5",
    "lr": 0.5,
    "model": {"fcnet_hiddens": [64, 64]},
}
RESULT: dict[str, Any] = {
    "timesteps_total": 100,
    "episode_reward_mean": 3.0,
    "info": {"loss": 0.5},
    "done": False,
}


def test_mlflow_keeps_the_settings_and_each_number_over_env_steps(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    for run in ("one", "two"):  # both in one process, as in a sweep
        (tmp_path / run).mkdir()
    settings = {**CONFIG, **{f"key_{number}": number for number in range(120)}}
    with (
        closing(make_loggers(["mlflow"], tmp_path / "one", settings)) as loggers,
        closing(make_loggers(["mlflow"], tmp_path / "two", CONFIG)) as second,
    ):
        loggers.write(RESULT)
        second.write(RESULT)
        loggers.write({**RESULT, "timesteps_total": 200, "episode_reward_mean": 4.0})
    (loss,) = tmp_path.glob("one/mlflow/*/*/metrics/info/loss")
    (mean,) = tmp_path.glob("one/mlflow/*/*/metrics/episode_reward_mean")
    assert list(tmp_path.glob("two/mlflow/*/*/metrics/info/loss"))
    assert len(loss.read_text().splitlines()) == 2
    assert [line.split()[1:] for line in mean.read_text().splitlines()] == [
        ["3.0", "100"],
        ["4.0", "200"],
    ]
    (lr,) = tmp_path.glob("one/mlflow/*/*/params/lr")
    assert lr.read_text() == "0.5"


class FakeRun:
    """Fake of a W&B run that keeps the data logged."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.logged.append("finished")


def test_wandb_gets_each_number_over_env_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, run = pytest.importorskip("wandb"), FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **settings: run)
    with closing(make_loggers(["wandb"], tmp_path, CONFIG)) as loggers:
        loggers.write(RESULT)
    numbers = {"timesteps_total": 100.0, "episode_reward_mean": 3.0, "info/loss": 0.5}
    assert run.logged == [(100, numbers), "finished"]


@pytest.mark.parametrize(
    "env", ["ALE/Pong-v5", "my_envs:Env", "a\\b#c?d%e", "long_names:" + "E" * 200]
)
def test_wandb_projects_have_names_that_it_takes(
    env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    projects: list[str] = []
    monkeypatch.setattr(wandb, "init", lambda project, **rest: projects.append(project))
    WandB(tmp_path, {"algo": "my_code:Algo", "env": env})
    (project,) = projects
    assert wandb.Settings(project=project).project == project, "it would be refused"
    assert project.startswith(f"my_code-Algo-{env[:1]}")


@pytest.mark.slow
def test_wandb_itself_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with closing(make_loggers(["wandb"], tmp_path, CONFIG)) as loggers:
        loggers.write(RESULT)
    (tracked,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # a separate process writes the file, and ends after the run has finished
    until = time.monotonic() + 30
    while tracked.stat().st_size <= 1000 and time.monotonic() < until:
        time.sleep(0.05)
    assert tracked.stat().st_size > 1000
