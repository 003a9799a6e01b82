"""Algorithms by name: the config at once, the algorithm itself (and TensorFlow with it) when it is asked for.

One of a user's own goes by the import path of its class, which is imported to know its config.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiorl.config.check import OTHER_ALGORITHMS
from aiorl.config.code import import_object, is_import_path
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, UnknownAlgorithmError, nearest
from aiorl.learning.algorithms.a2c.config import A2CConfig
from aiorl.learning.algorithms.a3c.config import A3CConfig
from aiorl.learning.algorithms.algorithm import Algorithm
from aiorl.learning.algorithms.apex.config import ApexConfig
from aiorl.learning.algorithms.appo.config import APPOConfig
from aiorl.learning.algorithms.bc.config import BCConfig
from aiorl.learning.algorithms.cql.config import CQLConfig
from aiorl.learning.algorithms.dqn.config import DQNConfig
from aiorl.learning.algorithms.impala.config import IMPALAConfig
from aiorl.learning.algorithms.iql.config import IQLConfig
from aiorl.learning.algorithms.marwil.config import MARWILConfig
from aiorl.learning.algorithms.pg.config import PGConfig
from aiorl.learning.algorithms.ppo.config import PPOConfig
from aiorl.learning.algorithms.sac.config import SACConfig
from aiorl.learning.algorithms.td3.config import TD3Config

__all__ = ["ALGORITHMS", "algorithm_class", "config_class"]


ALGORITHMS: dict[str, tuple[type[CommonConfig], str]] = {
    "a2c": (A2CConfig, "aiorl.learning.algorithms.a2c.algorithm:A2C"),
    "a3c": (A3CConfig, "aiorl.learning.algorithms.a3c.algorithm:A3C"),
    "apex": (ApexConfig, "aiorl.learning.algorithms.apex.algorithm:Apex"),
    "appo": (APPOConfig, "aiorl.learning.algorithms.appo.algorithm:APPO"),
    "bc": (BCConfig, "aiorl.learning.algorithms.bc.algorithm:BC"),
    "cql": (CQLConfig, "aiorl.learning.algorithms.cql.algorithm:CQL"),
    "dqn": (DQNConfig, "aiorl.learning.algorithms.dqn.algorithm:DQN"),
    "impala": (IMPALAConfig, "aiorl.learning.algorithms.impala.algorithm:IMPALA"),
    "iql": (IQLConfig, "aiorl.learning.algorithms.iql.algorithm:IQL"),
    "marwil": (MARWILConfig, "aiorl.learning.algorithms.marwil.algorithm:MARWIL"),
    "pg": (PGConfig, "aiorl.learning.algorithms.pg.algorithm:PG"),
    "ppo": (PPOConfig, "aiorl.learning.algorithms.ppo.algorithm:PPO"),
    "sac": (SACConfig, "aiorl.learning.algorithms.sac.algorithm:SAC"),
    "td3": (TD3Config, "aiorl.learning.algorithms.td3.algorithm:TD3"),
}
"""Name -> config class, and the algorithm's own class as "module:Class"."""


def config_class(name: str) -> type[CommonConfig]:
    """The config class of an algorithm; loads no TensorFlow, unless the module of a user's own algorithm does.

    Args:
        name: one of `ALGORITHMS`, in any case of letters, or the import path of an `Algorithm` class.
    Raises: UnknownAlgorithmError offering its name here or the nearest; ConfigError if the path names no algorithm.
    """
    return algorithm_class(name).config_class if is_import_path(name) else _entry(name)[0]


def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm itself; loads TensorFlow.

    Raises: as `config_class`.
    """
    if is_import_path(name):
        return _checked(import_object(name, key="algo"), name)
    module, _, attribute = _entry(name)[1].partition(":")
    found: type[Algorithm] = getattr(importlib.import_module(module), attribute)
    return found


def _entry(name: str) -> tuple[type[CommonConfig], str]:
    entry = ALGORITHMS.get(name.lower())
    if entry is None and (ours := OTHER_ALGORITHMS.get(name.lower())) is not None:
        raise UnknownAlgorithmError(
            f"There is no algorithm {name!r}.", key="algo", value=name, hint=f"Here it is {ours}."
        )
    if entry is None:
        raise UnknownAlgorithmError(
            f"There is no algorithm {name!r}.{nearest(name.lower(), ALGORITHMS)}",
            key="algo", value=name,
            hint=f"Known: {', '.join(sorted(ALGORITHMS))}; one of your own is package.module:Name.",
        )  # fmt: skip
    return entry


def _checked(found: Any, path: str) -> type[Algorithm]:
    """What a path names, if that is an algorithm which a run can find again by its config."""
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algo is {path!r}, which is {found!r:.200}, not a class of aiorl.learning.algorithms.Algorithm.",
            key="algo", value=path, hint="docs/new_algorithm.md shows one.",
        )  # fmt: skip
    kind: Any = getattr(found, "config_class", None)
    if not (isinstance(kind, type) and issubclass(kind, CommonConfig)):
        raise ConfigError(
            f"algo is {path!r}, whose config_class is {kind!r:.200}, not a class of configs.",
            key="algo", value=path, hint="Derive one from aiorl's CommonConfig, or from that of the nearest algorithm.",
        )  # fmt: skip
    if kind.model_fields["algo"].default != path:
        raise ConfigError(
            f"algo is {path!r}, but {kind.__name__} says {kind.model_fields['algo'].default!r}, by which the class "
            "is not found again.",
            key="algo", value=path, hint=f'Let the key algo of {kind.__name__} have the default "{path}".',
        )  # fmt: skip
    return found
