"""What a checkpoint holds of a run, between two updates: policies, filters, counters, episodes and ledger.

It is written while the run goes on and at its end, and taken up by a resume.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.config.schema import CommonConfig
from aiorl.errors import BatchError, CheckpointError, InternalError, PolicyError
from aiorl.learner.build import Learning
from aiorl.learner.checkpoint import Checkpoint, check_compatible, save_checkpoint
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.service import Counters, LearnerService
from aiorl.learner.update_thread import StateTaken, UpdateThread
from aiorl.observation.filters import ObservationFilter
from aiorl.process.tasks import Tasks
from aiorl.protocol.ledger import Ledger
from aiorl.report.results import Progress, Results

__all__ = ["RunState", "Saver", "take_up"]

logger = logging.getLogger(__name__)


def take_up(checkpoint: Checkpoint, config: CommonConfig, learning: Learning) -> None:
    """Give policies and filters back what a checkpoint of the run holds of them; workers get numbers not drawn yet.

    Raises:
        CheckpointError: it is of another run, or does not fit.
    """
    check_compatible(checkpoint, _identity_of(config, learning))
    RunState.apply(checkpoint, learning)
    learning.worker_part = learning.worker_part.model_copy(update={"life": checkpoint.number})


def _identity_of(config: CommonConfig, learning: Learning) -> dict[str, Any]:
    """What a checkpoint has to have in common with the run that resumes from it."""
    return {"env": config.env, "algo": config.algo, "spaces": learning.spaces}


@dataclass(frozen=True, slots=True)
class RunState:
    """Counters, episodes and ledger of a run.

    Attributes:
        counters: totals.
        results: `Results.to_state`.
        ledger: `Ledger.to_state`.
    """

    counters: Counters
    results: dict[str, Any]
    ledger: dict[str, Any]

    def to_meta(self) -> dict[str, Any]:
        """As JSON data, for a checkpoint's meta."""
        return {
            "counters": dataclasses.asdict(self.counters),
            "results": self.results,
            "ledger": self.ledger,
        }

    @classmethod
    def from_meta(cls, checkpoint: Checkpoint) -> RunState:
        """What a checkpoint holds, tried out: whatever takes it up later can.

        Raises:
            CheckpointError: something is missing or makes no sense.
        """
        meta = checkpoint.meta
        try:
            state = cls(Counters(**meta["counters"]), dict(meta["results"]), dict(meta["ledger"]))
            dict(meta["algorithm"])
            _check_counts("counters", meta["counters"])
            _check_counts("ledger", state.ledger)
            _check_counts("results", {name: state.results[name] for name in ("training_iteration", "episodes_total")})
            _check_lists("results", state.results)
            Results(1, 0.0).from_state(state.results, 0.0, Progress(0, 0))
            ledger = Ledger.from_state(state.ledger)
        except KeyError as error:
            raise CheckpointError(checkpoint.path, f"its meta.json lacks what every run has: {error}") from error
        except (TypeError, ValueError, AttributeError, OverflowError, InternalError) as error:
            raise CheckpointError(checkpoint.path, f"its meta.json makes no sense: {error}") from error
        if ledger.trained != state.counters.env_steps_trained:
            raise CheckpointError(
                checkpoint.path,
                f"its meta.json makes no sense: {state.counters.env_steps_trained} env steps were trained on by its "
                f"counters, {ledger.trained} by its ledger",
            )
        for name, array in checkpoint.tensors.items():
            if "/weights/" in name and not np.isfinite(array).all():
                raise CheckpointError(checkpoint.path, f"{name!r:.200} holds numbers that are not finite")
        return state

    @staticmethod
    def apply(checkpoint: Checkpoint, learning: Learning) -> None:
        """Give policies and filters back what the checkpoint holds of them.

        Raises:
            CheckpointError: it does not fit.
        """
        tensors = {
            name.removeprefix("algorithm/"): array
            for name, array in checkpoint.tensors.items()
            if name.startswith("algorithm/")
        }
        states = {
            policy_id: {
                name.removeprefix(f"filter/{policy_id}/"): array
                for name, array in checkpoint.tensors.items()
                if name.startswith(f"filter/{policy_id}/")
            }
            for policy_id in learning.filters
        }
        for policy_id, own in learning.filters.items():
            _check_filter(checkpoint, policy_id, own, states[policy_id])
        try:
            learning.group.set_state(AlgorithmState(tensors, dict(checkpoint.meta["algorithm"])))
        except (PolicyError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            # what an algorithm makes of values that are none of its own
            raise CheckpointError(checkpoint.path, f"its algorithm's state makes no sense: {error!r:.300}") from error
        for policy_id, own in learning.filters.items():
            own.restore(states[policy_id])


@dataclass(frozen=True, slots=True)
class _Content:
    """What a checkpoint will hold; all of it is of the same moment, between two updates."""

    algorithm: Callable[[], AlgorithmState]
    filters: dict[str, dict[str, NDArray[Any]]]
    run: RunState


class Saver:
    """Saves one run, one checkpoint at a time.

    It keeps what each update led to, in case the next one takes too long to be waited for.

    Attributes:
        newest: path of the newest checkpoint of this session, empty without one.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        learning: Learning,
        updates: UpdateThread,
        service: LearnerService,
        results: Results,
        tasks: Tasks,
        *,
        before_writing: Callable[[], None] = lambda: None,
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        """Nothing is written yet.

        Args:
            config: the run's configuration.
            directory: gets the checkpoints.
            learning: what is trained.
            updates: where its state is taken between two updates; `state_taken` is to be called with the answer.
            service: has the filters, the counters and the ledger.
            results: has the episodes.
            tasks: of the run, for checkpoints in passing.
            before_writing: called before each checkpoint, such as to make a directory again that is gone.
            on_error: hears of a checkpoint in passing that could not be written.
        """
        self._config = config
        self._directory = directory
        self._learning = learning
        self._updates = updates
        self._service = service
        self._results = results
        self._tasks = tasks
        self._before_writing = before_writing
        self._on_error = on_error
        self._writing = asyncio.Lock()
        self._waiting: list[asyncio.Future[_Content]] = []
        self._passing: asyncio.Task[None] | None = None
        self._kept: _Content | None = None
        self._updates_before = service.counters.updates
        self._updates_over = False
        self.newest = ""

    def state_taken(self, event: StateTaken) -> None:
        """The update thread's answer."""
        content = self._content_of(lambda: event.state)
        for future in self._waiting:
            if not future.done():
                future.set_result(content)
        self._waiting.clear()

    def keep(self, state: Callable[[], AlgorithmState]) -> None:
        """Keep the state after the update that was accounted for last; `state` is called if it is written."""
        self._kept = self._content_of(state)

    def updates_failed(self) -> None:
        """The update thread has ended without an answer; whoever waits for it goes on with what was kept."""
        self._updates_over = True
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()

    def save_in_passing(self) -> None:
        """Begin a checkpoint while training goes on, unless one is being written."""
        if self._passing is None or self._passing.done():
            self._passing = self._tasks.start(self._save_in_passing(), "checkpoint")

    async def await_last_update(self, wait_s: float, hurry: asyncio.Event, on_wait: Callable[[], None]) -> None:
        """Wait until the running update has ended, which is the last; what it leads to is kept for `save_last`.

        In a hurry, no longer than a little while: what was kept before stays then.

        Args:
            wait_s: the little while.
            hurry: set when, or as soon as, there is no time.
            on_wait: called when it takes longer.
        """
        if self._updates_over:
            return
        self._updates_over = True
        taking = self._tasks.start(self._take(self._updates.request_last_state), "last state")
        hurried = self._tasks.start(hurry.wait(), "hurry")
        try:
            await asyncio.wait([taking], timeout=wait_s)
            if not taking.done() and not hurry.is_set():
                on_wait()
                await asyncio.wait([taking, hurried], return_when=asyncio.FIRST_COMPLETED)
            if taking.done() and not taking.cancelled():
                self._kept = taking.result()
        finally:
            taking.cancel()
            hurried.cancel()

    @property
    def has_news(self) -> bool:
        """Whether `save_last` would write of an update that this session has made."""
        return self._kept is not None and self._kept.run.counters.updates > self._updates_before

    async def save_last(self) -> None:
        """Write a checkpoint of what was kept last, after one that is being written.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._passing is not None and not self._writing.locked():
            self._passing.cancel()  # it waits for a state that is no newer
        assert self._kept is not None
        await self._write(self._kept)

    async def _save_in_passing(self) -> None:
        try:
            await self._write(await self._take(self._updates.request_state))
        except CheckpointError as error:
            self._on_error(error)

    async def _take(self, request: Callable[[], None]) -> _Content:
        future: asyncio.Future[_Content] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        request()
        return await future

    def _content_of(self, state: Callable[[], AlgorithmState]) -> _Content:
        """To be called as soon as the state comes, before anything is done about later updates."""
        service = self._service
        assert service.publisher is not None
        counters = dataclasses.replace(service.counters)
        run = RunState(counters, {}, service.session.ledger.to_state())
        return _Content(state, service.publisher.filter_states(), run)

    async def _write(self, content: _Content) -> None:
        """Write it with the results as they are now, so that a resume goes on after the last one reported."""
        async with self._writing:
            self._before_writing()
            run = dataclasses.replace(content.run, results=self._results.to_state())
            meta = {
                **_identity_of(self._config, self._learning),
                "run_id": self._directory.run_id,
                **run.to_meta(),
            }
            self.newest = str(await asyncio.to_thread(self._write_now, content, meta))
        logger.info("checkpoint %s", self.newest)

    def _write_now(self, content: _Content, meta: dict[str, Any]) -> Path:
        state = content.algorithm()
        tensors = {f"algorithm/{name}": array for name, array in state.tensors.items()}
        for policy_id, own in content.filters.items():
            tensors.update({f"filter/{policy_id}/{name}": array for name, array in own.items()})
        number = content.run.counters.updates
        meta = {**meta, "algorithm": state.values}
        return save_checkpoint(self._directory.checkpoints, number, tensors, meta, keep=self._config.checkpoint_keep)


def _check_counts(where: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all values, those of inner mappings too, are counts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_counts(f"{where}.{name}", value)
        elif type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{f'{where}.{name}'!r:.100} is {value!r:.50}")


def _check_lists(where: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all lists, those of inner mappings too, hold numbers only."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_lists(f"{where}.{name}", value)
        elif isinstance(value, list) and not {type(item) for item in value} <= {int, float}:
            raise ValueError(f"{f'{where}.{name}'!r:.100} holds what is no number")


def _check_filter(
    checkpoint: Checkpoint, policy_id: str, own: ObservationFilter, state: Mapping[str, NDArray[Any]]
) -> None:
    """Refuse a checkpoint that the run's filter can't go on from.

    The policy has learned from filtered observations or from plain ones, and means nothing to the others.

    Raises:
        CheckpointError: it can't.
    """
    if own.is_identity and state:
        raise CheckpointError(
            checkpoint.path,
            f"policy {policy_id!r} was trained on filtered observations, and observation_filter is 'NoFilter' here; "
            "resume with the filter it was trained with, such as 'MeanStdFilter', or start a new run",
        )
    if not own.is_identity and not state:
        raise CheckpointError(
            checkpoint.path,
            f"policy {policy_id!r} was trained on observations as they are, and observation_filter is "
            f"{type(own).__name__!r} here; resume with observation_filter 'NoFilter', or start a new run",
        )
    try:
        own.copy().restore(state)
    except BatchError as error:
        raise CheckpointError(
            checkpoint.path, f"the filter statistics of policy {policy_id!r} do not fit this run: {error}"
        ) from error
