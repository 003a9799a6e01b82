"""Loggers of the user's own get every result, and cannot fail a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

import aiorl
from aiorl.errors import ConfigError
from aiorl.run.report.loggers import check_loggers, make_loggers


class Lines:
    """Logger that writes a line for each result."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self.file = (run_dir / "lines.txt").open("w", encoding="utf-8")
        self.lr = config["lr"]

    def write(self, result: dict[str, Any]) -> None:
        self.file.write(
            json.dumps([self.lr, result["training_iteration"], result["episodes_total"]]) + "\n"
        )

    def close(self) -> None:
        self.file.close()


class Failing:
    """Logger that fails at its second result and when it is closed."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self.count = 0

    def write(self, result: dict[str, Any]) -> None:
        self.count += 1
        if self.count >= 2:
            raise KeyError("no such run")

    def close(self) -> None:
        raise ValueError("it is gone")


def impossible(run_dir: Path, config: dict[str, Any]) -> None:
    raise OSError("no service")


def takes_nothing() -> None:
    pass


def test_each_logger_gets_each_result_even_if_others_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [f"{__name__}:Failing", f"{__name__}:Lines"]
    settings = {**SMALL, "lr": 0.5, "loggers": paths, "run_dir": str(tmp_path / "run")}
    with aiorl.PPOTrainer(settings, env="CartPole-v1") as trainer:
        results = [trainer.train() for _ in range(3)]
    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        [0.5, n, results[n - 1]["episodes_total"]] for n in (1, 2, 3)
    ]
    said = [record.getMessage() for record in caplog.records if "Failing" in record.getMessage()]
    assert sum("no such run" in text for text in said) == 1
    assert (tmp_path / "run" / "result.jsonl").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nothing", "mlflow, wandb"),
        ("wandbb", "'wandb'"),
        ("no_such_module_here:Name", "no_such_module_here"),
        (f"{__name__}:SMALL", "SMALL"),
        (f"{__name__}:takes_nothing", "takes_nothing"),
    ],
)
def test_an_invalid_logger_is_refused_before_a_directory_is_made(
    tmp_path: Path, path: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        aiorl.PPOTrainer(
            {**SMALL, "loggers": [path], "run_dir": str(tmp_path / "run")}, env="CartPole-v1"
        )
    assert caught.value.key == "loggers[0]"
    assert not (tmp_path / "run").exists()


def test_a_tracker_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="wandb") as caught:
        check_loggers(["wandb"])
    assert "[tracking]" in caught.value.hint


def test_a_logger_that_cannot_be_made_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no service"):
        make_loggers([f"{__name__}:impossible"], tmp_path, {})
