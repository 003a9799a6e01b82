"""What goes out: weights, filter states and global variables of one version, as one snapshot.

Filter deltas come in with fragments and are merged when a fragment is used, so that in on-policy runs the order
of merging, and with it every bit of the statistic, does not depend on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aiorl.errors import BatchError
from aiorl.observation.filters import ObservationFilter
from aiorl.protocol.messages import PolicyArrays, Snapshot

__all__ = ["Publisher"]


class Publisher:
    """Makes snapshots; versions rise by one with each.

    Attributes:
        version: version of the newest snapshot, -1 before the first.
        filters: policy id -> the merged filter of its observations.
    """

    def __init__(self, filters: Mapping[str, ObservationFilter]) -> None:
        """Take the filters that deltas are merged into."""
        self.version = -1
        self.filters = dict(filters)
        self._merged: dict[str, int] = {}

    def merge_deltas(self, incarnation: str, sequence: int, deltas: PolicyArrays) -> None:
        """Merge what a fragment's observations add; each fragment of an incarnation once, in order.

        Raises:
            BatchError: a delta that does not fit its filter; those of other policies are merged.
        """
        if sequence <= self._merged.get(incarnation, 0):
            return
        self._merged[incarnation] = sequence
        fault: BatchError | None = None
        for policy_id, delta in sorted(deltas.items()):
            own = self.filters.get(policy_id)
            if own is None or own.is_identity or not delta:
                continue
            try:
                own.merge_delta(delta)
            except BatchError as error:
                fault = fault or error
        if fault is not None:
            raise fault

    def forget(self, incarnation: str) -> None:
        """An incarnation has ended; nothing of it will be acknowledged any more."""
        self._merged.pop(incarnation, None)

    def filter_states(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Policy id -> state of its filter, for those whose filter has one."""
        return {policy_id: own.state() for policy_id, own in self.filters.items() if not own.is_identity}

    def next_snapshot(self, weights: PolicyArrays, global_vars: Mapping[str, Any]) -> Snapshot:
        """The snapshot of the next version.

        Args:
            weights: policy id -> weights by name.
            global_vars: for policies, such as the timestep.
        """
        self.version += 1
        return Snapshot(
            version=self.version,
            weights=dict(weights),
            filters=self.filter_states(),
            filter_acks=dict(self._merged),
            global_vars=dict(global_vars),
        )
