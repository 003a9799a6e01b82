"""Tasks of the worker around its endpoint and its session: receiving, sampling, sending and
heartbeats.

The session decides. This module passes received messages to it, sends its messages, and runs
samplers under its leases. Each sampler works in its own thread, so a blocked environment stops
neither heartbeats nor subscriptions. Several samplers of one process overlap their waits.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiorl.actors.calls import description_of
from aiorl.config.worker import WorkerPart
from aiorl.errors import (
    AiorlError,
    ConfigError,
    DataError,
    EndOfData,
    EnvError,
    LocalProtocolError,
    MemoryQuotaError,
    RemoteProtocolError,
    UnknownPolicyError,
    UnsendableError,
    described,
)
from aiorl.net.protocol import calls, events as ev
from aiorl.net.protocol.worker_session import (
    MAX_UNACKED_BYTES,
    WorkerSession,
    WorkerSettings,
    WorkerState,
)
from aiorl.net.transport.endpoint import Event, EventKind, Outbox, WorkerEndpoint
from aiorl.net.transport.relay import worker_endpoint
from aiorl.net.transport.security import load_worker_keys
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import DEFAULT_LIMITS, Limits, limits_of
from aiorl.net.wire.messages import (
    BUILDING,
    OUT_OF_DATA,
    WAITING_FOR,
    Failure,
    Message,
    RefusalCode,
    Reply,
    Samples,
    Snapshot,
    Welcome,
)
from aiorl.process.children import FAILED, HOPELESS, RUN_IS_OVER, STOPPED
from aiorl.process.machine import age_s, check_heap, host_name, keep_children_out
from aiorl.process.program import raise_open_file_limit
from aiorl.process.tasks import Tasks
from aiorl.run.worker.sampler_unit import SamplerUnit, StopSampling, UnitPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1
_STATUS_AFTER_S = 2.0
_STATUS_EVERY_S = 60.0
_STOP_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """Outcome of a worker.

    Attributes:
        ok: True if the run is over or the worker was asked to stop; False after a failure.
        reason: reason for the end, one plain sentence.
        final: True if a restart would be useless, because the run is over or the learner refused
            the worker for good.
        found_hub: True if there is no learner at the address but a hub of actors.
    """

    ok: bool
    reason: str
    final: bool = False
    found_hub: bool = False

    @property
    def status(self) -> int:
        """Exit status of the process, which its parent understands."""
        if self.ok:
            return RUN_IS_OVER if self.final else STOPPED
        return HOPELESS if self.final else FAILED


class _Running:
    """Sampler unit with its thread and its task, for one registration life of the worker.

    Attributes:
        turn: held while a fragment is sampled and sent, and during a call, so that filter deltas
            are taken while nothing uses the unit.
        is_out_of_data: True once all passes over its stored experience have been read.
    """

    def __init__(self, index: int, incarnation: str) -> None:
        self.index = index
        self.incarnation = incarnation
        self.turn = asyncio.Lock()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"sampler-{index}")
        self.unit: SamplerUnit | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_out_of_data = False
        self._is_closed = False

    def call(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call a function in the unit's thread."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.executor, keep_children_out, function, *arguments)

    def make(self, part: WorkerPart, welcome: Welcome) -> None:
        """Build the unit; runs in its thread."""
        place = UnitPlace(welcome.slot, self.incarnation, self.index, welcome.num_workers)
        self.unit = SamplerUnit(part, welcome.graphs, welcome.snapshot, place)

    def close(self) -> None:
        """Close the unit; runs in its thread and thus after it was built. Can be called again."""
        if self.unit is not None and not self._is_closed:
            self._is_closed = True
            self.unit.close()


@dataclass(frozen=True, slots=True)
class _LearnersSettings:
    """Settings that the handshake brings; before it, the defaults hold.

    Attributes:
        limits: limits of messages.
        compress: True if fragments may be compressed.
        max_heap: largest heap of this process, bytes; 0 for no limit.
    """

    limits: Limits = DEFAULT_LIMITS
    compress: bool = True
    max_heap: int = 0


@dataclass(slots=True)
class _StatusLog:
    """Log of what the worker does or waits for."""

    kind: str = ""
    since: float = 0.0
    logged_kind: str = ""
    logged_at: float = 0.0

    def note(self, text: str, now: float) -> None:
        """Log one INFO line when the status has changed and stayed the same for a while, and again
        once a minute.
        """
        kind = re.sub(r"\d+(\.\d+)?", "#", text)  # numbers change all the time
        if kind != self.kind:
            self.kind = kind
            self.since = now
        is_due = kind != self.logged_kind or now - self.logged_at >= _STATUS_EVERY_S
        if is_due and now - self.since >= _STATUS_AFTER_S:
            level = logging.DEBUG if kind == self.logged_kind == "sampling" else logging.INFO
            self.logged_kind = kind
            self.logged_at = now
            logger.log(level, "%s", text)


def make_service(
    connect: Sequence[str], keys: Path | str | None, worker_id: str = "", slot: int = 0
) -> WorkerService:
    """Return the service of this process's worker.

    Args:
        connect: places of the learner, as `aiorl.config.addresses.places_of` returns them.
        keys: directory of this host's CURVE keys; None = none.
        worker_id: its name; "" makes one.
        slot: preferred slot, 0 for any.

    Raises:
        SecurityError: the keys can't be used.
    """
    raise_open_file_limit()  # libzmq may abort if it gets no file descriptor
    worker_keys = None if keys is None else load_worker_keys(keys)
    settings = WorkerSettings(worker_id or secrets.token_hex(8), host_name(), os.getpid(), slot)
    return WorkerService(worker_endpoint(connect, worker_keys), WorkerSession(settings))


class WorkerService:
    """Samples for the learner at the endpoint's address until the run is over or ``stop`` is
    called.

    Attributes:
        former_end: how the former process ended, reported to the learner once; "" if there was
            none.
        may_join_hub: True if a hub of actors at the address may have this process. A worker that a
            learner has registered is that learner's.
    """

    def __init__(self, endpoint: WorkerEndpoint, session: WorkerSession) -> None:
        """Prepare with an endpoint that has not been started and a new session."""
        self.former_end = ""
        self.may_join_hub = False
        self._endpoint = endpoint
        self._session = session
        self._settings = _LearnersSettings()
        self._tasks = Tasks(self.fail)
        self._running: list[_Running] = []
        self._building: asyncio.Task[None] | None = None
        self._is_building = False
        self._newest: Snapshot | None = None
        self._has_sent = False
        self._wake = asyncio.Event()
        self._outbox = Outbox(endpoint, self._tasks, self._wake.set)
        self._done: asyncio.Future[WorkerOutcome] | None = None
        self._status_log = _StatusLog()

    async def run(self) -> WorkerOutcome:
        """Sample until the run ends, the learner refuses this worker for good, a sampler or task
        fails, or ``stop``.

        Cancelling it stops the samplers and closes the endpoint.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._endpoint.on_message = partial(self._take, self._session.receive)
        self._endpoint.on_broadcast = partial(self._take, self._session.broadcast)
        self._endpoint.on_event = self._on_event
        async with AsyncExitStack() as stack:  # each step of the end is taken even if another fails
            self._endpoint.start()
            stack.push_async_callback(self._endpoint.close)
            stack.push_async_callback(self._stop_units)
            stack.push_async_callback(self._tasks.close)
            self._tasks.start(self._tick(), "tick")
            self._tasks.start(give_back_regularly(), "memory")
            return await self._done

    def stop(self, reason: str) -> None:
        """Leave the learner and end; call this on the event loop."""
        self._session.leaving(reason, time.monotonic())
        self._pump()
        self._finish(WorkerOutcome(True, reason))

    def fail(self, error: BaseException) -> None:
        """End with an internal error, since a worker is useless after a task or callback has
        died.
        """
        message = f"unexpected {described(error)}"
        try:
            self._fail("worker", message, "".join(traceback.format_exception(error)))
        finally:  # reporting to the learner may be the part that fails
            self._finish(WorkerOutcome(False, message))

    # Receiving
    # ----------------------------------------------------------------------------------------------

    def _take(self, hear: Callable[[Message, float], None], frames: list[memoryview]) -> None:
        now = time.monotonic()
        try:
            hear(decode(frames, self._settings.limits), now)
        except RemoteProtocolError as error:
            logger.warning(
                "a message from the learner was not understood and is ignored: %s", error
            )
        self._pump()

    def _on_event(self, event: Event) -> None:
        now = time.monotonic()
        match event.kind:
            case EventKind.CONNECTED:
                self._session.connected(now)
            case EventKind.DISCONNECTED:
                self._outbox.clear()
                self._session.disconnected(now, event.reason)
            case EventKind.REFUSED | EventKind.WAITING:
                self._session.disconnected(now, event.reason)
            case _:
                logger.debug("connection: %s", event)
        self._pump()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            in_env_s = max(
                (running.unit.in_env_s for running in self._running if running.unit is not None),
                default=0.0,
            )
            self._session.note_progress(self._status_text(now), in_env_s)
            self._session.tick(now)
            self._pump()
            try:
                check_heap(self._settings.max_heap, "memory_per_worker")
            except MemoryQuotaError as error:
                self._fail("memory", str(error), "")
            self._status_log.note(self._status_text(now), now)
            await asyncio.sleep(_TICK_S)

    # Sending
    # ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Handle the session's events, then send its messages. Does nothing after the end."""
        if self._done is None or self._done.done():
            return
        for event in self._session.events():
            self._handle(event)
        for message in self._session.messages_to_send():
            self._send(message)
        self._wake.set()

    def _send(self, message: Message) -> None:
        try:
            frames = encode(
                message,
                compress=self._settings.compress and not self._endpoint.is_local,
                limits=self._settings.limits,
            )
        except LocalProtocolError as error:
            if isinstance(message, Reply):  # the result of a call may be too large
                refusal = UnsendableError(f"the result can't be sent: {error}")
                self._send(Reply(message.call_id, False, description_of(refusal)))
            else:
                self._fail("protocol", f"a message cannot be sent: {error}", "")
            return
        # without a connection, the session sends everything again after the next one
        self._outbox.send(frames)

    # Events
    # ----------------------------------------------------------------------------------------------

    def _handle(self, event: ev.WorkerEvent) -> None:
        match event:
            case ev.Registered(welcome):
                logger.info("registered as worker %d of run %s", welcome.slot, welcome.run_id)
                self.may_join_hub = False
                if self.former_end:
                    message = f"its former process ended with {self.former_end}"
                    self.former_end = ""
                    self._send(Failure("process", message, "", fatal=False))
                self._newest = welcome.snapshot
                self._restart_units(welcome)
            case ev.SnapshotReceived(snapshot):
                newest = snapshot  # for samplers still being built
                if self._newest is not None and snapshot.since >= 0:
                    newest = snapshot.after(self._newest)
                self._newest = newest
                for running in self._running:
                    if running.unit is not None:
                        running.unit.offer(snapshot)
            case ev.Reincarnated(reason):
                logger.info("registering again: %s", reason)
                self._newest = None
                self._restart_units(None)
            case ev.LearnerLost(reason):
                logger.warning("%s; no new fragment begins until it answers", reason)
            case ev.LearnerBack():
                logger.info("the learner answers again")
            case ev.WasRefused(reason, _, RefusalCode.ACTORS) if self.may_join_hub:
                self._finish(WorkerOutcome(True, reason, found_hub=True))
            case ev.WasRefused(reason, retry, code):
                logger.warning("the learner refused this worker: %s", reason)
                if not retry:  # a protocol violation, for instance by damaged bytes, need not recur
                    is_final = code != RefusalCode.VIOLATION
                    text = f"the learner refused this worker: {reason}"
                    self._finish(WorkerOutcome(False, text, final=is_final))
            case ev.Shutdown(reason, final):
                logger.info("the learner said goodbye: %s", reason)
                if final:
                    self._finish(WorkerOutcome(True, reason, final=True))
            case ev.CallRequested(method=calls.STACKS):
                self._session.reply(event, True, _stacks(), time.monotonic())
            case ev.CallRequested():
                self._tasks.start(self._answer(event), f"call-{event.call_id}")

    def _fail(self, kind: str, message: str, traceback_text: str) -> None:
        if self._session.state is WorkerState.ENDED:
            return
        self._session.failure(kind, message, traceback_text, time.monotonic())
        self._pump()
        self._finish(WorkerOutcome(False, message))

    def _finish(self, outcome: WorkerOutcome) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(outcome)

    def _status_text(self, now: float) -> str:
        if self._is_building:
            return BUILDING
        is_out_of_data = all(running.is_out_of_data for running in self._running)
        if self._running and is_out_of_data and not self._session.num_unacked:
            return OUT_OF_DATA
        for running in self._running:
            waits_for = "" if running.unit is None else running.unit.waits_for()
            if waits_for:
                return f"{WAITING_FOR}{waits_for}"
        return self._session.status_text(now)

    # Sampling
    # ----------------------------------------------------------------------------------------------

    def _is_current(self, incarnation: str) -> bool:
        """Return True if that registration life is current; anything of another life must not start
        or send.
        """
        is_running = self._session.state is not WorkerState.ENDED and (
            self._done is not None and not self._done.done()
        )
        return is_running and incarnation == self._session.incarnation

    def _restart_units(self, welcome: Welcome | None) -> None:
        """End the samplers of the previous registration, then start those of the new one.

        The old ones are stopped immediately, since building can take long and their work until then
        would be wasted.
        """
        for running in self._running:
            if running.unit is not None:
                running.unit.stop()
        previous = self._building
        self._building = self._tasks.start(self._rebuild(previous, welcome), "build-samplers")

    async def _rebuild(self, previous: asyncio.Task[None] | None, welcome: Welcome | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        await self._stop_units()
        if welcome is None or not self._is_current(welcome.incarnation):
            return
        incarnation = welcome.incarnation
        try:
            part = WorkerPart.from_dict(welcome.config)
            # after the handshake, times and limits come from the learner's configuration
            self._settings = _LearnersSettings(
                limits=limits_of(part.transport),
                compress=part.transport.compression != "off" or bool(part.compress_observations),
                max_heap=part.memory_per_worker,
            )
            self._session.settings.transport = part.transport
            self._session.settings.max_unacked_bytes = (
                part.object_store_memory_per_worker or MAX_UNACKED_BYTES
            )
            os.environ.update(part.extra_python_environs_for_worker)
            logging.getLogger("aiorl").setLevel(part.log_level.replace("WARN", "WARNING"))
            self._is_building = True
            self._session.note_progress(BUILDING)
            # the learner waits longer if building blocks the rest
            if self._session.state is WorkerState.REGISTERED:
                self._send(self._session.beat())
            for index in range(part.samplers_per_worker):
                running = _Running(index, incarnation)
                self._running.append(running)
                await self._build(running, part, welcome)
                if not self._is_current(incarnation):
                    return
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            self._fail_of(incarnation, error, "setup", AiorlError)
        finally:
            self._is_building = False

    def _fail_of(
        self,
        incarnation: str,
        error: BaseException,
        kind: str,
        of_setup: type[Exception] | tuple[type[Exception], ...],
    ) -> None:
        """Fail with a sampler's error; errors from an earlier registration are only logged.

        Args:
            incarnation: incarnation of the sampler.
            error: error of the sampler.
            kind: kind to report for all other errors.
            of_setup: types of errors that would recur in every worker.
        """
        if not self._is_current(incarnation):
            logger.info("a sampler of an earlier registration failed: %r", error)
        elif isinstance(error, EnvError):
            self._fail("env", str(error), error.traceback_text)
        elif isinstance(error, of_setup):
            self._fail("setup", str(error), "")
        else:
            logger.error("a sampler failed", exc_info=error)
            self._fail(kind, described(error), "".join(traceback.format_exception(error)))

    async def _build(self, running: _Running, part: WorkerPart, welcome: Welcome) -> None:
        await running.call(running.make, part, welcome)
        unit = running.unit
        # the worker or its registration may have ended meanwhile
        if unit is None or not self._is_current(running.incarnation):
            return
        if self._newest is not None:
            unit.offer(self._newest)
        running.task = self._tasks.start(self._sample(running, unit), f"sample-{running.index}")

    async def _sample(self, running: _Running, unit: SamplerUnit) -> None:
        """Produce fragments under leases, one after the other, until cancelled, failed or
        registered again.
        """
        try:
            while self._is_current(running.incarnation):
                lease_id = None
                if not self._outbox:
                    lease_id = self._session.start_fragment(self._session.version)
                if lease_id is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                async with running.turn:
                    try:
                        samples = await running.call(unit.sample)
                    except BaseException:
                        # leases of an earlier registration are forgotten
                        if running.incarnation == self._session.incarnation:
                            self._session.abandon_fragment(lease_id)
                        raise
                    if self._is_current(running.incarnation):
                        running.executor.submit(unit.prepare)  # while the fragment is being sent
                        self._send_fragment(unit, lease_id, samples)
        except StopSampling:
            pass
        except EndOfData as error:
            running.is_out_of_data = True
            logger.info("sampler %d has reached the end: %s", running.index, error)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            self._fail_of(
                running.incarnation, error, "sampler", (ConfigError, DataError, UnknownPolicyError)
            )

    def _send_fragment(self, unit: SamplerUnit, lease_id: int, samples: Samples) -> None:
        deltas = unit.take_deltas(self._session.next_seq)
        samples = samples._replace(lease_id=lease_id, filter_deltas=deltas)
        self._session.fragment_done(samples, time.monotonic())
        self._pump()
        if not self._has_sent:
            self._has_sent = True
            logger.info(
                "the first fragment is sent, %.2f s after this process was started", age_s()
            )

    # Calls
    # ----------------------------------------------------------------------------------------------

    async def _answer(self, request: ev.CallRequested) -> None:
        """Run a call of the learner between two fragments, and answer it, whatever happens."""
        if self._building is not None:
            await asyncio.wait([self._building])
        try:
            unit_index = request.args.get("sampler")
            running = next((one for one in self._running if one.index == unit_index), None)
            if running is None or running.unit is None:
                raise LookupError(f"the worker has no sampler {unit_index!r:.20}")
            async with running.turn:
                result = await running.call(running.unit.call, request.method, request.args)
        except StopSampling:
            return  # this incarnation ends, and the call with it
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            failure = description_of(error, runner=inspect.getfile(SamplerUnit))
            self._session.reply(request, False, failure, time.monotonic())
        else:
            self._session.reply(request, True, result, time.monotonic())
        self._pump()

    async def _stop_units(self) -> None:
        """End every sampler at its next step; one stuck in its environment is left behind with its
        thread.

        If this is cancelled, samplers may still be ending; another call continues to end them.
        """
        units = list(self._running)
        for running in units:
            if running.unit is not None:
                running.unit.stop()
        tasks = [running.task for running in units if running.task is not None]
        self._wake.set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_WAIT_S)
        closing = [(running.unit is not None, running.call(running.close)) for running in units]
        # a unit that is still being built is closed after that, without waiting for it
        waited_for = [future for is_built, future in closing if is_built]
        if waited_for:
            closed, _ = await asyncio.wait(waited_for, timeout=_STOP_WAIT_S)
            for error in filter(None, (future.exception() for future in closed)):
                logger.warning("a sampler could not be closed: %r", error)
        for running in units:
            running.executor.shutdown(wait=False)
            self._running.remove(running)


def _stacks() -> str:
    """Return the stack of every thread, for the learner's terminal when an environment hangs."""
    lines: list[str] = []
    for identity, frame in sys._current_frames().items():
        lines.append(f"thread {identity}:")
        lines.extend(line.rstrip() for line in traceback.format_stack(frame))
    return "\n".join(lines)
