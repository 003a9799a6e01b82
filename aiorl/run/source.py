"""Sources: what drives the learner's core, with workers elsewhere or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from aiorl.acting.filters import ObservationFilter
from aiorl.net.protocol.roster import Worker
from aiorl.net.transport.endpoint import EndpointStats
from aiorl.net.wire.messages import Arrays, PolicyArrays, Snapshot
from aiorl.run.build import Learning
from aiorl.run.core import LearnerCore
from aiorl.run.overview import Overview
from aiorl.run.ports import Play, Updates
from aiorl.run.sampler_calls import SamplerCalls
from aiorl.run.worker.sampler_unit import SamplerUnit

T = TypeVar("T")


class Source(Protocol):
    """Drives the learner's core: it passes messages to the core and carries out its effects.

    `RemoteSource` has worker processes, and a thread for updates. `LocalSource` samples and updates
    in the caller's thread. A source calls `TrainingView.compiled_in` once,
    `TrainingView.update_ended` after each update, and `TrainingView.stop` when all stored experience
    has been read.

    Attributes:
        core: the learner's core.
        updates: makes the updates; None before `begin`.
        overview: the account of the run.
        play: plays a checkpoint for an evaluation; None leaves that to separate processes.
        news: set when something has happened that `advance` waits for.
    """

    core: LearnerCore
    updates: Updates | None
    overview: Overview
    news: asyncio.Event
    play: Play | None = None

    # Questions
    # ----------------------------------------------------------------------------------------------

    @property
    def join_command(self) -> str:
        """Command with which a worker joins from any host; empty if no worker can join."""
        return ""

    @property
    def calls(self) -> SamplerCalls | None:
        """Calls of methods of worker processes; None if there are none."""
        return None

    @property
    def status(self) -> str:
        """Current work or wait, before the first update."""

    def waits_for_others(self) -> bool:
        """Return whether sampling waits for others than this run, such as clients who play."""

    def waiting_for(self) -> str:
        """Return the reason why nothing happens, in plain words."""

    def workers(self) -> Sequence[Worker]:
        """Return the registered worker processes, read-only."""

    def traffic(self) -> EndpointStats:
        """Return statistics of the connections."""

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything that does not need the model."""

    async def build(self, step: Callable[[], T]) -> T:
        """Return the result of a step that loads TensorFlow and builds the model."""

    async def begin(self, learning: Learning) -> None:
        """Publish the first snapshot, and return when sampling can begin.

        Raises:
            ConfigError: a setting turns out impossible.
        """

    async def add_workers(self, count: int) -> None:
        """Start more worker processes on this host, and wait until they are registered.

        Raises:
            ConfigError: this run has no worker processes, or no room for them.
            WorkerError: one of them ended again and again.
            OSError: a process could not be started.
        """

    async def compiled(self) -> None:
        """Wait until the updates are compiled."""

    def pump(self) -> None:
        """Carry out the effects of the core."""

    async def advance(self) -> None:
        """Wait for an update or for news; can return sooner.

        Raises:
            Exception: sampling or an update in the caller's thread failed.
        """

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with weights that do not come from an update.

        No update may be in work; training is paused afterwards.
        """

    def change_policies(
        self,
        policies: Arrays,
        weights: PolicyArrays,
        filters: Mapping[str, ObservationFilter],
    ) -> None:
        """Publish policies that were added to the run's, and remove others.

        No update may be in work; training is paused afterwards.

        Args:
            policies: policy id -> packed policy, see `Snapshot`.
            weights: weights of the new policies.
            filters: filters of all policies from now on.
        """

    def check_room(self, snapshot: Snapshot) -> None:
        """Check that a message has room for a whole snapshot and everything else that workers need.

        Raises:
            ConfigError: it does not.
        """

    def hold(self) -> None:
        """Begin no updates while the training is not waited for; those in work can still end."""

    def stop(self) -> None:
        """Stop for good: begin no updates and add nothing to results."""

    async def finish_update(self) -> None:
        """Wait for the running update, the last one: in a hurry for a short while, otherwise until
        it ends.
        """

    async def close(self, reason: str, *, final: bool) -> None:
        """End everything that samples and learns."""

    def join(self, timeout_s: float) -> None:
        """Wait for threads to end after `close`; call this from another thread than the loop's."""

    # For trainers
    # ----------------------------------------------------------------------------------------------

    def ask_for_experience(self) -> None:
        """Ask for the stored experience with the next update."""
        assert self.updates is not None
        self.updates.updater.wants_experience.set()

    async def sampler_here(self) -> SamplerUnit | None:
        """Return the sampler in this process, with the newest snapshot; None if workers sample.

        Raises:
            EnvError: the environment's constructor failed.
        """
        return None

    async def begin_episodes_anew(self) -> None:
        """Continue after a checkpoint like a run restored from it, as far as possible."""

    def interrupt(self) -> None:
        """Make `advance` return as soon as the current step has ended, if it runs in the caller's
        thread.
        """
