"""AsyncSampler: a thread around a SyncSampler, always a few batches ahead."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiorl.data.metrics import PerfStats, RolloutMetrics
from aiorl.errors import ConfigError, SamplerDied, SampleTimeout
from aiorl.sampling.sampler import Batch, SyncSampler
from aiorl.sampling.settings import SamplerSetup

logger = logging.getLogger(__name__)

MAX_BATCHES_AHEAD = 5
"""Finished batches that wait at most; then sampling waits."""
DATA_TIMEOUT_S = 600.0


class AsyncSampler:
    """Samples in a daemon thread, from ``start`` to ``stop``; what it gives may lag behind the weights.

    ``get_data``, ``get_metrics`` and ``get_extra_batches`` may be called from any thread.
    """

    def __init__(
        self,
        setup: SamplerSetup,
        *,
        blackhole_outputs: bool = False,
        timeout_s: float = DATA_TIMEOUT_S,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """Get ready; ``start`` begins to sample.

        Args:
            setup: what to sample, and how.
            blackhole_outputs: drop batches and keep metrics.
            timeout_s: ``get_data`` waits so long, seconds.
            on_turn: called in the sampling thread between two turns, where it may set weights and filter states.

        Raises:
            AssertionError: a filter that several threads may not use at once.
            UnknownPolicyError: a policy without preprocessor or filter (also a ValueError).
        """
        for policy_id, observation_filter in setup.filters.items():
            if not observation_filter.is_concurrent:
                raise AssertionError(
                    f"the observation filter of {policy_id!r} is a {type(observation_filter).__name__}, which threads "
                    "may not share; sample_async needs ConcurrentMeanStdFilter or NoFilter"
                )
        self._setup = setup
        self._sampler = SyncSampler(setup, on_turn=on_turn)
        self._blackhole = blackhole_outputs
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._batches: deque[Batch | Exception] = deque()
        self._cause: BaseException | None = None
        self._is_over = False
        self.shutdown = False
        self._thread = threading.Thread(target=self._run, name="aiorl-async-sampler", daemon=True)

    @property
    def perf(self) -> PerfStats:
        """Where time went."""
        return self._sampler.perf

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def get_data(self, timeout_s: float | None = None) -> Batch:
        """Return the next batch, in the order they were finished.

        Args:
            timeout_s: wait at most so long, seconds; None = as was given at construction.

        Raises:
            ConfigError: batches are dropped here, so that none would ever come.
            SampleTimeout: none came in time (also a TimeoutError).
            SamplerDied: the sampler has ended or is to end, and all that it left has been given out; its error is
                chained.
            Exception: what ended the sampler, in its turn after the batches that were finished before.
        """
        if self._blackhole:
            raise ConfigError(
                "input_evaluation 'simulation' drops what the sampler yields, so there are no batches to read.",
                key="input_evaluation",
                value="simulation",
                hint="Read stored input only, or leave 'simulation' out.",
            )
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._is_over or self.shutdown, wait_s)
            if not self._batches:
                if self._is_over or self.shutdown:
                    raise SamplerDied("the sampling thread has ended") from self._cause
                raise SampleTimeout(wait_s)
            item = self._batches.popleft()
            self._changed.notify_all()
        if isinstance(item, Exception):
            raise item
        return item

    def get_metrics(self) -> list[RolloutMetrics]:
        """Return episodes that ended since the last call, stamped with the current perf stats.

        Raises:
            SamplerDied: an error ended a sampler whose batches are dropped, which nobody would notice otherwise, and
                the metrics that it left have been given out; its error is chained.
        """
        metrics = self._sampler.get_metrics()
        if self._blackhole and self._cause is not None and not metrics and not self.shutdown:
            raise SamplerDied("the sampling thread has ended, and no more metrics will come") from self._cause
        return metrics

    def get_extra_batches(self) -> list[Batch]:
        """Return batches that episodes added on their own since the last call."""
        extra = self._sampler.get_extra_batches()
        return [] if self._blackhole else extra

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Keep the thread from processing observations and evaluating policies inside this block."""
        return self._sampler.paused()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread, also one that waits for room; an environment that blocks is not interrupted.

        Args:
            timeout_s: wait at most so long for the thread, seconds.
        Returns: the thread has ended.
        """
        self.end_soon()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_soon(self) -> None:
        """Stop without waiting; also from a finalizer, in whichever thread that runs."""
        self.shutdown = True
        if self._changed.acquire(timeout=1.0):  # when the interpreter ends, a thread that holds it never goes on
            self._changed.notify_all()
            self._changed.release()

    # --- the sampling thread ---

    def _run(self) -> None:
        try:
            while not self.shutdown:
                self._sampler.advance()
                self._hand_out(self._sampler.take_batches())
        except BaseException as error:  # SystemExit too would end this thread unseen
            self.shutdown = self.shutdown or self._setup.is_abandoned
            self._cause = error
            told: Any = error
            if not isinstance(error, Exception):  # it would end the whole process of whoever waits for data
                told = SamplerDied(f"the sampling thread was ended by {type(error).__name__}: {error}")
                told.__cause__ = error
            self._hand_out([told])
            if not self.shutdown:  # what stopping an environment brings about is no fault
                raise
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _hand_out(self, batches: Sequence[Batch | Exception]) -> None:
        """Take over what a turn gave; wait for room for each batch until the sampler is told to stop."""
        if self._blackhole:
            self._sampler.get_extra_batches()
            return
        with self._changed:
            for batch in batches:
                self._changed.wait_for(lambda: len(self._batches) < MAX_BATCHES_AHEAD or self.shutdown)
                if self.shutdown:
                    return
                self._batches.append(batch)
                self._changed.notify_all()
