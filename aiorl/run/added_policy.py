"""Policies that join a run after it has begun: as they wait to join, and as they travel in snapshots
to workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from aiorl.config import to_plain
from aiorl.config.files import check_depth
from aiorl.config.worker import PolicyPart
from aiorl.data.fragment import PolicyGraph
from aiorl.data.nested_codec import pack, unpack
from aiorl.errors import BadFrame, ConfigError, PolicyError
from aiorl.net.wire.messages import Snapshot

_MAX_DEPTH = 64

REMOVED: Final = np.zeros(0, np.uint8)
"""Stands for a policy that was removed, in place of a packed one."""


@dataclass(frozen=True, slots=True)
class AddedPolicy:
    """A policy that workers do not have from their welcome; its weights come with the same
    snapshot.

    Attributes:
        part: facts about it for workers.
        graph: its acting graph.
    """

    part: PolicyPart
    graph: PolicyGraph

    def pack(self) -> NDArray[np.uint8]:
        """Return the policy as bytes: msgpack of a map with ``part`` and ``graph``."""
        content: dict[str, Any] = {
            "part": to_plain(self.part.model_dump()),
            "graph": dict(self.graph),
        }
        return np.frombuffer(pack(content), np.uint8)

    @classmethod
    def unpack(cls, packed: NDArray[np.uint8]) -> Self:
        """Return the policy packed by `pack`.

        Raises:
            PolicyError: the bytes make no sense.
        """
        try:
            content = unpack(packed.tobytes())
            check_depth(content, _MAX_DEPTH)
            graph = content["graph"]
            return cls(
                part=PolicyPart.model_validate(content["part"]),
                graph=PolicyGraph(
                    graph=bytes(memoryview(graph["graph"])), spec=dict(graph["spec"])
                ),
            )
        except (BadFrame, ConfigError, KeyError, TypeError, ValueError, ValidationError) as error:
            raise PolicyError(
                f"the learner sent a policy that makes no sense: {error!r:.300}"
            ) from error


def changes_to(snapshot: Snapshot, networks: Set[str]) -> tuple[dict[str, NDArray[Any]], set[str]]:
    """Return what changes policies to those of a snapshot: packed policies to add, by id, and ids
    of policies to remove.

    Args:
        snapshot: the snapshot, whole or partial.
        networks: ids of the policies that have a network; the others are not in snapshots.
    """
    added = {}
    removed = set()
    for policy_id, packed in snapshot.policies.items():
        if not packed.size:
            removed.add(policy_id)
        elif policy_id not in networks:
            added[policy_id] = packed
    if snapshot.is_whole:
        removed |= networks - snapshot.weights.keys()
    return added, removed.intersection(networks)


@dataclass(slots=True)
class PolicyChanges:
    """Differences between a run's policies and its configuration, and changes that wait.

    Attributes:
        added: ids of policies that are not in the configuration.
        removed: ids of policies that were removed; they are not used again.
        to_add: policy id -> id of the policy that it is like, and its weights by name, None for
            those of the other one.
        to_remove: ids of policies.
    """

    added: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    to_add: dict[str, tuple[str, Mapping[str, NDArray[Any]] | None]] = field(default_factory=dict)
    to_remove: set[str] = field(default_factory=set)
