"""The learner's loop, in order: receive a message, take fragments in, begin an update, account for
it, publish its weights.

    messages -> session -> fragments -> train batches -> updates -> snapshots and leases -> messages

There is no socket, thread, clock or file here. A *source* drives the core: it passes on what happens
(`receive`, `tick`, `update_ended`, ...; ``now`` is any monotonic time in seconds) and then carries out
the `effects`. `RemoteSource` has sockets and a thread for updates; `LocalSource` has a worker in the
caller's thread and makes the updates itself.

The core is independent of the algorithm, whose lease plan says how much can be sampled and with which
version.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from aiorl.acting.filters import ObservationFilter
from aiorl.config.parts import SamplePart
from aiorl.config.worker import TransportConfig
from aiorl.data.fragment import PolicyGraph
from aiorl.errors import BatchError
from aiorl.learning.algorithm import LeasePlan
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings, Target
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire.format import limits_of, max_workers_of
from aiorl.net.wire.messages import Arrays, DownMessage, Message, PolicyArrays, Snapshot
from aiorl.run.build import Learning
from aiorl.run.counters import Counters
from aiorl.run.ingest import STALE, AssembledBatch, BatchAssembler, check_samples
from aiorl.run.policy_group import UpdateDone
from aiorl.run.ports import Grants
from aiorl.run.report.results import Results
from aiorl.text import one_line

MAX_BEGUN = 2
"""Updates begun and not ended: one in work, one whose train batch waits for it."""
_MAX_REASON = 500

# Effects
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FragmentRefused:
    """A worker sent a malformed fragment, for which it is lost."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeltaLeftOut:
    """A worker sent a filter delta that does not fit its filter."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateSkipped:
    """An update was skipped because its loss or gradients were not finite; ``bad_column`` is the
    column at fault, or "".
    """

    bad_column: str


News: TypeAlias = ev.LearnerEvent | FragmentRefused | DeltaLeftOut | UpdateSkipped


@dataclass(frozen=True, slots=True)
class Report:
    """Report to the user, or act on, what has happened."""

    news: News


@dataclass(frozen=True, slots=True, eq=False)
class BeginUpdate:
    """Make an update with a train batch, after those begun before; `LearnerCore.update_ended`
    follows.
    """

    batch: AssembledBatch


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send a message to a peer, or broadcast it."""

    target: Target
    message: DownMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the connection of a peer, after the messages before."""

    peer: bytes
    reason: str


Effect: TypeAlias = Report | BeginUpdate | Send | Disconnect


class LearnerCore:
    """State of a learner between messages: session, fragments that wait, versions, account.

    Attributes:
        session: the protocol with workers; it holds the leases and the ledger.
        counters: totals of the run.
        results: episodes and lags of the current iteration.
        publisher: version and merged filters; available after `begin`.
        metrics: metrics of the newest update.
        is_granting: True while workers get leases.
        is_enough: called after each update; returns True to pause training until `go_on`. An
            on-policy run then leases nothing. In a streaming run, workers use up the leases they
            have, and their fragments wait.
    """

    def __init__(self, session: LearnerSession, counters: Counters, results: Results) -> None:
        """Prepare for workers that say hello; they are admitted later, see `admit`.

        Args:
            session: a new session; its ledger is continued.
            counters: totals to continue.
            results: gets the episodes and lags.
        """
        self.session = session
        self.counters = counters
        self.results = results
        self.publisher: Publisher
        self.metrics: dict[str, float] = {}
        self.is_granting = False
        self.is_enough: Callable[[], bool] = lambda: False
        self._has_begun = False
        self._check_fragment: Callable[[PolicyArrays], None]
        self._assembler: BatchAssembler
        self._grants: Grants
        self._num_begun = 0
        self._is_paused = False
        self._is_stopped = False
        self._effects: list[Effect] = []

    @classmethod
    def of(
        cls,
        run_id: str,
        transport: TransportConfig,
        sample: SamplePart,
        *,
        counters: Counters,
        results: Results,
        ledger: Ledger,
    ) -> LearnerCore:
        """Return the core of a learner with these settings, and with totals to continue."""
        settings = LearnerSettings(
            transport=transport,
            max_workers=max_workers_of(limits_of(transport)),
            num_workers=sample.num_workers,
            data_ends=sample.data_ends,
        )
        session = LearnerSession(run_id, secrets.token_hex(8), settings, ledger)
        return cls(session, counters, results)

    # Begin
    # ----------------------------------------------------------------------------------------------

    def begin(self, learning: Learning, max_queued_bytes: int) -> Snapshot:
        """Set the policies, and return the first snapshot, which `admit` publishes.

        Args:
            learning: the policies and the leases that they need.
            max_queued_bytes: limit on the bytes of waiting fragments; at the limit, no further
                leases are streamed.
        """
        plan = learning.lease_plan
        self.publisher = Publisher(learning.filters)
        self._check_fragment = learning.group.check_fragment
        self._assembler = BatchAssembler(plan)
        if plan.mode == "streaming":
            self._grants = StreamingGrants(plan, self.session, self._assembler, max_queued_bytes)
        else:
            self._grants = OnPolicyGrants(self.session, self._assembler)
        self._has_begun = True
        return self._next_snapshot(learning.group.get_weights())

    def admit(
        self,
        config: Mapping[str, Any],
        graphs: Mapping[str, PolicyGraph],
        snapshot: Snapshot,
        now: float,
    ) -> None:
        """Admit workers and send them this data; sampling starts with `go_on`."""
        self.session.begin(config, graphs, now)
        self.session.publish(snapshot, now)

    # Receive a message
    # ----------------------------------------------------------------------------------------------

    def receive(
        self,
        peer: bytes,
        message: Message,
        now: float,
        key: str | None = None,
        host: str = "",
        *,
        has_unsent: bool = False,
    ) -> None:
        """Process a message from a peer; see `LearnerSession.receive`."""
        self.session.receive(peer, message, now, key=key, host=host, has_unsent=has_unsent)

    def tick(self, now: float) -> None:
        """Let time pass; see `LearnerSession.tick`.

        Raises:
            InternalError: the ledger does not balance.
        """
        self.session.tick(now)
        self.session.ledger.check()

    def effects(self, now: float) -> list[Effect]:
        """Process everything received, and return the things to do now, in order.

        Call it once for several messages: that combines acknowledgements.
        """
        disconnects: list[Effect] = []
        while events := self.session.events():
            for event in events:
                self._effects.append(Report(event))
                match event:
                    case ev.SamplesAccepted():
                        self._take_in(event, now)
                    case ev.WorkerJoined():
                        self.publisher.join(event.incarnation)
                    case ev.WorkerLost():
                        self.publisher.forget(event.incarnation)
                    case ev.PeerRejected(peer, reason):
                        disconnects.append(Disconnect(peer, reason))
        if self._has_begun:
            self._begin_updates()
        effects = self._effects
        self._effects = []
        effects += [Send(target, message) for target, message in self.session.messages_to_send()]
        return effects + disconnects

    # Take fragments in
    # ----------------------------------------------------------------------------------------------

    def _take_in(self, fragment: ev.SamplesAccepted, now: float) -> None:
        """Check, count and queue a fragment. A malformed fragment ends its worker's session."""
        message = fragment.message
        slot = fragment.slot
        try:
            episodes = check_samples(message)
            self._check_fragment(message.batches)
        except BatchError as error:
            self.session.ledger.discard("malformed", message.env_steps)
            reason = one_line(str(error), _MAX_REASON)
            self._effects.append(Report(FragmentRefused(slot, reason)))
            self.session.mark_lost(slot, f"it sent a malformed fragment: {reason}", now)
            self._grants.refused()
            return
        self.counters.env_steps_sampled += message.env_steps
        self.counters.agent_steps_sampled += message.agent_steps
        # the last result covers the run up to its end, not fragments that arrive while it ends
        if not self._is_stopped:
            self.results.add_episodes(episodes)
            self.results.add_perf(message.perf)
        self._assembler.add(fragment)
        if self._grants.merges_on_arrival:
            self._merge(fragment)
        self._grants.arrived()

    def _merge(self, fragment: ev.SamplesAccepted) -> None:
        """Merge the filter deltas of a fragment."""
        message = fragment.message
        try:
            self.publisher.merge_deltas(fragment.incarnation, message.seq, message.filter_deltas)
        except BatchError as error:
            reason = one_line(str(error), _MAX_REASON)
            self._effects.append(Report(DeltaLeftOut(fragment.slot, reason)))

    # Begin updates
    # ----------------------------------------------------------------------------------------------

    def _begin_updates(self) -> None:
        """Begin updates while there is room, account for fragments that are too old or too many, and
        lease others.
        """
        assembler = self._assembler
        if self._is_stopped or self._is_paused:
            return
        while self._num_begun < MAX_BEGUN:
            assembler.prune(ahead=self._num_begun)
            if not assembler.is_ready:
                break
            batch = assembler.take()
            if not self._grants.merges_on_arrival:
                for fragment in batch.fragments:
                    self._merge(fragment)
            self._effects.append(BeginUpdate(batch))
            self._num_begun += 1
        for reason, fragment in assembler.take_discarded():
            self.session.ledger.discard(reason, fragment.message.env_steps)
            # its observations count even if it is not used
            if not self._grants.merges_on_arrival:
                self._merge(fragment)
            if reason == STALE:
                self._grants.outdated(fragment.slot)
        self._top_up()

    # Account for an update that has ended, publish, and lease what follows
    # ----------------------------------------------------------------------------------------------

    def update_ended(self, update: UpdateDone, now: float) -> None:
        """Account for an update that has ended, publish its weights if due and lease the next
        fragments.
        """
        self._num_begun -= 1
        self._account(update)
        self._grants.updated(update.wait_s, now)
        if update.weights is not None:
            self._publish(update.weights, now)
        if self._is_paused or self.is_enough():
            self.stand_still()
        if self.is_granting:
            self._grants.begin_batch(self.publisher.version, self._num_begun)

    def _account(self, update: UpdateDone) -> None:
        batch = update.batch
        counters = self.counters
        for fragment in batch.fragments:
            message = fragment.message
            self.results.add_lag(self.publisher.version - message.first_version, message.env_steps)
        self.session.ledger.train(batch.env_steps)
        counters.env_steps_trained += batch.env_steps
        counters.updates += 1
        if update.result.skipped:
            counters.updates_skipped += 1
            self._effects.append(Report(UpdateSkipped(update.result.bad_column)))
        self.metrics = {
            **update.result.metrics,
            "update_s": update.update_s,
            "make_batch_s": update.make_batch_s,
            "wait_for_batch_s": update.wait_s,
        }

    def _publish(self, weights: PolicyArrays, now: float, policies: Arrays | None = None) -> None:
        """Publish weights that have changed, and new policies, as the next version."""
        self.session.publish(self._next_snapshot(weights, policies), now)
        self._assembler.set_version(self.publisher.version)

    def _next_snapshot(self, weights: PolicyArrays, policies: Arrays | None = None) -> Snapshot:
        global_vars = {"timestep": self.counters.env_steps_sampled}
        return self.publisher.next_snapshot(weights, global_vars, policies)

    def _top_up(self) -> None:
        if self.is_granting:
            self._grants.top_up(self.publisher.version, self._num_begun)

    def update_failed(self, batch: AssembledBatch) -> None:
        """Account for the env steps of a train batch whose update failed."""
        self._num_begun -= 1
        self.session.ledger.discard("the update failed", batch.env_steps)

    def updates_left(self, count: int) -> None:
        """Take note that the last ``count`` updates begun will not be made."""
        self._num_begun -= count

    # Pause, continue and stop
    # ----------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Grant leases by the algorithm's plan and train on waiting fragments.

        Does nothing if already doing so.
        """
        if not self.is_granting and not self._is_stopped:
            self._is_paused = False
            self.is_granting = True
            self._grants.begin_batch(self.publisher.version, self._num_begun)

    def stand_still(self) -> None:
        """Begin no more updates until `go_on`. Leased fragments can still arrive."""
        self._is_paused = True
        self.is_granting = False

    def stop(self) -> None:
        """Stop for good: begin no updates, add nothing to results and grant no leases."""
        self._is_stopped = True
        self.is_granting = False

    def set_weights(self, weights: PolicyArrays, now: float) -> None:
        """Publish weights that do not come from an update.

        No update may be in work; training is paused afterwards.
        """
        self.stand_still()
        self._publish(weights, now)

    def change_policies(
        self,
        policies: Arrays,
        weights: PolicyArrays,
        filters: Mapping[str, ObservationFilter],
        now: float,
    ) -> None:
        """Publish policies that were added, and remove others.

        No update may be in work; training is paused afterwards.

        Args:
            policies: policy id -> packed policy, see `Snapshot`.
            weights: weights of the new policies.
            filters: filters of all policies from now on.
            now: the time in seconds.
        """
        self.stand_still()
        self.publisher.filters = dict(filters)
        self._publish(weights, now, policies)

    # Questions
    # ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True while no update is in work and all earlier ones are accounted for."""
        return not self._num_begun

    @property
    def is_still(self) -> bool:
        """True while training is paused and the last update has ended."""
        return self._is_paused and self.is_idle

    @property
    def is_drained(self) -> bool:
        """True while no update is in work and fewer fragments wait than a train batch needs."""
        return self.is_idle and not self._assembler.is_ready

    @property
    def queued_fragments(self) -> int:
        """Number of fragments that wait for a train batch."""
        return self._assembler.queued_fragments if self._has_begun else 0


class Publisher:
    """Makes snapshots with consecutive versions, the first one whole, later ones with what has
    changed.

    Attributes:
        version: version of the newest snapshot, -1 before the first.
        filters: policy id -> the merged filter of its observations.
        env_config: settings of the environments; empty if they have not changed.
        env_changes: number of their changes.
    """

    def __init__(self, filters: Mapping[str, ObservationFilter]) -> None:
        """Set the filters that deltas are merged into."""
        self.version = -1
        self.env_config: Mapping[str, Any] = {}
        self.env_changes = 0
        self.filters = dict(filters)
        self._policy_ids: frozenset[str] = frozenset()
        self._has_new_policies = False
        # live incarnation -> highest sequence number merged; there are at most as many as the
        # session has slots. Lower numbers not merged yet belong to accepted fragments that wait in
        # the assembler.
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
            merged = self.filters.get(policy_id)
            if merged is None or merged.is_identity or merged.is_frozen or not delta:
                continue
            try:
                merged.merge_delta(delta)
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
            policy_id: merged.state()
            for policy_id, merged in self.filters.items()
            if not merged.is_identity
        }

    def next_snapshot(
        self,
        changed: PolicyArrays,
        global_vars: Mapping[str, Any],
        policies: Arrays | None = None,
    ) -> Snapshot:
        """Make the snapshot of the next version, a whole one if all policies have changed.

        Args:
            changed: policy id -> weights by name, of policies that have changed since the version
                before; the others keep theirs.
            global_vars: values that policies need, such as the timestep.
            policies: policy id -> packed policy of those added since the version before, empty for
                those removed; see `Snapshot`.
        """
        self.version += 1
        policies = dict(policies or {})
        removed = {policy_id for policy_id, packed in policies.items() if not packed.size}
        self._policy_ids = self._policy_ids.union(changed) - removed
        self._has_new_policies = self._has_new_policies or bool(policies)
        # a whole snapshot would need all policies added so far, which the session has
        is_whole = self._policy_ids == changed.keys() and not self._has_new_policies
        filters = self.filter_states()
        if not is_whole:
            # frozen statistics change only together with the weights
            filters = {
                policy_id: state
                for policy_id, state in filters.items()
                if policy_id in changed or not self.filters[policy_id].is_frozen
            }
        return Snapshot(
            version=self.version,
            weights=dict(changed),
            filters=filters,
            filter_acks={
                incarnation: sequence for incarnation, sequence in self._merged.items() if sequence
            },
            global_vars=dict(global_vars),
            since=-1 if is_whole else self.version - 1,
            policies=policies,
            env_config=self.env_config,
            env_changes=self.env_changes,
        )


class OnPolicyGrants:
    """Grants exactly one train batch for each version."""

    merges_on_arrival = False
    """Deltas are merged in the order of the train batch, so that statistics are reproducible bit by
    bit."""

    def __init__(self, session: LearnerSession, assembler: BatchAssembler) -> None:
        """Grant nothing yet; see `begin_batch`."""
        self._session = session
        self._assembler = assembler

    def begin_batch(self, version: int, num_begun: int) -> None:
        """See `Grants`."""
        self._session.deal(version, self._assembler.begin_batch())

    def top_up(self, version: int, num_begun: int) -> None:
        """See `Grants`; a version gets no more than its batch."""

    def arrived(self) -> None:
        """See `Grants`; whole episodes may be shorter than expected."""
        num_missing = self._assembler.more_wanted()
        if num_missing:
            self._session.deal_again(num_missing)

    def refused(self) -> None:
        """See `Grants`."""
        self._session.deal_again(1)

    def outdated(self, slot: int) -> None:
        """See `Grants`."""

    def updated(self, wait_s: float, now: float) -> None:
        """See `Grants`."""


class StreamingGrants:
    """Keeps leases topped up within the budget of the whole run, see `Pacing`."""

    merges_on_arrival = True
    """There is no order of fragments to wait for."""

    def __init__(
        self,
        plan: LeasePlan,
        session: LearnerSession,
        assembler: BatchAssembler,
        max_queued_bytes: int,
    ) -> None:
        """Grant nothing yet; see `begin_batch`."""
        self._plan = plan
        self._session = session
        self._assembler = assembler
        self._max_queued_bytes = max_queued_bytes
        self._pacing = Pacing(
            fragments_per_batch=plan.fragments_per_batch,
            max_policy_lag=plan.max_policy_lag,
            per_worker=plan.outstanding_per_worker,
            largest=plan.max_under_way,
        )
        session.leases.begin_streaming(self._pacing)

    def begin_batch(self, version: int, num_begun: int) -> None:
        """See `Grants`; leases don't belong to a batch here."""
        self.top_up(version, num_begun)

    def top_up(self, version: int, num_begun: int) -> None:
        """See `Grants`."""
        plan = self._plan
        queued = self._assembler.queued_fragments
        coming = self._pacing.outstanding
        is_batch_coming = queued + coming >= plan.fragments_per_batch
        # fragments for one batch are leased in any case, or the learner would wait forever
        if is_batch_coming and self._assembler.bytes_with(coming) >= self._max_queued_bytes:
            return
        oldest = version if plan.max_policy_lag is None else version - plan.max_policy_lag
        waiting = queued + num_begun * plan.fragments_per_batch
        self._session.stream(waiting, max(0, oldest))

    def arrived(self) -> None:
        """See `Grants`."""

    def refused(self) -> None:
        """See `Grants`; the budget has room again by itself."""

    def outdated(self, slot: int) -> None:
        """See `Grants`."""
        self._pacing.outdated(slot)

    def updated(self, wait_s: float, now: float) -> None:
        """See `Grants`."""
        self._pacing.updated(wait_s, self._assembler.queued_fragments, now)
