"""Learning with the policies of a worker: each on its own rows, those that are not to learn left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiorl.acting.policy_map import PolicyMap
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.concat import Batch, columns_of
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.process.log_once import report

__all__ = ["apply_gradients", "compute_gradients", "learn_on_batch"]


def compute_gradients(policies: PolicyMap, samples: Batch) -> tuple[Any, dict[str, Any]]:
    """Gradients and figures, by policy id for a multi-agent batch; ``batch_count`` joins the figures.

    Raises:
        UnknownPolicyError: a plain batch, and there is no default policy (a KeyError).
    """
    report("compute_gradients", columns_of(samples))
    gradients: Any = {}
    info: dict[str, Any] = {}
    if isinstance(samples, MultiAgentBatch):
        for policy_id, batch in _trainable_parts(policies, samples):
            gradients[policy_id], info[policy_id] = policies[policy_id].compute_gradients(batch)
    else:
        gradients, info = policies[DEFAULT_POLICY_ID].compute_gradients(samples)
    report("gradients_out", gradients)
    return gradients, {**info, "batch_count": samples.count}


def apply_gradients(policies: PolicyMap, gradients: Any) -> dict[str, Any]:
    """Apply gradients by policy id, whether these policies are to learn or not; in any other form the default policy's.

    The default policy's own gradients may be a dict as well, by weight name.

    Raises:
        UnknownPolicyError: no policy has that id; nothing is changed then (a KeyError).
    """
    report("apply_gradients", gradients)
    if not (isinstance(gradients, Mapping) and _are_by_policy(policies, gradients)):
        return policies[DEFAULT_POLICY_ID].apply_gradients(gradients)
    appliers = {policy_id: policies[policy_id] for policy_id in gradients}
    return {policy_id: policy.apply_gradients(gradients[policy_id]) for policy_id, policy in appliers.items()}


def learn_on_batch(policies: PolicyMap, samples: Batch) -> dict[str, Any]:
    """Figures of the default policy's update; of a multi-agent batch those of each policy that learns, by id.

    Raises:
        UnknownPolicyError: a plain batch, and there is no default policy (a KeyError).
    """
    report("learn_on_batch", columns_of(samples))
    info: dict[str, Any]
    if isinstance(samples, MultiAgentBatch):
        info = {name: policies[name].learn_on_batch(batch) for name, batch in _trainable_parts(policies, samples)}
    else:
        info = policies[DEFAULT_POLICY_ID].learn_on_batch(samples)
    report("learn_output", info)
    return info


def _trainable_parts(policies: PolicyMap, samples: MultiAgentBatch) -> Iterator[tuple[str, SampleBatch]]:
    return (item for item in samples.policy_batches.items() if item[0] in policies.trainable_ids)


def _are_by_policy(policies: PolicyMap, gradients: Mapping[str, Any]) -> bool:
    """Whether the keys are meant as policy ids, known here or not; else they are the default policy's weights."""
    if not gradients or DEFAULT_POLICY_ID not in policies or policies.keys() & gradients.keys():
        return True
    if not policies.is_multi_agent or gradients.keys() & policies[DEFAULT_POLICY_ID].get_weights().keys():
        return False
    # where there are several policies, what holds several arrays is all that one of them computed
    return any(isinstance(value, Mapping | list | tuple) for value in gradients.values())
