"""YAML by the rules of YAML 1.2, so that `1e-4` is a number and `off` is a word."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from aiorl.errors import ConfigError

__all__ = ["MAX_BYTES", "dump_mapping", "parse_value", "parse_yaml", "read_config_file", "read_yaml"]

MAX_BYTES = 1 << 20
"""Largest config file that is read."""

_MAX_DEPTH = 32
_MAX_NODES = 100_000


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The keys that a YAML file sets, and the line each dotted key stands on.

    Raises: ConfigError when the file can't be read, is no YAML, holds no mapping or sets a key twice.
    """
    return parse_yaml(path, read_config_file(path))


def parse_yaml(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """The keys that a file's content sets, and the line each dotted key stands on.

    Raises: ConfigError naming the file when it is no YAML, holds no mapping or sets a key twice.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Loader(content.decode("utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        _note_lines(node, "", lines)
        values = loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise ConfigError(f"Config file {path} can't be read: it is no UTF-8 text.", value=str(path)) from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: this is no valid YAML: {error.problem}.", value=str(path)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: this is no valid YAML: {error}.", value=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a config file holds `key: value` lines, not a {type(values).__name__}.")
    return values, lines


def parse_value(text: str) -> Any:
    """One value as a config file would hold it: `3`, `1e-4`, `true`, `[64, 64]`, `{a: 1}`; else the text itself."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return text if value is None and text.strip() not in ("null", "~", "Null", "NULL") else value


def dump_mapping(values: Mapping[str, Any]) -> str:
    """Plain data as YAML that reads back equal."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)
    return text


def read_config_file(path: Path) -> bytes:
    """The content of a file that the user names; it may be a pipe."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Config file {path} can't be read: {error.strerror}.", value=str(path)) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"Config file {path} can't be read: it has more than {MAX_BYTES:,} bytes.", value=str(path))
    return content


class _Loader(yaml.SafeLoader):
    """SafeLoader by the rules of YAML 1.2 for plain words, which refuses a key set twice.

    It also refuses what no config needs and what a few bytes can grow into: deep nesting, aliases of aliases, an alias
    for what it stands in.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, tuple[yaml.Node, int]] = {}  # by id, with the node so that no other gets its id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node, once it is known how large it is with all its aliases replaced."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "it is nested too deeply", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias stands for what it is in", mark)
        if not is_alias:
            self._sizes[id(node)] = node, 1 + sum(self._sizes[id(inner)][1] for inner in _inner(node))
        if max(len(self._sizes), self._sizes[id(node)][1]) > _MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f"it holds more than {_MAX_NODES:,} values", mark)
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """What a whole document holds."""
        try:
            return super().construct_document(node)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # PyYAML's own checks are of untagged values: `!!bool maybe` and the like come to this
            problem = f"a value is none of its type: {error!r:.100}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is one plain word", name.start_mark)
            if name.value in seen and name.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{name.value} is set twice", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep=deep)


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors, which readers of a config would stumble over."""

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
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
    # The dumper quotes what either version of YAML would not take for text.
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        dotted = f"{prefix}{name.value}"
        lines[dotted] = name.start_mark.line + 1
        _note_lines(value, f"{dotted}.", lines)
