"""What a config of somebody else would import is told, all of it, before it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aiorl.config.code import code_named_in, foreign_code
from aiorl.config.layers import load_config, save_config
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.registry import config_class

NAMED = {
    "env": "their_module:Env",
    "callbacks": {"on_train_result": "their_hooks:f"},
    "model": {"custom_model": "their_net:make", "custom_preprocessor": "their_views:View"},
    "multiagent": {
        "policies": {"a": ["their_policy:Mine", None, None, {"model": {"custom_model": "deep:down"}}]},
        "policy_mapping_fn": "their_map:f",
    },
    "env_config": {"inner": [{"reward": "their_reward:f"}]},
}


def config(**values: object) -> CommonConfig:
    return config_class("ppo").from_mapping({"env": "CartPole-v1", **values})


@pytest.fixture
def somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 123_456)


def test_every_import_path_is_found_however_deep_it_stands() -> None:
    assert code_named_in(config(**NAMED).to_dict()) == {
        "env": "their_module:Env",
        "callbacks.on_train_result": "their_hooks:f",
        "model.custom_model": "their_net:make",
        "model.custom_preprocessor": "their_views:View",
        "multiagent.policies.a[0]": "their_policy:Mine",
        "multiagent.policies.a[3].model.custom_model": "deep:down",
        "multiagent.policy_mapping_fn": "their_map:f",
        "env_config.inner[0].reward": "their_reward:f",
    }


def test_defaults_name_no_code() -> None:
    assert code_named_in(config().to_dict()) == {}


def test_somebody_elses_is_told_with_its_owner_and_nothing_reaches_the_terminal_raw(
    tmp_path: Path, somebody_else: None
) -> None:
    values = {"env": "m:E", "callbacks": "x:\x1b[31m", "env_config": {"\x1b]0;": "a:b"}}
    text = foreign_code([tmp_path], {**values, "extra_python_environs_for_worker": {"LD_PRELOAD": "their.so"}})
    assert "not to you" in text.splitlines()[0]
    assert "  env: 'm:E'" in text.splitlines()
    assert "  extra_python_environs_for_worker: LD_PRELOAD" in text.splitlines()
    assert text.replace("\n", "").isprintable()


def warnings_of_resuming(run_dir: Path) -> list[str]:
    told: list[str] = []
    load_config(config_class, overrides={"resume": str(run_dir)}, warn=told.append)
    return told


def test_ones_own_is_not(tmp_path: Path) -> None:
    save_config(config(env="m:E"), tmp_path)
    assert warnings_of_resuming(tmp_path) == []


def test_a_config_of_somebody_else_in_ones_own_directory_is_told_too(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to give a file away")
    save_config(config(env="m:E"), tmp_path)
    os.chown(tmp_path / "config.yaml", 12_345, -1)
    (told,) = warnings_of_resuming(tmp_path)
    assert "the user with id 12345" in told


def test_a_file_of_keys_that_somebody_else_wrote_is_told_too(tmp_path: Path, somebody_else: None) -> None:
    (tmp_path / "theirs.yaml").write_text("env: m:E\n")
    told: list[str] = []
    load_config(config_class, file=tmp_path / "theirs.yaml", warn=told.append)
    assert "theirs.yaml belongs to" in told[0]
    assert "  env: 'm:E'" in told[0]


MAIN = """
import os, sys
os.getuid = lambda: 123456
from aiorl.learner import main
sys.exit(main(["--resume", sys.argv[1]]))
"""


@pytest.mark.parametrize("key", ["env", "algo"])
def test_it_is_told_before_the_first_import(tmp_path: Path, key: str) -> None:
    (tmp_path / "their_module.py").write_text("import sys; sys.stderr.write('imported\\n'); raise ValueError('stop')")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"env": "CartPole-v1", key: "their_module:Theirs"}))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert lines.index(f"  {key}: 'their_module:Theirs'") < lines.index("imported")
