"""Algorithms by name: the config at once, the algorithm itself (and TensorFlow with it) when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from aiorl.algorithms.algorithm import Algorithm
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.config.schema import CommonConfig
from aiorl.errors import InternalError, UnknownAlgorithmError, nearest

__all__ = ["ALGORITHMS", "AlgorithmEntry", "algorithm_class", "config_class"]


@dataclass(frozen=True, slots=True)
class AlgorithmEntry:
    """Import paths of an algorithm.

    Attributes:
        config: its config class.
        path: its class, as "module:Class".
    """

    config: type[CommonConfig]
    path: str


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "impala": AlgorithmEntry(IMPALAConfig, "aiorl.algorithms.impala.algorithm:IMPALA"),
    "ppo": AlgorithmEntry(PPOConfig, "aiorl.algorithms.ppo.algorithm:PPO"),
}
"""Name -> where it is found."""


def config_class(name: str) -> type[CommonConfig]:
    """The config class of an algorithm; loads no TensorFlow.

    Raises: UnknownAlgorithmError offering the nearest names.
    """
    return _entry(name).config


def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm itself; loads TensorFlow.

    Raises: UnknownAlgorithmError offering the nearest names.
    """
    module, _, attribute = _entry(name).path.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise InternalError(f"{_entry(name).path} is no Algorithm")
    return found


def _entry(name: str) -> AlgorithmEntry:
    entry = ALGORITHMS.get(name.lower())
    if entry is None:
        raise UnknownAlgorithmError(
            f"There is no algorithm {name!r}.{nearest(name.lower(), ALGORITHMS)}",
            key="algo", value=name, hint=f"Known: {', '.join(sorted(ALGORITHMS))}.",
        )  # fmt: skip
    return entry
