"""SyncSampler: samples batches and metrics from environments, policies and filters, in the caller's
thread.

In lockstep, all environments step together and whole columns are written per step (`lockstep.py`).
Otherwise, an `Iteration` takes turns with the environments that are ready: poll, decide, send.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from aiorl.data.fragment import Fragment
from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.env.base_env import TrainingDisabled, as_poll
from aiorl.errors import SamplerDied
from aiorl.sampling.iteration import Iteration, Output
from aiorl.sampling.lockstep import Lockstep
from aiorl.sampling.settings import SamplerSetup

logger = logging.getLogger(__name__)

Batch = SampleBatch | MultiAgentBatch
T = TypeVar("T")

MAX_EPISODES = 100_000
"""Largest number of ended episodes whose metrics wait for ``get_metrics``."""


class TurnGate:
    """Lock that lets another thread change weights or filters while no turn uses them.

    The sampling thread holds it while it works on a turn; other threads request a pause. Each
    thread must pass the queue before it gets the turn, and a thread that waits for the turn holds
    the queue. So the sampling thread cannot overtake a requested pause. A pause requested by the
    sampling thread itself, as in a callback, never blocks.
    """

    def __init__(self) -> None:
        """Make an open gate."""
        self._queue = threading.RLock()
        self._turn = threading.RLock()
        self._inside: int | None = None  # identifier of the thread inside

    def __enter__(self) -> None:
        with self._queue:
            self._turn.acquire()
        self._inside = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._inside = None
        self._turn.release()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keep other threads from working on turns inside this block."""
        if self._inside == threading.get_ident():
            yield
        else:
            with self._queue, self._turn:
                yield


class SyncSampler:
    """Sampler that samples only while ``get_data`` or ``get_fragment`` runs.

    If several threads call at the same time, they get batches one after the other. The outputs of a
    turn are handed out before the policies are evaluated. Weights set in between determine the
    actions for the observations that led to these outputs.

    Attributes:
        on_turn: called between two turns; it can set weights and filter states. If it raises,
            ``get_data`` raises the same error, and the next call continues from there.
        perf: seconds spent so far, by activity; handing out the outputs is excluded.
        lockstep: sampler of all environments in lockstep; None if an Iteration takes turns.
    """

    def __init__(
        self,
        setup: SamplerSetup,
        *,
        lockstep: Lockstep | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to sample; the first ``get_data`` is the first to call the environment.

        Args:
            setup: environments, policies and settings.
            lockstep: the same environments in lockstep, until a step must be left out of the rows;
                None = turn by turn.
            on_turn: see the class.

        Raises:
            UnknownPolicyError: a policy has no preprocessor or filter (also a ValueError).
        """
        self.on_turn = on_turn
        self.perf = PerfStats() if lockstep is None else lockstep.perf
        self._setup = setup
        self.lockstep = lockstep
        self._iteration = Iteration(setup) if lockstep is None else None
        self._gate = TurnGate()
        self._sampling = threading.RLock()
        # bounded, since callers of ``get_data`` may never ask for metrics
        self._metrics: deque[RolloutMetrics] = deque(maxlen=MAX_EPISODES)
        self._outputs: deque[Output] = deque()
        self._must_act = False
        self._is_stopped = False
        self._died: BaseException | None = None
        self._delayed_error: Exception | None = None

    def get_fragment(
        self, on_turn: Callable[[], None] | None
    ) -> tuple[Fragment, EpisodeColumns] | None:
        """Return the next fragment and the episodes that ended since the last one; None unless in
        lockstep.

        A step that must not be trained on ends lockstep for good: the environments restart and are
        polled turn by turn.

        Args:
            on_turn: called between two steps, like the attribute of this name and in its place.

        Raises:
            Exception: see ``get_data``.
        """
        with self._sampling:
            lockstep = self.lockstep
            if lockstep is None:
                return None
            try:
                return lockstep.sample(on_turn), lockstep.take_episodes()
            except TrainingDisabled as error:
                logger.info("%s, so the environments restart and are polled from now on", error)
                self.lockstep = None
                self._iteration = Iteration(self._setup)
                return None

    def get_data(self) -> Batch:
        """Return the next batch of rows ``[B, ...]``; block until it is full.

        Raises:
            ValueError: the environment or a policy broke its contract, or the horizon is above the
                environment's limit.
            SamplerDied: an earlier call raised in the middle of a turn, or the sampler was stopped.
            Exception: the environment, a policy or a callback raised it; batches finished before
                are returned first. After an error of ``poll``, the next call polls again.
        """
        with self._sampling:
            sampled = self.get_fragment(self.on_turn)
            if sampled is not None:
                fragment, episodes = sampled
                pairs = zip(episodes.lengths.tolist(), episodes.rewards.tolist(), strict=True)
                self._metrics.extend(RolloutMetrics(length, reward) for length, reward in pairs)
                return fragment.to_sample_batch()
            while True:
                while not self._outputs:
                    self.advance()
                output = self._outputs.popleft()
                if not isinstance(output, RolloutMetrics):
                    return output
                self._metrics.append(output)

    def get_metrics(self) -> list[RolloutMetrics]:
        """Return the episodes that ended since the last call, with the current perf stats; of more
        than `MAX_EPISODES`, the newest.
        """
        stats = self.perf.get()
        return [item._replace(perf_stats=dict(stats)) for item in _drained(self._metrics)]

    def get_extra_batches(self) -> list[Batch]:
        """Return the batches of rows ``[B, ...]`` that episodes added themselves since the last
        call.
        """
        return [] if self._iteration is None else _drained(self._iteration.extra_batches)

    def take_up_policies(self) -> None:
        """See `Iteration.take_up_policies`; in lockstep, there is only one policy."""
        if self._iteration is not None:
            self._iteration.take_up_policies()

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that keeps other threads from processing observations and evaluating
        policies.
        """
        return self._gate.pause() if self.lockstep is None else self._sampling

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Make ``get_data`` raise from the next turn on; a blocking environment is not interrupted.

        Args:
            timeout_s: longest wait for another thread's ``get_data`` to end, seconds.

        Returns:
            True if sampling has ended.
        """
        self._is_stopped = True
        lockstep = self.lockstep
        if lockstep is not None:
            lockstep.is_stopped = True
        is_over = self._sampling.acquire(timeout=timeout_s)
        if is_over:
            self._sampling.release()
        return is_over

    # --- turns ---

    def advance(self) -> None:
        """Act on the latest observations if this is still due, and take in the next ones.

        Raises:
            SamplerDied: an earlier call raised in the middle of a turn, or the sampler was stopped.
            Exception: the environment, a policy or a callback raised it.
        """
        if self._is_stopped or self._died is not None:
            self._raise_why_it_ended()
        if self.on_turn is not None:
            self.on_turn()
        assert self._iteration is not None, "turns are taken out of lockstep"
        if self._must_act:
            self._act(self._iteration)
        self._observe(self._iteration)

    def take_batches(self) -> list[Batch]:
        """Return the last turn's batches of rows ``[B, ...]`` that have not been handed out,
        without the metrics.
        """
        batches: list[Batch] = []
        for output in _drained(self._outputs):
            if isinstance(output, RolloutMetrics):
                self._metrics.append(output)
            else:
                batches.append(output)
        return batches

    def _raise_why_it_ended(self) -> NoReturn:
        error = self._delayed_error
        self._delayed_error = None
        if error is not None:
            raise error
        if self._died is not None:
            raise SamplerDied(
                "the sampler failed in the middle of a turn and cannot continue"
            ) from self._died
        raise SamplerDied("the sampler was stopped")

    def _observe(self, iteration: Iteration) -> None:
        clock = time.perf_counter
        perf = self.perf
        perf.iters += 1
        began = clock()
        poll = as_poll(iteration.base_env.poll())
        perf.env_wait_time += clock() - began
        try:
            with self._gate:
                entered = clock()
                iteration.observe(poll, self._outputs)
                perf.processing_time += clock() - entered
        except BaseException as error:  # Ctrl-C also leaves a turn unfinished
            self._died = error
            if self._outputs and isinstance(error, Exception):
                # raised as soon as the turn's finished outputs are handed out
                self._delayed_error = error
                return
            raise
        self._must_act = True

    def _act(self, iteration: Iteration) -> None:
        clock = time.perf_counter
        perf = self.perf
        self._must_act = False
        try:
            with self._gate:
                entered = clock()
                actions = iteration.act()
                evaluated = clock()
            perf.inference_time += iteration.inferred_s
            perf.processing_time += evaluated - entered - iteration.inferred_s
            iteration.base_env.send_actions(actions)
            perf.env_wait_time += clock() - evaluated
        except BaseException as error:
            self._died = error
            raise


def _drained(items: deque[T]) -> list[T]:
    """Remove and return all items present; another thread may keep adding some."""
    return [items.popleft() for _ in range(len(items))]
