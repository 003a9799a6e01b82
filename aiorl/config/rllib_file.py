"""Experiment files of `rllib train -f`, converted to aiorl's keys.

`python -m aiorl.learner --config FILE` takes one as it is. `python -m aiorl.config.rllib_file FILE` prints it
converted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiorl.config.check import from_rllib
from aiorl.config.command_line import Parser, exit_status
from aiorl.config.files import dump_mapping, read_yaml
from aiorl.errors import ConfigError

_PROG = "python -m aiorl.config.rllib_file"
_GROUPS = ("model", "multiagent", "replay_buffer_config", "stop")
_EPSILONS = {"initial_epsilon": 1.0, "final_epsilon": 0.02, "epsilon_timesteps": 10_000}  # with RLlib's defaults


class Converted(NamedTuple):
    """An experiment file in aiorl's keys.

    Attributes:
        settings: nested as aiorl's config is.
        lines: dotted key of aiorl -> its line in the file.
        left_out: name in the file -> why it is left out.
    """

    settings: dict[str, Any]
    lines: dict[str, int]
    left_out: dict[str, str]


def is_rllib_file(values: Mapping[str, Any]) -> bool:
    """Return whether a file holds experiments of `rllib train`: names of their own, with `run` and an `env` below."""
    return bool(values) and all(map(_is_experiment, values.values()))


def _is_experiment(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("run"), str):
        return False
    config = value.get("config")
    return "env" in value or (isinstance(config, Mapping) and "env" in config)


def convert(values: Mapping[str, Any], lines: Mapping[str, int]) -> Converted:
    """Convert the experiment of a file.

    Keys of exactly the same meaning get aiorl's names. Keys that mean something else here are left out. All others stay
    as they are, so that the config checks them.

    Args:
        values: of the file, of which `is_rllib_file` is true.
        lines: dotted key -> its line.

    Raises:
        ConfigError: there are several experiments.
    """
    if len(values) > 1:
        raise ConfigError(
            f"the file holds {len(values)} experiments of rllib train ({', '.join(values)}), and a run is one.",
            hint="Keep one of them in the file.",
        )
    title, experiment = next(iter(values.items()))
    made = Converted({}, {}, {})
    for name, path, value in _settings(experiment):
        ours, why = from_rllib(name)
        if ours is None:
            made.left_out[name] = why
            continue
        *groups, last = ours.split(".")
        inner = made.settings
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = str(value).lower() if name == "run" else value
        made.lines[ours] = lines.get(f"{title}.{path}", 1)
    return made


def _settings(experiment: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the dotted place and the value of each setting."""
    config = experiment.get("config") or {}
    parts = [("", {name: value for name, value in experiment.items() if name != "config"}), ("config.", config)]
    for prefix, values in parts:
        for name, value in values.items():
            if name == "exploration_config" and isinstance(value, Mapping) and not _EPSILONS.keys().isdisjoint(value):
                first, last, steps = (value.get(key, default) for key, default in _EPSILONS.items())
                yield "epsilon_schedule", f"{prefix}{name}", [[0, first], [steps, last]]
            elif name in _GROUPS and isinstance(value, Mapping):
                if "Prioritized" in str(value.get("type")):
                    yield "prioritized_replay", f"{prefix}{name}.type", True
                yield from ((f"{name}.{inner}", f"{prefix}{name}.{inner}", of) for inner, of in value.items())
            elif value != "auto":  # which aiorl calls leaving it out
                yield name, f"{prefix}{name}", value


def _main(argv: list[str]) -> None:
    parser = Parser(_PROG, "FILE", "Prints what aiorl makes of an experiment file of rllib train.", "")
    parser.add_argument("file", type=Path)
    path: Path = parser.parse(argv)["file"]
    values, lines = read_yaml(path)
    if not is_rllib_file(values):
        raise ConfigError(f"{path} is no experiment file of rllib train: no experiment in it has the key run.")
    made = convert(values, lines)
    comments = [f"# {name} is left out. {why}\n" for name, why in made.left_out.items()]
    sys.stdout.write("".join(comments) + dump_mapping(made.settings))


if __name__ == "__main__":
    raise SystemExit(exit_status(lambda: _main(sys.argv[1:])))
