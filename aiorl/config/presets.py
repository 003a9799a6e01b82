"""Presets: settings with a name, for an algorithm and an environment.

Each is a file of `aiorl/presets`.
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aiorl.config.key import as_written
from aiorl.config.yaml_text import parse_yaml
from aiorl.errors import ConfigError, nearest

_PRESETS = importlib.resources.files("aiorl") / "presets"


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings with a name.

    Attributes:
        name: name of the file, ALGORITHM-ENVIRONMENT.
        envs: names of its environments, or patterns of names such as ``ALE/*-v5``.
        result: return that the settings reach, published or measured here.
        source: origin of the settings.
        settings: values, nested like the config and including `algo`.
    """

    name: str
    envs: tuple[str, ...]
    result: str
    source: str
    settings: dict[str, Any]

    @property
    def algo(self) -> str:
        """Algorithm of the settings."""
        return str(self.settings["algo"])

    def suits(self, env: str) -> bool:
        """Return whether the settings are for an environment with this name."""
        return any(fnmatchcase(env, pattern) for pattern in self.envs)

    def lines(self) -> list[str]:
        """Return the settings as lines of YAML."""
        return [f"{name}: {as_written(value)}" for name, value in self.settings.items()]

    def values(self) -> dict[str, Any]:
        """Return the settings, including the environment if they are for only one."""
        is_pattern = not set("*?[").isdisjoint(self.envs[0])
        if len(self.envs) > 1 or is_pattern:
            return dict(self.settings)
        return {**self.settings, "env": self.envs[0]}


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _PRESETS.iterdir()
        if entry.name.endswith(".yaml")
    )


def render_presets() -> str:
    """Return each preset with its environments, result and settings, for `--help-presets`."""
    paragraphs = []
    for preset in map(named_preset, preset_names()):
        lines = [
            f"{preset.name}: {', '.join(preset.envs)}",
            f"  Result: {preset.result}",
            f"  From: {preset.source}",
        ]
        lines += [f"      {line}" for line in preset.lines()]
        paragraphs.append("\n".join(lines) + "\n")
    return "\n".join(paragraphs)


@functools.cache
def named_preset(name: str) -> Preset:
    """Return the preset with a name.

    Raises:
        ConfigError: there is none; the error offers the nearest names.
    """
    if name not in preset_names():
        raise ConfigError(
            f"There is no preset {name!r}.{nearest(name, preset_names())}",
            key="preset",
            value=name,
            hint="`aiorl train --help-presets` lists all of them.",
        )
    file = f"{name}.yaml"
    values, _ = parse_yaml(Path(file), (_PRESETS / file).read_bytes())
    return Preset(name, **{**values, "envs": tuple(values["envs"])})


def find_preset(algo: str, env: str) -> Preset | None:
    """Return the preset for an algorithm in an environment; its exact name takes precedence over
    patterns.
    """
    presets = (named_preset(name) for name in preset_names() if name.startswith(f"{algo}-"))
    fitting = [preset for preset in presets if preset.suits(env)]
    fitting.sort(key=lambda preset: env not in preset.envs)
    return fitting[0] if fitting else None
