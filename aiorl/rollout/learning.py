"""Learning with the policies of a worker: each on its own rows, those that are not to learn left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.log_once import log_once, summarize
from aiorl.policy.policy_map import PolicyMap

__all__ = ["apply_gradients", "compute_gradients", "learn_by_policy", "learn_on_batch"]

logger = logging.getLogger(__name__)


def compute_gradients(policies: PolicyMap, samples: Batch) -> tuple[Any, dict[str, Any]]:
    """Gradients and figures, by policy id for a multi-agent batch; ``batch_count`` joins the figures.

    Raises:
        UnknownPolicyError: a plain batch, and there is no default policy (a KeyError).
    """
    _report("compute_gradients", "Gradients are computed on: %s", samples)
    gradients: Any = {}
    info: dict[str, Any] = {}
    if isinstance(samples, MultiAgentBatch):
        for policy_id, batch in _trainable_parts(policies, samples):
            gradients[policy_id], info[policy_id] = policies[policy_id].compute_gradients(batch)
    else:
        gradients, info = policies[DEFAULT_POLICY_ID].compute_gradients(samples)
    return gradients, {**info, "batch_count": samples.count}


def apply_gradients(policies: PolicyMap, gradients: Any) -> dict[str, Any]:
    """Apply gradients by policy id, whether these policies are to learn or not; in any other form the default policy's.

    The default policy's own gradients may be a dict as well, by weight name.

    Raises:
        UnknownPolicyError: no policy has that id; nothing is changed then (a KeyError).
    """
    if log_once("apply_gradients"):
        logger.info("Gradients are applied: %s", summarize(gradients))
    is_by_policy = isinstance(gradients, Mapping) and (
        not gradients or DEFAULT_POLICY_ID not in policies or bool(policies.keys() & gradients.keys())
    )
    if not is_by_policy:
        return policies[DEFAULT_POLICY_ID].apply_gradients(gradients)
    appliers = {policy_id: policies[policy_id] for policy_id in gradients}
    return {policy_id: policy.apply_gradients(gradients[policy_id]) for policy_id, policy in appliers.items()}


def learn_on_batch(policies: PolicyMap, samples: Batch) -> dict[str, Any]:
    """Figures of the default policy's update; of a multi-agent batch those of each policy that learns, by id.

    Raises:
        UnknownPolicyError: a plain batch, and there is no default policy (a KeyError).
    """
    _report("learn_on_batch", "Policies learn on: %s", samples)
    if isinstance(samples, MultiAgentBatch):
        return learn_by_policy(policies, samples)
    return policies[DEFAULT_POLICY_ID].learn_on_batch(samples)


def learn_by_policy(policies: PolicyMap, samples: MultiAgentBatch) -> dict[str, dict[str, Any]]:
    """Figures of the update of each policy that learns, by id."""
    return {
        policy_id: policies[policy_id].learn_on_batch(batch) for policy_id, batch in _trainable_parts(policies, samples)
    }


def _trainable_parts(policies: PolicyMap, samples: MultiAgentBatch) -> Iterator[tuple[str, SampleBatch]]:
    return (item for item in samples.policy_batches.items() if item[0] in policies.trainable_ids)


def _report(key: str, text: str, samples: Batch) -> None:
    if log_once(key):
        logger.info(text, summarize(samples if isinstance(samples, SampleBatch) else samples.policy_batches))
