"""Algorithms and their configs by name; each module is imported on demand.

A custom algorithm goes by the import path of its class, which is imported for its config.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiorl.config.code import import_object, is_import_path
from aiorl.config.rllib_file import other_names
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, UnknownAlgorithmError, nearest
from aiorl.learning.algorithm import Algorithm
from aiorl.learning.algorithms import ALGORITHMS


def config_class(name: str) -> type[CommonConfig]:
    """Return the config class of an algorithm.

    Args:
        name: one of `ALGORITHMS`, in upper or lower case, or the import path of an `Algorithm`
            class.

    Raises:
        UnknownAlgorithmError: there is no such algorithm; it suggests aiorl's or the nearest name.
        ConfigError: the path names no algorithm.
    """
    return algorithm_class(name).config_class


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """Return the class of an algorithm. Loads no TensorFlow unless the module of a custom algorithm
    does.

    Raises:
        (UnknownAlgorithmError, ConfigError): see `config_class`.
    """
    if is_import_path(name):
        return _checked(import_object(name, key="algo"), name)
    known = name.lower()
    if known not in ALGORITHMS:
        ours = other_names()["algorithms"].get(known)
        others = f"Known: {', '.join(sorted(ALGORITHMS))}; name your own as package.module:Name."
        raise UnknownAlgorithmError(
            f"There is no algorithm {name!r}.{'' if ours else nearest(known, ALGORITHMS)}",
            key="algo",
            value=name,
            hint=f"Here it is {ours}." if ours else others,
        )
    module = importlib.import_module(f"aiorl.learning.algorithms.{known}")
    kind: type[Algorithm[Any]] = getattr(module, ALGORITHMS[known])
    return kind


def _checked(found: Any, path: str) -> type[Algorithm[Any]]:
    """Return `found` if it is an algorithm class that a run can find again through its config."""
    kind: Any = getattr(found, "config_class", None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        wrong = f"{found!r:.200}, not a class of aiorl.algorithms.Algorithm"
        hint = "See docs/new_algorithm.md."
    elif missing := sorted(found.__abstractmethods__):
        wrong = f"a class without {' and '.join(missing)}"
        hint = "Define each as a static method of the config: see docs/new_algorithm.md."
    elif not (isinstance(kind, type) and issubclass(kind, CommonConfig)):
        wrong = f"a class with the config_class {kind!r:.200}, not a config class"
        hint = (
            "Derive it from aiorl's CommonConfig, or from the config of the most similar algorithm."
        )
    elif (own := kind.model_fields["algo"].default) != path:
        wrong = f"a class that a run can't find again: {kind.__name__}.algo is {own!r}"
        hint = f'Set the default of {kind.__name__}.algo to "{path}".'
    else:
        return found
    raise ConfigError(f"algo is {path!r}, which is {wrong}.", key="algo", value=path, hint=hint)
