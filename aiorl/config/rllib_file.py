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
from aiorl.config.yaml_text import dump_mapping, parse_yaml, read_yaml
from aiorl.errors import ConfigError

_PROG = "python -m aiorl.config.rllib_file"
_GROUPS = ("model", "multiagent", "replay_buffer_config", "stop")
# with RLlib's defaults
_EPSILONS = {
    "initial_epsilon": 1.0,
    "final_epsilon": 0.02,
    "epsilon_timesteps": 10_000,
}


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
    converted = Converted({}, {}, {})
    for name, path, value in _settings(experiment):
        key, difference = from_rllib(name)
        if key is None:
            converted.left_out[name] = difference
            continue
        if name == "run":
            value = str(value).lower()
        *groups, last = key.split(".")
        inner = converted.settings
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
        converted.lines[key] = lines.get(f"{title}.{path}", 1)
    return converted


def _settings(experiment: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the dotted place and the value of each setting."""
    config = experiment.get("config") or {}
    settings = [(name, name, value) for name, value in experiment.items() if name != "config"]
    settings += [(f"config.{name}", name, value) for name, value in config.items()]
    for path, name, value in settings:
        is_group = isinstance(value, Mapping)
        if is_group and name == "exploration_config" and not _EPSILONS.keys().isdisjoint(value):
            epsilons = {**_EPSILONS, **value}
            first = [0, epsilons["initial_epsilon"]]
            last = [epsilons["epsilon_timesteps"], epsilons["final_epsilon"]]
            yield "epsilon_schedule", path, [first, last]
        elif is_group and name in _GROUPS:
            if "Prioritized" in str(value.get("type")):
                yield "prioritized_replay", f"{path}.type", True
            for inner_name, inner_value in value.items():
                yield f"{name}.{inner_name}", f"{path}.{inner_name}", inner_value
        elif value != "auto":  # in aiorl a missing key means auto
            yield name, path, value


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
        for key, difference in answers.items():
            if key in units:
                unit = f" ({units[key]})" if units[key] else ""
                return f"{CALLED}{key}{unit}. {difference or ''}".strip()
        elsewhere = " and ".join(key for key in answers if key != NONE)
        texts.append(answers.get(NONE) or f"It is {elsewhere} in other algorithms.")
    return texts[0] if texts else ""


def attribute_hint(of: str, name: str) -> str:
    """Return the replacement for an attribute that another library has, or "".

    Args:
        of: aiorl, config, trainer, workers or result.
        name: name of the attribute.
    """
    if name.startswith("_"):
        return ""
    hints = (names.get(of, {}).get(name, "") for names in other_names()["python"].values())
    return next(filter(None, hints), "")


def no_attribute(of: str, owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object lacks, with a hint if another library has
    it.
    """
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    hint = attribute_hint(of, name)
    if hint:
        message = f"{message}. {hint}"
    return AttributeError(message, name=name, obj=owner)


def from_rllib(name: str) -> tuple[str | None, str]:
    """Return aiorl's key for a key of RLlib if both mean exactly the same; otherwise None and the
    difference.
    """
    names = other_names()["rllib"]
    if name not in names:
        # the config checks a name that RLlib doesn't have either
        is_ours = name.partition(".")[0] in ("model", "multiagent", name)
        return (name, "") if is_ours else (None, "It has no counterpart.")
    entry = names[name]
    if isinstance(entry, str):
        return None, entry.removesuffix(" Leave it out.")
    key, difference = next(iter(entry.items()))
    if difference:
        return None, f"The key here is {key}. {difference}"
    return key, ""


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
    settings, _, left_out = convert(values, lines)
    comments = [f"# {name} is left out. {reason}\n" for name, reason in left_out.items()]
    sys.stdout.write("".join(comments) + dump_mapping(settings))


if __name__ == "__main__":
    raise SystemExit(exit_status(_main))
