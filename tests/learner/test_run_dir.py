from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from aiorl.algorithms.registry import config_class
from aiorl.errors import ConfigError
from aiorl.learner.run_dir import RunDirectory


def config(**values: object) -> object:
    return config_class("ppo").from_mapping({"env": "CartPole-v1", **values})


def test_r173_the_default_name_has_algorithm_environment_and_time_and_is_unique(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunDirectory.open(config()), RunDirectory.open(config())
    assert re.match(r"ppo_CartPole-v1_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first.path.name)
    assert first.path != second.path
    assert first.run_id != second.run_id
    assert (first.path / "config.yaml").exists()


def test_a_run_is_found_again_with_its_id_and_address(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    directory = RunDirectory.open(config(run_dir=str(run_dir)))
    directory.save_address("tcp://127.0.0.1:5557")
    again = RunDirectory.open(config(run_dir=str(run_dir), resume=str(run_dir)))
    assert (again.run_id, again.last_address) == (directory.run_id, "tcp://127.0.0.1:5557")


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    RunDirectory.open(config(run_dir=str(tmp_path))).save_address("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--resume"):
        RunDirectory.open(config(run_dir=str(tmp_path)))


@pytest.mark.parametrize("content", [None, "{", '{"run_id": 1}', "[]"])
def test_what_is_no_run_directory_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        RunDirectory.open(config(resume=str(tmp_path)))


def test_a_directory_that_cannot_be_made_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunDirectory.open(config(run_dir=os.fspath(tmp_path / "file" / "run")))
