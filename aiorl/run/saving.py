"""What a checkpoint holds of a run, between two updates: policies, filters, counters, episodes and ledger.

It is written while the run goes on and at its end; `restoring` takes it up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import save_checkpoint
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.algorithm import AlgorithmState
from aiorl.learning.replay.ring import Snapshot
from aiorl.run.build import Learning
from aiorl.run.restoring import RunState, identity_of

if TYPE_CHECKING:
    from aiorl.run.training import Training

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a checkpoint will hold; all of it is of the same moment, between two updates."""

    algorithm: Callable[[], AlgorithmState]
    filters: dict[str, dict[str, NDArray[Any]]]
    run: RunState


class Saver:
    """Saves one run, one checkpoint at a time.

    It keeps what each update led to, and writes that: the next one may take too long to be waited for.

    Attributes:
        newest: path of the newest checkpoint of this session, empty without one.
    """

    def __init__(self, training: Training, learning: Learning) -> None:
        """Write nothing yet.

        Args:
            training: the run that is saved.
            learning: its policies and filters.
        """
        self._run = training
        self._config = config = training.config
        self._learning = learning
        self._awaits_experience = False
        self._writing = asyncio.Lock()
        self._passing: asyncio.Task[None] | None = None
        self._kept: _Content | None = None
        self._saved: _Content | None = None
        self._updates_before = training.counters.updates
        self._acting = ActingState.of(config, learning.worker_part, learning.graphs, learning.spaces).to_tensors()
        self.newest = ""

    def keep(self, state: Callable[[], AlgorithmState], experience: dict[str, Snapshot] | None = None) -> None:
        """Keep the state after an update, to be called as soon as that is accounted for, or before the first one.

        Args:
            state: called if it is written, in any thread.
            experience: policy id -> what is stored, where that was asked for: a checkpoint begins with it.
        """
        run = self._run
        held = RunState(dataclasses.replace(run.counters), {}, run.ledger.as_dict())
        is_first = self._kept is None
        self._kept = _Content(state, run.flow.publisher.filter_states(), held)
        if is_first:  # which the run began with
            self._saved = self._kept
        if experience is not None:
            self._awaits_experience = False
            self._begin(self._kept, experience)

    def save_in_passing(self) -> None:
        """Begin a checkpoint while training goes on, unless one is being written or there was no update yet.

        Where experience is stored, it begins after the next update, which says what is.
        """
        if self._kept is None or not self.has_news or self._awaits_experience:
            return
        if self._passing is not None and not self._passing.done():
            return
        if self._learning.group.stores_experience:
            self._awaits_experience = True
            self._run.source.ask_for_experience()
        else:
            self._begin(self._kept, {})

    def _begin(self, content: _Content, experience: dict[str, Snapshot]) -> None:
        self._passing = self._run.tasks.start(self._save_in_passing(content, experience), "checkpoint")

    @property
    def has_news(self) -> bool:
        """Whether `save_last` would write of an update that this session has made."""
        return self._kept is not None and self._kept.run.counters.updates > self._updates_before

    @property
    def has_unsaved(self) -> bool:
        """Whether what was kept last is in no checkpoint of the run, and not what the run began with."""
        return self._kept is not self._saved

    async def save_last(self, directory: Path | None = None, *, with_experience: bool = True) -> Path:
        """Write a checkpoint of what was kept last, after one that is being written.

        Args:
            directory: other than the run's directory of checkpoints; all that are there stay.
            with_experience: also what is stored, if no update is being made now, which would change it.
        Returns: its path.

        Raises:
            CheckpointError: it cannot be written.
        """
        assert self._kept is not None
        group = self._learning.group
        experience: dict[str, Snapshot] = {}
        if with_experience and group.stores_experience:
            if self._passing is not None and not self._passing.done():  # else it could not read on
                await asyncio.wait([self._passing])
            if self._run.flow.is_idle:
                experience = group.hold_experience()
            else:
                logger.warning("an update is not waited for, so the checkpoint is without stored experience")
        return await self._write(self._kept, experience, directory)

    async def _save_in_passing(self, content: _Content, experience: dict[str, Snapshot]) -> None:
        try:
            await self._write(content, experience)
        except CheckpointError as error:
            self._run.tell(f"{error}; training goes on", logging.ERROR)

    async def _write(self, content: _Content, experience: dict[str, Snapshot], directory: Path | None = None) -> Path:
        """Write it with the results as they are now, so that a resume goes on after the last one reported."""
        async with self._writing:
            self._run.before_checkpoint()
            run = dataclasses.replace(content.run, results=self._run.results.to_state())
            meta = {
                **identity_of(self._config, self._learning),
                "run_id": self._run.directory.run_id,
                **dataclasses.asdict(run),
            }
            try:
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(None, self._write_now, content, experience, meta, directory)
            except RuntimeError:  # Python is ending, and has no threads any more
                written = self._write_now(content, experience, meta, directory)
            else:
                try:
                    written = await asyncio.shield(writing)
                except asyncio.CancelledError:  # the thread writes on, and nobody else may write meanwhile
                    await asyncio.wait([writing])
                    raise
        if directory is None:
            self.newest, self._saved = str(written), content
        logger.info("checkpoint %s", written)
        return written

    def _write_now(
        self, content: _Content, experience: dict[str, Snapshot], meta: dict[str, Any], directory: Path | None
    ) -> Path:
        state = content.algorithm()
        tensors = {f"algorithm/{name}": array for name, array in state.tensors.items()}
        for policy_id, own in content.filters.items():
            tensors.update({f"filter/{policy_id}/{name}": array for name, array in own.items()})
        tensors |= self._acting
        meta = {**meta, "algorithm": state.values}
        if experience:
            meta["experience"] = {policy_id: dict(held.values) for policy_id, held in experience.items()}
        pieces = {policy_id: held.pieces() for policy_id, held in experience.items()}
        keep = None if directory else self._config.checkpoint_keep
        directory = directory or self._run.directory.checkpoints
        try:
            return save_checkpoint(directory, content.run.counters.updates, tensors, meta, keep=keep, pieces=pieces)
        finally:
            for held in experience.values():
                held.close()
