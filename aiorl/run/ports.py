"""Types for the parts of a run that need each other.

Each of them has two implementations, and one contract test for both: updates run in a thread or in
the thread that samples; leases are granted batch by batch or from a budget. Parts that serve a
training, such as sources and observers, know only a `TrainingView` of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiorl.acting.run_dir import RunDirectory
from aiorl.run.build import Learning
from aiorl.run.counters import Counters
from aiorl.run.end import End
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import UpdateDone, Updater
from aiorl.run.report.results import Results

Tell = Callable[[str, int], None]
"""Function that reports news to the user: (text, logging level)."""

Play = Callable[[Path, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Function that plays a checkpoint with the arguments of `aiorl.evaluate` and returns
`Evaluation.to_dict()`."""


class Updates(Protocol):
    """Makes updates, one after the other, in the order of their train batches."""

    updater: Updater

    def submit_nowait(self, batch: AssembledBatch) -> None:
        """Take a train batch without waiting for its update."""

    def stop(self) -> None:
        """Begin no more updates; train batches that wait are left. Can be called again."""


class Grants(Protocol):
    """Decides which leases a run grants, and when."""

    @property
    def merges_on_arrival(self) -> bool:
        """True if filter deltas are merged when fragments arrive, not when they are trained on."""

    def begin_batch(self, version: int, num_begun: int) -> None:
        """Grant what the next train batch needs, at the newest version.

        Args:
            version: version of the newest snapshot.
            num_begun: updates begun and not ended.
        """

    def top_up(self, version: int, num_begun: int) -> None:
        """Grant what there is room for now; the arguments are those of `begin_batch`."""

    def arrived(self) -> None:
        """Record that a fragment was queued."""

    def refused(self) -> None:
        """Record that a fragment could not be used."""

    def outdated(self, slot: int) -> None:
        """Record that a fragment of a worker was too old to be used."""

    def updated(self, wait_s: float, now: float) -> None:
        """Record that an update has ended, for whose train batch the learner waited ``wait_s``
        seconds.
        """


class Saving(Protocol):
    """Writes checkpoints of a run; see `aiorl.run.saving.Saver`."""

    def save_in_passing(self) -> None:
        """Start a checkpoint while training continues."""

    async def save_all(self) -> None:
        """Write a checkpoint, unless the newest one holds everything."""

    async def save_last(
        self, directory: Path | None = None, *, with_experience: bool = True
    ) -> Path:
        """Write a checkpoint of the newest state."""


class TrainingView(Protocol):
    """The part of a training that its sources and observers need; see
    `aiorl.run.training.Training`.
    """

    directory: RunDirectory
    tell: Tell
    end: End

    @property
    def counters(self) -> Counters:
        """Totals of the run."""

    @property
    def results(self) -> Results:
        """Episodes and rates."""

    @property
    def learning(self) -> Learning:
        """Policies, algorithms and filters."""

    @property
    def saver(self) -> Saving:
        """Writer of checkpoints."""

    @property
    def play(self) -> Play | None:
        """Function that plays evaluations in this process; None leaves that to processes."""

    @property
    def status(self) -> str:
        """Current work or wait, before the first update."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last update; 0 before updates are compiled."""

    def stop(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        """End training in an orderly way."""

    def fail(self, error: BaseException) -> None:
        """End training with an error."""

    def begin_saving(self, learning: Learning) -> None:
        """Keep the state that training begins with; called before the first update."""

    def before_checkpoint(self) -> None:
        """Notify observers that a checkpoint will be written."""

    def compiled_in(self, took_s: float) -> None:
        """Take note that the updates are compiled."""

    def update_ended(self, update: UpdateDone) -> None:
        """Keep the state after an update that the core has accounted for."""

    async def compiled(self) -> None:
        """Wait until the updates are compiled."""
