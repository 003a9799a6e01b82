"""Policies under RLlib's names, which act with an algorithm's network and learn by its update.

They are the ``policy`` of a RolloutWorker. Settings are keys of the algorithm, from the policy's
own config or the worker's ``policy_config``::

    worker = RolloutWorker("CartPole-v1", PGTFPolicy, policy_config={"gamma": 0.95, "lr": 0.001})
    worker.learn_on_batch(worker.sample())

Importing this module loads TensorFlow. It is therefore in this room, though its names are RLlib's:
nothing in `aiorl/compat/` loads TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from aiorl.learning.algorithms.registry import config_class
from aiorl.learning.policy_learning import AlgorithmPolicy

_OF_WORKERS = {"num_workers", "worker_index", "explore"}
"""Settings that are about the worker and its acting, not about learning."""


def _config(algo: str, settings: Mapping[str, Any]) -> Any:
    """Return the config of an algorithm that has the settings of a policy.

    Raises:
        ConfigError: one is no key of the algorithm, or wrong.
    """
    kind = config_class(algo)
    keys = {name: value for name, value in settings.items() if name not in _OF_WORKERS}
    fields = kind.model_fields
    if "gradients" in fields:
        keys["gradients"] = "learner"  # the policy's user decides where they are computed
        # and what a batch is, so sizes only have to fit each other
        length, num_envs = (
            keys.get(name, fields[name].default)
            for name in ("rollout_fragment_length", "num_envs_per_worker")
        )
        if isinstance(length, int) and isinstance(num_envs, int):
            sizes = dict.fromkeys(("train_batch_size", "sgd_minibatch_size"), length * num_envs)
            keys |= {"num_workers": 1, **sizes}
    return kind.from_mapping(keys)


def _named(name: str, algo: str, text: str) -> type[AlgorithmPolicy]:
    """Return the class of policies of an algorithm, which other processes import by its name."""
    members = {
        "__doc__": f"{text} (docs/algorithms/{algo}.md).",
        "__module__": __name__,
        "config_of": staticmethod(functools.partial(_config, algo)),
    }
    return type(name, (AlgorithmPolicy,), members)


PGTFPolicy = _named("PGTFPolicy", "pg", "Policy gradient with rewards to go")
A3CTFPolicy = _named("A3CTFPolicy", "a3c", "Advantage actor-critic")
PPOTFPolicy = _named("PPOTFPolicy", "ppo", "Clipped surrogate with values, one step for each batch")
VTraceTFPolicy = _named(
    "VTraceTFPolicy", "impala", "IMPALA's V-trace, for batches of older policies"
)
AsyncPPOTFPolicy = _named(
    "AsyncPPOTFPolicy", "appo", "APPO's clipped surrogate, for batches of older policies"
)
DQNTFPolicy = _named("DQNTFPolicy", "dqn", "Q-learning with rows of a replay")
SACTFPolicy = _named("SACTFPolicy", "sac", "Soft actor-critic with rows of a replay")
