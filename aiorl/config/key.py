"""One key of a config: its declaration, and its type in plain words."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

Where = Literal["learner", "workers", "both"]

_GROUPS = ("Run", "Learning", "Model", "Sampling", "Multi-agent", "Workers and hosts", "Transport", "Resources",
           "Reports", "Offline data")  # fmt: skip

_PLAIN_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "names", dict: "mappings"}


def key(
    default: Any,
    meaning: str,
    *,
    group: str,
    where: Where = "learner",
    unit: str = "",
    **constraints: Any,
) -> Any:
    """Declare one key of a config.

    The result is typed Any so that a type checker accepts it as the default of any field.

    Args:
        default: value of the key if nobody sets it; each config gets its own copy of a dict or list.
        meaning: one or two sentences for the reference and `--help-config`.
        group: heading of the key in the reference.
        where: processes that read it; keys that workers read belong into `WorkerConfig` and the groups in it.
        unit: unit of the value, such as "s" or "env steps"; empty if it has none.
        constraints: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    extra: dict[str, Any] = {"group": group, "where": where, "unit": unit} | constraints
    if isinstance(default, dict | list):
        constraints["default_factory"] = lambda: deepcopy(default)
    else:
        constraints["default"] = default
    return Field(description=meaning, json_schema_extra=extra, **constraints)


def changed(config: type[BaseModel], name: str, default: Any) -> Any:
    """Declare a key of `config` again with another default, for a subclass."""
    field = config.model_fields[name]
    return key(default, str(field.description), **cast(dict[str, Any], field.json_schema_extra))


def group_of(field: FieldInfo) -> str:
    """Return the heading of the key in the reference."""
    return _extra(field, "group")


def where_of(field: FieldInfo) -> str:
    """Return the processes that read the key: learner, workers or both."""
    return _extra(field, "where")


def unit_of(field: FieldInfo) -> str:
    """Return the unit of the value, or an empty string."""
    return _extra(field, "unit")


def by_group(keys: Iterable[tuple[str, FieldInfo]]) -> list[tuple[str, FieldInfo]]:
    """Sort keys by their group: the common groups first, then others as they come up."""
    keys = list(keys)
    order = list(dict.fromkeys((*_GROUPS, *(group_of(field) for _, field in keys))))
    return sorted(keys, key=lambda named: order.index(group_of(named[1])))


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and declaration of every key, with the keys of groups in place of the groups."""
    for name, field in model.model_fields.items():
        inner = sub_model(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from all_keys(inner, f"{prefix}{name}.")


def sub_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the config class of a group of keys, or None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def expected(annotation: Any) -> str:
    """Describe values of a type in plain words: "a whole number or null"."""
    return " or ".join(dict.fromkeys(_alternatives(annotation)))


def as_written(value: Any) -> str:
    """Return plain data as a config file would say it."""
    return value if isinstance(value, str) else json.dumps(value)


def _alternatives(annotation: Any) -> list[str]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN_TYPES:
        return [_PLAIN_TYPES[annotation]]
    if origin is Literal:
        return [str(choice) for choice in inner]
    if origin is Annotated:
        return _alternatives(inner[0])
    if origin in (typing.Union, types.UnionType):
        return [text for alternative in inner for text in _alternatives(alternative)]
    if origin in (list, tuple):
        return [f"a list of {_many(inner[0])}"]
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return ["a mapping"]
    return ["a value"]


def _many(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _many(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_many, inner))
    if origin is Literal:
        *others, last = map(str, inner)
        return f"{', '.join(others)} or {last}" if others else last
    return _PLURALS.get(origin or annotation, "lists")


def _extra(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""
