"""One training run from start to end: files, display, workers, stop criteria, checkpoints.

Bind and start workers; TensorFlow loads beside them; resume; warm up; train until a criterion, a signal or an error;
checkpoint; goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, ConfigError
from aiorl.learner.build import Learning, LearningPlan, build_learning
from aiorl.learner.checkpoint import Checkpoint, check_compatible, list_checkpoints, load_newest_valid
from aiorl.learner.publish import Publisher
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.run_files import RunFiles
from aiorl.learner.saving import Saver, identity_of
from aiorl.learner.service import Counters, LearnerService
from aiorl.learner.state import RunState
from aiorl.learner.tf_runtime import prepare_environment
from aiorl.learner.update_thread import (
    StateTaken,
    UpdateDone,
    UpdateEvent,
    UpdateFailed,
    UpdateThread,
    WarmUpDone,
)
from aiorl.learner.worker_failures import WorkerFailures
from aiorl.learner.worker_set import LocalWorkers
from aiorl.process.tasks import Tasks, first_of
from aiorl.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.protocol.ledger import Ledger
from aiorl.report.console import Display, DisplayHandler, Headline, Summary, make_display
from aiorl.report.results import Results
from aiorl.report.system import SystemUsage
from aiorl.text import indented, many_lines
from aiorl.transport.descriptors import raise_open_file_limit
from aiorl.transport.endpoint import EndpointLimits
from aiorl.transport.security import load_learner_keys, reachable_from_elsewhere, reachable_from_here
from aiorl.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.wire.limits import limits_of, max_workers_of

__all__ = ["Outcome", "Run"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5
_END_STEP_S = 10.0
_PACE_S, _PACE_SHARE = 1.0, 0.02
_MAX_EVENT = 24_000  # characters: a failure's sentence and its traceback


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        ok: a stop criterion was met or the user ended it.
        reason: one plain sentence.
        result: the last result, empty if there is none.
    """

    ok: bool
    reason: str
    result: dict[str, Any]


class Run:
    """Runs once. ``request_stop`` may be called at any time on the event loop.

    Attributes:
        is_misconfigured: the run failed at a setting that turned out impossible before anything was trained.
        on_release: called when what was started begins to be ended, which takes half a minute at most.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        display: Display | None = None,
        plan: LearningPlan | None = None,
    ) -> None:
        """Take an open run directory.

        Args:
            config: the effective configuration.
            directory: where the run's files go.
            display: shows the run; None is a live panel, or plain lines, on stdout.
            plan: what was made of the config before, if that was done.
        """
        self._config = config if plan is None else plan.config
        self._plan = plan
        self.is_misconfigured = False
        self.on_release: Callable[[], None] = lambda: None
        self._directory = directory
        self._display = display or make_display(
            Headline(
                config.algo,
                config.env or "",
                config.num_workers,
                config.stop_return,
                config.stop_timesteps,
                config.stop_time_s,
            )
        )
        self._display_logs = DisplayHandler()
        self._display_logs.addFilter(lambda record: not hasattr(record, "shown"))
        self._results = Results(config.metrics_smoothing_episodes, time.monotonic())
        self._usage = SystemUsage() if config.log_sys_usage else None
        self._iteration_began = time.monotonic()
        self._steps_at_iteration = 0
        self._began = time.monotonic()
        self._checkpointed = time.monotonic()
        self._last_result: dict[str, Any] = {}
        self._last_heard = time.monotonic()
        self._files = RunFiles(self._config, directory, self._tell)
        self._saver: Saver | None = None
        self._hurry = asyncio.Event()
        self._status = ""
        self._join_command = ""
        self._warm = False
        self._is_over = False
        self._tasks = Tasks(self._fail)

    # The way through ------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Train until the end; everything started is ended, whatever happens.

        Raises:
            ConfigError: a setting turns out impossible.
            AiorlError: training cannot go on; the newest checkpoint is saved first where there is something to save.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_stray_error)
        self._stopped: asyncio.Future[tuple[bool, str]] = self._loop.create_future()
        self._stopped.add_done_callback(_retrieve)
        updates: UpdateThread | None = None
        workers: LocalWorkers | None = None
        final = False
        reason = "the learner failed"
        try:
            self._display.start(time.monotonic())
            if self._config.stop_time_s is not None:
                time_s = self._config.stop_time_s
                self._loop.call_later(time_s, self._stop, True, f"Done: {time_s:g} s have passed.")
            logging.getLogger().addHandler(self._display_logs)
            prepare_environment(self._config)
            checkpoint = self._checkpoint_to_resume()
            self._make_service(checkpoint)
            self._tasks.start(self._tick(), "display")
            address = self._bind()
            self._directory.save_address(address)
            self._show_how_to_join(address)
            workers = self._workers = self._make_workers()
            await workers.start()
            self._open_files(checkpoint)
            learning = self._learning = await self._until_stopped(self._build(checkpoint))
            updates = self._updates = UpdateThread(
                learning.group,
                self._on_update_thread,
                env_steps_total=self._service.counters.env_steps_trained,
                max_queued=1,
            )
            self._saver = Saver(
                self._config,
                self._directory,
                learning,
                updates,
                self._service,
                self._results,
                self._tasks,
                before_writing=self._files.keep,
                on_error=lambda error: self._tell(f"{error}; training goes on", logging.ERROR),
            )
            updates.start()
            self._say_status("compiling the update")
            self._service.begin(learning, updates, Publisher(learning.filters))
            await self._until_stopped(self._first_workers())
            self._service.grant_leases()
            try:
                ok, reason = await self._stopped
            except Exception:
                await self._save_what_was_learned()
                raise
            final = True
            return await self._finish(ok, reason)
        except _Stopped as stopped:  # before there was anything to save
            final, reason = True, stopped.reason
            return Outcome(stopped.ok, f"{stopped.reason} Nothing was trained yet, so there is nothing to save.", {})
        finally:
            await self._release(updates, workers, reason, final=final)

    def request_stop(self, reason: str) -> None:
        """End the run in an orderly way, within seconds: checkpoint, goodbye, exit status 0."""
        self._hurry.set()
        self._stop(True, reason)

    def _stop(self, ok: bool, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result((ok, reason))
            if hasattr(self, "_service"):
                self._service.stop_training()

    def _fail(self, error: BaseException) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(error)

    def _on_stray_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback has nobody to tell: without this the run would go on as if nothing had happened."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._fail(error)

    async def _until_stopped(self, step: Coroutine[Any, Any, T]) -> T:
        """The result of a step of the start-up, unless the run is stopped before."""
        done = await first_of(step, self._stopped)
        if done is None:
            raise _Stopped(*self._stopped.result())
        return done.result()

    # Start ----------------------------------------------------------------------------------------------------

    def _checkpoint_to_resume(self) -> Checkpoint | None:
        if not self._config.resume:
            return None
        if not list_checkpoints(self._directory.checkpoints):
            self._tell("the run has no checkpoint yet: it starts from the beginning", logging.WARNING)
            return None
        checkpoint = load_newest_valid(self._directory.checkpoints, RunState.from_meta)
        self._tell(f"going on from {checkpoint.path}", logging.INFO)
        return checkpoint

    def _make_service(self, checkpoint: Checkpoint | None) -> None:
        config = self._config
        transport = config.transport
        keys = None if config.keys is None else load_learner_keys(Path(config.keys))
        endpoint_limits = EndpointLimits(
            max_frame_bytes=transport.max_message_bytes,
            max_message_bytes=transport.max_message_bytes,
            send_messages=transport.send_queue_length,
            dead_after_s=transport.heartbeat_timeout_s,
        )
        raise_open_file_limit()
        self._make_endpoint: Callable[[str], ZmqLearnerEndpoint] = lambda bind: ZmqLearnerEndpoint(
            bind, keys=keys, insecure=config.insecure, limits=endpoint_limits
        )
        state = None if checkpoint is None else RunState.from_meta(checkpoint)
        session = LearnerSession(
            self._directory.run_id,
            secrets.token_hex(8),
            LearnerSettings(
                heartbeat_interval_s=transport.heartbeat_interval_s,
                heartbeat_timeout_s=transport.heartbeat_timeout_s,
                build_timeout_s=transport.build_timeout_s,
                max_workers=max_workers_of(limits_of(transport)),
                lease_timeout_s=transport.lease_timeout_s,
                num_workers=config.num_workers,
            ),
            None if state is None else Ledger.from_state(state.ledger),
        )
        self._make_learner: Callable[[ZmqLearnerEndpoint], LearnerService] = lambda endpoint: LearnerService(
            config,
            endpoint,
            session,
            self._results,
            on_event=self._tell,
            on_failure=self._fail,
            on_worker_failed=lambda failed: self._failures.on_failed(failed),
            limits=limits_of(transport),
        )
        self._counters = Counters() if state is None else state.counters
        self._restored = state

    def _bind(self) -> str:
        """Listen where the run listened before the resume if that is free, else where the configuration says."""
        wanted = self._config.bind
        if self._directory.last_address and wanted.endswith(":0"):
            try:
                return self._start_service(self._directory.last_address)
            except ConfigError as error:
                self._tell(f"workers will not find the learner where it was: {error}", logging.WARNING)
        return self._start_service(wanted)

    def _start_service(self, bind: str) -> str:
        endpoint = self._make_endpoint(bind)
        self._worker_keys = endpoint.worker_keys
        service = self._make_learner(endpoint)
        address = service.start()
        self._service = service
        service.counters = self._counters
        self._sampled_before = self._counters.env_steps_sampled
        if self._restored is not None:
            self._results.from_state(self._restored.results, time.monotonic(), service.progress(None))
        return address

    def _open_files(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None or self._restored is None:
            self._files.open()
        else:
            self._files.open(
                resume_iteration=self._results.training_iteration,
                resume_step=self._restored.counters.env_steps_sampled,
            )

    def _show_how_to_join(self, address: str) -> None:
        keys = "" if self._config.keys is None else f" --keys {shlex.quote(self._config.keys)}"
        self._join_command = f"python -m aiorl.worker --connect {reachable_from_elsewhere(address)}{keys}"
        logger.info("more workers join with: %s", self._join_command)
        self._display.join(self._join_command, time.monotonic())

    def _make_workers(self) -> LocalWorkers:
        config, session = self._config, self._service.session
        self._failures = WorkerFailures(
            config,
            self._directory.worker_log,
            tell=self._tell,
            fail=self._fail,
            has_others=lambda slots: any(slot not in slots for slot in (*session.slots, *self._workers.pids)),
            has_sampled=lambda: self._service.counters.env_steps_sampled > self._sampled_before,
        )
        environment = {
            "OMP_NUM_THREADS": str(config.num_cpus_per_worker),
            **config.extra_python_environs_for_worker,
        }
        return LocalWorkers(
            config.num_workers,
            reachable_from_here(self._service.address),
            max_restarts=config.max_worker_restarts,
            keys=self._worker_keys,
            environment=environment,
            log_path=self._directory.worker_log,
            reserve=session.reserve_slot,
            on_ended=lambda worker_id, reason: session.lose_worker_id(worker_id, reason, time.monotonic()),
            on_event=self._failures.on_child,
            on_failure=self._fail,
            registered=lambda: None if self._is_over or self._service.publisher is None else session.slots,
            has_brought=session.has_brought,
        )

    async def _build(self, checkpoint: Checkpoint | None) -> Learning:
        """Load TensorFlow and build, in a daemon thread: a stop during the import need not wait for it."""
        self._say_status("loading TensorFlow and building the model")
        done: asyncio.Future[Learning] = self._loop.create_future()

        def tell(set_it: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_it(value)

        def build() -> None:
            try:
                learning = build_learning(self._config, self._directory.log, self._directory.path, self._plan)
                if checkpoint is not None:
                    assert self._restored is not None
                    check_compatible(checkpoint, identity_of(self._config, learning))
                    self._restored.apply(checkpoint, learning)
            except BaseException as error:
                self._call_soon(tell, done.set_exception, error)
            else:
                self._call_soon(tell, done.set_result, learning)

        threading.Thread(target=build, name="build", daemon=True).start()
        try:
            learning = await done
        except ConfigError:
            self.is_misconfigured = True
            raise
        if self._config.resume:
            self._directory.save_config(self._config)
        if learning.general_reason:
            self._tell(f"workers sample generally: {learning.general_reason}", logging.INFO)
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in learning.seconds.items())
        logger.info("built: %s", spent)
        return learning

    async def _first_workers(self) -> None:
        """Wait for the workers started here, so that a run with a seed always begins with the same ones."""
        wanted = max(1, self._config.num_workers)
        while not await self._service.wait_for_workers(wanted, _SAY_WAITING_S):
            present = len(self._service.session.slots)
            down = len(self._workers.given_up)
            if present and (present + down >= wanted or time.monotonic() - self._began > _JOIN_WAIT_S):
                break
            if not present and self._config.num_workers == 0:
                self._tell(self._service.waiting_for(time.monotonic()), logging.INFO)
            else:
                self._tell(f"waiting for workers: {present} of {wanted} are here", logging.INFO)

    def _say_status(self, text: str) -> None:
        """Say what is waited for, until there is a result."""
        if text != self._status:
            self._status = text
            self._display.status(text, time.monotonic())

    def _status_of_start(self) -> str:
        wanted, present = max(1, self._config.num_workers), len(self._service.session.slots)
        if not self._warm:
            return "compiling the update"
        if self._service.is_granting:
            return "sampling the first train batch"
        return f"the update is compiled; waiting for workers: {present} of {wanted} are here"

    # While it goes --------------------------------------------------------------------------------------------

    def _on_update_thread(self, event: UpdateEvent) -> None:
        self._call_soon(self._handle_update, event)

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call something, from another thread; not any more once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _handle_update(self, event: UpdateEvent) -> None:
        if self._is_over:
            return  # too late: what was trained is saved, and the workers have heard goodbye
        match event:
            case WarmUpDone(took_s):
                self._warm = True
                self._last_heard = time.monotonic()
                logger.info("the update is compiled, in %.1f s", took_s)
            case UpdateDone():
                self._last_heard = time.monotonic()
                self._service.take_update(event)
                try:
                    self._after_update()
                except ConfigError as error:
                    self._fail(error)
                if self._saver is not None:
                    self._saver.keep(event.state)
            case StateTaken():
                if self._saver is not None:
                    self._saver.state_taken(event)
            case UpdateFailed(error, batch):
                if batch is not None:
                    self._service.drop_batch(batch)
                if self._stopped.done():
                    self._tell(f"the last update failed, and is left out: {error}", logging.ERROR)
                if self._saver is not None:
                    self._saver.updates_failed()
                self._fail(error)

    def _after_update(self) -> None:
        now, config, counters = time.monotonic(), self._config, self._service.counters
        reason = self._stop_reason(now)
        grown = counters.env_steps_trained - self._steps_at_iteration
        # Left to itself a run reports often at first and once a second later: curves are fine where they are steep,
        # and the files of long runs stay small
        pace_s = config.min_iter_time_s or min(_PACE_S, _PACE_SHARE * (now - self._began))
        is_due = now - self._iteration_began >= pace_s and grown >= config.timesteps_per_iteration
        if reason:  # the last result is of all updates, those under way included
            self._stop(True, reason)
            return
        if is_due or counters.updates == 1:  # the first at once: it shows that all is well
            self._finish_iteration(now)
        if config.checkpoint_interval_s and now - self._checkpointed >= config.checkpoint_interval_s:
            self._checkpointed = now
            if self._saver is not None:
                self._saver.save_in_passing()

    def _stop_reason(self, now: float) -> str:
        config, counters = self._config, self._service.counters
        if config.stop_return is not None and self._results.has_reached(config.stop_return):
            return f"Solved: mean return {self._results.mean_last():.1f} over the last 100 episodes."
        if config.stop_timesteps is not None and counters.env_steps_trained >= config.stop_timesteps:
            return f"Done: {counters.env_steps_trained:,} env steps were trained on."
        return ""

    def _finish_iteration(self, now: float) -> None:
        perf = self._usage.look() if self._usage is not None else None
        result = self._results.finish_iteration(now, self._service.progress(perf), timestamp=time.time())
        result["run_id"] = self._directory.run_id
        self._iteration_began = now
        self._steps_at_iteration = self._service.counters.env_steps_trained
        self._tell_callbacks(result)
        self._last_result = result
        self._files.write(result)
        self._display.update(result, now)

    def _tell_callbacks(self, result: dict[str, Any]) -> None:
        """Let the user's hook see the result and change it.

        Raises:
            ConfigError: it raised.
        """
        callbacks = self._learning.callbacks
        if callbacks is None:
            return
        try:
            callbacks.on_train_result(trainer=self, result=result)
        except Exception as error:
            # whatever a user's hook raises
            raise ConfigError(
                f"callbacks {self._config.callbacks!r}: on_train_result failed: {error!r:.500}", key="callbacks"
            ) from error

    def _tell(self, text: str, level: int) -> None:
        text = indented(many_lines(text, _MAX_EVENT))  # parts of it may come from a peer or a file
        logger.log(level, "%s", text, extra={"shown": True})
        self._display.event(text, time.monotonic(), level)

    async def _tick(self) -> None:
        said = 0.0
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self._display_logs.drain(self._display, now)
            self._display.tick(now)
            if self._saver is not None and not self._last_result:
                self._say_status(self._status_of_start())
            silent = now - max(self._last_heard, self._began)
            if self._warm and silent > _SAY_WAITING_S and now - said > 3 * _SAY_WAITING_S:
                said = now
                self._tell(f"no update for {silent:.0f} s: {self._service.waiting_for(now)}", logging.WARNING)

    # End ------------------------------------------------------------------------------------------------------

    async def _finish(self, ok: bool, reason: str) -> Outcome:
        await self._await_last_update()
        saver = self._saver
        assert saver is not None
        if self._service.counters.env_steps_trained > self._steps_at_iteration:
            try:
                self._finish_iteration(time.monotonic())
            except ConfigError as error:
                logger.exception("the last iteration is not reported")
                ok, reason = False, str(error)
        if not saver.has_news:
            since = "since the resume" if self._service.counters.updates else "yet"
            return Outcome(ok, f"{reason} Nothing was trained {since}, so there is nothing to save.", {})
        try:
            await saver.save_last()
        except CheckpointError as error:
            ok, reason = False, str(error)
        return Outcome(ok, reason, self._last_result)

    async def _save_what_was_learned(self) -> None:
        """Write a checkpoint although the run has failed; it does so by its own error, not by one of this."""
        self._hurry.set()
        await self._await_last_update()
        assert self._saver is not None
        if self._saver.has_news:
            try:
                await self._saver.save_last()
            except CheckpointError as error:
                self._tell(str(error), logging.ERROR)

    async def _await_last_update(self) -> None:
        """Wait for the running update: in a hurry a little, otherwise to its end."""
        self._service.stop_training()
        if self._warm and self._saver is not None:
            await self._saver.await_last_update(
                _UPDATE_WAIT_S,
                self._hurry,
                lambda: self._tell(
                    "waiting for the last update to end, then its checkpoint is written "
                    "(Ctrl-C: that of the update before it, at once)",
                    logging.INFO,
                ),
            )

    async def _release(
        self,
        updates: UpdateThread | None,
        workers: LocalWorkers | None,
        reason: str,
        *,
        final: bool,
    ) -> None:
        """End all that was started: each step within its time, whatever becomes of the others.

        What the update thread, the workers or the display still have to say comes too late from now on.
        """
        self.on_release()
        self._is_over = True
        if updates is not None:
            updates.stop()
        goodbyes = []
        if hasattr(self, "_service"):
            goodbyes.append(_end("the connections", lambda: self._service.close(reason, final=final)))
        if workers is not None:  # beside the goodbyes: who leaves now is not started again
            goodbyes.append(_end("the workers", lambda: workers.stop(grace_s=_GOODBYE_S)))
        await asyncio.gather(*goodbyes)
        await _end("the run's tasks", self._tasks.close)
        await _end("the files", self._files.close)
        await _end("the display", self._close_display)

    def _close_display(self) -> None:
        logging.getLogger().removeHandler(self._display_logs)
        try:
            self._display_logs.drain(self._display, time.monotonic())
        finally:
            self._display.close()

    def summary(self, outcome: Outcome, picture: str) -> Summary:
        """What to show at the end."""
        directory = shlex.quote(str(self._directory.path))
        if outcome.ok and not outcome.result:
            return Summary(f"{outcome.reason} (run directory: {directory})", "")
        steps = []
        checkpoint = "" if self._saver is None else self._saver.newest
        if checkpoint:
            steps.append(("go on training from here", f"python -m aiorl.learner --resume {directory}"))
        steps.append(("draw the learning curve again", f"python -m aiorl.report.plot {directory}"))
        steps.append(("look at all figures", f"tensorboard --logdir {directory}"))
        steps.append(("add workers while it trains, from any host", self._join_command))
        return Summary(
            reason=outcome.reason,
            run_dir=str(self._directory.path),
            ok=outcome.ok,
            checkpoint=checkpoint,
            picture=picture,
            next_steps=steps,
        )

    def show(self, summary: Summary) -> None:
        """Show the summary after ``run`` has returned."""
        self._display.finish(summary, time.monotonic())


class _Stopped(Exception):
    """The way out of a start-up that was stopped; no error."""

    def __init__(self, ok: bool, reason: str) -> None:
        super().__init__(reason)
        self.ok, self.reason = ok, reason


async def _end(what: str, step: Callable[[], Awaitable[None] | None]) -> None:
    """Take a step of the end: it has its time, and what goes wrong is logged."""
    try:
        async with asyncio.timeout(_END_STEP_S):
            waiting = step()
            if waiting is not None:
                await waiting
    except TimeoutError:
        logger.error("%s could not be ended within %g s", what, _END_STEP_S)
    except Exception:
        logger.exception("%s could not be ended", what)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A failure that nobody came to wait for is still no unretrieved exception."""
    if not future.cancelled():
        future.exception()
