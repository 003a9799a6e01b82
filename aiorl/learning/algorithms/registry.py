"""Algorithms and their configs by name; each module is imported on demand.

A custom algorithm goes by the import path of its class, which is imported for its config.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

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
        algorithm = import_object(name, key="algo")
        _check_algorithm(algorithm, name)
        return cast(type[Algorithm[Any]], algorithm)
    module_name = name.lower()
    if module_name not in ALGORITHMS:
        raise _unknown(name)
    module = importlib.import_module(f"aiorl.learning.algorithms.{module_name}")
    kind: type[Algorithm[Any]] = getattr(module, ALGORITHMS[module_name])
    return kind


def _unknown(name: str) -> UnknownAlgorithmError:
    """Return the error for a name that is no algorithm's, with the nearest one that is."""
    message = f"There is no algorithm {name!r}."
    equivalent = other_names()["algorithms"].get(name.lower())
    if equivalent:
        hint = f"Here it is {equivalent}."
    else:
        message += nearest(name.lower(), ALGORITHMS)
        hint = f"Known: {', '.join(sorted(ALGORITHMS))}; name your own as package.module:Name."
    return UnknownAlgorithmError(message, key="algo", value=name, hint=hint)


def _check_algorithm(algorithm: Any, path: str) -> None:
    """Check that an object is an algorithm class that a run can find again through its config.

    Raises:
        ConfigError: it isn't.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise _not_usable(
            path,
            f"{algorithm!r:.200}, not a class of aiorl.algorithms.Algorithm",
            hint="See docs/new_algorithm.md.",
        )
    missing = sorted(algorithm.__abstractmethods__)
    if missing:
        raise _not_usable(
            path,
            f"a class without {' and '.join(missing)}",
            hint="Define each as a static method of the config: see docs/new_algorithm.md.",
        )
    kind: Any = getattr(algorithm, "config_class", None)
    if not (isinstance(kind, type) and issubclass(kind, CommonConfig)):
        raise _not_usable(
            path,
            f"a class with the config_class {kind!r:.200}, not a config class",
            hint="Derive it from aiorl's CommonConfig, or from the config of the most similar"
            " algorithm.",
        )
    default = kind.model_fields["algo"].default
    if default != path:
        raise _not_usable(
            path,
            f"a class that a run can't find again: {kind.__name__}.algo is {default!r}",
            hint=f'Set the default of {kind.__name__}.algo to "{path}".',
        )


def _not_usable(path: str, fault: str, *, hint: str) -> ConfigError:
    return ConfigError(f"algo is {path!r}, which is {fault}.", key="algo", value=path, hint=hint)
