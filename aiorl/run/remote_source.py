"""Sampling by worker processes, with updates in a separate thread, while the loop continues to
receive.

frames -> decode -> core -> encode -> frames
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from aiorl.acting.filters import ObservationFilter
from aiorl.config.addresses import dialable, join_command
from aiorl.config.parts import SamplePart, TransportPart
from aiorl.errors import (
    ConfigError,
    InternalError,
    LocalProtocolError,
    RemoteProtocolError,
    WorkerError,
)
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession, Target
from aiorl.net.protocol.roster import Worker
from aiorl.net.transport.endpoint import (
    Buffer,
    EndpointLimits,
    EndpointStats,
    Event,
    EventKind,
    LearnerEndpoint,
)
from aiorl.net.transport.security import load_learner_keys
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import ACK_BYTES, Limits, limits_of
from aiorl.net.wire.messages import (
    OUT_OF_DATA,
    Arrays,
    DownMessage,
    Hello,
    Message,
    PolicyArrays,
    Snapshot,
    SnapshotRequest,
    Status,
    Welcome,
)
from aiorl.process.machine import keep_within
from aiorl.process.program import raise_open_file_limit
from aiorl.process.tasks import Tasks, end_in_time
from aiorl.run.build import Learning
from aiorl.run.core import (
    BeginUpdate,
    Disconnect,
    Effect,
    FragmentRefused,
    LearnerCore,
    News,
    Report,
    Send,
)
from aiorl.run.end import wait_for_last
from aiorl.run.local_workers import LocalWorkers
from aiorl.run.overview import Overview
from aiorl.run.peer_news import PeerNews, states_of
from aiorl.run.policy_group import UpdateDone, Updater, WarmUpDone
from aiorl.run.ports import TrainingView
from aiorl.run.sampler_calls import SamplerCalls
from aiorl.run.source import Source
from aiorl.run.update_thread import UpdateEvent, UpdatesEnded, UpdateThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1
_QUEUED_BYTES = 1 << 30
_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5


class RemoteSource(Source):
    """Worker processes on this host and on others.

    They can connect from the beginning, while TensorFlow is loading; ``begin`` admits them.

    Attributes:
        workers_here: the workers started by this process.
    """

    def __init__(
        self,
        training: TrainingView,
        core: LearnerCore,
        *,
        transport: TransportPart,
        sample: SamplePart,
    ) -> None:
        """Listen for workers; call this on the running loop.

        Args:
            training: the training to sample for.
            core: the learner's core.
            transport: where and how to listen.
            sample: the workers to start.

        Raises:
            ConfigError: the address cannot be bound, or the keys cannot be used.
        """
        self.core = core
        self.updates: UpdateThread | None = None
        self.overview = Overview(sample.env)
        self.news = asyncio.Event()
        self._training = training
        self._transport = transport
        self._sample = sample
        limits = transport.limits
        self._codec = _Codec(limits_of(limits), compress=limits.compression != "off")
        self._news = PeerNews(training.tell, core.session)
        self._calls = SamplerCalls(core.session, lambda call: self._codec.check(call, 0), self.pump)
        self._happened = _Happened()
        self._is_pump_due = False
        self._is_over = False
        self._endpoint = self._listen()
        self.overview.addresses = dialable(self.address, transport.advertise)
        self.overview.workers = self.workers
        self.workers_here = LocalWorkers(
            training, core.session, self._endpoint.local_address, sample
        )
        self._tasks = Tasks(training.fail)
        self._tasks.start(self._tick(), "tick")
        self._tasks.start(give_back_regularly(), "memory")
        if sample.memory:
            self._tasks.start(keep_within(sample.memory, "memory"), "memory quota")

    def _listen(self) -> LearnerEndpoint:
        """Listen at the configured address, on the port used before a resume if any will do and it
        is free.
        """
        configured = self._transport.bind
        last_port = self._training.directory.last_port
        raise_open_file_limit()
        binds = [configured]
        if last_port and configured.endswith(":0"):
            binds.insert(0, f"{configured[:-1]}{last_port}")
        for bind in binds:
            endpoint = self.endpoint_at(bind)
            endpoint.on_message = self._on_message
            endpoint.on_event = self._on_endpoint_event
            endpoint.is_registered = self.core.session.knows
            try:
                endpoint.start()
            except ConfigError as error:
                if bind == configured:
                    raise
                self._training.tell(
                    f"workers will not find the learner at its old address: {error}",
                    logging.WARNING,
                )
            else:
                return endpoint
        raise InternalError("there is no address to listen on")

    def endpoint_at(self, bind: str) -> LearnerEndpoint:
        """Make an endpoint that listens at an address, with the configured keys and limits.

        Raises:
            ConfigError: the keys cannot be used.
        """
        transport = self._transport
        return ZmqLearnerEndpoint(
            bind,
            keys=None if transport.keys is None else load_learner_keys(Path(transport.keys)),
            insecure=transport.insecure,
            limits=EndpointLimits.of(transport.limits),
        )

    @property
    def address(self) -> str:
        """Address that it is bound to."""
        return self._endpoint.address

    @property
    def join_command(self) -> str:
        """See `Source`."""
        transport = self._transport
        return join_command(
            self.overview.addresses, transport.keys, are_advertised=bool(transport.advertise)
        )

    @property
    def status(self) -> str:
        """See `Source`."""
        if not self._happened.compiled.is_set():
            return "compiling the update"
        if self.core.is_granting:
            return "sampling the first train batch"
        num_present = len(self.session.slots)
        num_wanted = max(1, self._sample.num_workers)
        return (
            f"the update is compiled; waiting for workers: {num_present} of {num_wanted} are here"
        )

    def waits_for_others(self) -> bool:
        """See `Source`."""
        workers = self.workers()
        return bool(workers) and all(worker.waits_for_others for worker in workers)

    def waiting_for(self) -> str:
        """See `Source`. Names the state of each worker, or the command with which one joins."""
        workers = self.workers()
        if workers:
            return states_of(workers)
        text = f"no worker is connected; they join with: {self.join_command}"
        if self._sample.num_workers:
            return text
        return (
            f"{text} (with num_workers: 0 and bind, this run starts none; without bind, this"
            " process samples)"
        )

    @property
    def calls(self) -> SamplerCalls:
        """See `Source`."""
        return self._calls

    @property
    def session(self) -> LearnerSession:
        """The protocol with workers."""
        return self.core.session

    def workers(self) -> Sequence[Worker]:
        """See `Source`."""
        return self.session.workers

    def traffic(self) -> EndpointStats:
        """See `Source`."""
        return self._endpoint.stats()

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers; their processes load while the model is built.

        Raises:
            ConfigError: the run directory cannot be written.
            OSError: a worker could not be started.
        """
        self._training.directory.save_address(self.address, self.overview.addresses)
        await self.workers_here.start()

    async def build(self, step: Callable[[], T]) -> T:
        """See `Source`.

        Builds in a daemon thread, so that a stop need not wait for the import of TensorFlow.
        """
        built: concurrent.futures.Future[T] = concurrent.futures.Future()

        def build() -> None:
            try:
                built.set_result(step())
            except BaseException as error:
                built.set_exception(error)

        # it cannot be cancelled any more; at a stop it is abandoned
        built.set_running_or_notify_cancel()
        threading.Thread(target=build, name="build", daemon=True).start()
        return await asyncio.wrap_future(built)

    async def begin(self, learning: Learning) -> None:
        """Admit workers, begin to compile the update and wait for the workers started by this
        process.

        A run with a seed therefore always begins with the same workers.

        Raises:
            ConfigError: the data that workers need is too large for a message.
        """
        self.admit(learning)
        num_wanted = max(1, self._sample.num_workers)
        while not await self.wait_for_workers(num_wanted, _SAY_WAITING_S):
            num_present = len(self.session.slots)
            num_down = len(self.workers_here.given_up)
            is_late = time.monotonic() - self._happened.began > _JOIN_WAIT_S
            if num_present and (num_present + num_down >= num_wanted or is_late):
                break
            text = f"waiting for workers: {num_present} of {num_wanted} are here"
            if not num_present and self._sample.num_workers == 0:
                text = self.waiting_for()
            self._training.tell(text, logging.INFO)

    def admit(self, learning: Learning) -> None:
        """Admit workers, publish the first snapshot and begin to compile the update; sampling
        starts with `LearnerCore.go_on`.

        Raises:
            ConfigError: the data that workers need is too large for a message, including room for
                acknowledgements of all workers.
        """
        core = self.core
        counters = self._training.counters
        snapshot = core.begin(learning, self._transport.max_queued_bytes or _QUEUED_BYTES)
        # policies that are added later come with snapshots
        part = learning.worker_part.to_dict()
        self.session.begin(part, dict(learning.graphs), time.monotonic())
        self.check_room(snapshot)
        updater = Updater(learning.group, learning.lease_plan, counters.env_steps_trained)
        self.updates = UpdateThread(updater, self._post_to_loop())
        self.session.publish(snapshot, time.monotonic())
        self.pump()
        self._training.begin_saving(learning)
        self.workers_here.may_be_lost = True
        self.updates.start()

    def check_room(self, snapshot: Snapshot) -> None:
        """See `Source`."""
        session = self.session
        welcome = Welcome(
            slot=0,
            num_workers=self._sample.num_workers,
            run_id=session.run_id,
            learner_incarnation=session.learner_incarnation,
            config=session.start_data.config or {},
            graphs=session.start_data.graphs,
            snapshot=snapshot,
        )
        try:
            self._codec.check(welcome, session.settings.max_workers * ACK_BYTES)
        except LocalProtocolError as error:
            raise ConfigError(
                f"the data that workers need cannot be sent to them: {error}",
                hint=(
                    "Use a smaller model or raise transport.max_header_bytes or"
                    " transport.max_message_bytes."
                ),
            ) from error

    async def wait_for_workers(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` workers are registered; return False if they are not after
        ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.session.slots) < count:
                    self._happened.joined.clear()
                    await self._happened.joined.wait()
        except TimeoutError:
            return False
        return True

    async def add_workers(self, count: int) -> None:
        """See `Source`."""
        slots = self.workers_here.add(count)
        await self._training.end.before(self._wait_for_slots(slots))

    async def _wait_for_slots(self, slots: set[int]) -> None:
        while not slots.issubset(self.session.slots):
            given_up = sorted(slots & self.workers_here.given_up)
            if given_up:
                log = self._training.directory.worker_log(given_up[0])
                raise WorkerError(given_up[0], f"it did not start (log: {log})")
            self._happened.joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._happened.joined.wait()

    async def compiled(self) -> None:
        """See `Source`."""
        await self._training.end.before(self._happened.compiled.wait())

    async def advance(self) -> None:
        """See `Source`."""
        await self.news.wait()
        self.news.clear()

    def set_weights(self, weights: PolicyArrays) -> None:
        """See `Source`."""
        self.core.set_weights(weights, time.monotonic())
        self.pump()

    def change_policies(
        self,
        policies: Arrays,
        weights: PolicyArrays,
        filters: Mapping[str, ObservationFilter],
    ) -> None:
        """See `Source`."""
        self.core.change_policies(policies, weights, filters, time.monotonic())
        self.pump()

    def hold(self) -> None:
        """See `Source`; the thread would begin the next update by itself."""
        self.core.stand_still()

    def stop(self) -> None:
        """See `Source`; workers still get answers."""
        self.core.stop()

    async def finish_update(self) -> None:
        """See `Source`."""
        self.stop()
        if self.updates is not None and self._happened.compiled.is_set():
            self.updates.stop()
            hurry = self._training.end.hurry
            await wait_for_last(
                self._happened.updates_ended, _UPDATE_WAIT_S, hurry, self._training.tell
            )

    async def close(self, reason: str, *, final: bool) -> None:
        """Say goodbye and end the workers and the update thread; their later messages are
        ignored.
        """
        self.workers_here.may_be_lost = False
        self.core.stop()
        if self.updates is not None:
            self.updates.stop()
        await end_in_time("the sessions", lambda: self._say_goodbye(reason, final))
        await asyncio.gather(
            self._hang_up(),
            end_in_time("the workers", lambda: self.workers_here.stop(_GOODBYE_S)),
        )

    def _say_goodbye(self, reason: str, final: bool) -> None:
        try:
            self.session.shutdown(reason, final)
            self.pump()
        finally:
            self._is_over = True
            self._calls.close(reason)

    async def _hang_up(self) -> None:
        await end_in_time("the connections' tasks", self._tasks.close)
        await end_in_time("the connections", self._endpoint.close)

    def interrupt(self) -> None:
        """See `Source`; nothing runs in the caller's thread."""

    async def begin_episodes_anew(self) -> None:
        """See `Source`; workers continue their episodes."""

    def join(self, timeout_s: float) -> None:
        """See `Source`."""
        if self.updates is not None:
            self.updates.join(timeout_s)

    # What comes in
    # ----------------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        now = time.monotonic()
        core = self.core
        session = core.session
        try:
            message = self._codec.decode(frames, is_registered=session.knows(peer))
        except RemoteProtocolError as error:
            session.bad_frames(peer, error, now)
        else:
            if message is None:
                session.unread(peer, sum(frame.nbytes for frame in frames))
            else:
                host = ""
                has_unsent = False
                if isinstance(message, Hello):
                    host = self._endpoint.host_of(peer)
                # only these are answered by a whole snapshot
                if isinstance(message, (Hello, SnapshotRequest)):
                    has_unsent = self._endpoint.has_unsent(peer)
                core.receive(
                    peer, message, now, key=user_id or None, host=host, has_unsent=has_unsent
                )
        self._pump_soon()

    def _on_endpoint_event(self, event: Event) -> None:
        match event.kind:
            case EventKind.DISCONNECTED | EventKind.SILENT | EventKind.DROPPED:
                was_silent = event.kind is EventKind.SILENT
                if event.peer:
                    self.session.peer_gone(event.peer, time.monotonic(), was_silent=was_silent)
                if event.kind is not EventKind.DISCONNECTED:
                    fate = "ended" if was_silent else "dropped"
                    self._news.report_connection(fate, event.address, event.reason)
            case EventKind.REFUSED:
                self._news.report_connection("refused", event.address, event.reason)
            case _:
                logger.debug("connection: %s", event)
                return
        self._pump_soon()

    def _post_to_loop(self) -> Callable[[UpdateEvent], None]:
        """Return a function with which the update thread hands an event to this loop."""
        loop = asyncio.get_running_loop()

        def post(event: UpdateEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._handle_update, event)

        return post

    def _handle_update(self, event: UpdateEvent) -> None:
        if self._is_over:
            return  # too late: the run is saved, and the workers have been sent goodbyes
        match event:
            case WarmUpDone(took_s):
                self._happened.compiled.set()
                self._training.compiled_in(took_s)
            case UpdateDone():
                self.core.update_ended(event, time.monotonic())
                self._training.update_ended(event)
                self.pump()
                self.news.set()
            case UpdatesEnded():
                self._handle_end_of_updates(event)

    def _handle_end_of_updates(self, event: UpdatesEnded) -> None:
        self.core.stop()
        self.core.updates_left(event.num_left)
        self._happened.updates_ended.set_result(None)
        if event.batch is not None:
            self.core.update_failed(event.batch)
        if event.error is None:
            return
        if self._training.end.has_come:
            text = f"the last update failed and is left out: {event.error}"
            self._training.tell(text, logging.ERROR)
        self._training.fail(event.error)

    async def _tick(self) -> None:
        while True:
            self.core.tick(time.monotonic())
            self.pump()
            self._news.look_for_hung_workers()
            self._news.look_for_slow_workers()
            self._look_for_end_of_data()
            self._news.report_left_out()
            await asyncio.sleep(_TICK_S)

    def _look_for_end_of_data(self) -> None:
        workers = self.workers()
        if not self.session.settings.data_ends or not workers:
            return
        if any(worker.state != OUT_OF_DATA for worker in workers) or not self.core.is_drained:
            return
        slots_to_come = set(self.workers_here.slots)
        slots_to_come -= {*self.session.slots, *self.workers_here.given_up}
        if not slots_to_come:  # workers still to come have their share to read
            self._training.stop("Done: all stored experience was read.")

    # What goes out
    # ----------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Schedule one `pump` for all messages of this wake-up."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """See `Source`. Does nothing after the goodbyes."""
        self._is_pump_due = False
        if self._is_over:
            return
        for effect in self.core.effects(time.monotonic()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(target, message):
                self._send(target, message)
            case Report(news):
                self._report(news)
            case BeginUpdate(batch):
                assert self.updates is not None
                self.updates.submit_nowait(batch)
            case Disconnect(peer, reason):
                self._endpoint.drop(peer, reason)

    def _report(self, news: News) -> None:
        self.overview.note(news, self.session.version)
        if isinstance(news, ev.SamplesAccepted):  # the most frequent news
            return
        self._news.report_event(news)
        match news:
            case ev.WorkerJoined():
                self._happened.joined.set()
            case ev.WorkerFailed():
                self.workers_here.on_failed(news)
            case ev.CallReplied():
                self._calls.replied(news)
            case ev.CallLost():
                self._calls.lost(news)
            case FragmentRefused(slot, reason):
                self.workers_here.on_refused(slot, reason)
            case ev.StatusRequested(peer, max_bytes):
                most = min(max_bytes, self._codec.limits.max_header_bytes // 2)
                account = self.overview.account(self._training, max_bytes=most)
                self._send(peer, Status(account))

    def _send(self, target: Target, message: DownMessage) -> None:
        try:
            frames = self._codec.encode(message)
        except LocalProtocolError as error:
            # impossible by the bounds on names and texts and the check in `admit`
            kind = type(message).__name__
            text = f"a {kind} cannot be sent: {error}"
            self._news.report("messages that cannot be sent", kind, text, logging.ERROR)
            return
        if target is BROADCAST:
            self._endpoint.broadcast(frames)
        else:
            self._endpoint.send(target, frames)


class _Happened:
    """Events in the life of a source to wait for.

    Attributes:
        began: when the source was made, monotonic seconds.
        joined: set when a worker joins.
        compiled: set when the update is compiled.
        updates_ended: done when the update thread has ended.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.joined = asyncio.Event()
        self.compiled = asyncio.Event()
        self.updates_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Codec:
    """Messages to frames and back, within the configured limits.

    Attributes:
        limits: bounds of a message.
    """

    def __init__(self, limits: Limits, compress: bool) -> None:
        self.limits = limits
        self._compress = compress
        self._newest: DownMessage | None = None
        self._frames: Sequence[Buffer] = ()

    def encode(self, message: DownMessage) -> Sequence[Buffer]:
        """Return the frames of a message; a heartbeat is one message to all workers.

        Raises:
            LocalProtocolError: the message is too large.
        """
        if message is not self._newest:
            self._frames = encode(message, compress=self._compress, limits=self.limits)
            self._newest = message
        return self._frames

    def check(self, message: DownMessage, room: int) -> None:
        """Check that a message could have ``room`` more bytes in its header.

        Raises:
            LocalProtocolError: it could not.
        """
        max_header_bytes = self.limits.max_header_bytes - room
        limits = dataclasses.replace(self.limits, max_header_bytes=max_header_bytes)
        encode(message, compress=False, limits=limits)

    def decode(self, frames: list[memoryview], *, is_registered: bool) -> Message | None:
        """Return the message of these frames, or None if it is not read: of a peer without a
        registered worker, only a hello is.

        Raises:
            RemoteProtocolError: the frames cannot be decoded.
        """
        if not is_registered:
            return decode_hello(frames)
        return decode(frames, self.limits)
