"""The effective config: defaults < preset < YAML file < command line.

Values of environment variables whose names look like secrets are left out of printed and saved configs. When a saved
config is loaded, they are taken from the learner's own environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiorl.config.key import by_group
from aiorl.config.layers import Layer, file_layer, located, merged
from aiorl.config.named_code import foreign_code
from aiorl.config.presets import algo_of
from aiorl.config.regular_file import read_regular
from aiorl.config.schema import CommonConfig
from aiorl.config.withheld import without_secrets
from aiorl.config.yaml_text import MAX_BYTES, dump_mapping
from aiorl.errors import ConfigError

__all__ = ["CONFIG_FILE", "ConfigClassOf", "dump_yaml", "load_config", "save_config"]

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""Name of the effective config's file in a run directory."""

ConfigClassOf = Callable[[str], type[CommonConfig]]
"""Name of an algorithm -> its config class; raises UnknownAlgorithmError for others."""

_OF_NEW_RUNS = {
    "init_from": ("goes on with its own weights", "--init-from"),
    "preset": ("goes on with its own settings", "--preset"),
}
"""Key -> why a resumed run has none, and its option."""


def load_config(
    config_class_of: ConfigClassOf,
    *,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = _log.warning,
    env_hint: str = "Give one: --env CartPole-v1",
) -> CommonConfig:
    """The effective config, of the class that belongs to its `algo`, which is imported where it is the user's own.

    Args:
        config_class_of: name of an algorithm -> its config class.
        file: YAML file of keys; None for none. With `resume`, the run directory's own config is read before it.
        overrides: what the command line sets, nested as the config is; it wins.
        environ: the process's environment, which values that a saved config withholds are taken from.
        warn: called with a sentence on the code that somebody else's config names (see `foreign_code`), before any of
            it is imported; a file of keys may be somebody else's too.
        env_hint: what to do where there is no environment.
    Raises: ConfigError naming file and line where a file is at fault.
    """
    overrides = dict(overrides or {})
    layers: list[Layer] = []
    resume = overrides.get("resume")
    fixed: dict[str, str] = {}
    saved: list[Path] = []
    if resume is not None:
        for name, (why, option) in _OF_NEW_RUNS.items():
            if overrides.get(name) is not None:
                raise ConfigError(
                    f"{name} is for new runs, and the one in {resume} {why}.",
                    key=name,
                    value=overrides[name],
                    hint=f"Leave out {option} or --resume.",
                )
        saved = [Path(str(resume)), Path(str(resume)) / CONFIG_FILE]
        layers.append(_resumed(saved[0]))
        fixed = {"run_dir": str(resume), "algo": algo_of(layers)}
        overrides.setdefault("run_dir", fixed["run_dir"])
    if file is not None:
        layers.append(file_layer(file))
    layers.append(Layer(overrides))
    values = merged(layers)
    try:
        for name, own in fixed.items():
            wanted = own if values.get(name) is None else values[name]
            if os.path.normpath(str(wanted)) != os.path.normpath(own):
                raise _not_resumable(name, values[name], own, saved[0])
        if said := foreign_code([*saved, *([] if file is None else [file])], values):
            warn(said)
        config_class = config_class_of(algo_of(layers))
    except ConfigError as error:
        error.message = located(error.message, error.key, layers)
        raise
    config = config_class.from_layers(layers, environ=environ)
    if config.env is None:
        raise ConfigError(located("There is no environment to train in.", "env", layers), key="env", hint=env_hint)
    return config


def dump_yaml(config: CommonConfig) -> str:
    """All keys of the effective config as YAML that loads back equal; secrets are withheld."""
    plain = without_secrets(config.to_dict())
    values = {name: plain[name] for name, _ in by_group(type(config).model_fields.items())}
    return dump_mapping(values)


def save_config(config: CommonConfig, run_dir: Path) -> Path:
    """Writes the effective config to the run directory, for people and for `--resume`.

    Raises: ConfigError when the file can't be written.
    """
    path, temporary = run_dir / CONFIG_FILE, run_dir / f"{CONFIG_FILE}.tmp"
    try:
        temporary.write_text(dump_yaml(config.model_copy(update={"resume": None})), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.", key="run_dir", value=str(run_dir)) from error
    return path


def _resumed(run_dir: Path) -> Layer:
    """The config of the run to resume."""
    path = run_dir / CONFIG_FILE
    try:
        content = read_regular(path, max_bytes=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run_dir} is no run directory: it holds no {CONFIG_FILE}.",
            key="resume",
            value=str(run_dir),
            hint="Give the directory that the run named at its end.",
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", key="resume", value=str(run_dir)) from error
    return file_layer(path, content, is_record=True)


def _not_resumable(key: str, value: object, own: str, run_dir: Path) -> ConfigError:
    flag = f"--{key.replace('_', '-')}"
    return ConfigError(
        f"{key} can't be {value} here: the run in {run_dir} goes on with {key} {own}.",
        key=key,
        value=value,
        hint=f"Leave {flag} out, or begin a new run like it: --config {run_dir / CONFIG_FILE} {flag} {value}",
    )
