"""Algorithms and their configs by name; a module is imported when it is asked for.

One of a user's own goes by the import path of its class, which is imported to know its config.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiorl.config.code import import_object, is_import_path
from aiorl.config.rllib_file import other_names
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, UnknownAlgorithmError, nearest
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.algorithm import Algorithm


def config_class(name: str) -> type[CommonConfig]:
    """Return the config class of an algorithm.

    Args:
        name: one of `ALGORITHMS`, in any case of letters, or the import path of an `Algorithm` class.
    Raises: UnknownAlgorithmError offering its name here or the nearest; ConfigError if the path names no algorithm.
    """
    return algorithm_class(name).config_class


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class of an algorithm; loads no TensorFlow, unless the module of a user's own does.

    Raises: as `config_class`.
    """
    if is_import_path(name):
        return _checked(import_object(name, key="algo"), name)
    known = name.lower()
    if known not in ALGORITHMS:
        ours = other_names()["algorithms"].get(known)
        others = f"Known: {', '.join(sorted(ALGORITHMS))}; one of your own is package.module:Name."
        raise UnknownAlgorithmError(
            f"There is no algorithm {name!r}.{'' if ours else nearest(known, ALGORITHMS)}",
            key="algo", value=name, hint=f"Here it is {ours}." if ours else others,
        )  # fmt: skip
    module = importlib.import_module(f"aiorl.learning.algorithms.{known}")
    found: type[Algorithm] = getattr(module, ALGORITHMS[known])
    return found


def _checked(found: Any, path: str) -> type[Algorithm]:
    """What a path names, if that is an algorithm which a run can find again by its config."""
    kind: Any = getattr(found, "config_class", None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        wrong, hint = f"{found!r:.200}, not a class of aiorl.algorithms.Algorithm", "docs/new_algorithm.md shows one."
    elif not (isinstance(kind, type) and issubclass(kind, CommonConfig)):
        wrong = f"a class with the config_class {kind!r:.200}, not a class of configs"
        hint = "Derive one from aiorl's CommonConfig, or from that of the nearest algorithm."
    elif (own := kind.model_fields["algo"].default) != path:
        wrong = f"a class that isn't found again: {kind.__name__} says {own!r}"
        hint = f'Let the key algo of {kind.__name__} have the default "{path}".'
    else:
        return found
    raise ConfigError(f"algo is {path!r}, which is {wrong}.", key="algo", value=path, hint=hint)
