"""Names that other libraries use, and experiment files of `rllib train -f`, converted to aiorl's
keys.

`other_names.yaml` lists the names of other libraries and their counterparts here.

`python -m aiorl.learner --config FILE` accepts an experiment file unchanged. `python -m
aiorl.config.rllib_file FILE` prints the converted file.
"""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiorl.config.command_line import Parser, exit_status
from aiorl.config.files import dump_mapping, parse_yaml, read_yaml
from aiorl.errors import ConfigError

_PROG = "python -m aiorl.config.rllib_file"
_GROUPS = ("model", "multiagent", "replay_buffer_config", "stop")
_EPSILONS = {
    "initial_epsilon": 1.0,
    "final_epsilon": 0.02,
    "epsilon_timesteps": 10_000,
}  # with RLlib's defaults


class Converted(NamedTuple):
    """Experiment file in aiorl's keys.

    Attributes:
        settings: values, nested like aiorl's config.
        lines: dotted key of aiorl -> its line in the file.
        left_out: name in the file -> the reason for leaving it out.
    """

    settings: dict[str, Any]
    lines: dict[str, int]
    left_out: dict[str, str]


def is_rllib_file(values: Mapping[str, Any]) -> bool:
    """Return whether a file holds experiments of `rllib train`: free names, each with `run` and an
    `env` below it.
    """
    return bool(values) and all(map(_is_experiment, values.values()))


def _is_experiment(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("run"), str):
        return False
    config = value.get("config")
    return "env" in value or (isinstance(config, Mapping) and "env" in config)


def convert(values: Mapping[str, Any], lines: Mapping[str, int]) -> Converted:
    """Convert the experiment of a file.

    Keys with exactly the same meaning get aiorl's names. Keys that mean something else here are
    left out. All other keys stay unchanged, so that the config checks them.

    Args:
        values: content of a file for which `is_rllib_file` is true.
        lines: dotted key -> its line.

    Raises:
        ConfigError: the file has several experiments.
    """
    if len(values) > 1:
        raise ConfigError(
            f"the file holds {len(values)} experiments of rllib train ({', '.join(values)}), but a"
            " run is only one.",
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
    parts = [
        ("", {name: value for name, value in experiment.items() if name != "config"}),
        ("config.", config),
    ]
    for prefix, values in parts:
        for name, value in values.items():
            if (
                name == "exploration_config"
                and isinstance(value, Mapping)
                and not _EPSILONS.keys().isdisjoint(value)
            ):
                first, last, steps = (value.get(key, default) for key, default in _EPSILONS.items())
                yield "epsilon_schedule", f"{prefix}{name}", [[0, first], [steps, last]]
            elif name in _GROUPS and isinstance(value, Mapping):
                if "Prioritized" in str(value.get("type")):
                    yield "prioritized_replay", f"{prefix}{name}.type", True
                yield from (
                    (f"{name}.{inner}", f"{prefix}{name}.{inner}", of)
                    for inner, of in value.items()
                )
            elif value != "auto":  # in aiorl a missing key means auto
                yield name, f"{prefix}{name}", value


# Names of other libraries
# --------------------------------------------------------------------------------------------------

CALLED = "Here it is called "
"""Beginning of a hint; the name of a key follows."""

_FILE = "other_names.yaml"
NONE = "none"
"""Name in the table for the answer if an algorithm has none of the keys."""


def key_hint(name: str, units: Mapping[str, str]) -> str:
    """Return aiorl's name for a key of another library, or "" if no known library has the key.

    Args:
        name: dotted name of the key. If it is not in the table, the part after the last dot is
            looked up.
        units: dotted name -> unit of all keys of the algorithm, groups included.
    """
    texts: list[str] = []
    for answers in _answers(name) or _answers(name.rpartition(".")[2]):
        ours = next((key for key in answers if key in units), None)
        if ours is not None:
            unit = f" ({units[ours]})" if units[ours] else ""
            return f"{CALLED}{ours}{unit}. {answers[ours] or ''}".strip()
        others = " and ".join(key for key in answers if key != NONE)
        texts.append(answers.get(NONE) or f"It is {others} in other algorithms.")
    return next(iter(texts), "")


def attribute_hint(of: str, name: str) -> str:
    """Return the replacement for an attribute that another library has, or "".

    Args:
        of: aiorl, config or trainer.
        name: name of the attribute.
    """
    if name.startswith("_"):
        return ""
    found = (names[of].get(name, "") for names in other_names()["python"].values())
    return next(filter(None, found), "")


def no_attribute(of: str, owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object lacks, with a hint if another library has
    it.
    """
    said = f"{type(owner).__name__!r} object has no attribute {name!r}"
    hint = attribute_hint(of, name)
    return AttributeError(f"{said}. {hint}" if hint else said, name=name, obj=owner)


def from_rllib(name: str) -> tuple[str | None, str]:
    """Return aiorl's key for a key of RLlib if both mean exactly the same; otherwise None and the
    difference.
    """
    is_ours = name.partition(".")[0] in ("model", "multiagent", name)
    entry = other_names()["rllib"].get(name, {name: ""} if is_ours else "It has no counterpart.")
    if isinstance(entry, str):
        return None, entry.removesuffix(" Leave it out.")
    ours = next(iter(entry))
    return (None, f"The key here is {ours}. {entry[ours]}") if entry[ours] else (ours, "")


def _answers(name: str) -> list[dict[str, str | None]]:
    sections = (other_names()[section].get(name) for section in ("rllib", "sb3", "others"))
    return [
        {NONE: entry} if isinstance(entry, str) else entry
        for entry in sections
        if entry is not None
    ]


@functools.cache
def other_names() -> dict[str, Any]:
    """Return the table of `other_names.yaml`."""
    content = importlib.resources.files("aiorl.config").joinpath(_FILE).read_bytes()
    return parse_yaml(Path(_FILE), content)[0]


def _main() -> None:
    parser = Parser(
        _PROG, "FILE", "Prints an experiment file of rllib train with aiorl's keys.", ""
    )
    parser.add_argument("file", type=Path)
    path: Path = parser.parse()["file"]
    values, lines = read_yaml(path)
    if not is_rllib_file(values):
        raise ConfigError(
            f"{path} is not an experiment file of rllib train: no experiment in it has the key run."
        )
    made = convert(values, lines)
    comments = [f"# {name} is left out. {why}\n" for name, why in made.left_out.items()]
    sys.stdout.write("".join(comments) + dump_mapping(made.settings))


if __name__ == "__main__":
    raise SystemExit(exit_status(_main))
