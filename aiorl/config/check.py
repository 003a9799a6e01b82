"""Refusing unknown keys and wrong values, in one plain sentence that names the key."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from aiorl.config.key import all_keys, expected, reason_unsupported, sub_model
from aiorl.config.other_names import key_hint
from aiorl.errors import ConfigError, nearest
from aiorl.text import shortened

__all__ = [
    "FREE_SUB_DICTS",
    "check_known",
    "check_model",
    "check_no_search",
    "check_numbers",
    "check_supported",
    "plain_error",
    "warn_unheeded",
]

_log = logging.getLogger(__name__)

FREE_SUB_DICTS = (
    "tf_session_args",
    "env_config",
    "model",
    "optimizer",
    "multiagent",
    "custom_resources_per_worker",
    "evaluation_config",
)
"""Below these, keys that we don't know are allowed at any depth."""

_OPEN = (
    *FREE_SUB_DICTS, "extra_python_environs_for_driver", "extra_python_environs_for_worker", "input", "callbacks",
    "exploration",
)  # fmt: skip
"""The free ones, and those whose keys are names that only the user can know."""

_TYPE_FAULTS = ("_type", "_parsing", "_from_float", "literal_error")
"""Ends of pydantic's codes for values of a wrong kind; for these we say what kind was wanted."""

_MAX_BITS = 4096
"""Python refuses to make text of numbers of more than 4,300 digits."""

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_ALL_KEYS = "`python -m aiorl.learner --help-config` lists all keys."


def check_known(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses keys that the config doesn't have, except below the free sub-dicts (R167).

    Raises: ConfigError whose hint offers the nearest names.
    """
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:
            _refuse(str(name), prefix, tuple(model.model_fields), _other_name(f"{prefix}{name}", model))
        elif (not prefix and name in _OPEN) or not isinstance(value, Mapping):
            continue
        elif (inner := sub_model(field)) is not None:
            check_known(inner, value, f"{prefix}{name}.")
        else:
            known = field.get_default(call_default_factory=True)
            for sub in value:
                if isinstance(known, Mapping) and sub not in known:
                    _refuse(str(sub), f"{prefix}{name}.", tuple(known))


def check_no_search(values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse RLlib's `{grid_search: [...]}` in place of a value.

    Raises: ConfigError naming the key.
    """
    for name, value in values.items():
        if not isinstance(value, Mapping):
            continue
        if set(value) == {"grid_search"}:
            raise ConfigError(
                f"{prefix}{name} is a grid search, expected one value: a run has one set of settings.",
                key=f"{prefix}{name}", value=value,
                hint="examples/optuna_sweep.py searches with Optuna, and a shell loop over --set does for a grid.",
            )  # fmt: skip
        check_no_search(value, f"{prefix}{name}.")


def check_numbers(values: object, name: str = "") -> None:
    """Refuse whole numbers that Python writes down nowhere, at any depth.

    Raises: ConfigError naming the key.
    """
    if isinstance(values, int) and values.bit_length() > _MAX_BITS:
        raise ConfigError(
            f"{name} is a whole number of {values.bit_length():,} bits, expected one of at most {_MAX_BITS:,}.",
            key=name,
        )
    if isinstance(values, list | tuple):
        values = dict(enumerate(values))
    for key, value in values.items() if isinstance(values, Mapping) else ():
        check_numbers(value, f"{name}.{key}" if name else str(key))


def check_supported(config: BaseModel) -> None:
    """Refuse values of keys that nothing obeys, other than their defaults.

    Raises: ConfigError naming the key, and why there is no other value.
    """
    for dotted, field in all_keys(type(config)):
        reason = reason_unsupported(field)
        if not reason:
            continue
        value, default = attrgetter(dotted)(config), field.get_default(call_default_factory=True)
        if value != default:
            raise ConfigError(
                f"{dotted} can only be {default!r}, not {shortened(repr(value), 80)}: {reason}.",
                key=dotted,
                value=value,
            )


def check_model(config: BaseModel, model: BaseModel) -> None:
    """Refuse keys of a config's `model` that the built-in networks don't have.

    Raises: ConfigError whose hint offers the nearest names.
    """
    for extra in model.model_extra or {}:
        hint = _other_name(f"model.{extra}", type(config)) or nearest(extra, type(model).model_fields, count=2).strip()
        raise ConfigError(
            f"There is no key model.{extra}.",
            key=f"model.{extra}",
            hint=hint or "Only a model of your own (model.custom_model) may have keys of its own.",
        )


def warn_unheeded(config: BaseModel, name: str, group: BaseModel) -> None:
    """Warn of keys in a config's free sub-dict that nothing reads, since they may be misspelt."""
    for extra in group.model_extra or {}:
        dotted = f"{name}.{extra}"
        hint = _other_name(dotted, type(config)) or nearest(extra, type(group).model_fields, count=1).strip()
        _log.warning("aiorl has no key %s and ignores it.%s", dotted, f" {hint}" if hint else "")


def plain_error(model: type[BaseModel], error: ValidationError, prefix: str = "") -> ConfigError:
    """The first fault that pydantic found, in one sentence; `prefix` leads to the model, such as "model."."""
    first = error.errors(include_url=False)[0]
    names, annotation = _locate(model, first["loc"])
    dotted, value = prefix + ".".join(names), first["input"]
    if str(first["type"]).endswith(_TYPE_FAULTS):
        wanted = expected(annotation)
        return ConfigError(
            f"{dotted} must be {wanted}, not {shortened(repr(value), 80)}.",
            key=dotted,
            value=value,
            hint=_as_meant(value, wanted) or nearest(str(value), re.split(" or | of |, ", wanted)).strip(),
        )
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    separator = " " if message.startswith("must") else ": "
    return ConfigError(f"{dotted}{separator}{message}, not {shortened(repr(value), 80)}.", key=dotted, value=value)


def _as_meant(value: object, wanted: str) -> str:
    """Return how to write a list, or a time in seconds, that was written otherwise; "" for anything else."""
    if not isinstance(value, str):
        return ""
    if "list of" in wanted and "," in value:
        return f"Write it as [{', '.join(part.strip() for part in value.strip('()').split(',') if part.strip())}]."
    time = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)", value)
    if time is not None and "number" in wanted:
        return f"In seconds it is {float(time[1]) * _SECONDS[time[2]]:g}."
    return ""


def _refuse(name: str, prefix: str, known: tuple[str, ...], other: str = "") -> None:
    hint = other or nearest(name, known, count=2).strip() or _ALL_KEYS
    raise ConfigError(f"There is no key {prefix}{name}.", key=f"{prefix}{name}", hint=hint)


def _other_name(dotted: str, config: type[BaseModel]) -> str:
    """Return the hint for a key of another library, or ""."""
    return key_hint(dotted, {**config.model_fields, **dict(all_keys(config))})


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The names of the keys on the way to a fault, and the declared type of the last one.

    What follows the last key in `loc` (indices, pydantic's tags for the branches of a union) is left out.
    """
    names: list[str] = []
    annotation: Any = None
    inner: type[BaseModel] | None = model
    for part in loc:
        field = inner.model_fields.get(str(part)) if inner is not None else None
        if field is None:
            break
        names.append(str(part))
        annotation, inner = field.annotation, sub_model(field)
    return names or [str(part) for part in loc], annotation
