"""Presets: each loads into the config of its algorithm, and all its settings take effect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aiorl.config.layers import (
    dump_yaml,
    load_config,
    save_config,
)
from aiorl.config.presets import find_preset, named_preset, preset_names
from aiorl.config.yaml_text import parse_value
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.registry import config_class

WANTED = (
    "CartPole-v1",
    "Acrobot-v1",
    "LunarLander-v3",
    "Pendulum-v1",
    "MountainCar-v0",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "ALE/Pong-v5",
)


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = (
            leaves(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
        flat.update(inner)
    return flat


def test_there_is_a_preset_for_each_of_the_usual_environments() -> None:
    presets = [(algo, find_preset(algo, env)) for algo in ("ppo", "impala") for env in WANTED]
    assert all(preset is not None and preset.algo == algo for algo, preset in presets)
    names = {
        env: preset.name
        for env in ("ALE/Pong-v5", "ALE/Breakout-v5")
        if (preset := find_preset("ppo", env))
    }
    # an exact name before a pattern
    assert names == {
        "ALE/Pong-v5": "ppo-pong",
        "ALE/Breakout-v5": "ppo-atari",
    }
    assert find_preset("ppo", "Pong") is None


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_and_each_of_its_settings_takes_effect(name: str) -> None:
    preset = named_preset(name)
    kind = config_class(preset.algo)
    env = preset.envs[0].replace("*", "Breakout")  # which has no preset of its own
    # auto chooses dqn-cartpole and ppo-cartpole for their algorithm and environment
    is_second = name in ("rainbow-cartpole", "ppo-cartpole-quick")
    config = kind(env=env, preset=name if is_second else "auto")
    assert config.preset == name
    effective = leaves(config.to_dict())
    for key, value in leaves(preset.settings).items():
        assert effective[key] == value, key
        assert key == "algo" or config.origin_of(key) == f"preset {name}"
    assert type(config).from_mapping(parse_value(dump_yaml(config))) == config
    assert preset.result
    assert preset.source


def test_precedence_is_default_then_preset_then_file_then_argument(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: ppo-cartpole\ngamma: 0.5\nlambda_: 0.6\nmodel: {fcnet_hiddens: [8]}\n")
    config = load_config(
        config_class, file=file, overrides={"lambda_": 0.7, "model": {"use_lstm": True}}
    )
    assert isinstance(config, PPOConfig)
    assert (config.clip_actions, config.rollout_fragment_length, config.gamma, config.lambda_) == (
        True,
        32,
        0.5,
        0.7,
    )
    origins = [
        config.origin_of(key)
        for key in ("clip_actions", "rollout_fragment_length", "gamma", "lambda_", "env")
    ]
    assert origins == [
        "default",
        "preset ppo-cartpole",
        f"{file}, line 2",
        "argument",
        "preset ppo-cartpole",
    ]
    assert config.origin_of("model.fcnet_hiddens") == f"{file}, line 4"
    assert config.origin_of("model.use_lstm") == "argument"


def test_auto_waits_for_the_environment_and_uses_the_defaults_without_a_preset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = PPOConfig(preset="auto")
    assert (config.preset, config.gamma) == ("auto", 0.99)
    later = config.updated({"env": "CartPole-v1"})
    assert (later.preset, later.gamma) == ("ppo-cartpole", 0.98)
    assert PPOConfig(env="mine:Env", preset="auto") == PPOConfig(env="mine:Env")
    (warning,) = caplog.messages
    assert {"ppo", "mine:Env"} <= set(warning.replace(",", "").split())


def test_an_unknown_preset_is_an_error_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'ppo-cartpol'.*'ppo-cartpole'") as caught:
        PPOConfig(preset="ppo-cartpol")
    assert caught.value.key == "preset"
    file = tmp_path / "mine.yaml"
    file.write_text("env: E\npreset: nope\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: .*'nope'"):
        load_config(config_class, file=file)
    with pytest.raises(ConfigError) as caught:
        PPOConfig(preset=3)
    assert (caught.value.key, caught.value.value) == ("preset", 3)


def test_a_whole_config_names_its_preset_for_the_record_only() -> None:
    values = {**PPOConfig(env="CartPole-v1", preset="auto").to_dict(), "preset": "one-of-long-ago"}
    config = PPOConfig.from_mapping(values)
    assert (config.preset, config.gamma) == ("one-of-long-ago", 0.98)
    with pytest.raises(ConfigError, match="'one-of-long-ago'"):
        PPOConfig.from_mapping({name: value for name, value in values.items() if name != "gamma"})


def test_a_warning_says_that_a_complete_file_leaves_nothing_to_a_preset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a printed config, which would train with other settings under the preset's
    name.
    """
    file = tmp_path / "mine.yaml"
    file.write_text(dump_yaml(PPOConfig(env="CartPole-v1")))
    for name in ("auto", "ppo-acrobot"):
        caplog.clear()
        config = load_config(
            config_class, file=file, overrides={"env": "Acrobot-v1", "preset": name}
        )
        assert (config.preset, config.gamma) == ("ppo-acrobot", PPOConfig().gamma)
        (warning,) = caplog.messages
        assert "ppo-acrobot" in warning
        assert str(file) in warning


def test_there_is_no_warning_if_a_preset_has_an_effect_or_equals_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, part, run = tmp_path / "whole.yaml", tmp_path / "part.yaml", tmp_path / "run"
    run.mkdir()
    with_preset = PPOConfig(env="CartPole-v1", preset="auto")
    whole.write_text(dump_yaml(with_preset))
    part.write_text("gamma: 0.5\nlambda_: 0.6\n")
    save_config(with_preset.updated({"gamma": 0.5, "run_dir": str(run)}), run)
    for file in (whole, part):
        config = load_config(
            config_class, file=file, overrides={"env": "CartPole-v1", "preset": "auto"}
        )
        assert config.preset == "ppo-cartpole"
    load_config(config_class, file=whole)
    assert load_config(config_class, overrides={"resume": str(run)}).preset == "ppo-cartpole"
    part.write_text("preset: ppo-acrobot\n")
    load_config(config_class, file=part, overrides={"resume": str(run)})
    PPOConfig.from_file(whole, gamma=0.5).updated({"preset": "ppo-acrobot"})
    assert str(tmp_path) not in caplog.text


def test_a_preset_of_another_algorithm_is_refused_and_of_another_environment_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="algo: impala"):
        PPOConfig(preset="impala-atari")
    config = PPOConfig(env="mine:CartPole", preset="ppo-cartpole")
    assert (config.env, config.gamma) == ("mine:CartPole", 0.98)
    assert "mine:CartPole" in caplog.text


def test_a_value_of_the_user_replaces_a_presets_schedule() -> None:
    assert PPOConfig(preset="ppo-cartpole").lr_schedule is not None
    config = PPOConfig(preset="ppo-cartpole", lr=1e-4)
    assert (config.lr, config.lr_schedule) == (1e-4, None)
    schedule = [[0, 1.0], [10, 0.5]]
    assert (
        PPOConfig(preset="ppo-cartpole", lr=1e-4, lr_schedule=schedule).to_dict()["lr_schedule"]
        == schedule
    )


def test_a_value_on_top_replaces_the_schedule_of_a_file_or_a_config(tmp_path: Path) -> None:
    """For example --lr on top of a run's own config, or of a printed one."""
    before = PPOConfig(env="CartPole-v1", preset="auto")
    file = tmp_path / "printed.yaml"
    file.write_text(dump_yaml(before))
    assert PPOConfig.from_file(file).to_dict() == before.to_dict()
    for after in (PPOConfig.from_file(file, lr=1e-4), before.updated({"lr": 1e-4})):
        assert (after.lr, after.lr_schedule) == (1e-4, None)
        assert (after.origin_of("lr"), after.origin_of("lr_schedule")) == ("argument", "default")
        assert after.updated({"lr_schedule": [[0, 1.0]]}).lr_schedule == [(0.0, 1.0)]
        assert after.updated({"gamma": 0.5}).lr == 1e-4


def test_a_preset_can_be_changed_later_and_values_of_the_user_stay() -> None:
    config = PPOConfig(env="CartPole-v1", preset="auto", gamma=0.5, model={"fcnet_hiddens": [8]})
    config = config.model_copy(update={"seed": 7}).updated({"grad_clip": None})
    for changes, name, lam in (
        ({"preset": None}, None, 0.95),
        ({"preset": "ppo-acrobot"}, "ppo-acrobot", 0.94),
    ):
        changed = config.updated(changes)
        assert (changed.preset, changed.lambda_) == (name, lam)
        assert (changed.gamma, changed.seed, changed.grad_clip, changed.model.fcnet_hiddens) == (
            0.5,
            7,
            None,
            (8,),
        )
        assert changed.env == "CartPole-v1"
    assert config.updated({"lambda_": 0.1}).rollout_fragment_length == 32


def test_a_missing_environment_is_reported_as_without_a_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ConfigError, match=r"\[mujoco\]"):
        resolve_env(str(PPOConfig(env="HalfCheetah-v5", preset="auto").env))(EnvContext())
