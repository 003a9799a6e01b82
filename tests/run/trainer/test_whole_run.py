"""A whole run in one call of `aiorl.train`; with Ctrl-C and workers: test_trainer_with_workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

import aiorl
from aiorl.config.yaml_text import read_yaml
from aiorl.errors import AiorlError, ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig

IMPALA: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "train_batch_size": 64,
    "eager": True,
    "seed": 1,
    "model": {"fcnet_hiddens": [8]},
    "compilation_cache": "off",
}


def of(run_dir: Path) -> dict[str, Any]:
    values, _ = read_yaml(run_dir / "config.yaml")
    return values


def test_the_algorithm_is_the_arguments_the_configs_or_the_presets(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        # the preset has an environment, too
        "preset": {
            "config": IMPALA,
            "preset": "impala-cartpole",
        },
        "argument": {"env": "CartPole-v1", "algo": "impala", "config": IMPALA},
        "object": {"config": PPOConfig(env="CartPole-v1", **SMALL)},
    }
    for name, how in ways.items():
        aiorl.train(**how, stop_timesteps=64, run_dir=str(tmp_path / name))
        found = of(tmp_path / name)
        assert (found["algo"], found["env"]) == (
            "ppo" if name == "object" else "impala",
            "CartPole-v1",
        )
    assert of(tmp_path / "preset")["normalize_rewards"] is True
    with pytest.raises(ConfigError) as caught:
        aiorl.train(algo="ppo", preset="impala-cartpole")
    assert (caught.value.key, caught.value.value) == ("preset", "impala-cartpole")
    with pytest.raises(ConfigError, match="env='CartPole-v1'"):
        aiorl.train(algo="ppo")


@pytest.mark.parametrize("make", [aiorl.train, lambda **settings: PPOConfig(**settings).build()])
def test_a_missing_tensorflow_is_reported_before_a_run_directory_is_made(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="tensorflow") as caught:
        make(env="CartPole-v1", run_dir=str(tmp_path / "run"))
    assert "[learner]" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_its_own_settings(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = aiorl.train(
        "CartPole-v1", config={**SMALL, "lr": 0.0125}, stop_timesteps=64, run_dir=str(run_dir)
    )
    more = aiorl.train(resume=str(run_dir), stop_timesteps=128)
    steps = [result["env_steps_trained_total"] for result in (first, more)]
    assert 64 <= steps[0] < 128 <= steps[1]
    assert of(run_dir)["lr"] == 0.0125
    with aiorl.PPOTrainer({"resume": str(run_dir)}) as trainer:
        assert trainer.config.lr == 0.0125
        assert trainer.train()["env_steps_trained_total"] > steps[1]


class Blocks(aiorl.DefaultCallbacks):
    """Callbacks that put a file in place of the directory of checkpoints."""

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        checkpoints = Path(trainer.training.directory.checkpoints)
        checkpoints.rmdir()
        checkpoints.touch()


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    settings = {**SMALL, "callbacks": f"{__name__}:Blocks", "run_dir": str(tmp_path / "run")}
    with pytest.raises(AiorlError, match=str(tmp_path / "run" / "checkpoints")):
        aiorl.train("CartPole-v1", config=settings, stop_timesteps=64)


def test_a_run_in_this_process_shows_plain_lines_even_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A panel would draw over a debugger's prompt."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    result = aiorl.train(
        "CartPole-v1", config=SMALL, stop_timesteps=64, run_dir=str(tmp_path / "run")
    )
    shown = capsys.readouterr().out
    assert "CartPole-v1" in shown
    assert "\x1b[" not in shown.partition(result["reason"])[0]
