"""YAML of settings, by version 1.2: `1e-4` is a number and `off` is a word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from aiorl.config.files import MAX_DEPTH, read_config_file
from aiorl.errors import ConfigError

_MAX_NODES = 100_000
_MAX_DIGITS = 1000


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the keys that a YAML file sets, and the line of each dotted key.

    Raises:
        ConfigError: the file can't be read, is not YAML, holds no mapping or sets a key twice.
    """
    content, _ = read_config_file(path)
    return parse_yaml(path, content)


def parse_yaml(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the keys that a file's content sets, and the line of each dotted key.

    Raises:
        ConfigError: the file is not YAML, holds no mapping or sets a key twice; the error names it.
    """
    try:
        values, lines = _load(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"Config file {path} can't be read: it is not UTF-8 text.", value=str(path)
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", error)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{line}: this is not valid YAML: {problem}.", value=str(path)
        ) from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a config file holds `key: value` lines, not a {type(values).__name__}."
        )
    return values, lines


def parse_value(text: str) -> Any:
    """Return a value as in a config file:

    `3`, `1e-4`, `true`, `[64, 64]`, `{a: 1}`; anything else stays text.
    """
    try:
        value, _ = _load(text)
    except yaml.YAMLError:
        return text
    if value is None and text.strip() not in ("null", "~", "Null", "NULL"):  # nothing, or a comment
        return text
    return value


def dump_mapping(values: Mapping[str, Any]) -> str:
    """Return plain data as YAML that loads back equal."""
    text: str = yaml.dump(
        dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110
    )
    return text


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain words of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors, which make a config hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_FLOAT = (
    r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|^\.(?:nan|NaN|NAN)$"
)

_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
    # Quote all texts that either version of YAML would not read as text.
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _load(text: str) -> tuple[Any, dict[str, int]]:
    """Return a document's value (None if it is empty) and the line of each dotted key.

    Raises:
        yaml.YAMLError: the text is not valid.
    """
    lines: dict[str, int] = {}
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _check_nodes(node, prefix="", lines=lines, budget=iter(range(_MAX_NODES)))
        return loader.construct_document(node), lines
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML does not check values with explicit tags: `!!bool maybe` is a KeyError
        raise yaml.YAMLError(f"a value does not fit its type: {error!r:.100}") from error


def _check_nodes(
    node: yaml.Node, *, prefix: str, lines: dict[str, int], budget: Iterator[int], depth: int = 1
) -> None:
    """Record the lines of keys; refuse repeated keys, deep nesting, and too many values after
    aliases are expanded.

    Each value takes one number from `budget`.
    """
    if depth > MAX_DEPTH:
        raise _fault("it is nested too deeply", node)
    if next(budget, None) is None:
        raise _fault(f"it holds more than {_MAX_NODES:,} values", node)
    is_int = node.tag == "tag:yaml.org,2002:int"
    if is_int and len(node.value) > _MAX_DIGITS:  # in hex, Python would read any number
        raise _fault("a number has too many digits", node)
    if isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            _check_nodes(inner, prefix="", lines={}, budget=budget, depth=depth + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    names: set[str] = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise _fault("a key must be one plain word", name)
        if name.value in names and name.tag != "tag:yaml.org,2002:merge":
            raise _fault(f"{name.value} is set twice", name)
        names.add(name.value)
        dotted = f"{prefix}{name.value}"
        lines[dotted] = name.start_mark.line + 1
        _check_nodes(value, prefix=f"{dotted}.", lines=lines, budget=budget, depth=depth + 1)


def _fault(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
