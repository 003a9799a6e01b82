"""When trained steps rose: read from ``result.jsonl`` as it grows, and measured against faults.

Times are seconds of the wall clock, as results have them; one *life* is the time of one learner process.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ledger import ledger_gap

__all__ = ["SETTLE_S", "Progress", "Row", "Span", "longest_standstill", "standstill"]

SETTLE_S = 1.0
"""A standstill that begins so soon after a fault's end still counts as the fault's."""


@dataclass(frozen=True, slots=True)
class Row:
    """What matters of one result.

    Attributes:
        at: when it was made.
        life: of which learner process, from 0 on.
        trained: env steps trained on in all.
        workers: workers that were there.
    """

    at: float
    life: int
    trained: int
    workers: int


@dataclass(frozen=True, slots=True)
class Span:
    """From one time to another."""

    begin: float
    end: float

    def meets(self, other: Span) -> bool:
        """Whether both have a time in common."""
        return self.begin <= other.end and other.begin <= self.end


class Progress:
    """All results of a run, also those that a resumed learner takes off the file again.

    Attributes:
        births: when each life began; whoever starts learners adds to it.
        rows: results so far.
        rises: when trained steps rose.
        gaps: what was wrong with ledgers.
    """

    def __init__(self, path: Path) -> None:
        """Take the file; it need not be there yet."""
        self.births: list[float] = []
        self.rows: list[Row] = []
        self.rises: list[float] = []
        self.gaps: list[str] = []
        self._path = path
        self._offset = 0
        self._inode = 0

    def read(self) -> None:
        """Take up the results that have come since the last call."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:  # a resumed learner wrote it anew
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
        """Take one result; one that is not newer than the last is left out, for it was there before."""
        at, last = float(result["timestamp"]), self.rows[-1] if self.rows else None
        if last is not None and at <= last.at:
            return
        row = Row(
            at=at,
            life=max(0, bisect.bisect_right(self.births, at) - 1),
            trained=int(result["env_steps_trained_total"]),
            workers=int(result["num_healthy_workers"]),
        )
        if last is None or row.life != last.life:  # a resumed learner begins where its checkpoint was
            has_risen = result["updates_this_iter"] > 0
        else:
            has_risen = row.trained > last.trained
        self.rows.append(row)
        if has_risen:
            self.rises.append(at)
        gap = ledger_gap(result["ledger"])
        if gap:
            self.gaps.append(f"result {result['training_iteration']}: {gap}")


def standstill(rises: Sequence[float], fault: Span) -> float | None:
    """The longest time without a rise from a fault's begin on, None while that is still open.

    Looked at is each standstill that begins before ``SETTLE_S`` after the fault's end; one that began before the
    fault counts from the fault on.
    """
    until = fault.end + SETTLE_S
    if not rises or rises[-1] <= until:
        return None
    first, last = bisect.bisect_right(rises, fault.begin), bisect.bisect_right(rises, until)
    return max(b - a for a, b in itertools.pairwise([fault.begin, *rises[first : last + 1]]))


def longest_standstill(rises: Sequence[float], within: Span, left_out: Sequence[Span]) -> float:
    """The longest time between two rises, but for those that meet a span to be left out; 0 if there are none."""
    first, last = bisect.bisect_left(rises, within.begin), bisect.bisect_right(rises, within.end)
    gaps = [Span(a, b) for a, b in itertools.pairwise(rises[first:last])]
    return max((g.end - g.begin for g in gaps if not any(g.meets(span) for span in left_out)), default=0.0)
