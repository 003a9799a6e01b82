"""Keys: declared once, described in plain words, and refused in one sentence if unknown or set to a
wrong value.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.key import changed, expected, fact_of, key, meanings, sub_model
from aiorl.config.schema import CommonConfig, ModelConfig, MultiAgentConfig
from aiorl.config.worker import TransportConfig, WorkerConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class

ROOT = Path(__file__).parents[2]


class Inner(BaseModel):
    """Group of keys."""

    depth: int = key(3, group="A")
    """Levels
    of it."""


class Outer(BaseModel):
    """Config with a group."""

    inner: Inner = key(Inner(), "Keys inside.", group="A")
    wait_s: float = key(1.0, group="B", where="workers", unit="s", ge=0)
    """Pause."""


class Longer(Outer):
    """Config with another default and an inherited meaning."""

    wait_s: float = changed(Outer, "wait_s", 2.0)


def test_a_key_keeps_its_facts_and_a_changed_default_keeps_the_others() -> None:
    for kind in (Outer, Longer):
        field = kind.model_fields["wait_s"]
        assert [fact_of(field, name) for name in ("group", "where", "unit")] == [
            "B",
            "workers",
            "s",
        ]
        assert meanings(kind) == {
            "inner": "Keys inside.",
            "inner.depth": "Levels of it.",
            "wait_s": "Pause.",
        }
    assert (Outer().wait_s, Longer().wait_s) == (1.0, 2.0)
    assert sub_model(Outer.model_fields["inner"]) is Inner
    with pytest.raises(ValidationError, match="wait_s"):
        Longer(wait_s=-1)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (bool | Literal["bulk"], "true or false or bulk"),
        (list[str], "a list of names"),
        (tuple[int, ...], "a list of whole numbers"),
        (list[Literal["a", "b", "c"]], "a list of a, b or c"),
        (list[Literal["a"]] | None, "a list of a or null"),
        (tuple[tuple[int, int], ...] | None, "a list of lists or null"),
        (dict[str, Any], "a mapping"),
        (Inner, "a mapping"),
        (object, "a value"),
    ],
)
def test_types_are_described_in_plain_words(annotation: object, words: str) -> None:
    assert expected(annotation) == words


# One declaration
# --------------------------------------------------------------------------------------------------


def test_no_key_is_declared_in_two_places_of_the_config() -> None:
    for config in (CommonConfig, ModelConfig, MultiAgentConfig, TransportConfig):
        for name in config.model_fields:
            # groups are narrower for workers; env is always set there
            if name not in (
                "model",
                "multiagent",
                "env",
            ):
                defining = [
                    kind for kind in config.__mro__ if name in vars(kind).get("__annotations__", {})
                ]
                assert len(defining) == 1, name


@pytest.mark.slow
def test_a_new_sampler_setting_touches_one_file(tmp_path: Path) -> None:
    """In a copy of the package, a new declaration is an option, is checked, reaches workers and is
    documented.
    """
    shutil.copytree(
        ROOT / "aiorl", tmp_path / "aiorl", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = tmp_path / "aiorl" / "config" / "worker.py"
    text = file.read_text(encoding="utf-8")
    new_key = '    brand_new: int = _sampling(3, ge=0)\n    """Something new."""\n'
    file.write_text(
        text.replace("    soft_horizon: bool = ", f"{new_key}    soft_horizon: bool = ", 1),
        encoding="utf-8",
    )
    code = """
from aiorl.learning.algorithms.registry import config_class
from aiorl.learner import configure_learner
from aiorl.config.layers import dump_yaml
from aiorl.config.worker import WorkerPart
from aiorl.sampling.settings import WorkerSettings
from pages import config_page

config = configure_learner(["--env", "E", "--algo", "impala", "--brand-new", "4"], config_class)
part = WorkerPart.from_dict(WorkerPart.of(config).to_dict())
assert part.brand_new == 4
assert WorkerSettings(config=part, env_creator="E", policy=None).config.brand_new == 4
assert "brand_new: 4" in dump_yaml(config)
assert "| `brand_new` | `3` | a whole number | W | Something new. |" in config_page()
configure_learner(["--env", "E", "--brand-new", "-1"], config_class)
"""
    places = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests' / 'support'}"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=places,
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "--brand-new" in result.stderr


def test_the_keywords_of_a_rollout_worker_take_the_declared_defaults() -> None:
    parameters = inspect.signature(RolloutWorker).parameters
    different = {
        "rollout_fragment_length",
        "callbacks",
        "env_config",
        "log_level",
        "input_evaluation",
    }
    shared = set(parameters) & set(WorkerConfig.model_fields) - different
    assert len(shared) >= 12
    for name in shared:
        assert parameters[name].default == getattr(WorkerConfig(), name), name


# Refused keys and values
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "values", "key", "hint"),
    [
        ("ppo", {"model": {"fcnet_hiddens": "64,64"}}, "model.fcnet_hiddens", "[64, 64]"),
        ("ppo", {"stop_time_s": "5m"}, "stop_time_s", "300"),
        ("ppo", {"input_evaluation": ["simulatoin"]}, "input_evaluation", "'simulation'"),
        ("ppo", {"lr": {"grid_search": [1, 2]}}, "lr", "examples/optuna_sweep.py"),
        ("ppo", {"run_dir": "runs/\udcff"}, "run_dir", "Rename"),
        ("ppo", {"env_config": {"files": ["a", "\udce9.bin"]}}, "env_config.files.1", "Rename"),
        ("ppo", {"model": {"lr": {"grid_search": [1]}}}, "model.lr", "examples/optuna_sweep.py"),
        ("pg", {"lambda_": 0.5}, "lambda_", ""),
        ("dqn", {"buffer_size": 1}, "buffer_size", "replay_capacity"),
        ("ppo", {"buffer_size": 1}, "buffer_size", "replay_capacity"),
        ("ppo", {"batch_size": 1}, "batch_size", "sgd_minibatch_size"),
        ("ppo", {"n_steps": 1}, "n_steps", "rollout_fragment_length"),
        ("dqn", {"n_steps": 1}, "n_steps", "n_step"),
        ("td3", {"policy_kwargs": 1}, "policy_kwargs", "model"),
        ("ppo", {"use_gae": 1}, "use_gae", "GAE"),
        ("ppo", {"zzz": 1}, "zzz", "`aiorl train --help-config`"),
        ("ppo", {"model": {"net_arch": 1}}, "model.net_arch", "model.fcnet_hiddens"),
        ("ppo", {"model": {"custom_options": 1}}, "model.custom_options", "model"),
        ("ppo", {"model": {"fcnet_hidden": 1}}, "model.fcnet_hidden", "'fcnet_hiddens'"),
        ("ppo", {"model": {"mine": 1}}, "model.mine", "model.custom_model"),
    ],
)
def test_refused_keys_are_named_with_their_replacement(
    algo: str, values: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(algo).from_mapping(values)
    assert caught.value.key == key
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["target_kl", "verbose", "exploration_final_eps", "start_steps", "memory_size", "max_steps"],
)
def test_no_key_with_another_meaning_is_offered_for_its_spelling(name: str) -> None:
    for algo in ("ppo", "dqn", "sac"):
        with pytest.raises(ConfigError) as caught:
            config_class(algo).from_mapping({name: 1})
        assert caught.value.hint
        assert "'?" not in caught.value.hint
