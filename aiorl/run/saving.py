"""Checkpoints of a run between two updates: policies, filters, counters, episodes and ledger.

They are written while the run continues and at its end; `restoring` reads them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import save_checkpoint
from aiorl.config.parts import SavePart
from aiorl.errors import CheckpointError
from aiorl.learning.algorithm import AlgorithmState
from aiorl.learning.replay.ring import Snapshot
from aiorl.process.tasks import Tasks
from aiorl.run.build import Learning
from aiorl.run.core import LearnerCore
from aiorl.run.env_changes import changed, made_changes
from aiorl.run.policy_changes import changes_of
from aiorl.run.ports import TrainingView
from aiorl.run.restoring import RunState, identity_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a checkpoint, all of it from the same moment between two updates."""

    algorithm: Callable[[], AlgorithmState]
    filters: dict[str, dict[str, NDArray[Any]]]
    run: RunState
    policies: _Policies


@dataclass(frozen=True, slots=True)
class _Policies:
    """Facts about the policies of a run: entries of a checkpoint's meta, and data for acting."""

    meta: dict[str, Any]
    acting: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Any], learning: Learning) -> Self:
        """Return the facts about the policies that a run has now."""
        changes = learning.env_changes
        acting = ActingState.of(
            changed(settings, changes), learning.worker_part, learning.graphs, learning.spaces
        )
        meta = {**identity_of(learning), **changes_of(learning), **made_changes(changes)}
        return cls(meta, acting.to_tensors())


class Saver:
    """Saves one run, one checkpoint at a time.

    It keeps the state after each update and writes that one, since the next update may take too
    long to wait for.

    Attributes:
        newest: path of the newest checkpoint of this session; empty if there is none.
    """

    def __init__(
        self,
        training: TrainingView,
        core: LearnerCore,
        learning: Learning,
        ask_for_experience: Callable[[], None],
        *,
        save: SavePart,
    ) -> None:
        """Prepare without writing yet.

        Args:
            training: the run to save.
            core: its filters, totals and ledger.
            learning: its policies.
            ask_for_experience: asks for the stored experience with the next update.
            save: the run's settings, and the number of checkpoints to keep.
        """
        self._run = training
        self._core = core
        self._max_checkpoints = save.keep
        self._learning = learning
        self._ask_for_experience = ask_for_experience
        self._tasks = Tasks(training.fail)
        self._awaits_experience = False
        self._writing = asyncio.Lock()
        self._passing: asyncio.Task[None] | None = None
        self._kept: _Content | None = None
        self._saved: _Content | None = None
        self._saved_iteration = -1
        self._updates_before = training.counters.updates
        self._settings = save.settings
        self._policies = _Policies.of(save.settings, learning)
        self.newest = ""

    def policies_changed(self) -> None:
        """Describe the policies and environments again in later checkpoints; call `keep` next."""
        self._policies = _Policies.of(self._settings, self._learning)

    def keep(
        self, state: Callable[[], AlgorithmState], experience: dict[str, Snapshot] | None = None
    ) -> None:
        """Keep the state after an update. Call this before the first update and as soon as an
        update is accounted for.

        Args:
            state: returns the state; called only if it is written, in any thread.
            experience: policy id -> stored experience, if it was requested; starts a checkpoint.
        """
        core = self._core
        counters = dataclasses.replace(self._run.counters)
        run = RunState(counters, {}, core.session.ledger.as_dict())
        is_first = self._kept is None
        self._kept = _Content(state, core.publisher.filter_states(), run, self._policies)
        if is_first:  # the run began with this state
            self._saved = self._kept
        if experience is not None:
            self._awaits_experience = False
            self._begin(self._kept, experience)

    def save_in_passing(self) -> None:
        """Start a checkpoint while training continues, unless one is being written or there has
        been no update.

        If policies store experience, it starts after the next update, which returns the experience.
        """
        if self._kept is None or not self.has_news or self._awaits_experience:
            return
        if self._passing is not None and not self._passing.done():
            return
        if self._learning.group.stores_experience:
            self._awaits_experience = True
            self._ask_for_experience()
        else:
            self._begin(self._kept, {})

    def _begin(self, content: _Content, experience: dict[str, Snapshot]) -> None:
        saving = self._save_in_passing(content, experience)
        self._passing = self._tasks.start(saving, "checkpoint")

    async def close(self) -> None:
        """End a checkpoint that is being written."""
        await self._tasks.close()

    @property
    def has_news(self) -> bool:
        """True if this session has made an update that `save_last` would write."""
        return self._kept is not None and self._kept.run.counters.updates > self._updates_before

    @property
    def has_unsaved(self) -> bool:
        """True if the state kept last is neither in a checkpoint nor the one the run began with."""
        return self._kept is not self._saved

    async def save_all(self) -> None:
        """Write a checkpoint to the run's directory, unless the newest one holds the same state and
        all results.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self.has_unsaved or self._saved_iteration != self._run.results.training_iteration:
            await self.save_last()

    async def save_last(
        self, directory: Path | None = None, *, with_experience: bool = True
    ) -> Path:
        """Write a checkpoint of the state kept last, after one that is being written.

        Args:
            directory: directory to use instead of the run's directory of checkpoints; none are
                deleted there.
            with_experience: include stored experience, unless an update that would change it is
                running.

        Returns:
            Path of the checkpoint.

        Raises:
            CheckpointError: it cannot be written.
        """
        assert self._kept is not None
        group = self._learning.group
        experience: dict[str, Snapshot] = {}
        if with_experience and group.stores_experience:
            # otherwise it could not continue to read
            if self._passing is not None and not self._passing.done():
                await asyncio.wait([self._passing])
            if self._core.is_idle:
                experience = group.hold_experience()
            else:
                logger.warning(
                    "an update is still running, so the checkpoint does not contain stored"
                    " experience"
                )
        return await self._write(self._kept, experience, directory)

    async def _save_in_passing(self, content: _Content, experience: dict[str, Snapshot]) -> None:
        try:
            await self._write(content, experience)
        except CheckpointError as error:
            self._run.tell(f"{error}; training continues", logging.ERROR)

    async def _write(
        self, content: _Content, experience: dict[str, Snapshot], directory: Path | None = None
    ) -> Path:
        """Write a checkpoint with the current results, so that a resume continues after the last
        one reported.
        """
        async with self._writing:
            self._run.before_checkpoint()
            iteration = self._run.results.training_iteration
            run = dataclasses.replace(content.run, results=self._run.results.to_state())
            meta = {
                **content.policies.meta,
                "run_id": self._run.directory.run_id,
                **dataclasses.asdict(run),
            }

            def write() -> Path:
                return self._write_now(content, experience, meta, directory)

            try:
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(None, write)
            except RuntimeError:  # Python is shutting down and starts no more threads
                written = write()
            else:
                try:
                    written = await asyncio.shield(writing)
                except asyncio.CancelledError:
                    # the thread continues to write, and no one else may write meanwhile
                    await asyncio.wait([writing])
                    raise
        if directory is None:
            self.newest = str(written)
            self._saved = content
            self._saved_iteration = iteration
        logger.info("checkpoint %s", written)
        return written

    def _write_now(
        self,
        content: _Content,
        experience: dict[str, Snapshot],
        meta: dict[str, Any],
        directory: Path | None,
    ) -> Path:
        state = content.algorithm()
        tensors = {f"algorithm/{name}": array for name, array in state.tensors.items()}
        for policy_id, arrays in content.filters.items():
            tensors.update({f"filter/{policy_id}/{name}": array for name, array in arrays.items()})
        tensors |= content.policies.acting
        meta = {**meta, "algorithm": state.values}
        if experience:
            meta["experience"] = {
                policy_id: dict(snapshot.values) for policy_id, snapshot in experience.items()
            }
        pieces = {policy_id: snapshot.pieces() for policy_id, snapshot in experience.items()}
        keep = None if directory else self._max_checkpoints
        directory = directory or self._run.directory.checkpoints
        try:
            return save_checkpoint(
                directory, content.run.counters.updates, tensors, meta, keep=keep, pieces=pieces
            )
        finally:
            for snapshot in experience.values():
                snapshot.close()
