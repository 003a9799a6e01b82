"""The learner's tasks around its endpoint and its session.

    frames -> decode -> session -> accepted fragments -> assembler -> update thread -> weights -> snapshot -> all

Everything here runs on the event loop except the updates, which have a thread of their own, so receiving and
decoding go on beside them. Nothing here knows an algorithm's name: the algorithm's lease plan says how much may
be sampled and at which version.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiorl.algorithms.algorithm import LeasePlan
from aiorl.config.schema import CommonConfig
from aiorl.errors import BatchError, ConfigError, LocalProtocolError, RemoteProtocolError
from aiorl.learner.build import Learning
from aiorl.learner.ingest import STALE, AssembledBatch, BatchAssembler, QueuedFragment, check_samples
from aiorl.learner.publish import Publisher
from aiorl.learner.update_thread import UpdateDone, UpdateThread
from aiorl.process.tasks import Tasks
from aiorl.protocol import events as ev
from aiorl.protocol.learner_session import BROADCAST, LearnerSession
from aiorl.protocol.pacing import Pacing
from aiorl.protocol.rates import EventRates
from aiorl.report.results import Progress, Results
from aiorl.text import one_line, without_numbers
from aiorl.transport.buffers import give_back_regularly
from aiorl.transport.endpoint import Event, EventKind, LearnerEndpoint
from aiorl.wire.decoding import decode, decode_hello
from aiorl.wire.encoding import encode
from aiorl.wire.limits import ACK_BYTES, DEFAULT_LIMITS, Limits
from aiorl.wire.messages import DownMessage, Hello, PolicyArrays, Welcome

__all__ = ["Counters", "LearnerService"]

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_QUEUED_BYTES = 1 << 30
_HUNG_S = 60.0
_MAX_REASON = 500
_MAX_NAMED = 8


@dataclass(slots=True)
class Counters:
    """Totals of the run, kept over a resume.

    Attributes:
        env_steps_sampled: env steps that arrived.
        agent_steps_sampled: rows that arrived.
        env_steps_trained: env steps trained on.
        updates: updates done, skipped ones included.
        updates_skipped: updates that were not finite.
    """

    env_steps_sampled: int = 0
    agent_steps_sampled: int = 0
    env_steps_trained: int = 0
    updates: int = 0
    updates_skipped: int = 0


class LearnerService:
    """Keeps workers sampling and the update thread busy.

    ``start`` binds, so that workers can already connect while TensorFlow is loading; ``begin`` starts training.

    Attributes:
        session: the protocol's state.
        counters: totals of the run.
        results: episodes and rates.
        publisher: version and merged filters; None before ``begin``.
        learner_metrics: metrics of the newest update.
    """

    def __init__(
        self,
        config: CommonConfig,
        endpoint: LearnerEndpoint,
        session: LearnerSession,
        results: Results,
        *,
        on_event: Callable[[str, int], None],
        on_failure: Callable[[BaseException], None],
        on_worker_failed: Callable[[ev.WorkerFailed], None] = lambda failed: None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Take the parts; nothing is started.

        Args:
            config: the effective configuration.
            endpoint: not started yet.
            session: fresh, or with the ledger of the run to resume.
            results: where episodes and lags go.
            on_event: told (text, logging level) what users want to know.
            on_failure: told of an error of a task, after which the service is of no use.
            on_worker_failed: told what workers report of failures of their own.
            limits: bounds of messages.
        """
        self.session = session
        self.counters = Counters()
        self.results = results
        self.publisher: Publisher | None = None
        self.learner_metrics: dict[str, float] = {}
        self._config = config
        self._endpoint = endpoint
        self._on_event = on_event
        self._on_worker_failed = on_worker_failed
        self._limits = limits
        self._compress = config.transport.compression != "off"
        self._max_queued_bytes = config.object_store_memory or _QUEUED_BYTES
        self._plan: LeasePlan | None = None
        self._assembler: BatchAssembler | None = None
        self._updates: UpdateThread | None = None
        self._check_fragment: Callable[[PolicyArrays], None] = lambda batches: None
        self._is_columnar = True
        self._num_in_thread = 0
        self._granting = False
        self._pump_due = False
        self._tasks = Tasks(on_failure)
        self._hung: set[str] = set()  # incarnations, of live workers only
        self._slow: set[int] = set()  # slots, of live workers only
        self._rates = EventRates()
        self._joined = asyncio.Event()
        self._stopping = False
        self._is_over = False

    @property
    def address(self) -> str:
        """Where workers connect to."""
        return self._endpoint.address

    @property
    def is_granting(self) -> bool:
        """Whether workers get leases."""
        return self._granting

    @property
    def _is_streaming(self) -> bool:
        return self.session.leases.pacing is not None

    # Life -----------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Bind and answer workers from now on; returns the address they connect to.

        Raises:
            ConfigError: the address is in use, or not this host's.
        """
        self._loop = asyncio.get_running_loop()
        self._endpoint.on_message = self._on_message
        self._endpoint.on_event = self._on_endpoint_event
        self._endpoint.start()
        self._tasks.start(self._tick(), "tick")
        self._tasks.start(give_back_regularly(), "memory")
        return self._endpoint.address

    def begin(self, learning: Learning, updates: UpdateThread, publisher: Publisher) -> None:
        """Admit workers and publish the first snapshot; sampling starts with ``grant_leases``.

        Raises:
            ConfigError: what workers need to know is larger than messages may be, room for what grows with their number
                included.
        """
        self.publisher = publisher
        self._updates = updates
        self._plan = learning.lease_plan
        self._check_fragment = learning.group.check_fragment
        self._is_columnar = learning.worker_part.sampling == "columnar"
        self._assembler = BatchAssembler(self._plan)
        if self._plan.mode == "streaming":
            self.session.leases.set_pacing(
                Pacing(self._plan.fragments_per_batch, self._plan.max_policy_lag, self._plan.outstanding_per_worker)
            )
        part, weights = learning.worker_part.to_dict(), learning.group.get_weights()
        snapshot = publisher.next_snapshot(weights, self._global_vars)
        session = self.session
        welcome = Welcome(
            0, self._config.num_workers, session.run_id, session.learner_incarnation, part, learning.graphs, snapshot
        )
        room = session.settings.max_workers * ACK_BYTES
        limits = dataclasses.replace(self._limits, max_header_bytes=self._limits.max_header_bytes - room)
        try:
            encode(welcome, compress=False, limits=limits)
        except LocalProtocolError as error:
            raise ConfigError(
                f"what workers need to know cannot be sent to them: {error}",
                hint="Use a smaller model or raise transport.max_header_bytes or transport.max_message_bytes.",
            ) from error
        now = time.monotonic()
        session.set_registration(part, learning.graphs, now)
        session.publish(snapshot, now)
        self._pump()

    async def wait_for_workers(self, count: int, timeout_s: float) -> bool:
        """Wait until so many workers are registered; False if they are not after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.session.slots) < count:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            return False
        return True

    def grant_leases(self) -> None:
        """Start sampling: from now on leases follow the algorithm's plan."""
        self._granting = True
        self._grant_next_batch()
        self._pump()

    def stop_training(self) -> None:
        """Take nothing more into updates and results; workers go on being answered."""
        self._stopping = True
        self._granting = False

    async def close(self, reason: str, *, final: bool) -> None:
        """Say goodbye to the workers and close the endpoint; from the call on, nothing else is said."""
        async with contextlib.AsyncExitStack() as stack:  # each step is taken, whatever becomes of the others
            stack.push_async_callback(self._endpoint.close)
            stack.push_async_callback(self._tasks.close)
            try:
                self.session.shutdown(reason, final, time.monotonic())
                self._pump()
            finally:
                self._is_over = True

    # What arrives ---------------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        now, session = time.monotonic(), self.session
        try:
            message = decode(frames, self._limits) if session.is_registered(peer) else decode_hello(frames)
        except RemoteProtocolError as error:
            session.bad_frames(peer, error, now)
        else:
            if message is None:
                session.unread(peer, sum(frame.nbytes for frame in frames))
            else:
                host = self._endpoint.host_of(peer) if isinstance(message, Hello) else ""
                session.receive(peer, message, now, user_id or None, host)
        if not self._pump_due:  # one turn for all messages of this wake-up
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _on_endpoint_event(self, event: Event) -> None:
        match event.kind:
            case EventKind.DISCONNECTED | EventKind.SILENT | EventKind.DROPPED:
                was_silent = event.kind is EventKind.SILENT
                if event.peer:
                    self.session.peer_gone(event.peer, time.monotonic(), was_silent=was_silent)
                if event.kind is not EventKind.DISCONNECTED:
                    self._tell_of_connection("ended" if was_silent else "dropped", event)
            case EventKind.REFUSED:
                self._tell_of_connection("refused", event)
            case _:
                logger.debug("connection: %s", event)
        self._pump()

    def _tell_of_connection(self, fate: str, event: Event) -> None:
        """One line a minute of each host, which has a port of its own for each try."""
        said = f"the connection from {event.address or 'a peer'} was {fate}: {event.reason}"
        self._tell_of(f"connections {fate}", _host(event.address), said, logging.WARNING, at_most=1)

    async def _tick(self) -> None:
        while True:
            self.session.tick(time.monotonic())
            self._pump()
            self.session.ledger.check()
            self._look_for_hung_workers()
            self._look_for_slow_workers()
            self._tell_of_the_rest()
            await asyncio.sleep(_TICK_S)

    # What follows ---------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Act on what the session decided and say what it wants said; nothing once the goodbyes are said."""
        self._pump_due = False
        if self._is_over:
            return
        rejected: list[ev.PeerRejected] = []
        for event in self.session.events():
            self._handle(event)
            if isinstance(event, ev.PeerRejected) and event.dropped:
                rejected.append(event)
        self._feed_updates()
        for target, message in self.session.messages_to_send():
            self._say(target, message)
        for event in rejected:  # after it was told why
            self._endpoint.drop(event.peer, event.reason)

    def _say(self, target: bytes | None, message: DownMessage) -> None:
        try:
            frames = encode(message, compress=self._compress, limits=self._limits)
        except LocalProtocolError as error:  # cannot be, by the bounds on names and texts and what `begin` checks
            kind = type(message).__name__
            self._tell_of("messages that cannot be sent", kind, f"a {kind} cannot be sent: {error}", logging.ERROR)
            return
        if target is BROADCAST:
            self._endpoint.broadcast(frames)
        else:
            self._endpoint.send(target, frames)

    def _handle(self, event: ev.LearnerEvent) -> None:
        match event:
            case ev.SamplesAccepted():
                self._take_samples(event)
            case ev.WorkerJoined(slot, incarnation, _, host, pid, local):
                if self.publisher is not None:
                    self.publisher.join(incarnation)
                kind = "local worker" if local else "worker"
                self._tell_of("workers that joined", slot, f"{kind} {slot} joined ({host}, pid {pid})", logging.INFO)
                self._joined.set()
                self._stream()
            case ev.WorkerLost(slot, incarnation, _, reason, lost_env_steps):
                lost = f"; {lost_env_steps:,} env steps on their way are lost" if lost_env_steps else ""
                said = f"worker {slot} lost: {reason}{lost}"
                what = without_numbers(reason) if reason.startswith("failed: ") else None  # the failure is told already
                self._tell_of("workers lost", slot, said, logging.WARNING, what=what)
                if self.publisher is not None:
                    self.publisher.forget(incarnation)
            case ev.WorkerFailed(slot, _, _, message, text, _):
                said = f"worker {slot} failed: {message}\n{text}".rstrip()
                self._tell_of("failures of workers", slot, said, logging.ERROR, what=without_numbers(message))
                self._on_worker_failed(event)
            case ev.LeaseOverdue(slot, fragments, waited_s):
                said = (
                    f"worker {slot} lives, but has brought nothing for {waited_s:.0f} s: "
                    f"the {fragments} fragments that it owes are leased to others"
                )
                self._tell_of("workers that bring nothing", slot, said, logging.WARNING)
            case ev.PeerRejected(peer, reason, dropped):  # where it is dropped, that is told, with its address
                logger.debug("peer %s %s: %s", peer.hex(), "is to be dropped" if dropped else "erred", reason)
            case ev.CallReplied(slot, _, ok, result):
                if ok:
                    said = result if isinstance(result, str) else "(it does not say)"
                    self._tell_of("stacks of workers", slot, f"what worker {slot} is doing:\n{said}", logging.WARNING)

    def _tell_of(
        self,
        kind: str,
        source: object,
        text: str,
        level: int,
        *,
        at_most: int | None = None,
        what: str | None = None,
    ) -> bool:
        """Tell the user what a peer has done, the one way there is, but not more often than anybody can read.

        ``at_most`` and ``what`` are those of `EventRates.allow`.

        Returns: False if it was only counted.
        """
        is_told = self._rates.allow(kind, source, time.monotonic(), at_most=at_most, what=what)
        if is_told:
            self._on_event(text, level)
        return is_told

    def _tell_of_the_rest(self) -> None:
        left_out = self._rates.take_left_out(time.monotonic())
        if left_out:
            counts = ", ".join(f"{kind}: {count:,}" for kind, count in left_out.items())
            self._on_event(f"in the last minute, beside those told one by one: {counts}", logging.WARNING)

    def _take_samples(self, event: ev.SamplesAccepted) -> None:
        message, assembler, publisher = event.message, self._assembler, self.publisher
        if assembler is None or publisher is None:
            self.session.ledger.discard("before training began", message.env_steps)
            return
        try:
            self._check_fragment(message.batches)
            episodes = check_samples(message, every_row_is_a_step=self._is_columnar)
        except BatchError as error:
            self.session.ledger.discard("malformed", message.env_steps)
            said = f"worker {event.slot} sent what can't be trained on: {one_line(str(error), _MAX_REASON)}"
            self._tell_of("malformed fragments", event.slot, said, logging.ERROR)
            self.session.lose(event.slot, "it sent a malformed fragment", time.monotonic())
            if not self._is_streaming:
                self.session.deal_again(1)
            return
        self.counters.env_steps_sampled += message.env_steps
        self.counters.agent_steps_sampled += message.agent_steps
        if not self._stopping:  # the last result is of what the run ended for, not of what came while it ended
            self.results.add_episodes(episodes)
            self.results.add_perf(message.perf)
        fragment = QueuedFragment(
            slot=event.slot,
            seq=message.seq,
            version=message.first_version,
            batches=message.batches,
            env_steps=message.env_steps,
            incarnation=event.incarnation,
            filter_deltas=message.filter_deltas,
        )
        assembler.add(fragment)
        if self._is_streaming:
            self._merge(fragment)

    # Updates --------------------------------------------------------------------------------------------------

    def _feed_updates(self) -> None:
        """Hand out train batches while the update thread has room, and lease what replaces them."""
        assembler, updates = self._assembler, self._updates
        if assembler is None or updates is None or self._stopping:
            return
        while updates.has_room:
            assembler.prune(ahead=self._num_in_thread)
            if not assembler.is_ready:
                break
            batch = assembler.take()
            if not self._is_streaming:  # in worker order, so that every bit of the statistic is repeatable
                for fragment in batch.fragments:
                    self._merge(fragment)
            updates.submit_nowait(batch)
            self._num_in_thread += 1
        pacing = self.session.leases.pacing
        for discarded in assembler.take_discarded():
            self.session.ledger.discard(discarded.reason, discarded.env_steps)
            if pacing is None:  # on-policy: what it saw counts, used or not
                self._merge(discarded.fragment)
            elif discarded.reason == STALE:
                pacing.outdated(discarded.fragment.slot)
        self._stream()

    def _merge(self, fragment: QueuedFragment) -> None:
        assert self.publisher is not None
        try:
            self.publisher.merge_deltas(fragment.incarnation, fragment.seq, fragment.filter_deltas)
        except BatchError as error:
            said = f"worker {fragment.slot} sent a filter delta that was left out: {one_line(str(error), _MAX_REASON)}"
            self._tell_of("filter deltas left out", fragment.slot, said, logging.WARNING)

    def take_update(self, done: UpdateDone) -> None:
        """An update has ended: account for it, publish its weights, lease what comes next."""
        assert self.publisher is not None
        assert self._assembler is not None
        self._num_in_thread -= 1
        for fragment in done.batch.fragments:
            self.results.add_lag(self.publisher.version - fragment.version, fragment.env_steps)
        self.session.ledger.train(done.batch.env_steps)
        self.counters.env_steps_trained += done.batch.env_steps
        self.counters.updates += 1
        if done.result.skipped:
            self.counters.updates_skipped += 1
            where = f": column {done.result.bad_column!r} is not finite" if done.result.bad_column else ""
            self._on_event(f"an update was skipped, its loss or gradients were not finite{where}", logging.WARNING)
        self.learner_metrics = {
            **done.result.metrics,
            "update_s": done.update_s,
            "make_batch_s": done.make_batch_s,
            "wait_for_batch_s": done.wait_s,
        }
        if self.session.leases.pacing is not None:
            self.session.leases.pacing.updated(done.wait_s, self._assembler.queued_fragments, time.monotonic())
        self._publish(done.weights)
        self._assembler.set_version(self.publisher.version)
        self._grant_next_batch()
        self._pump()

    def drop_batch(self, batch: AssembledBatch) -> None:
        """A batch the update thread failed on: its env steps are accounted for."""
        self._num_in_thread -= 1
        self.session.ledger.discard("the update failed", batch.env_steps)

    def _publish(self, weights: PolicyArrays) -> None:
        assert self.publisher is not None
        self.session.publish(self.publisher.next_snapshot(weights, self._global_vars), time.monotonic())

    @property
    def _global_vars(self) -> dict[str, int]:
        return {"timestep": self.counters.env_steps_sampled}

    # Leases ---------------------------------------------------------------------------------------------------

    def _grant_next_batch(self) -> None:
        """On-policy: lease exactly one train batch of the newest version. Streaming: what the budget allows."""
        if not self._granting or self._plan is None or self.publisher is None:
            return
        if self._is_streaming:
            self._stream()
        else:
            self.session.deal(self.publisher.version, self._plan.fragments_per_batch)

    def _stream(self) -> None:
        plan, assembler, publisher, pacing = self._plan, self._assembler, self.publisher, self.session.leases.pacing
        if not self._granting or plan is None or assembler is None or publisher is None or pacing is None:
            return
        coming = assembler.queued_fragments + pacing.outstanding
        if coming >= plan.fragments_per_batch and assembler.size_of(coming) >= self._max_queued_bytes:
            return
        oldest = publisher.version if plan.max_policy_lag is None else publisher.version - plan.max_policy_lag
        waiting = assembler.queued_fragments + self._num_in_thread * plan.fragments_per_batch
        self.session.stream(waiting, max(0, oldest))

    # Reports --------------------------------------------------------------------------------------------------

    def progress(self, perf: Mapping[str, float] | None) -> Progress:
        """Where the learner stands now."""
        stats, counters = self._endpoint.stats(), self.counters
        queued = self._assembler.queued_fragments if self._assembler is not None else 0
        return Progress(
            env_steps_sampled=counters.env_steps_sampled,
            env_steps_trained=counters.env_steps_trained,
            agent_steps_sampled=counters.agent_steps_sampled,
            updates=counters.updates,
            updates_skipped=counters.updates_skipped,
            num_healthy_workers=len(self.session.slots),
            ledger=self.session.ledger.as_dict(),
            transport={
                "queued_fragments": queued,
                "queued_messages_out": stats.queued_messages,
                "rejected_messages": stats.rejected,
                "refused_connections": stats.refused,
                "dropped_peers": stats.dropped,
            },
            bytes_in=stats.bytes_in,
            bytes_out=stats.bytes_out,
            learner=self.learner_metrics,
            perf=perf,
        )

    def waiting_for(self, now: float) -> str:
        """Why nothing happens, in plain words: what each worker says of itself."""
        workers = self.session.workers(now)
        if not workers:
            return f"no worker is connected; they join with: python -m aiorl.worker --connect {self._endpoint.address}"
        said = [
            f"worker {info.slot}: {info.state}" + (f" ({info.in_env_s:.0f} s in one step)" if info.in_env_s > 1 else "")
            for info in workers[:_MAX_NAMED]
        ]
        if len(workers) > _MAX_NAMED:
            said.append(f"and {len(workers) - _MAX_NAMED} more")
        return "; ".join(said)

    def _look_for_hung_workers(self) -> None:
        """Name a worker whose environment does not return, and have it say where it is stuck."""
        now = time.monotonic()
        hung = self.session.workers(now, min_in_env_s=_HUNG_S)
        for info in hung:
            if info.incarnation not in self._hung:
                said = (
                    f"worker {info.slot}: its environment has not returned for {info.in_env_s:.0f} s; "
                    "its stacks follow in the log"
                )
                if self._tell_of("environments that hang", info.slot, said, logging.WARNING):
                    self.session.call(info.slot, "stacks", {}, now)
        self._hung = {info.incarnation for info in hung}

    def _look_for_slow_workers(self) -> None:
        """Name workers that get no leases since the policy outruns what they sample, once while they are there."""
        pacing, slots = self.session.leases.pacing, set(self.session.slots)
        self._slow &= slots
        for slow in [] if pacing is None else pacing.slow_workers():
            if slow.slot not in self._slow:
                self._slow.add(slow.slot)
                said = (
                    f"worker {slow.slot} is left out while the policy outruns it: a fragment takes it "
                    f"{slow.fragment_s:.1f} s, about {slow.updates:.0f} updates, which is more than max_policy_lag "
                    "allows; a shorter rollout_fragment_length or a larger train_batch_size lets it take part"
                )
                self._tell_of("workers left out", slow.slot, said, logging.INFO)


def _host(address: str) -> str:
    """The host of an address, which may be all that is known of it."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
