"""The policies that a learner has told of, as RolloutWorker's argument ``policy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiorl.acting.loading import learned_policy_class
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import mapping_by_table
from aiorl.config.import_path import import_object
from aiorl.config.user_function import named_failures
from aiorl.config.worker import WorkerPart
from aiorl.data.sample_plan import PolicyGraph
from aiorl.data.spaces import space_from_dict
from aiorl.errors import PolicyError
from aiorl.sampling.policy_specs import ENV_SPACE

__all__ = ["learned_policies", "named_function"]

_FOR_LEARNING = {"algo", "rollout_fragment_length", "num_envs_per_worker", "batch_mode", "num_cpus_per_worker"}


def learned_policies(
    part: WorkerPart, graphs: Mapping[str, PolicyGraph], *, explore: bool = True
) -> dict[str, tuple[type[Policy], Any, Any, dict[str, Any]]]:
    """Policy id -> class, spaces and config of each; networks have no weights yet.

    Args:
        part: the workers' part of the learner's configuration.
        graphs: policy id -> acting graph, of policies that are not of a class of the user's own.
        explore: False has networks take their most likely actions.

    Raises:
        PolicyError: a policy without graph, or a damaged one.
        ConfigError: a class of the user's own that can't be imported.
    """
    entries = {}
    for policy_id, policy in part.policies.items():
        config, plan = policy.config if explore else {**policy.config, "explore": False}, policy.sample_plan
        if policy.policy_class is not None:
            kind = import_object(policy.policy_class, key=f"multiagent.policies.{policy_id}")
        elif policy_id not in graphs:
            raise PolicyError(f"the learner sent no graph for policy {policy_id!r}")
        else:
            graph = graphs[policy_id]
            kind = learned_policy_class(
                graph["graph"],
                graph["spec"],
                threads=part.num_cpus_per_worker,
                runs_per_weights=part.cut_length,
            )
            learning = {**part.model_dump(include=_FOR_LEARNING), "algo": policy.algo or part.algo}
            config = {**config, **plan.policy_settings(), "learning": learning}
        entries[policy_id] = (kind, _space(policy.observation_space), _space(policy.action_space), config)
    return entries


def named_function(path: str | Mapping[str, str] | None, key: str) -> Any:
    """The function that a setting names, whose failures name the setting; of a table, its mapping; None for none.

    Raises:
        ConfigError: it can't be imported.
    """
    if isinstance(path, Mapping):
        return mapping_by_table(path)
    return None if path is None else named_failures(import_object(path, key=key), f"{key} {path!r}", key)


def _space(data: dict[str, Any] | None) -> Any:
    return ENV_SPACE if data is None else space_from_dict(data)
