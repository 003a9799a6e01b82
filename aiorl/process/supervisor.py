"""Supervisor: keeps a set of child processes alive and leaves none behind, within an event loop.

Whatever ends a child, with whatever status, it is started again as `aiorl.process.children` says. A start that fails
for a lack of processes, memory or descriptors is tried again every ten seconds, and does not count.

Children are started by ``exec`` (never forked copies of a process that has loaded TensorFlow or ZeroMQ), in a
session of their own so that a terminal's Ctrl-C reaches only the supervisor, and with a pipe as standard
input that ends when the supervisor does: see ``parent_watch``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiorl.process.children import FAILED, RUN_IS_OVER, TRY_AGAIN_S, Restarts, may_pass
from aiorl.process.tasks import Tasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """Something happened to the child of this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class ChildStarted(ChildEvent):
    """The child runs.

    Attributes:
        pid: its process id.
        restarts: how often it had to be started again in a row.
    """

    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class ChildRestarting(ChildEvent):
    """The child has ended and will be started again after ``wait_s`` seconds."""

    status: int
    restarts: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class ChildGaveUp(ChildEvent):
    """The child has ended, more often than allowed or for good, and stays down."""

    status: int
    restarts: int


@dataclass(frozen=True, slots=True)
class ChildKilled(ChildEvent):
    """The child runs but is of no use: it was killed, ChildRestarting or ChildGaveUp follows."""


@dataclass(slots=True)
class _Child:
    slot: int
    restarts: Restarts
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """Runs one child process per slot until told to stop.

    ``start`` and ``stop`` belong to one task of the event loop; ``on_event`` is called on that loop.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        slots: Sequence[int],
        *,
        max_restarts: int,
        on_failure: Callable[[BaseException], None],
        log_path: Callable[[int], Path] | None = None,
        healthy_after_s: float = 60.0,
        on_event: Callable[[ChildEvent], None] = lambda event: None,
        environment_of: Callable[[int], dict[str, str]] = lambda slot: {},
        has_worked: Callable[[int], bool] = lambda slot: True,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        """Take the command line of each slot.

        Args:
            command: slot -> argument vector, the program first.
            slots: one child each.
            max_restarts: restarts in a row after which a child stays down.
            on_failure: told of an error of the supervisor's own, after which a child is looked after no more.
            log_path: slot -> file its output is appended to; None = this process's own output.
            healthy_after_s: seconds after which the restarts of a running child that has worked are forgotten.
            on_event: told of every start, restart and surrender.
            environment_of: slot -> variables added to this process's own, asked after ``command`` before each start.
            has_worked: slot -> whether its child has done anything of what it is there for, asked when it has ended.
            try_again_s: seconds after which a start is tried again that failed for a lack of processes or the like.
        """
        self._command = command
        self._environment_of = environment_of
        self._has_worked = has_worked
        self._try_again_s = try_again_s
        self._log_path = log_path
        self._on_event = on_event
        self._children = {slot: _Child(slot, Restarts(max_restarts, healthy_after_s=healthy_after_s)) for slot in slots}
        self._tasks = Tasks(on_failure)
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running child by slot."""
        return {
            slot: child.process.pid
            for slot, child in self._children.items()
            if child.process is not None and child.process.returncode is None
        }

    async def start(self) -> None:
        """Start every child; returns once all are running.

        Raises:
            OSError: a program that cannot be started.
        """
        for child in self._children.values():
            await self._spawn(child)
            child.task = self._tasks.start(self._watch(child), f"supervise-{child.slot}")

    async def wait(self) -> None:
        """Return when every child has ended for good."""
        tasks = [child.task for child in self._children.values() if child.task is not None]
        await asyncio.gather(*tasks)

    def kill(self, slot: int) -> None:
        """End a child that runs but is of no use; it is started again like any other that a signal has ended."""
        child = self._children[slot]
        if child.process is not None and child.process.returncode is None:
            self._on_event(ChildKilled(slot))
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()

    async def stop(self, grace_s: float = 2.0) -> None:
        """End every child: wait ``grace_s`` for those that leave by themselves, then SIGTERM, then SIGKILL.

        From the call on, none is started again.
        """
        self._stopping.set()
        for wait_s, number in ((grace_s, signal.SIGTERM), (min(1.0, grace_s), signal.SIGKILL), (5.0, None)):
            running = [c.process for c in self._children.values() if c.process and c.process.returncode is None]
            if not running:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await asyncio.gather(*(process.wait() for process in running))
            for process in running:
                if process.returncode is None and number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(number)
        await self._tasks.close()

    async def _spawn(self, child: _Child) -> None:
        command = list(self._command(child.slot))
        path = self._log_path(child.slot) if self._log_path else None
        with contextlib.ExitStack() as stack:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it while we run
            output = stack.enter_context(path.open("ab")) if path else None
            child.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment_of(child.slot)},
                start_new_session=True,
            )
        self._on_event(ChildStarted(child.slot, child.process.pid, child.restarts.in_a_row))

    async def _watch(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        assert child.process is not None
        began = loop.time()
        status = await child.process.wait()
        while not self._stopping.is_set() and status != RUN_IS_OVER:
            has_worked = self._has_worked(child.slot)
            wait_s = child.restarts.pause_after(status, loop.time() - began, has_worked=has_worked)
            if wait_s is None:
                self._on_event(ChildGaveUp(child.slot, status, child.restarts.in_a_row))
                return
            self._on_event(ChildRestarting(child.slot, status, child.restarts.in_a_row, wait_s))
            await asyncio.sleep(wait_s)
            if self._stopping.is_set():
                return
            began = loop.time()
            try:
                await self._spawn_in_time(child)
            except OSError:
                logger.exception("worker %d could not be started again", child.slot)
                status = FAILED
            else:
                began = loop.time()
                status = await child.process.wait()

    async def _spawn_in_time(self, child: _Child) -> None:
        """Start a child again, as soon as nothing is lacking that may come back."""
        has_said = False
        while not self._stopping.is_set():
            try:
                return await self._spawn(child)
            except OSError as error:
                if not may_pass(error):
                    raise
                if not has_said:
                    has_said = True
                    text = "worker %d can't be started for now (%s); tried again every %g s"
                    logger.warning(text, child.slot, error.strerror, self._try_again_s)
            await asyncio.sleep(self._try_again_s)
