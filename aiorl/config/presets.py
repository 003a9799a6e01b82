"""Presets: settings for one algorithm in one environment, or in several alike; YAML files in `aiorl/presets`."""

from __future__ import annotations

import functools
import importlib.resources
import json
import logging
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aiorl.config.import_path import named
from aiorl.config.layers import PRESET, Layer, merged
from aiorl.config.merge import deep_update
from aiorl.config.worker import WorkerConfig
from aiorl.config.yaml_text import parse_yaml
from aiorl.errors import ConfigError, nearest

__all__ = [
    "AUTO",
    "Preset",
    "algo_of",
    "find_preset",
    "named_preset",
    "preset_names",
    "render_markdown",
    "render_text",
    "with_preset",
]

_log = logging.getLogger(__name__)

AUTO = "auto"
"""Stands for the preset of the algorithm and the environment, if there is one."""

_FOLDER = importlib.resources.files("aiorl") / "presets"
_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings under a name.

    Attributes:
        name: of the file, ALGORITHM-ENVIRONMENT.
        envs: names of environments that they are for, or patterns of names such as ``ALE/*-v5``.
        result: what they achieve, where, and whether that was measured here.
        source: where they come from.
        settings: nested as the config is; `algo` is among them.
    """

    name: str
    envs: tuple[str, ...]
    result: str
    source: str
    settings: dict[str, Any]

    @property
    def algo(self) -> str:
        """The algorithm that they are for."""
        return str(self.settings["algo"])

    def suits(self, env: str) -> bool:
        """Whether they are for an environment of this name."""
        return any(fnmatchcase(env, pattern) for pattern in self.envs)

    def lines(self) -> list[str]:
        """The settings as lines of YAML."""
        return [f"{name}: {_text(value)}" for name, value in self.settings.items()]

    def layer(self) -> Layer:
        """The settings; the environment is among them where they are for a single one."""
        own = {} if len(self.envs) > 1 or _is_pattern(self.envs[0]) else {"env": self.envs[0]}
        return Layer({**self.settings, **own}, f"{PRESET}{self.name}")


def preset_names() -> list[str]:
    """The names of all presets."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


@functools.cache
def named_preset(name: str) -> Preset:
    """The preset of a name.

    Raises: ConfigError offering the nearest names.
    """
    if name not in preset_names():
        raise ConfigError(
            f"There is no preset {name!r}.{nearest(name, preset_names())}", key="preset", value=name,
            hint="`python -m aiorl.learner --help-presets` lists all of them.",
        )  # fmt: skip
    file = f"{name}.yaml"
    values, _ = parse_yaml(Path(file), (_FOLDER / file).read_bytes())
    return Preset(name, **{**values, "envs": tuple(values["envs"])})


def find_preset(algo: str, env: str) -> Preset | None:
    """The preset for an algorithm in an environment: one that names it rather than one with a pattern."""
    fitting = [preset for preset in _presets_of(algo) if preset.suits(env)]
    return next((preset for preset in fitting if env in preset.envs), next(iter(fitting), None))


def algo_of(layers: Sequence[Layer]) -> str:
    """The algorithm that layers of settings ask for: by its name, by that of a preset, or by saying nothing.

    Raises: ConfigError when there is no such preset.
    """
    values = merged(layers)
    if values.get("algo") is not None:
        return str(named(values["algo"]))
    name = _name_in(layers)
    return str(WorkerConfig.model_fields["algo"].default) if name in (None, AUTO) else named_preset(str(name)).algo


def with_preset(layers: Sequence[Layer], algo: str, keys: Set[str]) -> list[Layer]:
    """The layers, below them the preset that they name; where that is ``auto``, the one found is named on top.

    Args:
        layers: of one config.
        algo: the algorithm that the config is for.
        keys: all that the config has; whoever sets them all leaves nothing to a preset, which need not exist any more.
    Raises: ConfigError when there is no such preset, or it is for another algorithm.
    """
    values, name = merged(layers), _name_in(layers, keys)
    env = values.get("env")
    if name is None or (name == AUTO and env is None):
        return list(layers)
    found = find_preset(algo.lower(), str(env)) if name == AUTO else named_preset(name)
    if found is None:
        _log.warning("there is no preset for %s in %s: its defaults are taken", algo, env)
    elif found.algo != algo.lower():
        raise ConfigError(
            f"preset {name} is for {found.algo}, not for {algo}.", key="preset", value=name,
            hint=f"Set algo: {found.algo}, or take another of `python -m aiorl.learner --help-presets`.",
        )  # fmt: skip
    elif env is not None and not found.suits(str(env)):
        _log.warning("preset %s is made for %s, not for %s", found.name, " and ".join(found.envs), env)
    if found is not None:
        _warn_if_overruled(found, layers)
    below = [] if found is None else [found.layer()]
    if name != AUTO:
        return [*below, *layers]
    origin = next(layer.origin_of("preset") for layer in reversed(layers) if "preset" in layer.values)
    return [*below, *layers, Layer({"preset": None if found is None else found.name}, f"{origin} ({AUTO})")]


def _name_in(layers: Sequence[Layer], keys: Set[str] | None = None) -> str | None:
    """The preset that layers ask for; None where there is nothing to look up."""
    layer = next((layer for layer in reversed(layers) if "preset" in layer.values), None)
    name = None if layer is None else layer.values["preset"]
    if layer is None or not isinstance(name, str):
        return None
    is_whole = layer.is_record or (keys is not None and keys <= layer.values.keys())
    return None if is_whole and name != AUTO else name


def _warn_if_overruled(preset: Preset, layers: Sequence[Layer]) -> None:
    """Say it where a config file leaves nothing to a preset, as one that was printed does; runs' own are not meant."""
    settings = {name: value for name, value in preset.settings.items() if name != "algo"}
    names = set(Layer(settings).names())
    for layer in layers:
        is_users = layer.is_file and not layer.is_record
        if is_users and names <= {*layer.names()} and deep_update(layer.values, settings) != layer.values:
            _log.warning(
                "preset %s adds nothing, since %s sets all of its keys and wins: leave out there what the preset is to "
                "set, or give env and preset without the file", preset.name, layer.origin,
            )  # fmt: skip


def _presets_of(algo: str) -> Iterator[Preset]:
    return (named_preset(name) for name in preset_names() if name.startswith(f"{algo}-"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_pattern(env: str) -> bool:
    return not _PATTERN.isdisjoint(env)


def render_text() -> str:
    """What `--help-presets` prints: each preset with its environments, its result and its settings."""
    paragraphs = []
    for preset in map(named_preset, preset_names()):
        lines = [f"{preset.name}: {', '.join(preset.envs)}", f"  Result: {preset.result}", f"  From: {preset.source}"]
        paragraphs.append("\n".join(lines + [f"      {line}" for line in preset.lines()]) + "\n")
    return "\n".join(paragraphs)


def render_markdown() -> str:
    """The text of docs/presets.md: one table, and each preset's settings."""
    presets = list(map(named_preset, preset_names()))
    lines = [
        "# Presets",
        "",
        "Settings for one algorithm in one environment, or in several alike. `--preset NAME` takes one,",
        "`--preset auto` the one for the algorithm and the environment, if there is one; likewise `preset: NAME` in a",
        'config file and `PPOConfig(preset="auto")`. Default < preset < config file < option or argument: what is set',
        "otherwise wins. `--show-config` shows each value and where it comes from. The files are in `aiorl/presets/`.",
        "",
        "| Preset | Environments | Result | Settings from |",
        "|---|---|---|---|",
    ]
    for preset in presets:
        envs = ", ".join(f"`{env}`" for env in preset.envs)
        lines.append(f"| `{preset.name}` | {envs} | {preset.result} | {preset.source} |")
    for preset in presets:
        lines += ["", f"## {preset.name}", "", "```yaml", *preset.lines(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
