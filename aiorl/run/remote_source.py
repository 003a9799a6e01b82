"""Workers sample, and a thread of its own makes the updates, while the loop goes on receiving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, TypeVar

from aiorl.errors import ConfigError, InternalError
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.security import load_learner_keys, reachable_from_elsewhere
from aiorl.net.transport.system import raise_open_file_limit
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.format import limits_of, max_workers_of
from aiorl.net.wire.messages import PolicyArrays
from aiorl.process.imports import python_path
from aiorl.process.tasks import end_in_time
from aiorl.run.build import Learning
from aiorl.run.local_workers import LocalWorkers, WorkerFailures
from aiorl.run.policy_group import UpdateDone, WarmUpDone
from aiorl.run.report.results import Progress
from aiorl.run.service import LearnerService
from aiorl.run.training import Source, Training, wait_for_last
from aiorl.run.update_thread import UpdateEvent, UpdateFailed, UpdatesEnded, UpdateThread

logger = logging.getLogger(__name__)


T = TypeVar("T")

_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5


class RemoteSource(Source):
    """Worker processes of this host and of others.

    Attributes:
        service: sessions with the workers.
        workers: those that are started here.
    """

    def __init__(self, training: Training) -> None:
        """Listen for workers; to be called on the running loop.

        Args:
            training: the training that is sampled for.

        Raises:
            ConfigError: the address can't be bound, or the keys can't be used.
        """
        super().__init__(training)
        config, directory = training.config, training.directory
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._steps_before = training.counters.env_steps_sampled
        self._failures = WorkerFailures(config, directory.worker_log, tell=training.tell, source=self)
        self.service, address = self._listen()
        self.workers = LocalWorkers(
            config.num_workers,
            address,
            self.service.session,
            max_restarts=config.max_worker_restarts,
            environment={
                **python_path(),
                "OMP_NUM_THREADS": str(config.num_cpus_per_worker),
                **config.extra_python_environs_for_worker,
            },
            log_path=directory.worker_log,
            on_event=self._failures.on_child,
            on_failure=training.fail,
        )
        self._updates: UpdateThread | None = None
        self._updates_ended: asyncio.Future[None] = self._loop.create_future()
        self._compiled = asyncio.Event()
        self._is_over = False

    def _listen(self) -> tuple[LearnerService, str]:
        """Listen where the run listened before a resume if that is free, else at the address of the config.

        Returns: the service, and where workers connect to that the learner starts.
        """
        config, training, last = self._config, self._training, self._training.directory.last_address
        keys = None if config.keys is None else load_learner_keys(Path(config.keys))
        limits = limits_of(config.transport)
        settings = LearnerSettings(
            config.transport, max_workers_of(limits), config.num_workers, data_ends=config.input_epochs is not None
        )
        raise_open_file_limit()
        for bind in [last, config.bind] if last and config.bind.endswith(":0") else [config.bind]:
            endpoint = ZmqLearnerEndpoint(
                bind, keys=keys, insecure=config.insecure, limits=EndpointLimits.of(config.transport)
            )
            service = LearnerService(
                training,
                endpoint,
                LearnerSession(training.directory.run_id, secrets.token_hex(8), settings, training.ledger),
                on_worker_failed=self._failures.on_failed,
                on_out_of_data=self._on_out_of_data,
                limits=limits,
            )
            try:
                service.start()
            except ConfigError as error:
                if bind == config.bind:
                    raise
                self._tell(f"workers will not find the learner where it was: {error}", logging.WARNING)
            else:
                return service, endpoint.local_address
        raise InternalError("there is no address to listen on")

    @property
    def join_command(self) -> str:
        """See `Source`."""
        keys = "" if self._config.keys is None else f" --keys {shlex.quote(self._config.keys)}"
        return f"python -m aiorl.worker --connect {reachable_from_elsewhere(self.service.address)}{keys}"

    @property
    def status(self) -> str:
        """See `Source`."""
        if not self._compiled.is_set():
            return "compiling the update"
        if self.flow.is_granting:
            return "sampling the first train batch"
        present, wanted = len(self.service.session.slots), max(1, self._config.num_workers)
        return f"the update is compiled; waiting for workers: {present} of {wanted} are here"

    def waiting_for(self) -> str:
        """See `Source`."""
        said = self.service.waiting_for(self.join_command)
        if self.service.session.slots or self._config.num_workers:
            return said
        return f"{said} (with num_workers: 0 and bind, this run starts none; without bind, this process samples)"

    def progress(self, perf: dict[str, float] | None) -> Progress:
        """See `Source`."""
        return self.service.progress(perf)

    # Life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers; their processes load while the model is built.

        Raises:
            ConfigError: the run directory can't be written.
            OSError: a worker can't be started.
        """
        self._training.directory.save_address(self.service.address)
        await self.workers.start()

    async def build(self, step: Callable[[], T]) -> T:
        """See `Source`; in a daemon thread: a stop during the import of TensorFlow need not wait for it."""
        done: asyncio.Future[T] = self._loop.create_future()

        def settle(set_it: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_it(value)

        def build() -> None:
            try:
                built = step()
            except BaseException as error:
                self._call_soon(settle, done.set_exception, error)
            else:
                self._call_soon(settle, done.set_result, built)

        threading.Thread(target=build, name="build", daemon=True).start()
        return await done

    async def begin(self, learning: Learning) -> None:
        """Admit workers, begin to compile the update, and wait for the workers that are started here.

        So a run with a seed always begins with the same ones.

        Raises:
            ConfigError: what workers need to know is larger than messages may be.
        """
        updates = self._updates = UpdateThread(
            learning.group,
            self._on_update_thread,
            env_steps_total=self._training.counters.env_steps_trained,
            max_queued=1,
            publish_every=learning.lease_plan.publish_every,
            publish_interval_s=learning.lease_plan.publish_interval_s,
        )
        self._flow = self.service.begin(learning, updates)
        self._training.begin_saving(learning)
        self.workers.may_be_lost = True
        updates.start()
        wanted = max(1, self._config.num_workers)
        while not await self.service.wait_for_workers(wanted, _SAY_WAITING_S):
            present = len(self.service.session.slots)
            down = len(self.workers.given_up)
            if present and (present + down >= wanted or time.monotonic() - self._began > _JOIN_WAIT_S):
                break
            if not present and self._config.num_workers == 0:
                self._tell(self.waiting_for(), logging.INFO)
            else:
                self._tell(f"waiting for workers: {present} of {wanted} are here", logging.INFO)

    async def compiled(self) -> None:
        """See `Source`."""
        await self._training.end.before(self._compiled.wait())

    def go_on(self) -> None:
        """See `Source`."""
        self.service.go_on()

    async def advance(self) -> None:
        """See `Source`."""
        await self._news.wait()
        self._news.clear()

    def stop(self, *, hurry: bool) -> None:
        """See `Source`."""
        self.service.stop_training()

    async def finish_update(self) -> None:
        """See `Source`."""
        self.service.stop_training()
        if self._updates is not None and self._compiled.is_set():
            self._updates.stop()
            hurry, tell = self._training.end.hurry, self._training.waits_for_update
            await wait_for_last(self._updates_ended, _UPDATE_WAIT_S, hurry, tell)

    async def settle(self) -> None:
        """See `Source`; training stands still, also after an iteration that was broken off."""
        await self.compiled()
        self.flow.stand_still()
        while not self.flow.is_still:
            if not await self._training.next_update():
                return

    def set_weights(self, weights: PolicyArrays) -> None:
        """See `Source`."""
        self.service.set_weights(weights)

    def ask_for_experience(self) -> None:
        """See `Source`."""
        assert self._updates is not None
        self._updates.ask_for_experience()

    async def close(self, reason: str, *, final: bool) -> None:
        """Say goodbye, end the workers and the thread of updates; what they still have to say comes too late."""
        self._is_over = True
        self.workers.may_be_lost = False
        if self._updates is not None:
            self._updates.stop()
        await asyncio.gather(  # who leaves now is not started again
            end_in_time("the connections", lambda: self.service.close(reason, final=final)),
            end_in_time("the workers", lambda: self.workers.stop(grace_s=_GOODBYE_S)),
        )

    def join_updates(self, timeout_s: float) -> None:
        """Wait for the thread of updates to end; to be called from another thread than the loop's."""
        if self._updates is not None:
            self._updates.join(timeout_s)

    # What workers do --------------------------------------------------------------------------------------------

    def has_sampled(self) -> bool:
        """Return whether any worker has brought a fragment."""
        return self._training.counters.env_steps_sampled > self._steps_before

    def has_others(self, slots: Container[int]) -> bool:
        """Return whether any worker of another slot than these is registered or runs."""
        return any(slot not in slots for slot in (*self.service.session.slots, *self.workers.pids))

    def fail(self, error: BaseException) -> None:
        """End the training with an error."""
        self._training.fail(error)

    def _on_out_of_data(self) -> None:
        """End, unless a local worker is to come (again), which has its share still to read."""
        here = {*self.service.session.slots, *self.workers.given_up}
        if here.issuperset(range(1, self._config.num_workers + 1)):
            self._training.stop("Done: all stored experience was read.")

    # Updates ----------------------------------------------------------------------------------------------------

    def _on_update_thread(self, event: UpdateEvent) -> None:
        self._call_soon(self._handle_update, event)

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call something, from another thread; not any more once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _handle_update(self, event: UpdateEvent) -> None:
        if self._is_over:
            return  # too late: what was trained is saved, and the workers have heard goodbye
        training = self._training
        match event:
            case WarmUpDone(took_s):
                self._compiled.set()
                training.compiled_in(took_s)
            case UpdateDone():
                training.take_update(event)
                self.service.pump()
                self._news.set()
            case UpdatesEnded(num_left):
                self.flow.leave_batches(num_left)
                self._updates_ended.set_result(None)
            case UpdateFailed(error, batch):
                if batch is not None:
                    self.flow.drop_batch(batch)
                if training.end.has_come:
                    self._tell(f"the last update failed, and is left out: {error}", logging.ERROR)
                self._updates_ended.set_result(None)
                training.fail(error)
