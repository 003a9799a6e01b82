"""Policies of a run that are updated together, checked before TensorFlow is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.joint import joint_experience_of
from aiorl.run.policy_plan import POLICIES, PlannedPolicy, learning_settings


def joint_policies(policies: Mapping[str, PlannedPolicy]) -> dict[str, tuple[str, ...]]:
    """Return the policies of joint algorithms: all that learn by one of them are updated together.

    Args:
        policies: the run's policies by id.

    Returns:
        Name of the learner, which is the ids of its policies joined by "+" -> these ids.

    Raises:
        ConfigError: they can't be updated together.
    """
    ids_by_algo: dict[str, list[str]] = {}
    for policy_id, policy in policies.items():
        if policy.is_trained and algorithm_class(policy.config.algo).is_joint:
            ids_by_algo.setdefault(policy.config.algo, []).append(policy_id)
    joint: dict[str, tuple[str, ...]] = {}
    for algo, policy_ids in ids_by_algo.items():
        _check_joint(algo, [policies[policy_id] for policy_id in policy_ids])
        name = "+".join(policy_ids)
        if name in policies:
            raise ConfigError(
                f"{name!r} is the id of a policy, and the name under which {algo} saves what"
                f" it learns for {' and '.join(policy_ids)} together.",
                key=POLICIES,
                value=name,
                hint="Give that policy another id.",
            )
        if name in joint:
            raise ConfigError(
                f"{' and '.join(joint[name])} would be saved under the same name as"
                f" {' and '.join(policy_ids)}, {name!r}.",
                key=POLICIES,
                value=name,
                hint='Give these policies ids without "+".',
            )
        joint[name] = tuple(policy_ids)
    return joint


def _check_joint(algo: str, policies: list[PlannedPolicy]) -> None:
    """Check that policies can be updated together.

    Raises:
        ConfigError: there is only one, their settings differ, or the experience of the algorithm
            can't give their rows to one update.
    """
    first, *rest = policies
    if not rest:
        raise ConfigError(
            f"{algo} updates several policies at once, but only {first.policy_id!r} learns by it.",
            key=POLICIES,
            hint="Name at least two policies, for example one for each agent, by per_agent.",
        )
    settings = learning_settings(first.config)
    for policy in rest:
        other_settings = learning_settings(policy.config)
        differing = sorted(name for name in settings if settings[name] != other_settings.get(name))
        if differing:
            raise ConfigError(
                f"{algo} updates {first.policy_id!r} and {policy.policy_id!r} at once, so their"
                f" settings can't differ: {', '.join(differing)}.",
                key=f"{POLICIES}.{policy.policy_id}.config",
                hint="Give all policies of this algorithm the same settings.",
            )
    joint_experience_of(algorithm_class(algo), first.config)
