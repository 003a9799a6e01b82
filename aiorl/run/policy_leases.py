"""Whether workers can sample for all policies of a run that learn at once; loads TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.algorithm import LeasePlan
from aiorl.learning.algorithms.registry import ALGORITHMS, algorithm_class, config_class
from aiorl.run.policy_config import POLICIES, config_of
from aiorl.run.policy_plan import PlannedPolicy

__all__ = ["check_leases"]

_MODES = {
    "on_policy": "exactly one train batch of each policy version",
    "streaming": "fragments as they come, of older policy versions too",
}
_MEANINGS = {
    "fragments_per_batch": "fragments in one update",
    "outstanding_per_worker": "fragments that a worker may owe",
    "max_policy_lag": "policy versions after which a fragment is discarded",
    "max_under_way": "fragments under way at most",
    "publish_every": "updates after which weights go out",
    "publish_interval_s": "seconds after which they go out at the latest",
    "env_steps_per_batch": "env steps in one update",
}


def check_leases(config: CommonConfig, planned: Mapping[str, PlannedPolicy]) -> None:
    """Refuse policies that would be sampled for in different ways: a worker samples for all its policies at once.

    Raises:
        ConfigError: the algorithm of a policy that learns wants other leases than the run's, and the message says in
            what they differ; or it needs whole episodes, and the run cuts them.
    """
    leases = algorithm_class(config.algo).lease_plan(config)
    for policy in planned.values():
        if not policy.is_trained:
            continue
        wanted = algorithm_class(policy.config.algo).lease_plan(policy.config)
        if wanted != leases:
            raise _disagreement(config, policy, leases, wanted)
        if _is_cut_short(config, type(policy.config)):
            raise _cut_short(config, policy, planned)


def _disagreement(config: CommonConfig, policy: PlannedPolicy, leases: LeasePlan, wanted: LeasePlan) -> ConfigError:
    key, algo = f"{POLICIES}.{policy.policy_id}.class", policy.config.algo
    others = _that_agree(config, policy, leases)
    beside = f"Beside {config.algo} may learn: {', '.join(others)}. " if others else ""
    return ConfigError(
        f"{key} is {algo!r}, which can't learn beside {config.algo!r}, the run's algorithm: workers sample for all "
        f"policies at once, and {_difference(config.algo, leases, algo, wanted)}.",
        key=key, value=algo,
        hint=f"{beside}A policy that only acts, of any algorithm, is left out of multiagent.policies_to_train.",
    )  # fmt: skip


def _is_cut_short(config: CommonConfig, kind: type[CommonConfig]) -> bool:
    """Whether a run of another algorithm cuts episodes that an algorithm needs whole."""
    return kind.needs_whole_episodes and kind is not type(config) and config.is_truncating


def _cut_short(config: CommonConfig, policy: PlannedPolicy, planned: Mapping[str, PlannedPolicy]) -> ConfigError:
    key, algo = f"{POLICIES}.{policy.policy_id}.class", policy.config.algo
    others = [other for other in planned.values() if other.policy_class is None and other.config.algo == config.algo]
    beside = f"policy {others[0].policy_id!r}, which learns by" if others else "all policies of a run of"
    return ConfigError(
        f"{key} is {algo!r}, which needs whole episodes: its returns would be wrong where one is cut. batch_mode is "
        f"{config.batch_mode}, and workers sample for policy {policy.policy_id!r} as for {beside} {config.algo!r}.",
        key=key, value=algo,
        hint=f"Set batch_mode: complete_episodes, which is then for all policies, or leave policy {policy.policy_id!r} "
        "out of multiagent.policies_to_train.",
    )  # fmt: skip


def _difference(algo: str, leases: LeasePlan, other: str, wanted: LeasePlan) -> str:
    if leases.mode != wanted.mode:
        return f"{algo} wants {_MODES[leases.mode]}, {other} {_MODES[wanted.mode]}"
    mine, theirs = dataclasses.asdict(leases), dataclasses.asdict(wanted)
    return "; ".join(
        f"{meaning}: {_said(mine[name])} for {algo}, {_said(theirs[name])} for {other}"
        for name, meaning in _MEANINGS.items()
        if mine[name] != theirs[name]
    )


def _said(limit: float | None) -> str:
    return "no limit" if limit in (None, float("inf")) else f"{limit:g}"


def _that_agree(config: CommonConfig, policy: PlannedPolicy, leases: LeasePlan) -> list[str]:
    """Names of the other algorithms that want these leases in this run, and choose the policy's actions."""
    found = []
    for name in sorted(ALGORITHMS):
        kind = config_class(name)
        if kind is type(config) or _is_cut_short(config, kind) or not kind.learns_actions_of(policy.action_space):
            continue
        try:
            if algorithm_class(name).lease_plan(config_of(config, kind, policy.policy_id, {})) == leases:
                found.append(name)
        except ConfigError:  # it doesn't fit the run for other reasons
            continue
    return found
