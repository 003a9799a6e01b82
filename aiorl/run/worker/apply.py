"""Taking up snapshots: weights, filter state and global variables of one version, as a whole, between two steps.

The event loop offers each snapshot as it comes; the sampler's thread takes up the newest one at its next step.
So new weights govern the very next inference and never change in the middle of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiorl.acting.observation.filters import ObservationFilter
from aiorl.acting.policy import Policy
from aiorl.net.wire.messages import Snapshot

__all__ = ["SnapshotSlot", "StopSampling"]

logger = logging.getLogger(__name__)


class StopSampling(BaseException):
    """Raised between two steps to leave a fragment unfinished; not an error, so not an Exception."""


class SnapshotSlot:
    """Hands the newest snapshot from the event loop to one sampler's thread.

    Attributes:
        version: policy version in force, -1 before the first.
        newest_version: version of the newest snapshot offered, taken up or not, -1 before the first.
        global_vars: global variables of that version.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        filters: Mapping[str, ObservationFilter],
        incarnation: str,
        *,
        synchronize_filters: bool,
    ) -> None:
        """Take what snapshots apply to; both mappings are read anew with each snapshot.

        Args:
            policies: by policy id; each gets the weights of its id, if a snapshot has any.
            filters: by policy id; each adopts the published state, keeping what it has not sent yet.
            incarnation: under which this worker's filter deltas are acknowledged.
            synchronize_filters: False leaves the filters' statistics their own after the first snapshot.
        """
        self.version = self.newest_version = -1
        self.global_vars: Mapping[str, Any] = {}
        self._policies = policies
        self._filters = filters
        self._incarnation = incarnation
        self._synchronize_filters = synchronize_filters
        self._offered: Snapshot | None = None
        self._stop = False

    def offer(self, snapshot: Snapshot) -> None:
        """Leave a snapshot for the sampler; an older one not yet taken up is skipped. Any thread may call."""
        offered = self._offered
        if snapshot.version > self.version and (offered is None or snapshot.version > offered.version):
            self._offered = snapshot
            self.newest_version = snapshot.version

    def stop(self) -> None:
        """Make the next ``between_steps`` raise StopSampling. Any thread may call."""
        self._stop = True

    def between_steps(self) -> None:
        """Take up what is offered; the sampler calls this before each step.

        Raises:
            StopSampling: after ``stop``.
            PolicyError: weights that do not fit their policy.
            BatchError: a filter state that does not fit its filter.
        """
        if self._stop:
            raise StopSampling
        snapshot = self._offered
        if snapshot is None:
            return
        self._offered = None
        for policy_id, policy in self._policies.items():
            if policy_id in snapshot.weights:
                policy.set_weights(snapshot.weights[policy_id])
            policy.on_global_var_update(snapshot.global_vars)
        acknowledged = snapshot.filter_acks.get(self._incarnation, 0)
        adopts = self._synchronize_filters or self.version < 0
        for policy_id, observation_filter in self._filters.items():
            state = snapshot.filters.get(policy_id)
            if state and adopts:
                observation_filter.adopt(state, acknowledged)
            else:
                observation_filter.acknowledge(acknowledged)
        self.global_vars = snapshot.global_vars
        self.version = snapshot.version
