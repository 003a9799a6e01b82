"""Workers that have missed a snapshot, and the order in which they get a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aiorl.net.protocol.rates import Allowance
from aiorl.net.protocol.roster import Worker

_AT_ONCE = 64
_PER_S = 64.0
"""Limit of the whole snapshots sent to workers that ask for one, over all connections. If many miss
a broadcast together, the next one is whole, too."""
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 8.0
"""Limits of the seconds before a worker gets another snapshot although it has not used the last one.
They double each time. A worker of ours waits longer between its requests."""


class MissedSnapshots:
    """Workers in line for a whole snapshot, first in, first out; each has one place.

    Attributes:
        line: worker in line -> the version that it has.
    """

    def __init__(self) -> None:
        """Begin without workers."""
        self.line: dict[Worker, int] = {}
        self._allowance = Allowance(_AT_ONCE, _PER_S)
        self._answers: dict[Worker, _Answer] = {}

    @property
    def by_many(self) -> bool:
        """True if workers wait for the answer to a first request, so that the next broadcast should
        be whole.
        """
        return any(not self._has_lost_answer(worker) for worker in self.line)

    def ask(self, worker: Worker, have_version: int, now: float) -> bool:
        """Put a worker in line, unless it is in line or asks again too soon.

        Args:
            worker: the worker.
            have_version: its version, below the newest one.
            now: the time in seconds.

        Returns:
            False if its request serves no purpose.
        """
        answer = self._answers.setdefault(worker, _Answer())
        if worker in self.line or (have_version < answer.version and now < answer.again_at):
            return False
        if have_version >= answer.version:
            answer.wait_s = _FIRST_WAIT_S
        self.line[worker] = have_version
        return True

    def take(self, version: int, cost: float, now: float) -> Iterator[Worker]:
        """Remove and yield the workers that get a snapshot now.

        Args:
            version: version of the snapshot.
            cost: its cost; 1 is that of a small one.
            now: the time in seconds.
        """
        while self.line and self._allowance.take(now, min(_AT_ONCE, cost)):
            worker = next(iter(self.line))
            self._answer(worker, version, now)
            yield worker

    def broadcast(self, version: int, now: float) -> None:
        """Note that a whole snapshot was broadcast: it answers the workers in line, except those
        that have already lost an answer.
        """
        for worker in list(self.line):
            if not self._has_lost_answer(worker):
                self._answer(worker, version, now)

    def leave(self, worker: Worker) -> None:
        """Remove a worker from the line, because it gets a snapshot or has no connection."""
        self.line.pop(worker, None)

    def forget(self, worker: Worker) -> None:
        """Forget a lost worker."""
        self.leave(worker)
        self._answers.pop(worker, None)

    def _has_lost_answer(self, worker: Worker) -> bool:
        return self.line[worker] < self._answers[worker].version

    def _answer(self, worker: Worker, version: int, now: float) -> None:
        answer = self._answers[worker]
        answer.version = version
        answer.again_at = now + answer.wait_s
        answer.wait_s = min(2 * answer.wait_s, _MAX_WAIT_S)
        self.leave(worker)


@dataclass(slots=True)
class _Answer:
    """The last snapshot that a worker got for a request.

    Attributes:
        version: its version, -1 for none.
        again_at: time from which the worker gets another one if it doesn't have this version.
        wait_s: seconds from the next answer to the one after it.
    """

    version: int = -1
    again_at: float = float("-inf")
    wait_s: float = _FIRST_WAIT_S
