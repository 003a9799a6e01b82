"""SyncSampler: environments polled in the caller's thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from aiorl.data.metrics import PerfStats, RolloutMetrics
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.sampling.gate import TurnGate
from aiorl.sampling.iteration import Iteration
from aiorl.sampling.setup import SamplerSetup
from aiorl.sampling.turns import Turns

__all__ = ["SyncSampler"]

Batch = SampleBatch | MultiAgentBatch


class SyncSampler:
    """Samples from a BaseEnv, only while ``get_data`` is running.

    Of several threads that ask at once, one after the other gets a batch.
    """

    def __init__(self, setup: SamplerSetup, *, on_turn: Callable[[], None] | None = None) -> None:
        """Get ready; the environment is not touched before the first ``get_data``.

        Args:
            setup: what to sample, and how.
            on_turn: called between two turns, where it may set weights and filter states; if it raises,
                ``get_data`` raises the same, and the next call goes on from there.

        Raises:
            UnknownPolicyError: a policy without preprocessor or filter (also a ValueError).
        """
        self._gate = TurnGate()
        self._turns = Turns(Iteration(setup), gate=self._gate, on_turn=on_turn)
        self._sampling = threading.RLock()
        self._metrics: list[RolloutMetrics] = []

    @property
    def perf(self) -> PerfStats:
        """Where time went."""
        return self._turns.perf

    def get_data(self) -> Batch:
        """The next batch; blocks until it is full.

        Raises:
            ValueError: the environment or a policy broke its contract, or the horizon is above the
                environment's limit.
            SamplerDied: an earlier call raised in the middle of a turn, or the sampler was stopped.
            Exception: whatever the environment, a policy or a callback raised, once the batches that were finished
                before have been given.
        """
        with self._sampling:
            while True:
                output = self._turns.next_output()
                if isinstance(output, RolloutMetrics):
                    self._metrics.append(output)
                else:
                    return output

    def get_metrics(self) -> list[RolloutMetrics]:
        """Episodes that ended since the last call, stamped with the current perf stats."""
        metrics, self._metrics = self._metrics, []
        stats = self._turns.perf.get()
        return [item._replace(perf_stats=dict(stats)) for item in metrics]

    def get_extra_batches(self) -> list[Batch]:
        """Batches that episodes added on their own since the last call."""
        return self._turns.take_extra_batches()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Neither observations are processed nor policies evaluated inside this block, by another thread."""
        return self._gate.pause()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Let ``get_data`` raise from the next turn on; an environment that blocks is not interrupted.

        Args:
            timeout_s: wait at most so long for another thread's ``get_data`` to end, seconds.
        Returns: nothing samples any more.
        """
        self._turns.stop()
        is_over = self._sampling.acquire(timeout=timeout_s)
        if is_over:
            self._sampling.release()
        return is_over
