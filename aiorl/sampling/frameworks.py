"""What differs between policies in plain Python and those that TensorFlow runs.

Nothing here imports TensorFlow unless a policy needs it: a class counts as TensorFlow's if it derives from
``aiorl.learning.models.tf_policy.TFPolicy``, or says ``framework = "tf"``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from aiorl.acting.policy import Policy
from aiorl.errors import ConfigError
from aiorl.process.extras import install_command

__all__ = [
    "check_tensorflow",
    "enable_eager",
    "granted_gpus",
    "is_tf_policy",
    "policy_class_for",
    "seed_generators",
    "wants_eager",
]

logger = logging.getLogger(__name__)

_OWN_TF_POLICY = ("aiorl.learning.models.tf_policy", "TFPolicy")


def is_tf_policy(policy_class: type[Policy]) -> bool:
    """Whether TensorFlow runs policies of this class."""
    return getattr(policy_class, "framework", None) == "tf" or _is_own_tf_policy(policy_class)


def _is_own_tf_policy(policy_class: type[Policy]) -> bool:
    return any((base.__module__, base.__name__) == _OWN_TF_POLICY for base in policy_class.__mro__)


def granted_gpus(policy_config: Mapping[str, Any], worker_index: int) -> float:
    """GPUs that this process may use, by the policies' base config."""
    return float(policy_config.get("num_gpus_per_worker" if worker_index else "num_gpus", 0) or 0)


def check_tensorflow(policy_class: type[Policy], gpus: float) -> None:
    """Nothing, where a policy of this class can be run.

    Raises:
        ImportError: TensorFlow runs it, and is not installed.
        RuntimeError: GPUs are granted, but TensorFlow sees none.
    """
    if not is_tf_policy(policy_class):
        return
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"policy {policy_class.__name__} needs TensorFlow, which is not installed; {install_command('learner')}"
        )
    if gpus > 0 and not _tensorflow().config.list_physical_devices("GPU"):
        raise RuntimeError(
            f"{gpus:g} GPUs are granted to this process, but TensorFlow sees none; install aiorl[learner-gpu] on a "
            "host with CUDA, or grant none"
        )


def wants_eager(policy_config: Mapping[str, Any]) -> bool:
    """Whether policies are to be run eagerly on workers."""
    return bool(policy_config.get("eager")) and not policy_config.get("no_eager_on_workers")


def enable_eager(policy_config: Mapping[str, Any], policy_classes: Collection[type[Policy]]) -> None:
    """Make TensorFlow run functions eagerly in this process, where that is asked for and policies need it.

    With ``eager_tracing`` functions stay traced, which in TensorFlow 2 is what tracing an eager policy means.
    """
    if not wants_eager(policy_config) or policy_config.get("eager_tracing"):
        return
    if any(is_tf_policy(policy_class) for policy_class in policy_classes):
        config = _tensorflow().config
        if not config.functions_run_eagerly():
            config.run_functions_eagerly(True)


def policy_class_for(policy_class: type[Policy], policy_config: Mapping[str, Any]) -> type[Policy]:
    """The class itself, or in eager mode its eager variant.

    A class of any kind offers it by a class method ``as_eager``, and a traced form of that by ``with_tracing``. A
    TFPolicy of aiorl is its own eager variant.

    Raises:
        ConfigError: a class of TensorFlow's has no eager variant (also a ValueError).
    """
    if not wants_eager(policy_config):
        return policy_class
    make_eager = getattr(policy_class, "as_eager", None)
    if make_eager is None:
        if not is_tf_policy(policy_class) or _is_own_tf_policy(policy_class):
            return policy_class
        raise ConfigError(
            f"policy {policy_class.__name__} cannot be run eagerly: it has no method as_eager.",
            key="eager",
            hint="Set eager: false, or no_eager_on_workers: true.",
        )
    eager: type[Policy] = make_eager()
    make_traced = getattr(eager, "with_tracing", None)
    if policy_config.get("eager_tracing") and make_traced is not None:
        traced: type[Policy] = make_traced()
        return traced
    return eager


def seed_generators(seed: int, policy_classes: Collection[type[Policy]]) -> None:
    """Seed the random generators of this process: Python's, NumPy's, and those of frameworks in use.

    Nothing imports torch for this: it is seeded if it is there by now, as where a policy's module imports it. A policy
    that imports it as late as in its constructor has to seed it itself.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is None:
        logger.debug("torch is not in use, so it is not seeded")
    else:
        torch.manual_seed(seed)
    if "tensorflow" in sys.modules or any(is_tf_policy(policy_class) for policy_class in policy_classes):
        _tensorflow().random.set_seed(seed)


def _tensorflow() -> Any:
    # by name: workers load no TensorFlow unless a policy needs it, so it is not in their import graph
    return importlib.import_module("tensorflow")
