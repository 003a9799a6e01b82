"""One key of a config: its declaration, and how its type is said in plain words."""

from __future__ import annotations

import types
import typing
from copy import deepcopy
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

__all__ = ["Where", "expected", "group_of", "key", "sub_model", "unit_of", "where_of"]

Where = Literal["learner", "workers", "both"]

_PLAIN_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def key(default: Any, meaning: str, *, group: str, where: Where = "learner", unit: str = "", **constraints: Any) -> Any:
    """One key of a config: default, meaning, and what the reference prints beside it.

    Any is what lets a type checker accept the result as the default of a field of any type.

    Args:
        default: value taken when nobody sets the key; dicts and lists are copied for each config.
        meaning: one or two sentences for the reference and `--help-config`.
        group: heading that the reference puts the key under.
        where: which processes read it.
        unit: unit of the value, such as "s" or "env steps"; empty if it has none.
        constraints: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    extra: dict[str, Any] = {"group": group, "where": where, "unit": unit}
    if isinstance(default, dict | list):
        return Field(
            default_factory=lambda: deepcopy(default), description=meaning, json_schema_extra=extra, **constraints
        )
    return Field(default=default, description=meaning, json_schema_extra=extra, **constraints)


def group_of(field: FieldInfo) -> str:
    """Heading that the reference puts the key under."""
    return _extra(field, "group")


def where_of(field: FieldInfo) -> str:
    """Which processes read the key: learner, workers or both."""
    return _extra(field, "where")


def unit_of(field: FieldInfo) -> str:
    """Unit of the value, or an empty string."""
    return _extra(field, "unit")


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
    plural = {int: "whole numbers", float: "numbers", str: "names"}
    return plural.get(annotation, "lists")


def _extra(field: FieldInfo, name: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""
