"""Flow of fragments from workers into train batches, and the leases that ask for more.

    fragments -> assembler -> updates -> weights -> snapshot of the next version -> leases

This module is independent of the algorithm, whose lease plan says how much can be sampled and with
which version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from aiorl.acting.filters import ObservationFilter
from aiorl.errors import BatchError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.transport.endpoint import EndpointStats
from aiorl.net.wire.messages import PolicyArrays, Snapshot
from aiorl.run.build import Learning
from aiorl.run.ingest import STALE, AssembledBatch, BatchAssembler, check_samples
from aiorl.run.policy_group import UpdateDone
from aiorl.run.report.results import Progress
from aiorl.text import one_line

if TYPE_CHECKING:
    from aiorl.net.protocol.learner_session import LearnerSession
    from aiorl.run.local_source import LocalSource
    from aiorl.run.training import Training
    from aiorl.run.update_thread import UpdateThread


class Publisher:
    """Makes snapshots with consecutive versions.

    Attributes:
        version: version of the newest snapshot, -1 before the first.
        filters: policy id -> the merged filter of its observations.
    """

    def __init__(self, filters: Mapping[str, ObservationFilter]) -> None:
        """Set the filters that deltas are merged into."""
        self.version = -1
        self.filters = dict(filters)
        # live incarnation -> highest sequence number merged; there are at most as many as the
        # session has slots. lower numbers not merged yet belong to accepted fragments that wait in
        # the assembler
        self._merged: dict[str, int] = {}

    def join(self, incarnation: str) -> None:
        """Add a live incarnation, so that snapshots acknowledge its merged deltas."""
        self._merged.setdefault(incarnation, 0)

    def merge_deltas(self, incarnation: str, sequence: int, deltas: PolicyArrays) -> None:
        """Merge the filter deltas of a fragment. The session ensures that each fragment comes only
        once.

        Deltas can be merged after their incarnation has ended. No acknowledgement is kept then,
        since no one waits for it.

        Raises:
            BatchError: a delta does not fit its filter; those of other policies are still merged.
        """
        if incarnation in self._merged and any(deltas.values()):
            self._merged[incarnation] = max(sequence, self._merged[incarnation])
        fault: BatchError | None = None
        for policy_id, delta in sorted(deltas.items()):
            own = self.filters.get(policy_id)
            if own is None or own.is_identity or own.is_frozen or not delta:
                continue
            try:
                own.merge_delta(delta)
            except BatchError as error:
                fault = fault or error
        if fault is not None:
            raise fault

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation that has ended, so that snapshots no longer acknowledge its
        deltas.
        """
        self._merged.pop(incarnation, None)

    def filter_states(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return policy id -> state of its filter, for all filters that have a state."""
        return {
            policy_id: own.state() for policy_id, own in self.filters.items() if not own.is_identity
        }

    def next_snapshot(self, weights: PolicyArrays, global_vars: Mapping[str, Any]) -> Snapshot:
        """Make the snapshot of the next version.

        Args:
            weights: policy id -> weights by name.
            global_vars: values that policies need, such as the timestep.
        """
        self.version += 1
        return Snapshot(
            version=self.version,
            weights=dict(weights),
            filters=self.filter_states(),
            filter_acks={
                incarnation: sequence for incarnation, sequence in self._merged.items() if sequence
            },
            global_vars=dict(global_vars),
        )


_MAX_REASON = 500


@dataclass(slots=True)
class Counters:
    """Totals of the run, which a resume preserves.

    Attributes:
        env_steps_sampled: env steps received.
        agent_steps_sampled: rows received.
        env_steps_trained: env steps trained on.
        updates: updates made, including skipped ones.
        updates_skipped: updates skipped because they were not finite.
    """

    env_steps_sampled: int = 0
    agent_steps_sampled: int = 0
    env_steps_trained: int = 0
    updates: int = 0
    updates_skipped: int = 0


_NO_TRAFFIC = EndpointStats()


def progress_of(
    counters: Counters,
    ledger: Ledger,
    flow: Flow | None,
    perf: Mapping[str, float] | None,
    traffic: EndpointStats = _NO_TRAFFIC,
    num_workers: int = 0,
) -> Progress:
    """Return a learner's progress.

    Args:
        counters: totals of the run.
        ledger: the account of env steps.
        flow: the flow, or None before training begins.
        perf: CPU and memory usage.
        traffic: statistics of the endpoint. Without an endpoint they are zero, so that results keep
            the same columns.
        num_workers: number of registered workers.
    """
    return Progress(
        **asdict(counters),
        num_healthy_workers=num_workers,
        ledger=ledger.as_dict(),
        transport={
            "queued_fragments": 0 if flow is None else flow.queued_fragments,
            "queued_messages_out": traffic.queued_messages,
            "rejected_messages": traffic.rejected,
            "refused_connections": traffic.refused,
            "dropped_peers": traffic.dropped,
        },
        bytes_in=traffic.bytes_in,
        bytes_out=traffic.bytes_out,
        learner={} if flow is None else flow.metrics,
        perf=perf,
    )


class Flow:
    """Keeps the update thread busy and the workers sampling. It is made when training begins.

    Attributes:
        publisher: version and merged filters.
        metrics: metrics of the newest update.
        is_granting: True while workers get leases.
        is_enough: called after each update; returns True to pause training until `go_on`. An
            on-policy run then leases nothing. In a streaming run, workers use up the leases they
            have, and their fragments wait.
    """

    def __init__(
        self,
        training: Training,
        learning: Learning,
        updates: UpdateThread | LocalSource,
        session: LearnerSession | LocalSource,
        *,
        tell: Callable[..., bool],
        max_queued_bytes: int,
    ) -> None:
        """Prepare without leasing anything yet.

        Args:
            training: the training; its counters and results are updated.
            learning: the policies and the leases that they need.
            updates: takes the train batches.
            session: hands out leases and publishes snapshots.
            tell: called with (kind, source, text, logging level) of news about a peer.
            max_queued_bytes: limit on the bytes of waiting fragments; at the limit, no further
                leases are streamed.
        """
        self.publisher = Publisher(learning.filters)
        self.metrics: dict[str, float] = {}
        self.is_granting = False
        self.is_enough: Callable[[], bool] = lambda: False
        self._plan = plan = learning.lease_plan
        self._check_fragment = learning.group.check_fragment
        self._assembler = BatchAssembler(plan)
        self._pacing: Pacing | None = None
        if plan.mode == "streaming":
            self._pacing = Pacing(
                plan.fragments_per_batch,
                plan.max_policy_lag,
                plan.outstanding_per_worker,
                plan.max_under_way,
            )
            session.leases.begin_streaming(self._pacing)
        self._updates = updates
        self._session = session
        self._counters = training.counters
        self._results = training.results
        self._tell = tell
        self._say = training.tell
        self._max_queued_bytes = max_queued_bytes
        self._num_in_thread = 0
        self._stopping = False
        self._stands_still = False

    @property
    def is_still(self) -> bool:
        """True while training is paused and the last update has ended."""
        return self._stands_still and self.is_idle

    @property
    def is_idle(self) -> bool:
        """True while no update runs and all earlier ones are accounted for."""
        return not self._num_in_thread

    @property
    def queued_fragments(self) -> int:
        """Number of fragments that wait for a batch."""
        return self._assembler.queued_fragments

    @property
    def is_drained(self) -> bool:
        """True while no update runs and fewer fragments wait than a train batch needs."""
        return self.is_idle and not self._assembler.is_ready

    # Fragments and updates
    # ----------------------------------------------------------------------------------------------

    def take(self, event: ev.SamplesAccepted) -> None:
        """Check, count and queue a fragment. A malformed fragment ends its worker's session."""
        message = event.message
        try:
            episodes = check_samples(message)
            self._check_fragment(message.batches)
        except BatchError as error:
            self._session.ledger.discard("malformed", message.env_steps)
            said = (
                f"worker {event.slot} sent a malformed fragment:"
                f" {one_line(str(error), _MAX_REASON)}"
            )
            self._tell("malformed fragments", event.slot, said, logging.ERROR)
            self._session.lose(event.slot, "it sent a malformed fragment", time.monotonic())
            if self._pacing is None:
                self._session.deal_again(1)
            return
        self._counters.env_steps_sampled += message.env_steps
        self._counters.agent_steps_sampled += message.agent_steps
        if (
            not self._stopping
        ):  # the last result covers the run up to its end, not fragments that arrive while it ends
            self._results.add_episodes(episodes)
            self._results.add_perf(message.perf)
        self._assembler.add(event)
        if self._pacing is not None:
            self._merge(event)
        elif more := self._assembler.more_wanted():
            self._session.deal_again(more)

    def feed_updates(self) -> None:
        """Hand out train batches while the update thread has room, and lease fragments to replace
        them.
        """
        assembler = self._assembler
        if self._stopping or self._stands_still:
            return
        while self._updates.has_room:
            assembler.prune(ahead=self._num_in_thread)
            if not assembler.is_ready:
                break
            batch = assembler.take()
            if (
                self._pacing is None
            ):  # in the order of workers, so that the statistics are reproducible bit by bit
                for fragment in batch.fragments:
                    self._merge(fragment)
            self._updates.submit_nowait(batch)
            self._num_in_thread += 1
        for reason, fragment in assembler.take_discarded():
            self._session.ledger.discard(reason, fragment.message.env_steps)
            if (
                self._pacing is None
            ):  # on-policy: its observations count even if the fragment is not used
                self._merge(fragment)
            elif reason == STALE:
                self._pacing.outdated(fragment.slot)
        self.stream()

    def _merge(self, fragment: ev.SamplesAccepted) -> None:
        message = fragment.message
        try:
            self.publisher.merge_deltas(fragment.incarnation, message.seq, message.filter_deltas)
        except BatchError as error:
            said = (
                f"worker {fragment.slot} sent a filter delta that was left out:"
                f" {one_line(str(error), _MAX_REASON)}"
            )
            self._tell("filter deltas left out", fragment.slot, said, logging.WARNING)

    def take_update(self, done: UpdateDone) -> None:
        """Account for an update that has ended, publish its weights if due and lease the next
        fragments.
        """
        self._num_in_thread -= 1
        for fragment in done.batch.fragments:
            message = fragment.message
            self._results.add_lag(self.publisher.version - message.first_version, message.env_steps)
        self._session.ledger.train(done.batch.env_steps)
        self._counters.env_steps_trained += done.batch.env_steps
        self._counters.updates += 1
        if done.result.skipped:
            self._counters.updates_skipped += 1
            where = (
                f": column {done.result.bad_column!r} is not finite"
                if done.result.bad_column
                else ""
            )
            self._say(
                f"an update was skipped because its loss or gradients were not finite{where}",
                logging.WARNING,
            )
        self.metrics = {
            **done.result.metrics,
            "update_s": done.update_s,
            "make_batch_s": done.make_batch_s,
            "wait_for_batch_s": done.wait_s,
        }
        if self._pacing is not None:
            self._pacing.updated(done.wait_s, self.queued_fragments, time.monotonic())
        if done.weights is not None:
            self._session.publish(self.next_snapshot(done.weights), time.monotonic())
            self._assembler.set_version(self.publisher.version)
        if self._stands_still or self.is_enough():
            self.stand_still()
        self._grant_next_batch()

    def set_weights(self, weights: PolicyArrays) -> None:
        """Publish weights that do not come from an update.

        Training must be idle and is paused afterwards.
        """
        self.stand_still()
        self._session.publish(self.next_snapshot(weights), time.monotonic())
        self._assembler.set_version(self.publisher.version)

    def drop_batch(self, batch: AssembledBatch) -> None:
        """Account for the env steps of a batch that the update thread failed on."""
        self._num_in_thread -= 1
        self._session.ledger.discard("the update failed", batch.env_steps)

    def leave_batches(self, count: int) -> None:
        """Take note that the update thread has ended without touching the last ``count`` train
        batches.
        """
        self._num_in_thread -= count

    def next_snapshot(self, weights: PolicyArrays) -> Snapshot:
        """Make the snapshot of the next version."""
        return self.publisher.next_snapshot(weights, {"timestep": self._counters.env_steps_sampled})

    # Leases
    # ----------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Grant leases by the algorithm's plan and train on waiting fragments.

        Does nothing if already doing so.
        """
        if not self.is_granting and not self._stopping:
            self._stands_still = False
            self.is_granting = True
            self._grant_next_batch()
            self.feed_updates()

    def stand_still(self) -> None:
        """Hand out no more train batches until `go_on`. Leased fragments can still arrive."""
        self._stands_still = True
        self.is_granting = False

    def stop(self) -> None:
        """Stop for good: start no updates, add nothing to results and grant no leases."""
        self._stopping = True
        self.is_granting = False

    def _grant_next_batch(self) -> None:
        """Lease one train batch of the newest version (on-policy), or as much as the budget allows
        (streaming).
        """
        if self._pacing is not None:
            self.stream()
        elif self.is_granting:
            self._session.deal(self.publisher.version, self._assembler.begin_batch())

    def stream(self) -> None:
        """Lease as much as the budget allows now, in a streaming run."""
        if not self.is_granting or self._pacing is None:
            return
        plan = self._plan
        version = self.publisher.version
        coming = self._pacing.outstanding
        is_enough = self.queued_fragments + coming >= plan.fragments_per_batch
        if is_enough and self._assembler.bytes_with(coming) >= self._max_queued_bytes:
            return
        oldest = version if plan.max_policy_lag is None else version - plan.max_policy_lag
        waiting = self.queued_fragments + self._num_in_thread * plan.fragments_per_batch
        self._session.stream(waiting, max(0, oldest))
