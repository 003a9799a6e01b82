"""The effective config: defaults < algorithm < YAML file < command line.

YAML is read by the rules of YAML 1.2, so `1e-4` is a number and `off` is a word. Values of environment variables
whose names look like secrets are left out of what is printed or saved; when such a file is loaded, they are taken
from the learner's own environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from aiorl.config.key import by_group
from aiorl.config.merge import deep_update
from aiorl.config.regular_file import read_regular
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

__all__ = ["CONFIG_FILE", "WITHHELD", "dump_yaml", "load_config", "parse_value", "read_yaml", "save_config"]

CONFIG_FILE = "config.yaml"
"""Name of the effective config's file in a run directory."""

WITHHELD = "<withheld>"
"""Stands in printed and saved configs for a value that looks like a secret."""

ConfigClassOf = Callable[[str], type[CommonConfig]]
"""Name of an algorithm -> its config class; raises UnknownAlgorithmError for others."""

_DEFAULT_ALGO = CommonConfig.model_fields["algo"].default
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 32
_MAX_NODES = 100_000

_SECRET = re.compile(r"token|secret|passw|credential|api_?key|access_?key|private", re.IGNORECASE)
_ENVIRONS = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")


def load_config(
    config_class_of: ConfigClassOf,
    *,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> CommonConfig:
    """The effective config, of the class that belongs to its `algo`.

    Args:
        config_class_of: name of an algorithm -> its config class.
        file: YAML file of keys; None for none. With `resume`, the run directory's own config is read before it.
        overrides: what the command line sets, nested as the config is; it wins.
        environ: the process's environment, which values that a saved config withholds are taken from.
    Raises: ConfigError naming file and line where a file is at fault.
    """
    overrides = dict(overrides or {})
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    contents: list[tuple[Path, bytes]] = []
    resume = overrides.get("resume")
    fixed: dict[str, str] = {}
    if resume is not None:
        contents.append(_resumed(Path(str(resume))))
        fixed = {"run_dir": str(resume), "algo": str(_parse(*contents[0])[0].get("algo", _DEFAULT_ALGO))}
        overrides.setdefault("run_dir", fixed["run_dir"])
    if file is not None:
        contents.append((file, _read(file)))
    for path, content in contents:
        read, where = _parse(path, content)
        values = deep_update(values, read)
        lines.update({name: f"{path}, line {line}: " for name, line in where.items()})
    for name in _names(overrides):
        lines.pop(name, None)
    values = deep_update(values, overrides)
    _restore_withheld(values, os.environ if environ is None else environ)
    try:
        for name, own in fixed.items():
            if os.path.normpath(str(values.get(name, own))) != os.path.normpath(own):
                raise _not_resumable(name, values[name], own, Path(str(resume)))
        config = config_class_of(str(values.get("algo", _DEFAULT_ALGO))).from_mapping(values)
        if config.env is None:
            raise ConfigError("There is no environment to train in.", key="env", hint="Give one: --env CartPole-v1")
    except ConfigError as error:
        if error.key in lines:
            error.message = lines[error.key] + error.message
        raise
    return config


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The keys that a YAML file sets, and the line each dotted key stands on.

    Raises: ConfigError when the file can't be read, is no YAML, holds no mapping or sets a key twice.
    """
    return _parse(path, _read(path))


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, int]]:
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


def dump_yaml(config: CommonConfig) -> str:
    """All keys of the effective config as YAML that loads back equal; secrets are withheld."""
    plain = config.to_dict()
    values = {name: plain[name] for name, _ in by_group(type(config).model_fields.items())}
    for group in _ENVIRONS:
        values[group] = {name: WITHHELD if _SECRET.search(name) else text for name, text in values[group].items()}
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)
    return text


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


def _names(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in values.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            names.extend(_names(value, f"{prefix}{name}."))
    return names


def _read(path: Path) -> bytes:
    """The content of a file that the user names; it may be a pipe."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Config file {path} can't be read: {error.strerror}.", value=str(path)) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"Config file {path} can't be read: it has more than {_MAX_BYTES:,} bytes.", value=str(path))
    return content


def _resumed(run_dir: Path) -> tuple[Path, bytes]:
    """The config of the run to resume, and its content."""
    path = run_dir / CONFIG_FILE
    try:
        return path, read_regular(path, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run_dir} is no run directory: it holds no {CONFIG_FILE}.",
            key="resume",
            value=str(run_dir),
            hint="Give the directory that the run named at its end.",
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", key="resume", value=str(run_dir)) from error


def _not_resumable(key: str, value: object, own: str, run_dir: Path) -> ConfigError:
    flag = f"--{key.replace('_', '-')}"
    return ConfigError(
        f"{key} can't be {value} here: the run in {run_dir} goes on with {key} {own}.",
        key=key,
        value=value,
        hint=f"Leave {flag} out, or begin a new run like it: --config {run_dir / CONFIG_FILE} {flag} {value}",
    )


def _restore_withheld(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    for group in _ENVIRONS:
        variables = values.get(group)
        if not isinstance(variables, dict):
            continue
        for name, text in variables.items():
            if text != WITHHELD:
                continue
            if name not in environ:
                raise ConfigError(
                    f"{group}.{name} was withheld when this config was saved, and {name} is not set here.",
                    key=f"{group}.{name}",
                    hint=f"Set the environment variable {name}.",
                )
            variables[name] = environ[name]
