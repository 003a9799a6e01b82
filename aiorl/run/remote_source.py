"""Sampling by worker processes, with updates in a separate thread, while the loop continues to
receive.

frames -> decode -> session -> accepted fragments -> flow -> snapshots and leases -> session ->
encode -> frames
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aiorl.config.addresses import dialable
from aiorl.errors import ConfigError, InternalError, LocalProtocolError, RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession, LearnerSettings
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, Event, EventKind, LearnerEndpoint
from aiorl.net.transport.security import load_learner_keys
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import ACK_BYTES, limits_of, max_workers_of
from aiorl.net.wire.messages import (
    OUT_OF_DATA,
    DownMessage,
    Hello,
    PolicyArrays,
    SnapshotRequest,
    Status,
    Welcome,
)
from aiorl.process.log_once import EventRates
from aiorl.process.machine import keep_within
from aiorl.process.program import raise_open_file_limit
from aiorl.process.tasks import Tasks, end_in_time
from aiorl.run.build import Learning
from aiorl.run.flow import Flow, progress_of
from aiorl.run.local_workers import LocalWorkers
from aiorl.run.policy_group import UpdateDone, Updater, WarmUpDone
from aiorl.run.report.results import Progress
from aiorl.run.training import Source, Training, wait_for_last
from aiorl.run.update_thread import UpdateEvent, UpdatesEnded, UpdateThread
from aiorl.text import indented, many_lines, without_numbers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1
_QUEUED_BYTES = 1 << 30
_HUNG_S = 60.0
_MAX_NAMED = 8
_LOGGED_PER_KIND = 1000
_MAX_LOGGED = 24_000
_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5


class RemoteSource(Source):
    """Worker processes on this host and on others.

    They can connect from the beginning, while TensorFlow is loading; ``begin`` admits them.

    Attributes:
        session: state of the protocol.
        workers: the workers started by this process.
        updates: the thread that makes the updates; None before ``begin``.
    """

    def __init__(self, training: Training) -> None:
        """Listen for workers; call this on the running loop.

        Args:
            training: the training to sample for.

        Raises:
            ConfigError: the address cannot be bound, or the keys cannot be used.
        """
        super().__init__(training)
        config = training.config
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._limits = limits_of(config.transport)
        self._compress = config.transport.compression != "off"
        settings = LearnerSettings(
            config.transport,
            max_workers_of(self._limits),
            config.num_workers,
            data_ends=config.input_epochs is not None,
        )
        self.session = LearnerSession(
            training.directory.run_id, secrets.token_hex(8), settings, training.ledger
        )
        self.updates: UpdateThread | None = None
        self._updates_ended: asyncio.Future[None] = self._loop.create_future()
        self._compiled = asyncio.Event()
        self._joined = asyncio.Event()
        self._hung: set[str] = set()  # incarnations of live workers only
        self._slow: set[int] = set()  # slots of live workers only
        self._rates = EventRates()
        self._rates_of_hosts = EventRates(per_kind=_LOGGED_PER_KIND)
        self._pump_due = self._is_over = False
        self._encoded: tuple[DownMessage | None, Sequence[Buffer]] = (None, ())
        self._endpoint = self._listen()
        self.addresses = dialable(self.address, config.advertise)
        self.overview.workers = lambda: self.session.workers
        self.workers = LocalWorkers(training, self.session, self._endpoint.local_address)
        self._tasks = Tasks(training.fail)
        self._tasks.start(self._tick(), "tick")
        self._tasks.start(give_back_regularly(), "memory")
        if config.memory:
            self._tasks.start(keep_within(config.memory, "memory"), "memory quota")

    def _listen(self) -> LearnerEndpoint:
        """Listen at the config's address, on the port used before a resume if any will do and it is
        free.
        """
        config = self._config
        last = self._training.directory.last_port
        raise_open_file_limit()
        before = [f"{config.bind[:-1]}{last}"] if last and config.bind.endswith(":0") else []
        for bind in [*before, config.bind]:
            endpoint = self.endpoint_at(bind)
            endpoint.on_message = self._on_message
            endpoint.on_event = self._on_endpoint_event
            endpoint.is_registered = self.session.knows
            try:
                endpoint.start()
            except ConfigError as error:
                if bind == config.bind:
                    raise
                self._tell(
                    f"workers will not find the learner at its old address: {error}",
                    logging.WARNING,
                )
            else:
                return endpoint
        raise InternalError("there is no address to listen on")

    def endpoint_at(self, bind: str) -> LearnerEndpoint:
        """Make an endpoint that listens at an address, with the config's keys and limits.

        Raises:
            ConfigError: the keys cannot be used.
        """
        config = self._config
        keys = None if config.keys is None else load_learner_keys(Path(config.keys))
        return ZmqLearnerEndpoint(
            bind, keys=keys, insecure=config.insecure, limits=EndpointLimits.of(config.transport)
        )

    @property
    def address(self) -> str:
        """Address that it is bound to."""
        return self._endpoint.address

    @property
    def join_command(self) -> str:
        """See `Source`."""
        keys = (
            ""
            if self._config.keys is None
            else f" --keys {shlex.quote(os.path.abspath(self._config.keys))}"
        )
        addresses = self.addresses if self._config.advertise else self.addresses[:1]
        return f"aiorl worker --connect {','.join(addresses)}{keys}"

    @property
    def status(self) -> str:
        """See `Source`."""
        if not self._compiled.is_set():
            return "compiling the update"
        if self.flow.is_granting:
            return "sampling the first train batch"
        present = len(self.session.slots)
        wanted = max(1, self._config.num_workers)
        return f"the update is compiled; waiting for workers: {present} of {wanted} are here"

    def waiting_for(self) -> str:
        """See `Source`. Names the state of each worker, or the command with which one joins."""
        workers = self.session.workers
        if not workers:
            said = f"no worker is connected; they join with: {self.join_command}"
            if self._config.num_workers:
                return said
            return (
                f"{said} (with num_workers: 0 and bind, this run starts none; without bind, this"
                " process samples)"
            )
        said = "; ".join(
            f"worker {info.slot}: {info.state}"
            + (f" ({info.in_env_s:.0f} s in one step)" if info.in_env_s > 1 else "")
            for info in workers[:_MAX_NAMED]
        )
        return (
            said if len(workers) <= _MAX_NAMED else f"{said}; and {len(workers) - _MAX_NAMED} more"
        )

    def progress(self, perf: dict[str, float] | None) -> Progress:
        """See `Source`."""
        training = self._training
        num_workers = len(self.session.slots)
        return progress_of(
            training.counters,
            training.ledger,
            self._flow,
            perf,
            self._endpoint.stats(),
            num_workers,
        )

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers; their processes load while the model is built.

        Raises:
            ConfigError: the run directory cannot be written.
            OSError: a worker could not be started.
        """
        self._training.directory.save_address(self.address, self.addresses)
        await self.workers.start()

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
        wanted = max(1, self._config.num_workers)
        while not await self.wait_for_workers(wanted, _SAY_WAITING_S):
            present = len(self.session.slots)
            down = len(self.workers.given_up)
            if present and (
                present + down >= wanted or time.monotonic() - self._began > _JOIN_WAIT_S
            ):
                break
            if not present and self._config.num_workers == 0:
                self._tell(self.waiting_for(), logging.INFO)
            else:
                self._tell(f"waiting for workers: {present} of {wanted} are here", logging.INFO)

    def admit(self, learning: Learning) -> None:
        """Admit workers, publish the first snapshot and begin to compile the update; sampling
        starts with `go_on`.

        Raises:
            ConfigError: the data that workers need is too large for a message, including room for
                acknowledgements of all workers.
        """
        session = self.session
        config = self._config
        updater = Updater(
            learning.group, learning.lease_plan, self._training.counters.env_steps_trained
        )
        updates = self.updates = UpdateThread(updater, self._on_update_thread)
        most = config.object_store_memory or _QUEUED_BYTES
        self._flow = Flow(
            self._training, learning, updates, session, tell=self._tell_of, max_queued_bytes=most
        )
        part = learning.worker_part.to_dict()
        snapshot = self._flow.next_snapshot(learning.group.get_weights())
        welcome = Welcome(
            0,
            config.num_workers,
            session.run_id,
            session.learner_incarnation,
            part,
            learning.graphs,
            snapshot,
        )
        room = session.settings.max_workers * ACK_BYTES
        limits = dataclasses.replace(
            self._limits, max_header_bytes=self._limits.max_header_bytes - room
        )
        try:
            encode(welcome, compress=False, limits=limits)
        except LocalProtocolError as error:
            raise ConfigError(
                f"the data that workers need cannot be sent to them: {error}",
                hint=(
                    "Use a smaller model or raise transport.max_header_bytes or"
                    " transport.max_message_bytes."
                ),
            ) from error
        now = time.monotonic()
        session.begin(part, learning.graphs, now)
        session.publish(snapshot, now)
        self.pump()
        self._training.begin_saving(learning)
        self.workers.may_be_lost = True
        updates.start()

    async def wait_for_workers(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` workers are registered; return False if they are not after
        ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.session.slots) < count:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            return False
        return True

    async def compiled(self) -> None:
        """See `Source`."""
        await self._training.end.before(self._compiled.wait())

    def go_on(self) -> None:
        """See `Source`. From now on, leases follow the algorithm's plan."""
        super().go_on()
        self.pump()

    async def advance(self) -> None:
        """See `Source`."""
        await self._news.wait()
        self._news.clear()

    def stop(self, *, hurry: bool) -> None:
        """See `Source`; workers still get answers."""
        if self._flow is not None:
            self._flow.stop()

    async def finish_update(self) -> None:
        """See `Source`."""
        self.stop(hurry=False)
        if self.updates is not None and self._compiled.is_set():
            self.updates.stop()
            hurry = self._training.end.hurry
            tell = self._training.waits_for_update
            await wait_for_last(self._updates_ended, _UPDATE_WAIT_S, hurry, tell)

    async def settle(self) -> None:
        """See `Source`; afterwards training is paused, even if the iteration was interrupted."""
        await self.compiled()
        self.flow.stand_still()
        while not self.flow.is_still:
            if not await self._training.next_update():
                return

    def set_weights(self, weights: PolicyArrays) -> None:
        """See `Source`."""
        super().set_weights(weights)
        self.pump()

    def ask_for_experience(self) -> None:
        """See `Source`."""
        assert self.updates is not None
        self.updates.updater.wants_experience.set()

    async def close(self, reason: str, *, final: bool) -> None:
        """Say goodbye and end the workers and the update thread; their later messages are
        ignored.
        """
        self.workers.may_be_lost = False
        if self.updates is not None:
            self.updates.stop()
        await end_in_time("the sessions", lambda: self._say_goodbye(reason, final))
        await asyncio.gather(
            self._hang_up(), end_in_time("the workers", lambda: self.workers.stop(_GOODBYE_S))
        )

    def _say_goodbye(self, reason: str, final: bool) -> None:
        try:
            self.session.shutdown(reason, final, time.monotonic())
            self.pump()
        finally:
            self._is_over = True

    async def _hang_up(self) -> None:
        await end_in_time("the connections' tasks", self._tasks.close)
        await end_in_time("the connections", self._endpoint.close)

    def join_updates(self, timeout_s: float) -> None:
        """Wait for the update thread to end; call this from another thread than the loop's."""
        if self.updates is not None:
            self.updates.join(timeout_s)

    # Receiving
    # ----------------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        now = time.monotonic()
        session = self.session
        try:
            message = decode(frames, self._limits) if session.knows(peer) else decode_hello(frames)
        except RemoteProtocolError as error:
            session.bad_frames(peer, error, now)
        else:
            if message is None:
                session.unread(peer, sum(frame.nbytes for frame in frames))
            else:
                host = self._endpoint.host_of(peer) if isinstance(message, Hello) else ""
                has_unsent = isinstance(
                    message, (Hello, SnapshotRequest)
                ) and self._endpoint.has_unsent(peer)
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
        """Report at most one line a minute for each host, since every attempt comes from another
        port.
        """
        said = f"the connection from {event.address or 'a peer'} was {fate}: {event.reason}"
        host = event.address.rpartition(":")[0] or event.address
        self._tell_of(f"connections {fate}", host, said, logging.WARNING, at_most=1)

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

    # Acting and sending
    # ----------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Schedule one `pump` for all messages of this wake-up."""
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Handle the session's events and send its messages. Does nothing after the goodbyes."""
        self._pump_due = False
        if self._is_over:
            return
        events = self.session.events()
        for event in events:
            self.overview.note(event, self.session.version)
            self._handle(event)
        if self._flow is not None:
            self._flow.feed_updates()
        for target, message in self.session.messages_to_send():
            self._say(target, message)
        for event in events:
            if isinstance(event, ev.PeerRejected):  # after the reason was sent
                self._endpoint.drop(event.peer, event.reason)

    def _say(self, target: bytes | None, message: DownMessage) -> None:
        try:
            if message is not self._encoded[0]:  # a heartbeat is one message to all workers
                self._encoded = (
                    message,
                    encode(message, compress=self._compress, limits=self._limits),
                )
        except (
            LocalProtocolError
        ) as error:  # impossible by the bounds on names and texts and the check in `begin`
            kind = type(message).__name__
            self._tell_of(
                "messages that cannot be sent",
                kind,
                f"a {kind} cannot be sent: {error}",
                logging.ERROR,
            )
            return
        if target is BROADCAST:
            self._endpoint.broadcast(self._encoded[1])
        else:
            self._endpoint.send(target, self._encoded[1])

    def _handle(self, event: ev.LearnerEvent) -> None:
        match event:
            case ev.SamplesAccepted():
                self.flow.take(event)
            case ev.WorkerJoined(slot, incarnation, host, pid, local):
                self.flow.publisher.join(incarnation)
                kind = "local worker" if local else "worker"
                self._tell_of(
                    "workers that joined",
                    slot,
                    f"{kind} {slot} joined ({host}, pid {pid})",
                    logging.INFO,
                )
                self._joined.set()
                self.flow.stream()
            case ev.WorkerLost(slot, incarnation, reason, lost_env_steps, host):
                lost = (
                    f"; {lost_env_steps:,} env steps in transit are lost" if lost_env_steps else ""
                )
                said = f"{_named(slot, host)} lost: {reason}{lost}"
                what = (
                    without_numbers(reason) if reason.startswith("failed: ") else None
                )  # already reported
                self._tell_of("workers lost", slot, said, logging.WARNING, what=what, host=host)
                self.flow.publisher.forget(incarnation)
            case ev.WorkerFailed(slot, _, message, text, host):
                said = f"{_named(slot, host)} failed: {message}\n{text}".rstrip()
                what = without_numbers(message)
                self._tell_of(
                    "failures of workers", slot, said, logging.ERROR, what=what, host=host
                )
                self.workers.on_failed(event)
            case ev.LeaseOverdue(slot, fragments, waited_s):
                said = (
                    f"{_named(slot, self.session.host_of(slot))} is alive, but has sent nothing for"
                    f" {waited_s:.0f} s: the {fragments} fragments that it owes are leased to"
                    " others"
                )
                self._tell_of("workers that bring nothing", slot, said, logging.WARNING)
            case ev.StatusRequested(peer, max_bytes):
                most = min(max_bytes, self._limits.max_header_bytes // 2)
                self._say(peer, Status(self.overview.account(self._training, max_bytes=most)))
            case ev.CallReplied(slot, _, ok, result):
                if ok:
                    said = result if isinstance(result, str) else "(no answer)"
                    self._tell_of(
                        "stacks of workers",
                        slot,
                        f"stacks of worker {slot}:\n{said}",
                        logging.WARNING,
                    )

    def _tell_of(
        self,
        kind: str,
        source: object,
        text: str,
        level: int,
        *,
        at_most: int | None = None,
        what: str | None = None,
        host: str = "",
    ) -> bool:
        """Report news about a peer to the user, but not more often than anyone can read.

        ``at_most`` and ``what`` are the arguments of `EventRates.allow`. With a ``host``, the log
        also gets what other hosts' news leave no room for.

        Returns:
            False if the news was only counted or logged.
        """
        now = time.monotonic()
        is_told = self._rates.allow(kind, source, now, at_most=at_most, what=what)
        if is_told:
            self._tell(text, level)
        elif host and self._rates_of_hosts.allow(kind, host, now, what=what and f"{host}: {what}"):
            logger.log(level, "%s", indented(many_lines(text, _MAX_LOGGED)), extra={"shown": True})
        return is_told

    def _tell_of_the_rest(self) -> None:
        left_out = self._rates.take_left_out(time.monotonic())
        if left_out:
            counts = ", ".join(f"{kind}: {count:,}" for kind, count in left_out.items())
            self._tell(f"not shown in the last minute: {counts}", logging.WARNING)

    # Periodic checks
    # ----------------------------------------------------------------------------------------------

    def _look_for_hung_workers(self) -> None:
        """Report workers whose environment does not return, and ask them for their stacks."""
        hung = [worker for worker in self.session.workers if worker.in_env_s >= _HUNG_S]
        for info in hung:
            if info.incarnation not in self._hung:
                said = (
                    f"{_named(info.slot, info.host_elsewhere)}: its environment has not returned"
                    f" for {info.in_env_s:.0f} s; its stacks follow in the log"
                )
                if self._tell_of("environments that hang", info.slot, said, logging.WARNING):
                    self.session.call(info.slot, "stacks", {})
        self._hung = {info.incarnation for info in hung}

    def _look_for_end_of_data(self) -> None:
        workers = self.session.workers if self.session.settings.data_ends else []
        if (
            workers
            and all(worker.state == OUT_OF_DATA for worker in workers)
            and self.flow.is_drained
        ):
            to_come = {*range(1, self._config.num_workers + 1)} - {
                *self.session.slots,
                *self.workers.given_up,
            }
            if not to_come:  # workers still to come have their share to read
                self._training.stop("Done: all stored experience was read.")

    def _look_for_slow_workers(self) -> None:
        """Report workers that get no leases because the policy outruns them, once for each
        registration.
        """
        pacing = self.session.leases.pacing
        slots = set(self.session.slots)
        self._slow &= slots
        for slow in [] if pacing is None else pacing.slow_workers():
            if slow.slot not in self._slow:
                self._slow.add(slow.slot)
                said = (
                    f"worker {slow.slot} is left out because the policy outruns it: it needs"
                    f" {slow.fragment_s:.1f} s for a fragment, about {slow.updates:.0f} updates,"
                    " which is more than max_policy_lag allows. Set a shorter"
                    " rollout_fragment_length or a larger train_batch_size"
                )
                self._tell_of("workers left out", slow.slot, said, logging.INFO)

    # Updates
    # ----------------------------------------------------------------------------------------------

    def _on_update_thread(self, event: UpdateEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle_update, event)

    def _handle_update(self, event: UpdateEvent) -> None:
        if self._is_over:
            return  # too late: the run is saved, and the workers have been sent goodbyes
        training = self._training
        match event:
            case WarmUpDone(took_s):
                self._compiled.set()
                training.compiled_in(took_s)
            case UpdateDone():
                training.take_update(event)
                self.pump()
                self._news.set()
            case UpdatesEnded(num_left, error, batch):
                self.flow.leave_batches(num_left)
                self._updates_ended.set_result(None)
                if batch is not None:
                    self.flow.drop_batch(batch)
                if error is not None:
                    if training.end.has_come:
                        self._tell(
                            f"the last update failed and is left out: {error}", logging.ERROR
                        )
                    training.fail(error)


def _named(slot: int, host: str) -> str:
    """Return a worker's name for people, with its host if that is another one."""
    return f"worker {slot} on {host}" if host else f"worker {slot}"
