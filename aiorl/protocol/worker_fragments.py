"""What a worker has sampled: fragments that wait to be acknowledged, and the count of env steps."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

from aiorl.protocol.worker_settings import WorkerSettings
from aiorl.wire import messages as m

__all__ = ["SentFragments"]

_MAX_RESEND_WAIT_S = 16.0


class SentFragments:
    """Fragments finished and not acknowledged, in order; one incarnation's, until `reset`.

    Settings are given with each call, since a learner may change them.

    Attributes:
        abandoned_total: env steps of fragments that were given up.
        in_progress: env steps of all unfinished fragments together.
        next_seq: the number the next finished fragment gets.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._unacked: deque[tuple[m.Samples, int]] = deque()
        self.reset(settings)

    def reset(self, settings: WorkerSettings) -> None:
        """Forget all: another incarnation begins."""
        self.next_seq = 1
        self.abandoned_total = self.in_progress = 0
        self._finished = 0
        self._unacked.clear()
        self._bytes = 0
        self._resend_at = float("inf")
        self._resend_wait = settings.resend_after_s

    def __len__(self) -> int:
        return len(self._unacked)

    @property
    def sampled_total(self) -> int:
        """Env steps of this incarnation so far."""
        return self._finished + self.abandoned_total + self.in_progress

    def is_full(self, begun: int, settings: WorkerSettings) -> bool:
        """Whether no other fragment may be begun beside the ``begun`` ones until more is acknowledged."""
        return len(self._unacked) + begun >= settings.max_unacked or self._bytes >= settings.max_unacked_bytes

    def add(self, samples: m.Samples, now: float, settings: WorkerSettings) -> m.Samples:
        """Keep a finished fragment; the message to be sent, with its number and the totals."""
        self._finished += samples.env_steps
        self.in_progress = max(0, self.in_progress - samples.env_steps)
        message = dataclasses.replace(
            samples, seq=self.next_seq, sampled_total=self.sampled_total, abandoned_total=self.abandoned_total
        )
        self.next_seq += 1
        if not self._unacked:
            self._wait_anew(now, settings)
        size = _array_bytes(message)
        self._unacked.append((message, size))
        self._bytes += size
        return message

    def abandon(self, env_steps: int) -> None:
        """Give an unfinished fragment up."""
        self.abandoned_total += env_steps
        self.in_progress = max(0, self.in_progress - env_steps)

    def acked(self, seq: int, now: float, settings: WorkerSettings) -> None:
        """All fragments up to this number have come."""
        unacked = self._unacked
        advanced = False
        while unacked and unacked[0][0].seq <= seq:
            self._bytes -= unacked.popleft()[1]
            advanced = True
        if advanced:
            self._wait_anew(now, settings)

    def is_resend_due(self, now: float) -> bool:
        """Whether fragments have waited for their acknowledgement long enough."""
        return bool(self._unacked) and now >= self._resend_at

    def take_again(self, now: float) -> list[m.Samples]:
        """All unacknowledged fragments, to be sent again; the next time comes twice as late."""
        self._resend_at = now + self._resend_wait
        self._resend_wait = min(2 * self._resend_wait, _MAX_RESEND_WAIT_S)
        return [message for message, _ in self._unacked]

    def _wait_anew(self, now: float, settings: WorkerSettings) -> None:
        self._resend_wait = settings.resend_after_s
        self._resend_at = now + self._resend_wait


def _array_bytes(samples: m.Samples) -> int:
    groups: list[Mapping[str, m.AnyArray]] = [*samples.batches.values(), *samples.filter_deltas.values()]
    return sum(array.nbytes for group in groups for array in group.values())
