"""Samplers of a worker in this process, with policies that act by small networks without
TensorFlow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gymnasium import spaces

from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Snapshot
from aiorl.run.build import Learning
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

Network = tuple[bytes, Any, dict[str, Any]]
"""Acting graph, its description, and weights."""
POLLED: dict[str, Any] = {"callbacks": "general_parts:Watching"}
LOCKSTEP: dict[str, Any] = {"callbacks": None, "vectorize": "serial"}


def network(
    obs_size: int, num_outputs: int = 2, action_space: spaces.Space[Any] | None = None
) -> Network:
    weights = mlp_weights(obs_size, num_outputs)
    return (
        *make_acting_graph(obs_size, action_space or spaces.Discrete(2), num_outputs, weights),
        weights,
    )


def entry(plan: SamplePlan, **settings: Any) -> dict[str, Any]:
    """Return a policy's entry as workers receive it."""
    return {"sample_plan": dataclasses.asdict(plan), **settings}


def make_unit(
    policies: dict[str, Any], network: Network, *, slot: int = 1, version: int = 0, **settings: Any
) -> SamplerUnit:
    """Make a sampler with trainable policies that all act by one network of a given version."""
    part = WorkerPart.from_dict(
        {"rollout_fragment_length": 8, "seed": 5, "policies": policies, **settings}
    )
    graph, spec, weights = network
    learning = [policy_id for policy_id, policy in policies.items() if "policy_class" not in policy]
    graphs = {policy_id: {"graph": graph, "spec": spec.to_dict()} for policy_id in learning}
    first = Snapshot(version, dict.fromkeys(learning, weights), {}, {}, {"timestep": 10 * version})
    return SamplerUnit(part, graphs, first, UnitPlace(slot, "ab12", num_workers=2))


def unit_of(learning: Learning) -> SamplerUnit:
    """Make a sampler of the only worker of a run."""
    snapshot = Snapshot(0, learning.group.get_weights(), {}, {}, {"timestep": 0})
    return SamplerUnit(
        learning.worker_part, learning.graphs, snapshot, UnitPlace(1, "ab12", num_workers=1)
    )


def sent(unit: SamplerUnit, seq: int = 1) -> Any:
    """Return the message of the next fragment, decoded from the wire."""
    fragment = unit.sample()
    frames = encode(fragment._replace(seq=seq, lease_id=1, filter_deltas=unit.take_deltas(seq)))
    return decode([memoryview(frame) for frame in frames])


def rows_of(unit: SamplerUnit) -> dict[str, Any]:
    """Return columns of the default policy in the next fragment."""
    return dict(unit.sample().batches[DEFAULT_POLICY_ID])
