"""The learner's tasks around its endpoint and its session.

    frames -> decode -> session -> accepted fragments -> flow -> snapshots and leases -> session -> encode -> frames

Everything here runs on the event loop, and receiving and decoding go on beside the updates, which have a thread of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aiorl.errors import ConfigError, InternalError, LocalProtocolError, RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession
from aiorl.net.transport.endpoint import Event, EventKind
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import ACK_BYTES, DEFAULT_LIMITS, Limits
from aiorl.net.wire.messages import OUT_OF_DATA, DownMessage, Hello, PolicyArrays, SnapshotRequest, Welcome
from aiorl.process.machine import keep_within
from aiorl.process.tasks import Tasks
from aiorl.run.build import Learning
from aiorl.run.flow import Flow, progress_of
from aiorl.run.report.results import Progress
from aiorl.run.update_thread import UpdateThread
from aiorl.text import without_numbers

if TYPE_CHECKING:
    from aiorl.run.training import Training

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_QUEUED_BYTES = 1 << 30
_HUNG_S = 60.0
_MAX_NAMED = 8


class LearnerService:
    """Keeps workers sampling and the update thread busy.

    ``start`` binds, so that workers can already connect while TensorFlow is loading; ``begin`` starts training.

    Attributes:
        session: the protocol's state.
        counters: totals of the run.
        results: episodes and rates.
    """

    def __init__(
        self,
        training: Training,
        endpoint: ZmqLearnerEndpoint,
        session: LearnerSession,
        *,
        on_worker_failed: Callable[[ev.WorkerFailed], None],
        on_out_of_data: Callable[[], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Take the parts; nothing is started.

        Args:
            training: the training that is sampled for, which fails with a task of the service.
            endpoint: not started yet.
            session: fresh, or with the ledger of the run to resume.
            on_worker_failed: called with the failures that workers report.
            on_out_of_data: called, again and again, once the registered workers have read all of their stored
                experience and it was trained on, but for less than a train batch.
            limits: bounds of messages.
        """
        self.session = session
        self.counters = training.counters
        self.results = training.results
        self._training = training
        self._endpoint = endpoint
        self._on_worker_failed = on_worker_failed
        self._on_out_of_data = on_out_of_data
        self._limits = limits
        self._compress = training.config.transport.compression != "off"
        self._flow: Flow | None = None
        self._pump_due = False
        self._tasks = Tasks(training.fail)
        self._hung: set[str] = set()  # incarnations, of live workers only
        self._slow: set[int] = set()  # slots, of live workers only
        self._rates = EventRates()
        self._joined = asyncio.Event()
        self._is_over = False

    @property
    def address(self) -> str:
        """Where workers connect to."""
        return self._endpoint.address

    @property
    def flow(self) -> Flow:
        """What becomes of the fragments that come; nobody is registered, and none comes, before ``begin``.

        Raises:
            InternalError: it was asked for before.
        """
        if self._flow is None:
            raise InternalError("training has not begun")
        return self._flow

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
        if memory := self._training.config.memory:
            self._tasks.start(keep_within(memory, "memory"), "memory quota")
        return self._endpoint.address

    def begin(self, learning: Learning, updates: UpdateThread) -> Flow:
        """Admit workers and publish the first snapshot; sampling starts with ``go_on``.

        Returns: what becomes of the fragments that come.

        Raises:
            ConfigError: what workers need to know is larger than messages may be, room for what grows with their number
                included.
        """
        session, config = self.session, self._training.config
        most = config.object_store_memory or _QUEUED_BYTES
        flow = self._flow = Flow(self._training, learning, updates, session, tell=self._tell_of, max_queued_bytes=most)
        part, snapshot = learning.worker_part.to_dict(), flow.next_snapshot(learning.group.get_weights())
        welcome = Welcome(
            0, config.num_workers, session.run_id, session.learner_incarnation, part, learning.graphs, snapshot
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
        session.begin(part, learning.graphs, now)
        session.publish(snapshot, now)
        self.pump()
        return flow

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

    def go_on(self) -> None:
        """Start sampling, or go on after `Flow.is_enough`: from now on leases follow the algorithm's plan."""
        self.flow.go_on()
        self.pump()

    def stop_training(self) -> None:
        """Take nothing more into updates and results; workers go on being answered."""
        if self._flow is not None:
            self._flow.stop()

    async def close(self, reason: str, *, final: bool) -> None:
        """Say goodbye to the workers and close the endpoint; from the call on, nothing else is said."""
        async with contextlib.AsyncExitStack() as stack:  # each step is taken, whatever becomes of the others
            stack.push_async_callback(self._endpoint.close)
            stack.push_async_callback(self._tasks.close)
            try:
                self.session.shutdown(reason, final, time.monotonic())
                self.pump()
            finally:
                self._is_over = True

    # What arrives ---------------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        now, session = time.monotonic(), self.session
        try:
            message = decode(frames, self._limits) if session.knows(peer) else decode_hello(frames)
        except RemoteProtocolError as error:
            session.bad_frames(peer, error, now)
        else:
            if message is None:
                session.unread(peer, sum(frame.nbytes for frame in frames))
            else:
                host = self._endpoint.host_of(peer) if isinstance(message, Hello) else ""
                has_unsent = isinstance(message, (Hello, SnapshotRequest)) and self._endpoint.has_unsent(peer)
                session.receive(peer, message, now, user_id or None, host, has_unsent=has_unsent)
        self._pump_soon()

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
                return
        self._pump_soon()

    def _tell_of_connection(self, fate: str, event: Event) -> None:
        """One line a minute of each host, which has a port of its own for each try."""
        said = f"the connection from {event.address or 'a peer'} was {fate}: {event.reason}"
        self._tell_of(f"connections {fate}", _host(event.address), said, logging.WARNING, at_most=1)

    async def _tick(self) -> None:
        while True:
            self.session.tick(time.monotonic())
            self.pump()
            self.session.ledger.check()
            self._look_for_hung_workers()
            self._look_for_slow_workers()
            self._look_for_end_of_data()
            self._tell_of_the_rest()
            await asyncio.sleep(_TICK_S)

    # What follows ---------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Have one turn for all that comes with this wake-up."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Act on what the session decided and say what it wants said; nothing once the goodbyes are said."""
        self._pump_due = False
        if self._is_over:
            return
        events = self.session.events()
        for event in events:
            self._handle(event)
        if self._flow is not None:
            self._flow.feed_updates()
        for target, message in self.session.messages_to_send():
            self._say(target, message)
        for event in events:
            if isinstance(event, ev.PeerRejected):  # after it was told why
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
                self.flow.take(event)
            case ev.WorkerJoined(slot, incarnation, host, pid, local):
                self.flow.publisher.join(incarnation)
                kind = "local worker" if local else "worker"
                self._tell_of("workers that joined", slot, f"{kind} {slot} joined ({host}, pid {pid})", logging.INFO)
                self._joined.set()
                self.flow.stream()
            case ev.WorkerLost(slot, incarnation, reason, lost_env_steps):
                lost = f"; {lost_env_steps:,} env steps on their way are lost" if lost_env_steps else ""
                said = f"worker {slot} lost: {reason}{lost}"
                what = without_numbers(reason) if reason.startswith("failed: ") else None  # the failure is told already
                self._tell_of("workers lost", slot, said, logging.WARNING, what=what)
                self.flow.publisher.forget(incarnation)
            case ev.WorkerFailed(slot, _, message, text):
                said = f"worker {slot} failed: {message}\n{text}".rstrip()
                self._tell_of("failures of workers", slot, said, logging.ERROR, what=without_numbers(message))
                self._on_worker_failed(event)
            case ev.LeaseOverdue(slot, fragments, waited_s):
                said = (
                    f"worker {slot} lives, but has brought nothing for {waited_s:.0f} s: "
                    f"the {fragments} fragments that it owes are leased to others"
                )
                self._tell_of("workers that bring nothing", slot, said, logging.WARNING)
            case ev.CallReplied(slot, _, ok, result):
                if ok:
                    said = result if isinstance(result, str) else "(it does not say)"
                    self._tell_of("stacks of workers", slot, f"what worker {slot} is doing:\n{said}", logging.WARNING)

    def _tell_of(
        self, kind: str, source: object, text: str, level: int, *, at_most: int | None = None, what: str | None = None
    ) -> bool:
        """Tell the user what a peer has done, the one way there is, but not more often than anybody can read.

        ``at_most`` and ``what`` are those of `EventRates.allow`.

        Returns: False if it was only counted.
        """
        is_told = self._rates.allow(kind, source, time.monotonic(), at_most=at_most, what=what)
        if is_told:
            self._training.tell(text, level)
        return is_told

    def _tell_of_the_rest(self) -> None:
        left_out = self._rates.take_left_out(time.monotonic())
        if left_out:
            counts = ", ".join(f"{kind}: {count:,}" for kind, count in left_out.items())
            self._training.tell(f"in the last minute, beside those told one by one: {counts}", logging.WARNING)

    # Updates --------------------------------------------------------------------------------------------------

    def set_weights(self, weights: PolicyArrays) -> None:
        """Publish other weights than an update led to, while no update is made; training stands still then."""
        self.flow.set_weights(weights)
        self.pump()

    # Reports --------------------------------------------------------------------------------------------------

    def progress(self, perf: Mapping[str, float] | None) -> Progress:
        """Return where the learner stands now."""
        workers = len(self.session.slots)
        return progress_of(self.counters, self.session.ledger, self._flow, perf, self._endpoint.stats(), workers)

    def waiting_for(self, join_command: str) -> str:
        """Why nothing happens, in plain words: what each worker says of itself, or how one joins."""
        workers = self.session.workers
        if not workers:
            return f"no worker is connected; they join with: {join_command}"
        said = [
            f"worker {info.slot}: {info.state}" + (f" ({info.in_env_s:.0f} s in one step)" if info.in_env_s > 1 else "")
            for info in workers[:_MAX_NAMED]
        ]
        if len(workers) > _MAX_NAMED:
            said.append(f"and {len(workers) - _MAX_NAMED} more")
        return "; ".join(said)

    def _look_for_hung_workers(self) -> None:
        """Name a worker whose environment does not return, and have it say where it is stuck."""
        hung = [worker for worker in self.session.workers if worker.in_env_s >= _HUNG_S]
        for info in hung:
            if info.incarnation not in self._hung:
                said = (
                    f"worker {info.slot}: its environment has not returned for {info.in_env_s:.0f} s; "
                    "its stacks follow in the log"
                )
                if self._tell_of("environments that hang", info.slot, said, logging.WARNING):
                    self.session.call(info.slot, "stacks", {})
        self._hung = {info.incarnation for info in hung}

    def _look_for_end_of_data(self) -> None:
        workers = self.session.workers if self.session.settings.data_ends else []
        if workers and all(worker.state == OUT_OF_DATA for worker in workers) and self.flow.is_drained:
            self._on_out_of_data()

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


class EventRates:
    """Decides which of the things that peers do are told one by one; the others are counted by kind.

    Kinds are few and ours; sources, and what is said, may be anything a peer chooses. No more than ``per_kind`` of each
    are remembered for each kind, and all are forgotten when the window ends.
    """

    def __init__(self, per_source: int = 10, per_kind: int = 60, window_s: float = 60.0) -> None:
        """Allow so many in a window.

        Args:
            per_source: of one kind from one source.
            per_kind: of one kind in all.
            window_s: length of a window; it begins with the first event after the one before has ended.
        """
        self._per_source = per_source
        self._per_kind = per_kind
        self._window_s = window_s
        self._ends = float("-inf")
        self._told: Counter[str] = Counter()
        self._told_of: Counter[tuple[object, ...]] = Counter()
        self._left_out: Counter[str] = Counter()

    def allow(
        self, kind: str, source: object, now: float, *, at_most: int | None = None, what: str | None = None
    ) -> bool:
        """Tell whether this event is to be reported; if not, count it.

        Args:
            kind: which of our kinds it is.
            source: who it is of.
            now: the time.
            at_most: of this kind from this source, where it is not ``per_source``.
            what: told once in a window, whoever it is of.
        """
        most = self._per_source if at_most is None else at_most
        if now >= self._ends:
            self._ends = now + self._window_s
            self._told.clear()
            self._told_of.clear()
        is_known = what is not None and self._told_of[kind, "what", what] > 0
        if is_known or self._told[kind] >= self._per_kind or self._told_of[kind, source] >= most:
            self._left_out[kind] += 1
            return False
        self._told[kind] += 1
        self._told_of[kind, source] += 1
        if what is not None:
            self._told_of[kind, "what", what] = 1
        return True

    def take_left_out(self, now: float) -> dict[str, int]:
        """Kind -> how many were left out, once their window is over; they are gone from here."""
        if not self._left_out or now < self._ends:
            return {}
        left_out = dict(self._left_out)
        self._left_out.clear()
        return left_out
