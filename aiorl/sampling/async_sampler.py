"""AsyncSampler: a SyncSampler in its own thread, always a few batches ahead."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiorl.data.metrics import PerfStats, RolloutMetrics
from aiorl.errors import ConfigError, SamplerDied, SampleTimeout, described
from aiorl.sampling.sampler import Batch, SyncSampler
from aiorl.sampling.settings import SamplerSetup

logger = logging.getLogger(__name__)

MAX_BATCHES_AHEAD = 5
"""Maximum number of finished batches that wait; then sampling pauses."""
DATA_TIMEOUT_S = 600.0


class AsyncSampler:
    """Sampler that runs in a daemon thread, from ``start`` to ``stop``; its batches can lag behind
    the weights.

    Any thread can call ``get_data``, ``get_metrics`` and ``get_extra_batches``.

    Attributes:
        shutdown: True once the sampler must end.
    """

    def __init__(
        self,
        setup: SamplerSetup,
        *,
        blackhole_outputs: bool = False,
        timeout_s: float = DATA_TIMEOUT_S,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to sample; ``start`` begins.

        Args:
            setup: environments, policies and settings.
            blackhole_outputs: True drops the batches and keeps only metrics.
            timeout_s: time that ``get_data`` waits, seconds.
            on_turn: called in the sampling thread between two turns; it can set weights and filter
                states.

        Raises:
            AssertionError: a filter must not be shared by threads.
            UnknownPolicyError: a policy has no preprocessor or filter (also a ValueError).
        """
        for policy_id, observation_filter in setup.filters.items():
            if not observation_filter.is_concurrent:
                raise AssertionError(
                    f"the observation filter of {policy_id!r} is a"
                    f" {type(observation_filter).__name__}, which must not be shared by threads;"
                    " sample_async needs ConcurrentMeanStdFilter or NoFilter"
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
        """Seconds spent so far, by activity."""
        return self._sampler.perf

    @property
    def is_alive(self) -> bool:
        """True while the thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def get_data(self, timeout_s: float | None = None) -> Batch:
        """Return the next batch of rows ``[B, ...]``, in the order in which they were finished.

        Args:
            timeout_s: longest wait, seconds; None = the constructor's value.

        Raises:
            ConfigError: batches are dropped, so none would ever arrive.
            SampleTimeout: no batch arrived in time (also a TimeoutError).
            SamplerDied: the sampler has ended or must end, and all its batches were returned; its
                error is chained.
            Exception: the error that ended the sampler, raised after the batches that were finished
                before it.
        """
        if self._blackhole:
            raise ConfigError(
                "input_evaluation 'simulation' drops the sampler's batches, so there are none to"
                " read.",
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
        """Return the episodes that ended since the last call, with the current perf stats.

        Raises:
            SamplerDied: an error ended a sampler whose batches are dropped, and all its metrics
                were returned. The error, which would otherwise go unnoticed, is chained.
        """
        metrics = self._sampler.get_metrics()
        if self._blackhole and self._cause is not None and not metrics and not self.shutdown:
            raise SamplerDied(
                "the sampling thread has ended, so there are no more metrics"
            ) from self._cause
        return metrics

    def get_extra_batches(self) -> list[Batch]:
        """Return the batches of rows ``[B, ...]`` that episodes added themselves since the last
        call.
        """
        batches = self._sampler.get_extra_batches()
        return [] if self._blackhole else batches

    def take_up_policies(self) -> None:
        """See `Iteration.take_up_policies`; call this in the sampling thread."""
        self._sampler.take_up_policies()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that keeps the thread from processing observations and evaluating
        policies.
        """
        return self._sampler.paused()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread, even if it waits to hand out a batch; a blocking environment is not
        interrupted.

        Args:
            timeout_s: longest wait for the thread, seconds.

        Returns:
            True if the thread has ended.
        """
        self.end_soon()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_soon(self) -> None:
        """Stop without waiting; safe in a finalizer, in any thread."""
        self.shutdown = True
        # at interpreter exit, a thread that holds it may never run again
        if self._changed.acquire(timeout=1.0):
            self._changed.notify_all()
            self._changed.release()

    # --- the sampling thread ---

    def _run(self) -> None:
        try:
            while not self.shutdown:
                self._sampler.advance()
                self._hand_out(self._sampler.take_batches())
        except BaseException as error:  # SystemExit would also end this thread unnoticed
            self.shutdown = self.shutdown or self._setup.is_abandoned
            self._cause = error
            reported: Any = error
            # another error would end the whole process of the thread that waits for data
            if not isinstance(error, Exception):
                reported = SamplerDied(f"the sampling thread was ended by {described(error)}")
                reported.__cause__ = error
            self._hand_out([reported])
            if not self.shutdown:  # errors from stopping an environment are expected
                raise
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _hand_out(self, batches: Sequence[Batch | Exception]) -> None:
        """Hand out a turn's batches; wait for room for each batch until the sampler must stop."""
        if self._blackhole:
            self._sampler.get_extra_batches()
            return
        with self._changed:
            for batch in batches:
                self._changed.wait_for(
                    lambda: len(self._batches) < MAX_BATCHES_AHEAD or self.shutdown
                )
                if self.shutdown:
                    return
                self._batches.append(batch)
                self._changed.notify_all()
