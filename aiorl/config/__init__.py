"""Settings, and how to merge them.

The order is defaults < preset < YAML file < command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from aiorl.config.built_trainer import BuiltTrainer
    from aiorl.config.schema import CommonConfig

Settings = Mapping[str, Any]
"""Values by the names of keys, nested like the config; checked or not."""


class Registry:
    """Functions that configs and workers call, and that packages above them have.

    `aiorl/__init__.py` registers them; it runs first, whatever part of aiorl a program imports.

    Attributes:
        build_trainer: returns a trainer for a config.
        translate_old_keys: renames or drops old keys, or raises ConfigError; see
            `aiorl.compat.old_keys`.
        wrap_worker: returns a RolloutWorker of a `sampling.Worker`, for code of users.
        worker_class: returns the class RolloutWorker.
    """

    build_trainer: Callable[[CommonConfig], BuiltTrainer]
    translate_old_keys: Callable[[Settings], dict[str, Any]]
    wrap_worker: Callable[[Any], Any]
    worker_class: Callable[[], type[Any]]

    def register(
        self,
        *,
        build_trainer: Callable[[CommonConfig], BuiltTrainer],
        translate_old_keys: Callable[[Settings], dict[str, Any]],
        wrap_worker: Callable[[Any], Any],
        worker_class: Callable[[], type[Any]],
    ) -> None:
        """Provide the functions; see the attributes."""
        self.build_trainer = build_trainer
        self.translate_old_keys = translate_old_keys
        self.wrap_worker = wrap_worker
        self.worker_class = worker_class


registry = Registry()
"""Functions of packages above this one."""


def with_base_config(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `base`, updated by `extra` one level deep: a sub-dict replaces the
    whole sub-dict.
    """
    return {**copied(base), **copied(extra)}


def is_group(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping of settings.

    Mappings that never change are values: a Dict space, for example, or a file of arrays.
    """
    return isinstance(value, MutableMapping | MappingProxyType)


def has_plain_keys(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping of plain data; one with other keys, such as tuples, is an
    object.
    """
    return is_group(value) and all(isinstance(name, str | int | float) for name in value)


def copied(value: Any) -> Any:
    """Copy the lists of settings, and the dicts with plain keys; all other objects are shared."""
    if has_plain_keys(value):
        return {name: copied(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def deep_update(base: Settings, changes: Settings) -> dict[str, Any]:
    """Return a deep copy of `base` with `changes` merged in: a dict merges into a dict, anything
    else replaces.
    """
    merged: dict[str, Any] = copied(base)
    for name, value in changes.items():
        old = merged.get(name)
        if has_plain_keys(old) and has_plain_keys(value):
            merged[name] = deep_update(old, value)
        else:
            merged[name] = copied(value)
    return merged


def put_on_top(base: Settings, changes: Settings) -> dict[str, Any]:
    """Return a config's values with `changes` merged in. All settings are merged by this function,
    wherever they enter.

    A group merges into a group; anything else replaces, null included. `changes` also win over the
    defaults of policies. Two keys are values, although they can be mappings: `input`, because its
    probabilities belong together, and `exploration` of another type, because the settings are those
    of its type.
    """
    below = without_defaults_of(base, changes)
    for name in ("input", "exploration"):
        if name in changes and not _is_part(name, below.get(name), changes[name]):
            below.pop(name, None)
    return deep_update(below, changes)


def _is_part(name: str, old: Any, new: Any) -> bool:
    """Return whether a key's new value changes a part of the old one, instead of replacing it."""
    if name == "input" or not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    return "type" not in new or _class_name(new["type"]) == _class_name(old.get("type"))


def _class_name(kind: Any) -> str:
    """Return the name of a class that is given by itself, by name or by import path."""
    return str(getattr(kind, "__qualname__", kind)).rpartition(":")[2]


def without_emptied(values: Settings, defaults: Settings) -> dict[str, Any]:
    """Return a config's values without the groups that are null: they have their defaults again.

    Args:
        values: values nested like the config, checked or not.
        defaults: values in the same form; those of groups are mappings.
    """
    return {
        name: value
        for name, value in values.items()
        if value is not None or not isinstance(defaults.get(name), Mapping)
    }


def without_defaults_of(config: Settings, changes: Settings) -> dict[str, Any]:
    """Return a config's values without the policies' defaults that `changes` replace.

    In a run's config, a policy with another algorithm has all its settings as ``defaults`` of its
    entry in ``multiagent.policies``. A key set on top of that config applies to this policy too, so
    its default is removed. All defaults are removed if the policy gets another class.

    Args:
        config: values nested like the config, checked or not. Not modified.
        changes: values in the same form.
    """
    entries = _entries(config)
    if not any(isinstance(entry, Mapping) and "defaults" in entry for entry in entries.values()):
        return dict(config)
    new_entries = _entries(changes)
    policies = {
        policy_id: _without_defaults_of(entry, new_entries.get(policy_id), changes)
        for policy_id, entry in entries.items()
    }
    return {**config, "multiagent": {**config["multiagent"], "policies": policies}}


FORMER_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"normalize_actions": False, "model.conv_parts": False}
)
"""Values of keys that configs of earlier versions don't have, by dotted name: their runs continue
with them."""


def with_former_defaults(config: Settings) -> dict[str, Any]:
    """Return the whole config of a run, completed by `FORMER_DEFAULTS` if an earlier version wrote
    it.

    The run's config and the ``defaults`` of its policies leave out no key of the version that wrote
    them.
    """
    completed = _completed(config)
    for entry in _entries(completed).values():
        if isinstance(entry, dict) and isinstance(entry.get("defaults"), Mapping):
            entry["defaults"] = _completed(entry["defaults"])
    return completed


def _completed(values: Settings) -> dict[str, Any]:
    completed: dict[str, Any] = copied(values)
    for name, value in FORMER_DEFAULTS.items():
        *groups, key = name.split(".")
        inner: Any = completed
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):  # the check of the config names the fault
                break
        else:
            inner.setdefault(key, value)
    return completed


def _entries(config: Settings) -> Settings:
    """Return policy id -> entry of `multiagent.policies`; empty if there is no such mapping."""
    group = config.get("multiagent")
    entries = group.get("policies") if isinstance(group, Mapping) else None
    return entries if isinstance(entries, Mapping) else {}


def _without_defaults_of(entry: Any, new: Any, changes: Settings) -> Any:
    """Return a policy's entry without the defaults that `changes` set; `new` will be put on top of
    the entry.
    """
    if not (isinstance(entry, Mapping) and isinstance(entry.get("defaults"), Mapping)):
        return entry
    old_class = entry.get("class")
    new_class = new.get("class", old_class) if isinstance(new, Mapping) else old_class
    if str(new_class).lower() != str(old_class).lower():
        return {**entry, "defaults": None}
    return {**entry, "defaults": _without(entry["defaults"], changes)}


def _without(values: Settings, changes: Settings) -> dict[str, Any]:
    """Return the values that `changes` do not set."""
    remaining: dict[str, Any] = {}
    for name, value in values.items():
        if name not in changes:
            remaining[name] = value
        elif isinstance(value, Mapping) and isinstance(changes[name], Mapping):
            remaining[name] = _without(value, changes[name])
    return remaining


def to_plain(value: Any) -> Any:
    """Return `value` with lists instead of tuples, so that YAML and msgpack return an equal
    value.
    """
    if isinstance(value, dict):
        return {name: to_plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    return value
