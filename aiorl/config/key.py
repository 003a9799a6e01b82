"""One key of a config: its declaration, and how its type is said in plain words."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

__all__ = [
    "Where",
    "all_keys",
    "by_group",
    "changed",
    "expected",
    "group_of",
    "key",
    "reason_unsupported",
    "sub_model",
    "unit_of",
    "where_of",
]

Where = Literal["learner", "workers", "both"]

_GROUPS = ("Run", "Learning", "Model", "Sampling", "Multi-agent", "Workers and hosts", "Transport", "Resources",
           "Reports", "Offline data")  # fmt: skip

_PLAIN_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def key(
    default: Any,
    meaning: str,
    *,
    group: str,
    where: Where = "learner",
    unit: str = "",
    unsupported: str = "",
    **constraints: Any,
) -> Any:
    """One key of a config: default, meaning, and what the reference prints beside it.

    Any is what lets a type checker accept the result as the default of a field of any type.

    Args:
        default: value taken when nobody sets the key; dicts and lists are copied for each config.
        meaning: one or two sentences for the reference and `--help-config`.
        group: heading that the reference puts the key under.
        where: which processes read it; those that workers read belong into `WorkerConfig` and the groups in it.
        unit: unit of the value, such as "s" or "env steps"; empty if it has none.
        unsupported: why no value but the default is taken; empty if all are.
        constraints: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    extra: dict[str, Any] = {"group": group, "where": where, "unit": unit, "unsupported": unsupported} | constraints
    if isinstance(default, dict | list):
        return Field(
            default_factory=lambda: deepcopy(default), description=meaning, json_schema_extra=extra, **constraints
        )
    return Field(default=default, description=meaning, json_schema_extra=extra, **constraints)


def changed(config: type[BaseModel], name: str, default: Any) -> Any:
    """A key of `config` with another default, for a subclass; all else of its declaration stays."""
    field = config.model_fields[name]
    return key(default, str(field.description), **cast(dict[str, Any], field.json_schema_extra))


def group_of(field: FieldInfo) -> str:
    """Heading that the reference puts the key under."""
    return _extra(field, "group")


def where_of(field: FieldInfo) -> str:
    """Which processes read the key: learner, workers or both."""
    return _extra(field, "where")


def unit_of(field: FieldInfo) -> str:
    """Unit of the value, or an empty string."""
    return _extra(field, "unit")


def by_group(keys: Iterable[tuple[str, FieldInfo]]) -> list[tuple[str, FieldInfo]]:
    """Keys with those of a group together: the common groups first, then others as they come up."""
    keys = list(keys)
    groups = dict.fromkeys((*_GROUPS, *(group_of(field) for _, field in keys)))
    order = {group: position for position, group in enumerate(groups)}
    return sorted(keys, key=lambda named: order[group_of(named[1])])


def reason_unsupported(field: FieldInfo) -> str:
    """Why no value but the default is taken, or an empty string."""
    return _extra(field, "unsupported")


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and declaration of every key, those inside groups in place of the groups."""
    for name, field in model.model_fields.items():
        inner = sub_model(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from all_keys(inner, f"{prefix}{name}.")


def sub_model(field: FieldInfo) -> type[BaseModel] | None:
    """The config class that a key holds, or None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def expected(annotation: Any) -> str:
    """What a value of this type looks like, in plain words: "a whole number or null"."""
    return " or ".join(dict.fromkeys(_alternatives(annotation)))


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
    if origin is list:
        return [f"a list of {_many(inner[0])}"]
    if origin is tuple:
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
    plural = {int: "whole numbers", float: "numbers", str: "names", dict: "mappings"}
    return plural.get(origin or annotation, "lists")


def _extra(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""
