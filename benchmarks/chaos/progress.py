"""Times at which trained steps rose, read from the growing ``result.jsonl`` and compared with
faults.

Times are seconds of the wall clock, as in results. A *life* is the time of one learner process.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ledger import ledger_gap

__all__ = ["SETTLE_S", "Progress", "Row", "Span", "longest_standstill", "standstill", "time_dead"]

SETTLE_S = 1.0
"""A standstill that begins within this time after a fault's end still counts as the fault's."""


_NEVER_COUNTED = ("abandoned by the worker", "malformed")
_RESULTS = 8
"""Consecutive results that must show the same."""
_BATCHES = 3
"""Train batches that are being assembled, queued or trained on."""


@dataclass(frozen=True, slots=True)
class Row:
    """Relevant fields of one result.

    Attributes:
        at: time of the result.
        life: number of the learner process, from 0.
        trained: total of env steps trained on.
        workers: number of workers.
    """

    at: float
    life: int
    trained: int
    workers: int


def _arrived_elsewhere(result: Mapping[str, Any]) -> int:
    """Return the env steps that arrived by the counter and are neither trained, queued nor
    discarded in the ledger.

    It is 0 for a learner that was never resumed; a resume adds the steps that were queued when its
    checkpoint was written.
    """
    ledger = result["ledger"]
    discarded = sum(
        steps for reason, steps in ledger["discarded"].items() if reason not in _NEVER_COUNTED
    )
    return (
        int(result["timesteps_total"])
        - int(ledger["trained"])
        - int(ledger["queued"])
        - int(discarded)
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Time span."""

    begin: float
    end: float

    def meets(self, other: Span) -> bool:
        """Return True if both overlap."""
        return self.begin <= other.end and other.begin <= self.end


class Progress:
    """All results of a run, including those that a resumed learner removes from the file.

    Attributes:
        births: begin of each life; the code that starts learners appends to it.
        rows: results so far.
        rises: times at which trained steps rose.
        gaps: problems of ledgers.
        firsts: life -> its first result.
        left: "discarded" and "lost" -> env steps of the newest result.
    """

    def __init__(self, path: Path, *, fragment_steps: int = 0, batch_steps: int = 0) -> None:
        """Take the path of the file; the file need not exist yet.

        Args:
            path: results file.
            fragment_steps: env steps of a fragment.
            batch_steps: env steps of a train batch; 0 skips the check of queued steps.
        """
        self.births: list[float] = []
        self.rows: list[Row] = []
        self.rises: list[float] = []
        self.gaps: list[str] = []
        self.firsts: dict[int, Mapping[str, Any]] = {}
        self.left: dict[str, int] = {}
        self._fragment_steps, self._batch_steps = fragment_steps, batch_steps
        self._elsewhere = 0
        self._apart: deque[int] = deque(maxlen=_RESULTS)
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> None:
        """Read the results that have come since the last call."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                # a resumed learner has rewritten it
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self.add(json.loads(line))

    def add(self, result: Mapping[str, Any]) -> None:
        """Add a result; skip it if it is not newer than the last, because it was read before."""
        at, last = float(result["timestamp"]), self.rows[-1] if self.rows else None
        if last is not None and at <= last.at:
            return
        row = Row(
            at=at,
            life=max(0, bisect.bisect_right(self.births, at) - 1),
            trained=int(result["env_steps_trained_total"]),
            workers=int(result["num_healthy_workers"]),
        )
        if last is None or row.life != last.life:  # a resumed learner begins at its checkpoint
            has_risen = result["updates_this_iter"] > 0
            self.firsts[row.life] = result
            self._elsewhere = _arrived_elsewhere(result) if row.life else 0
            self._apart.clear()
        else:
            has_risen = row.trained > last.trained
        self.rows.append(row)
        if has_risen:
            self.rises.append(at)
        gaps = [ledger_gap(result["ledger"]), self._astray(result), self._excess(result)]
        self.gaps += [f"result {result['training_iteration']}: {gap}" for gap in gaps if gap]
        self.left = {name: sum(result["ledger"][name].values()) for name in ("discarded", "lost")}

    def _astray(self, result: Mapping[str, Any]) -> str:
        """Return a complaint if the ledger and the counter differ for good; steps in arrival are
        only in the ledger.
        """
        self._apart.append(_arrived_elsewhere(result) - self._elsewhere)
        if len(self._apart) < _RESULTS or min(self._apart) <= 0 <= max(self._apart):
            return ""
        least = min(self._apart, key=abs)
        self._apart.clear()
        return f"{least:+,} env steps arrived and are not in the ledger"

    def _excess(self, result: Mapping[str, Any]) -> str:
        """Return a complaint if the ledger queues more than the existing fragments and train
        batches hold.
        """
        if not self._batch_steps:
            return ""
        waits = (
            int(result["transport"]["queued_fragments"]) * self._fragment_steps
            + _BATCHES * self._batch_steps
        )
        queued = int(result["ledger"]["queued"])
        return (
            f"{queued:,} env steps are queued, but at most {waits:,} can be"
            if queued > waits
            else ""
        )


def standstill(rises: Sequence[float], fault: Span) -> float | None:
    """Return the longest time without a rise from a fault's begin, None while it is still open.

    A standstill counts if it begins before ``SETTLE_S`` after the fault's end; one that began
    before the fault counts from the fault.
    """
    until = fault.end + SETTLE_S
    if not rises or rises[-1] <= until:
        return None
    first, last = bisect.bisect_right(rises, fault.begin), bisect.bisect_right(rises, until)
    return max(b - a for a, b in itertools.pairwise([fault.begin, *rises[first : last + 1]]))


def time_dead(deaths: Sequence[Span], fault: Span) -> float | None:
    """Return how long the learner that a fault ended was dead; None if it does not train again.

    A learner that another fault had ended just before, and that has not trained since, does not die
    again.
    """
    own = next((death for death in deaths if death.end > fault.begin), None)
    return None if own is None else own.end - max(own.begin, fault.begin)


def longest_standstill(rises: Sequence[float], within: Span, left_out: Sequence[Span]) -> float:
    """Return the longest time between two rises, except those that meet a span in ``left_out``; 0
    if there is none.
    """
    first, last = bisect.bisect_left(rises, within.begin), bisect.bisect_right(rises, within.end)
    gaps = [Span(a, b) for a, b in itertools.pairwise(rises[first:last])]
    return max(
        (g.end - g.begin for g in gaps if not any(g.meets(span) for span in left_out)), default=0.0
    )
