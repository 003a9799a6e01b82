"""Keys of a config: their declaration, their meaning and type in plain words, and the refusal of
wrong values.

A key is a field with a docstring below it:

    gamma: float = key(0.99, group="Learning", ge=0, le=1)
    \"\"\"Discount of future rewards.\"\"\"
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Annotated, Any, Literal, SupportsIndex, TypeGuard, cast

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from aiorl.config import is_group, to_plain
from aiorl.config.rllib_file import key_hint
from aiorl.errors import ConfigError, either, nearest
from aiorl.text import is_utf8, shortened

_log = logging.getLogger(__name__)

Where = Literal["learner", "workers", "both"]

_GROUPS = (
    "Run",
    "Learning",
    "Model",
    "Sampling",
    "Multi-agent",
    "Workers and hosts",
    "Transport",
    "Resources",
    "Reports",
    "Offline data",
)

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_PLURALS = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "text": "names",
    "a mapping": "mappings",
}


def key(
    default: Any,
    meaning: str | None = None,
    *,
    group: str,
    where: Where = "learner",
    unit: str = "",
    needs: str = "",
    place: bool | None = None,
    **constraints: Any,
) -> Any:
    """Declare one key of a config.

    The result is typed Any so that a type checker accepts it as the default of any field.

    Args:
        default: value of the key if no one sets it; each config gets its own copy of a dict or
            list.
        meaning: one or two sentences for the reference and `--help-config`; None takes the
            docstring below the key.
        group: heading of the key in the reference.
        where: processes that read it; keys that workers read belong in `WorkerConfig` and its
            groups.
        unit: unit of the value, such as "s" or "env steps"; empty if it has none.
        needs: key without which this one has no effect: while that is null, false or 0, this must
            keep its default.
        place: True if the key says where a run listens, whom it admits, or what it opens and
            writes: only the user sets it, and it is never taken from another user's run or file.
            None counts as False.
        **constraints: pydantic's `ge`, `gt`, `le`, `lt`.

    Returns:
        The field.
    """
    facts: dict[str, Any] = {
        "group": group,
        "where": where,
        "unit": unit,
        "needs": needs,
        "place": place,
    }
    facts |= constraints
    if isinstance(default, dict | list):
        constraints["default_factory"] = lambda: deepcopy(default)
    else:
        constraints["default"] = default
    return Field(description=meaning, json_schema_extra=facts, **constraints)


def unchanging(group: str = "") -> Callable[[BaseModel, str, Any], None]:
    """Return the `__setattr__` of a config, or of a group of keys in it, which never changes.

    Args:
        group: name of the group; "" for a config itself.
    """

    def __setattr__(self: BaseModel, name: str, value: Any) -> None:
        """Refuse to set a key, whether it exists or not.

        Raises:
            ConfigError: the name is that of a key; the hint has the call that makes a changed
                config.
        """
        if name.startswith("_"):  # a config's notes about itself
            BaseModel.__setattr__(self, name, value)
            return
        dotted = name
        change = f"{name!r}: {shortened(repr(value), 80)}"
        if group:
            dotted = f"{group}.{name}"
            change = f"{group!r}: {{{change}}}"
        raise ConfigError(
            f"config.{dotted} can't be set: a config never changes.",
            key=dotted,
            value=value,
            hint=f"Make a changed one: config = config.updated({{{change}}}).",
        )

    return __setattr__


def changed(config: type[BaseModel], name: str, default: Any) -> Any:
    """Declare a key again with another default, for a subclass.

    Args:
        config: class of the config that has the key.
        name: name of the key.
        default: the new default.

    Returns:
        The field, with the meaning and limits that the key has in `config`.
    """
    field = config.model_fields[name]
    return key(default, field.description, **cast(dict[str, Any], field.json_schema_extra))


def fact_of(field: FieldInfo, name: Literal["group", "where", "unit", "needs"]) -> str:
    """Return one fact of a key: its heading in the reference, the processes that read it, its unit,
    or a needed key.
    """
    return str(cast(dict[str, Any], field.json_schema_extra).get(name, ""))


def decides_place(field: FieldInfo) -> bool | None:
    """Return whether a key says where a run listens, whom it admits, or what it opens and writes;
    None if undecided.
    """
    place: bool | None = cast(dict[str, Any], field.json_schema_extra).get("place")
    return place


def by_group(keys: Iterable[tuple[str, FieldInfo]]) -> list[tuple[str, FieldInfo]]:
    """Sort keys by group: the common groups first, then the others in the order of their first
    keys.
    """
    keys = list(keys)
    groups = [fact_of(field, "group") for _, field in keys]
    order = list(dict.fromkeys([*_GROUPS, *groups]))
    return sorted(keys, key=lambda item: order.index(fact_of(item[1], "group")))


@functools.cache
def all_keys(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the declaration of every key by its dotted name; a group is replaced by its keys."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = sub_model(field)
        if inner is None:
            keys[name] = field
        else:
            keys.update({f"{name}.{key}": declared for key, declared in all_keys(inner).items()})
    return types.MappingProxyType(keys)


def sub_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the config class of a group of keys, or None for a plain value."""
    annotation = field.annotation
    return annotation if _is_model(annotation) else None


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


# Keys in plain words
# --------------------------------------------------------------------------------------------------


def meanings(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return dotted name -> meaning of every key and group; "" if the source of the class is not
    available.
    """
    docstrings: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        docstrings |= _docstrings(kind)
    meaning_of: dict[str, str] = {}
    for name, field in model.model_fields.items():
        meaning_of[f"{prefix}{name}"] = field.description or docstrings.get(name, "")
        inner = sub_model(field)
        if inner is not None:
            meaning_of |= meanings(inner, f"{prefix}{name}.")
    return meaning_of


@functools.cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return attribute -> the docstring below it in the source of a class."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # defined at a prompt, or built in
        return {}
    docstrings = {}
    for field, below in pairwise(getattr(definition, "body", ())):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docstrings[name] = " ".join(text.split())
    return docstrings


def render_keys(model: type[BaseModel]) -> str:
    """Return each key with its default, and its meaning below, for `--help-config`."""
    meaning_of = meanings(model)
    lines: list[str] = []
    last_group = ""
    for name, field in by_group(all_keys(model).items()):
        group = fact_of(field, "group")
        if group != last_group:
            lines += ["", group.upper()]
            last_group = group
        lines.append(f"  {name}: {default_text(field)}")
        lines.append(f"      {meaning_of[name]} ({kind_text(field)})")
    return "\n".join(lines[1:]) + "\n"


class HelpText(str):
    """Docstring of a config class that adds the keys when Python's `help` or a notebook shows it.

    Both clean a docstring first, and cleaning begins with `expandtabs`. Reading the meanings of the
    keys takes too long to do it for each imported class.
    """

    config_class: type[BaseModel]

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        """Return the docstring and each key with its default, meaning and unit."""
        return f"{inspect.cleandoc(str(self))}\n\nKeys\n----\n{render_keys(self.config_class)}"


def show_keys_in_help(config_class: type[BaseModel]) -> None:
    """Make `help` of a class show its keys, and their defaults without pydantic's annotations."""
    config_class.__doc__ = text = HelpText(config_class.__doc__ or "")
    text.config_class = config_class
    config_class.__signature__ = _signature(config_class)


def _signature(config_class: type[BaseModel]) -> inspect.Signature:
    """Return a signature of the keys and their defaults, without pydantic's annotations."""
    keys = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True),
        )
        for name, field in config_class.model_fields.items()
    ]
    return inspect.Signature([inspect.Parameter("values", inspect.Parameter.VAR_POSITIONAL), *keys])


def default_text(field: FieldInfo) -> str:
    """Return a key's default in the form of a config file."""
    return as_written(to_plain(field.get_default(call_default_factory=True)))


def kind_text(field: FieldInfo) -> str:
    """Return the type of a key's values in plain words, and their unit."""
    return "; ".join(filter(None, [expected(field.annotation), fact_of(field, "unit")]))


def expected(annotation: Any) -> str:
    """Describe values of a type in plain words: "a whole number or null"."""
    return either(_alternatives(annotation))


def as_written(value: Any) -> str:
    """Return plain data in the form of a config file."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=repr)


def _alternatives(annotation: Any) -> list[str]:
    """Return descriptions of a type's values, without repetition."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is Literal:
        return list(map(str, inner))
    if origin is Annotated:
        return _alternatives(inner[0])
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(text for kind in inner for text in _alternatives(kind)))
    if origin in (list, tuple):
        *plurals, last = map(_plural, _alternatives(inner[0]))
        if not plurals:
            return [f"a list of {last}"]
        return [f"a list of {', '.join(plurals)} or {last}"]
    if origin is dict or _is_model(annotation):
        return ["a mapping"]
    return [_WORDS.get(annotation, "a value")]


def _plural(text: str) -> str:
    if text.startswith("a list"):
        return "lists"
    return _PLURALS.get(text, text)


# Refusing unknown keys and wrong values
# -------------------------------------------------------------------------

_OPEN = {
    "tf_session_args",
    "env_config",
    "model",
    "optimizer",
    "multiagent",
    "evaluation_config",
    "input",
    "callbacks",
    "extra_python_environs_for_driver",
    "extra_python_environs_for_worker",
    "exploration",
}
"""Keys with free contents: unknown keys are allowed at any depth below them, because only the user
knows them."""

_TYPE_FAULTS = ("_type", "_parsing", "_from_float", "literal_error", "missing")
"""Ends of pydantic's codes for values of a wrong type; the message for these names the type
expected."""

_MAX_BITS = 4096
"""Size limit of whole numbers: Python can't convert more than 4,300 digits to text."""

_MAX_WARNINGS = 10
"""Unknown keys that are warned of one by one."""

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_ALL_KEYS = "`aiorl train --help-config` lists all keys."


def check_known(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse unknown keys, except in mappings with free contents (R167).

    Raises:
        ConfigError: a key is unknown; the hint offers the nearest names.
    """
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        field = model.model_fields.get(name)
        if field is None:
            raise _unknown(dotted, model.model_fields, _other_name(dotted, model))
        if dotted in _OPEN or not isinstance(value, Mapping):
            continue
        inner = sub_model(field)
        if inner is not None:
            check_known(inner, value, f"{dotted}.")
            continue
        default = field.get_default(call_default_factory=True)
        if not isinstance(default, Mapping):
            continue
        for inner_name in value:
            if inner_name not in default:
                raise _unknown(f"{dotted}.{inner_name}", default)


def check_values(values: object, name: str = "") -> None:
    """Refuse RLlib's `{grid_search: [...]}`, whole numbers too long to print, and text that is no
    UTF-8, at any depth.

    Raises:
        ConfigError: there is one; the error names it.
    """
    if isinstance(values, int) and values.bit_length() > _MAX_BITS:
        raise ConfigError(
            f"{name} is a whole number of {values.bit_length():,} bits, expected one of at most"
            f" {_MAX_BITS:,}.",
            key=name,
        )
    if isinstance(values, str) and not is_utf8(values):
        raise ConfigError(
            f"{name} is {values!r:.200}, which is no UTF-8 text, so files and workers can't"
            " get it.",
            key=name,
            value=values,
            hint="Rename the file or directory.",
        )
    if is_group(values) and name and set(values) == {"grid_search"}:
        raise ConfigError(
            f"{name} is a grid search, expected one value: a run has one set of settings.",
            key=name,
            value=values,
            hint=(
                "examples/optuna_sweep.py searches with Optuna; for a grid, use a shell loop over"
                " --set."
            ),
        )
    if isinstance(values, list | tuple):
        values = dict(enumerate(values))
    if is_group(values):
        for key, value in values.items():
            check_values(value, f"{name}.{key}" if name else str(key))


def check_extras(config: Any) -> None:
    """Refuse unknown keys of `model` for built-in networks, and warn about unused keys of
    `multiagent`.

    Raises:
        ConfigError: a key is unknown; the hint offers the nearest names.
    """
    if config.model.custom_model is None:
        for extra in config.model.model_extra:
            hint = _other_name(f"model.{extra}", type(config))
            hint = hint or nearest(extra, type(config.model).model_fields, count=2)
            hint = hint or "Only a custom model (model.custom_model) can have keys of its own."
            raise _unknown(f"model.{extra}", (), hint)
    extras = list(config.multiagent.model_extra)
    for extra in extras[:_MAX_WARNINGS]:
        dotted = f"multiagent.{extra}"
        hint = _other_name(dotted, type(config))
        hint = hint or nearest(extra, type(config.multiagent).model_fields, count=1).strip()
        _log.warning("%s", f"aiorl has no key {dotted} and ignores it. {hint}".rstrip())
    if len(extras) > _MAX_WARNINGS:
        _log.warning("aiorl ignores %d more keys of multiagent", len(extras) - _MAX_WARNINGS)


def plain_error(model: type[BaseModel], error: ValidationError, prefix: str = "") -> ConfigError:
    """Return the first fault that pydantic found, in one sentence; `prefix` is the path to the
    model, like "model.".
    """
    first = error.errors(include_url=False)[0]
    names, annotation = _locate(model, first["loc"])
    dotted = prefix + ".".join(names)
    value = first["input"]
    hint = ""
    if str(first["type"]).endswith(_TYPE_FAULTS):
        kind = expected(annotation)
        fault = f" must be {kind}"
        hint = _as_meant(value, kind) or nearest(str(value), re.split(" or | of |, ", kind)).strip()
    else:
        rule = first["msg"].removeprefix("Value error, ")
        rule = re.sub("^(Input|Tuple) should", "must", rule)
        fault = f": {rule}"
        if rule.startswith("must"):
            fault = f" {rule}"
    message = f"{dotted}{fault}, not {shortened(repr(value), 80)}."
    return ConfigError(message, key=dotted, value=value, hint=hint)


def _as_meant(value: object, kind: str) -> str:
    """Return the right form of a list, or of a time in seconds, that is text in another form; ""
    otherwise.

    `kind` is the result of `expected` for the key's type.
    """
    if not isinstance(value, str):
        return ""
    if "list of" in kind and "," in value:
        parts = (part.strip() for part in value.strip("()").split(","))
        return f"Write it as [{', '.join(filter(None, parts))}]."
    time = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)", value)
    if time is not None and "number" in kind:
        return f"In seconds it is {float(time[1]) * _SECONDS[time[2]]:g}."
    return ""


def _unknown(dotted: str, existing: Iterable[str], hint: str = "") -> ConfigError:
    name = dotted.rpartition(".")[2]
    hint = hint.strip() or nearest(name, existing, count=2).strip() or _ALL_KEYS
    return ConfigError(f"There is no key {dotted}.", key=dotted, hint=hint)


def _other_name(dotted: str, config: type[BaseModel]) -> str:
    """Return the hint for a key of another library, or ""."""
    fields = {**config.model_fields, **all_keys(config)}
    return key_hint(dotted, {name: fact_of(field, "unit") for name, field in fields.items()})


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """Return the names of the keys that lead to a fault, and the declared type of the last one.

    Parts of `loc` after the last key (indices, pydantic's tags for the branches of a union) are
    left out.
    """
    names: list[str] = []
    annotation: Any = None
    inner: type[BaseModel] | None = model
    for part in loc:
        name = str(part)
        if inner is None or name not in inner.model_fields:
            break
        field = inner.model_fields[name]
        names.append(name)
        annotation = field.annotation
        inner = sub_model(field)
    return names or [str(part) for part in loc], annotation
