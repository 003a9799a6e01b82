"""Taking up snapshots: weights, filter state and global variables of one version, as a whole, between two steps.

The event loop offers each snapshot as it comes; the sampler's thread takes up the newest one at its next step.
So new weights govern the very next inference and never change in the middle of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.observation.filters import ObservationFilter
from aiorl.policy.graph_policy import GraphPolicy
from aiorl.protocol.messages import Snapshot

__all__ = ["SnapshotSlot", "StopSampling"]

logger = logging.getLogger(__name__)


class StopSampling(BaseException):
    """Raised between two steps to leave a fragment unfinished; not an error, so not an Exception."""


class SnapshotSlot:
    """Hands the newest snapshot from the event loop to one sampler's thread.

    Attributes:
        version: policy version in force, -1 before the first.
        global_vars: global variables of that version.
    """

    def __init__(
        self,
        policy: GraphPolicy,
        observation_filter: ObservationFilter,
        incarnation: str,
        *,
        synchronize_filters: bool,
    ) -> None:
        """Take what snapshots apply to.

        Args:
            policy: gets the weights of the default policy.
            observation_filter: adopts the published state, keeping what it has not sent yet.
            incarnation: under which this worker's filter deltas are acknowledged.
            synchronize_filters: False leaves the filter's statistics its own after the first snapshot.
        """
        self.version = -1
        self.global_vars: Mapping[str, Any] = {}
        self._policy = policy
        self._filter = observation_filter
        self._incarnation = incarnation
        self._synchronize_filters = synchronize_filters
        self._offered: Snapshot | None = None
        self._stop = False

    def offer(self, snapshot: Snapshot) -> None:
        """Leave a snapshot for the sampler; an older one not yet taken up is skipped. Any thread may call."""
        offered = self._offered
        if snapshot.version > self.version and (offered is None or snapshot.version > offered.version):
            self._offered = snapshot

    def stop(self) -> None:
        """Make the next ``between_steps`` raise StopSampling. Any thread may call."""
        self._stop = True

    def between_steps(self) -> None:
        """Take up what is offered; the sampler calls this before each step.

        Raises:
            StopSampling: after ``stop``.
            PolicyError: weights that do not fit the policy.
            BatchError: a filter state that does not fit the filter.
        """
        if self._stop:
            raise StopSampling
        snapshot = self._offered
        if snapshot is None:
            return
        self._offered = None
        self._policy.set_weights(snapshot.weights[DEFAULT_POLICY_ID])
        state = snapshot.filters.get(DEFAULT_POLICY_ID)
        acknowledged = snapshot.filter_acks.get(self._incarnation, 0)
        if state and (self._synchronize_filters or self.version < 0):
            self._filter.adopt(state, acknowledged)
        else:
            self._filter.acknowledge(acknowledged)
        self.global_vars = snapshot.global_vars
        self.version = snapshot.version
