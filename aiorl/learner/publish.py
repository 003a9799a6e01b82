"""What goes out: weights, filter state and global variables of one version, as one snapshot.

Filter deltas come in with fragments and are merged when a fragment is used, so that in on-policy runs the order
of merging, and with it every bit of the statistic, does not depend on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.observation.filters import ObservationFilter
from aiorl.protocol.messages import PolicyArrays, Snapshot

__all__ = ["Publisher"]


class Publisher:
    """Makes snapshots; versions rise by one with each.

    Attributes:
        version: version of the newest snapshot, -1 before the first.
        filter: the merged observation filter.
    """

    def __init__(self, observation_filter: ObservationFilter) -> None:
        """Take the filter that deltas are merged into."""
        self.version = -1
        self.filter = observation_filter
        self._merged: dict[str, int] = {}

    def merge_deltas(self, incarnation: str, sequence: int, deltas: PolicyArrays) -> None:
        """Merge what a fragment's observations add; each fragment of an incarnation once, in order.

        Raises:
            BatchError: a delta that does not fit the filter.
        """
        if sequence <= self._merged.get(incarnation, 0):
            return
        self._merged[incarnation] = sequence
        delta = deltas.get(DEFAULT_POLICY_ID)
        if delta and not self.filter.is_identity:
            self.filter.merge_delta(delta)

    def forget(self, incarnation: str) -> None:
        """An incarnation has ended; nothing of it will be acknowledged any more."""
        self._merged.pop(incarnation, None)

    def next_snapshot(self, weights: Mapping[str, NDArray[Any]], global_vars: Mapping[str, Any]) -> Snapshot:
        """The snapshot of the next version."""
        self.version += 1
        state = {} if self.filter.is_identity else {DEFAULT_POLICY_ID: self.filter.state()}
        return Snapshot(
            version=self.version,
            weights={DEFAULT_POLICY_ID: weights},
            filters=state,
            filter_acks=dict(self._merged),
            global_vars=dict(global_vars),
        )
