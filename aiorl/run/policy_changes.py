"""Policies that join a run, or leave it, between two of its updates; such as the opponents of a
league.

They act and do not learn. Checkpoints name them, so that a resumed run has them as well, although
its configuration does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import Checkpoint
from aiorl.acting.filters import ObservationFilter
from aiorl.acting.graph_policy import FIXED_TIMESTEP
from aiorl.acting.policy_map import mapping_parameters
from aiorl.config.code import import_object
from aiorl.config.worker import PolicyPart
from aiorl.data.fragment import PolicyGraph, SamplePlan
from aiorl.errors import CheckpointError, ConfigError, UnknownPolicyError
from aiorl.net.wire.messages import Arrays
from aiorl.run.added_policy import REMOVED, AddedPolicy
from aiorl.run.build import Learning
from aiorl.run.policy_plan import POLICIES, check_policy_id

_MAPPING = "multiagent.policy_mapping_fn"
_ADDED = "added_policies"
_REMOVED = "removed_policies"


@dataclass(frozen=True, slots=True)
class NewPolicy:
    """A policy that joins a run.

    Attributes:
        part: facts about it for workers.
        graph: its acting graph.
        spaces: "observation" and "action" space as plain data.
        filter: statistics of its observations, frozen.
        weights: its weights by name.
    """

    part: PolicyPart
    graph: PolicyGraph
    spaces: Mapping[str, Any]
    filter: ObservationFilter
    weights: Arrays


def plan_addition(learning: Learning, policy_id: str, like: str, weights: Arrays | None) -> None:
    """Plan a policy, which joins the run before its next update.

    Args:
        learning: the run's policies.
        policy_id: id of the new policy.
        like: id of a policy whose network, spaces and settings it has, which can join at the same
            time.
        weights: its weights by name; None takes those that the other policy has then.

    Raises:
        UnknownPolicyError: there is no policy `like` (also a KeyError).
        ConfigError: the id can't be used, the other policy has no network, the weights don't fit
            it, or the mapping function could never choose the new policy.
    """
    part = learning.worker_part
    changes = learning.changes
    check_policy_id(policy_id)
    if not isinstance(like, str):
        raise UnknownPolicyError(like, part.policies)
    if policy_id in part.policies or policy_id in changes.to_add:
        raise ConfigError(
            f"there is a policy {policy_id!r} already.",
            key=POLICIES,
            value=policy_id,
            hint="Choose another id. set_policy_state gives a policy other weights.",
        )
    if policy_id in changes.removed:
        raise ConfigError(
            f"policy {policy_id!r} was removed, and episodes may still play with it.",
            key=POLICIES,
            value=policy_id,
            hint="Choose another id, such as one with a number that grows.",
        )
    if like in changes.to_add:  # it will be a copy of yet another policy at that time
        like, weights_of_like = changes.to_add[like]
        if weights is None:
            weights = weights_of_like
    if like not in part.policies:
        raise UnknownPolicyError(like, policy_ids_of(learning))
    if like not in learning.graphs:
        raise ConfigError(
            f"policy {policy_id!r} can't be like {like!r}, whose class is your own"
            f" {part.policies[like].policy_class}.",
            key=POLICIES,
            value=like,
            hint="Name a policy with a network.",
        )
    mapping = part.multiagent.policy_mapping_fn
    if not isinstance(mapping, str):
        raise ConfigError(
            f"no agent would ever act with policy {policy_id!r}: {_MAPPING} is no function.",
            key=_MAPPING,
            value=mapping,
            hint=(
                "Set it to a function of agent, episode and worker, which can choose among"
                " worker.policy_map."
            ),
        )
    if weights is not None:
        spec = ActingSpec.from_dict(learning.graphs[like]["spec"])
        weights = _fitting(policy_id, weights, spec, like)
    changes.to_add[policy_id] = like, weights


def plan_removal(learning: Learning, policy_id: str) -> None:
    """Plan to remove a policy before the next update; it must not learn.

    Raises:
        UnknownPolicyError: there is no such policy (also a KeyError).
        ConfigError: the policy learns, agents are mapped to it, or its class is the user's own.
    """
    policies = learning.worker_part.policies
    changes = learning.changes
    if not isinstance(policy_id, str):
        raise UnknownPolicyError(policy_id, policies)
    if policy_id in changes.to_add:
        del changes.to_add[policy_id]
        return
    if policy_id not in policies or policy_id in changes.to_remove:
        raise UnknownPolicyError(policy_id, policies.keys() - changes.to_remove)
    reason = ""
    if policies[policy_id].is_trained:
        reason = "it learns"
    elif policy_id not in learning.graphs:
        reason = f"its class is your own {policies[policy_id].policy_class}"
    elif policy_id in _mapped_policies(learning):
        reason = f"{_MAPPING} maps agents to it"
    if reason:
        raise ConfigError(
            f"policy {policy_id!r} can't be removed: {reason}.", key=POLICIES, value=policy_id
        )
    changes.to_remove.add(policy_id)


def policy_ids_of(learning: Learning) -> list[str]:
    """Return the ids of a run's policies in order, as they are once the planned changes are made."""
    changes = learning.changes
    return sorted({*learning.worker_part.policies, *changes.to_add} - changes.to_remove)


def take_planned(learning: Learning, timestep: int) -> tuple[dict[str, NewPolicy], set[str]]:
    """Return the policies to add and the ids of those to remove, and forget them.

    No update may be in work.

    Args:
        learning: the run's policies.
        timestep: env steps sampled so far; the exploration of new policies stays as it is there.
    """
    changes = learning.changes
    added = {
        policy_id: _new_policy(learning, like, weights, timestep)
        for policy_id, (like, weights) in changes.to_add.items()
    }
    removed = changes.to_remove
    changes.to_add = {}
    changes.to_remove = set()
    return added, removed


def change_policies(learning: Learning, added: Mapping[str, NewPolicy], removed: set[str]) -> None:
    """Add policies to a run's, and remove others; workers do not know of it yet."""
    policies = dict(learning.worker_part.policies)
    for policy_id, policy in added.items():
        policies[policy_id] = policy.part
        learning.graphs[policy_id] = policy.graph
        learning.spaces[policy_id] = policy.spaces
        learning.filters[policy_id] = policy.filter
    for policy_id in removed:
        del policies[policy_id]
        del learning.graphs[policy_id]
        del learning.spaces[policy_id]
        del learning.filters[policy_id]
    learning.worker_part = learning.worker_part.model_copy(update={"policies": policies})
    learning.group.change_fixed(
        {policy_id: policy.weights for policy_id, policy in added.items()}, removed
    )
    changes = learning.changes
    changes.added = changes.added.union(added) - removed
    changes.removed |= removed


def for_snapshot(added: Mapping[str, NewPolicy], removed: set[str]) -> dict[str, NDArray[np.uint8]]:
    """Return changes in the form of `Snapshot.policies`."""
    packed = {
        policy_id: AddedPolicy(policy.part, policy.graph).pack()
        for policy_id, policy in added.items()
    }
    return {**packed, **dict.fromkeys(removed, REMOVED)}


def _new_policy(learning: Learning, like: str, weights: Arrays | None, timestep: int) -> NewPolicy:
    part = learning.worker_part.policies[like]
    config = {FIXED_TIMESTEP: timestep, **part.config}  # that of a fixed policy stays
    acting = ActingState({}, learning.worker_part, learning.graphs, learning.spaces)
    _, statistics = acting.preprocessing_of(like)
    merged = learning.filters[like]
    if not merged.is_identity:
        statistics.restore(merged.state())
    statistics.is_frozen = True
    return NewPolicy(
        part=part.model_copy(
            update={
                "config": config,
                "sample_plan": SamplePlan(),
                "is_trained": False,
                "sends": "rows",
            }
        ),
        graph=learning.graphs[like],
        spaces=learning.spaces[like],
        filter=statistics,
        weights=learning.group.get_weights()[like] if weights is None else weights,
    )


def _fitting(policy_id: str, weights: Any, spec: ActingSpec, like: str) -> Arrays:
    """Return weights as arrays for a network.

    Raises:
        ConfigError: they don't fit, or are not finite.
    """
    what = f"the weights of policy {policy_id!r}"
    names = [weight.name for weight in spec.weights]
    if not isinstance(weights, Mapping) or weights.keys() != set(names):
        raise ConfigError(
            f"{what} are {weights!r:.200}, expected arrays with the names of those of {like!r}:"
            f" {', '.join(names)}."
        )
    fitting = {}
    for weight in spec.weights:
        array = _numbers(weights[weight.name], np.dtype(weight.dtype))
        if array is None:
            raise ConfigError(
                f"{what} have {weights[weight.name]!r:.200} as {weight.name}, expected an array of"
                f" {weight.dtype}."
            )
        if array.shape != tuple(weight.shape):
            raise ConfigError(
                f"{what} don't fit the spaces or the network of {like!r}: {weight.name} has shape"
                f" {list(array.shape)}, expected {list(weight.shape)}."
            )
        if not np.isfinite(array).all():
            raise ConfigError(f"{what} contain numbers that are not finite, in {weight.name}.")
        fitting[weight.name] = array
    return fitting


def _numbers(values: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return a copy of real numbers as an array of a dtype; None if they aren't such an array."""
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            return None
        with np.errstate(over="ignore"):  # the caller refuses what becomes infinite
            return array.astype(dtype)
    except (TypeError, ValueError):  # such as lists of different lengths
        return None


def _mapped_policies(learning: Learning) -> set[str]:
    """Return the policies that agents act with as long as the run lasts, as far as that is known:
    a function that sees the episode or the worker can choose others at any time.
    """
    mapping = learning.worker_part.multiagent.policy_mapping_fn
    if isinstance(mapping, Mapping):
        return set(mapping.values())
    if mapping is not None and mapping_parameters(import_object(mapping, key=_MAPPING)):
        return set()
    return {policy_id for policy_id, agents in learning.agents.items() if agents}


# In checkpoints
# --------------------------------------------------------------------------------------------------


def changes_of(learning: Learning) -> dict[str, list[str]]:
    """Return the changes to the configuration's policies, for the meta of checkpoints; empty if
    there are none.
    """
    changes = learning.changes
    lists = {_ADDED: sorted(changes.added), _REMOVED: sorted(changes.removed)}
    return {name: policy_ids for name, policy_ids in lists.items() if policy_ids}


def repeat_changes(checkpoint: Checkpoint, learning: Learning) -> None:
    """Add the policies to a run's that it had in a checkpoint, and remove the others.

    Raises:
        CheckpointError: the checkpoint lacks a policy that it names.
    """
    names = [checkpoint.meta.get(key) or [] for key in (_ADDED, _REMOVED)]
    if not any(names):
        return
    policies = learning.worker_part.policies
    stored = ActingState.from_checkpoint(checkpoint)
    added = {}
    for policy_id in map(str, names[0]):
        if policy_id in policies:  # the configuration has it now
            continue
        if policy_id not in stored.graphs or policy_id not in stored.part.policies:
            raise CheckpointError(checkpoint.path, f"it lacks its policy {policy_id!r:.100}")
        _, statistics = stored.preprocessing_of(policy_id)
        statistics.is_frozen = True
        added[policy_id] = NewPolicy(
            part=stored.part.policies[policy_id],
            graph=stored.graphs[policy_id],
            spaces=stored.spaces[policy_id],
            filter=statistics,
            weights=checkpoint.under(f"algorithm/{policy_id}/weights/"),
        )
    removed = {str(policy_id) for policy_id in names[1]}
    learning.changes.removed |= removed  # also those that joined the run and left it
    change_policies(learning, added, removed & learning.group.fixed.keys())
