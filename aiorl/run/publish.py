"""What goes out: weights, filter states and global variables of one version, as one snapshot.

Filter deltas come in with fragments and are merged when a fragment is used or discarded, so that in on-policy runs the
order of merging, and with it every bit of the statistic, does not depend on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aiorl.acting.observation.filters import ObservationFilter
from aiorl.errors import BatchError
from aiorl.net.wire.messages import PolicyArrays, Snapshot

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
        # of live incarnations, which are as many as the session has slots: the highest number merged
        self._merged: dict[str, int] = {}
        # of those: lower numbers that are not, which are those of accepted fragments that wait in the assembler
        self._skipped: dict[str, set[int]] = {}

    def join(self, incarnation: str) -> None:
        """An incarnation lives from now on: what is merged of it is acknowledged in snapshots."""
        self._merged.setdefault(incarnation, 0)

    def merge_deltas(self, incarnation: str, sequence: int, deltas: PolicyArrays) -> None:
        """Merge what a fragment's observations add; each fragment of a live incarnation once.

        What an incarnation sent before it ended may be merged after its end, too: nobody waits for its acknowledgement,
        so none is kept, and that each comes once is the caller's part then.

        Raises:
            BatchError: a delta that does not fit its filter; those of other policies are merged.
        """
        if incarnation in self._merged and not self._is_new(incarnation, sequence):
            return
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
        self._skipped.pop(incarnation, None)

    def _is_new(self, incarnation: str, sequence: int) -> bool:
        """Note a number of a live incarnation; False if it is merged already."""
        highest = self._merged[incarnation]
        if sequence > highest:
            self._merged[incarnation] = sequence
            if sequence > highest + 1:
                self._skipped.setdefault(incarnation, set()).update(range(highest + 1, sequence))
            return True
        skipped = self._skipped.get(incarnation, set())
        if sequence not in skipped:
            return False
        skipped.discard(sequence)
        return True

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
            filter_acks={incarnation: sequence for incarnation, sequence in self._merged.items() if sequence},
            global_vars=dict(global_vars),
        )
