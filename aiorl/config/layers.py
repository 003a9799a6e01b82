"""What is put on top of what, and where each value of a config comes from: default < preset < file < argument."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from aiorl.config.merge import deep_update, put_on_top
from aiorl.config.rllib_file import convert, is_rllib_file
from aiorl.config.yaml_text import parse_yaml, read_config_file

__all__ = ["DEFAULT", "DERIVED", "PRESET", "Layer", "Origins", "file_layer", "located", "merged", "without_overruled"]

_log = logging.getLogger(__name__)

DEFAULT = "default"
"""Where values come from that nobody sets."""

PRESET = "preset "
"""Begins the origin of a value that a preset sets; its name follows."""

DERIVED = "derived"
"""Where sizes come from that follow from others, which a user set."""

_ARGUMENT = "argument"
_SCHEDULE = "_schedule"


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one place.

    Attributes:
        values: nested as the config is.
        origin: where they come from, for people.
        origins: the same for single keys (dotted) where it is known better, such as file and line.
        is_file: an error of one of them names the line.
        is_record: they are a whole run's, so that a preset they name has nothing to add.
    """

    values: Mapping[str, Any]
    origin: str = _ARGUMENT
    origins: Mapping[str, str] = field(default_factory=dict)
    is_file: bool = False
    is_record: bool = False

    def names(self) -> Iterator[str]:
        """Every dotted key that is set, groups included."""
        return _keys(self.values)

    def origin_of(self, key: str) -> str:
        """Where the value of a dotted key comes from."""
        return self.origins.get(key, self.origin)


def file_layer(path: Path, content: bytes | None = None, *, is_record: bool = False) -> Layer:
    """Return the keys that a YAML file sets; those of an experiment file of RLlib are converted.

    Args:
        path: of the file.
        content: what it holds, if that was read already.
        is_record: it is the config of a run.
    Raises: ConfigError when the file can't be read, is no YAML, holds no mapping or sets a key twice.
    """
    values, lines = parse_yaml(path, read_config_file(path) if content is None else content)
    if is_rllib_file(values):
        values, lines, left_out = convert(values, lines)
        _log.warning("%s is an experiment file of rllib train, and its keys are converted", path)
        for name, why in left_out.items():
            _log.warning("%s is left out. %s", name, why)
    origins = {key: f"{path}, line {line}" for key, line in lines.items()}
    return Layer(values, str(path), origins, is_file=True, is_record=is_record)


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """The values of all layers, later ones on top."""
    return reduce(put_on_top, (layer.values for layer in layers), {})


def without_overruled(layers: Sequence[Layer], keys: Set[str]) -> list[Layer]:
    """The layers without the schedules of settings that a later one sets: a schedule would win over its value.

    Args:
        layers: of one config.
        keys: all that the config has.
    """
    kept: list[Layer] = []
    overruled: set[str] = set()
    for layer in reversed(layers):
        kept.append(replace(layer, values={name: layer.values[name] for name in layer.values if name not in overruled}))
        overruled |= {f"{name}{_SCHEDULE}" for name in layer.values} & keys - layer.values.keys()
    return kept[::-1]


def located(message: str, key: str, layers: Sequence[Layer]) -> str:
    """An error's sentence, with file and line before it where the value at fault stands in a file."""
    layer = next((layer for layer in reversed(layers) if key in layer.names()), None)
    if layer is None or not layer.is_file:
        return message
    return f"{layer.origin_of(key)}: {message}"


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the values of a config come from. Any two are equal: configs are compared by their values.

    Attributes:
        tree: nested as the config is, of what is set; each leaf is an origin.
    """

    tree: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Origins:
        """Those of values that are put together from layers, later ones on top."""
        return cls(reduce(deep_update, (_origins(layer, layer.values) for layer in layers), {}))

    def origin_of(self, key: str, *, has_default: bool = False) -> str:
        """Where the value of a dotted key comes from; several origins where parts of it come from several places.

        Args:
            key: dotted.
            has_default: it is a mapping whose parts have defaults, and keep them where they are not set.
        """
        inner: Any = self.tree
        for name in key.split("."):
            inner = inner.get(name, {}) if isinstance(inner, Mapping) else {}
        parts = list(_leaves(inner))
        is_mixed = has_default and isinstance(inner, Mapping)
        return ", ".join(dict.fromkeys([DEFAULT, *parts] if is_mixed or not parts else parts))

    def users_keys(self) -> set[str]:
        """The keys of the outermost level that a user sets, in full or in part."""
        return {name for name, inner in self.tree.items() if any(map(_is_users, _leaves(inner)))}

    def users_values(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Of a config's values, those that a user sets, or that differ from their defaults for want of an origin."""
        return _users_values(values, defaults, self.tree)

    def as_layer(self, values: Mapping[str, Any]) -> Layer:
        """All of a config's values, with their origins; a preset among them has nothing to add."""
        return Layer(values, DEFAULT, dict(_flat(self.tree)), is_record=True)


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")


def _origins(layer: Layer, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _origins(layer, value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else layer.origin_of(f"{prefix}{name}")
        for name, value in values.items()
    }


def _users_values(values: Mapping[str, Any], defaults: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = tree.get(name, {}) if isinstance(tree, Mapping) else tree
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            below = _users_values(value, default, inner)
            if below:
                kept[name] = below
            continue
        origins = list(_leaves(inner))
        is_known = any(origin == DERIVED or origin.startswith(PRESET) for origin in origins)
        if any(map(_is_users, origins)) or (value != default and not is_known):
            kept[name] = value
    return kept


def _is_users(origin: str) -> bool:
    return origin not in (DEFAULT, DERIVED) and not origin.startswith(PRESET)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for inner in tree.values():
            yield from _leaves(inner)
    else:
        yield tree
