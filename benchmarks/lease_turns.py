"""Learner that changes the number of fragments a worker may owe in turns.

    python -m benchmarks.lease_turns TURN_S OPTIONS

One run measures all settings of ``outstanding_fragments_per_worker``, so nothing else differs
between them. The wall clock alone decides which setting is in force, so that a reader of the
results can tell, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from unittest.mock import patch

from aiorl.learner import main as learner_main
from aiorl.net.protocol.pacing import Pacing

__all__ = ["SETTINGS", "Turn", "main", "number_of", "setting_of", "turns_of"]

SETTINGS = (1, 3, 8)
_SETTLES = 0.5
"""First share of a turn, which is left out: its train batches were sampled in the turn before."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Outcome of a turn, without its beginning.

    Attributes:
        setting: fragments that one worker may owe.
        rate: env steps trained on per second.
        sampled: env steps that arrived.
        discarded: env steps of these that were not trained on.
        lag: mean policy lag; NaN if there is none.
    """

    setting: int
    rate: float
    sampled: int
    discarded: int
    lag: float


def number_of(at: float, turn_s: float) -> int:
    """Return the number of the turn at a wall-clock time; turns of one round begin at multiples of
    their number.
    """
    return int(at // turn_s)


def setting_of(number: int) -> int:
    """Return the setting of a turn."""
    return SETTINGS[number % len(SETTINGS)]


def turns_of(rows: Iterable[Mapping[str, Any]], turn_s: float) -> dict[int, Turn]:
    """Return the turns of a run by number, from its results; turns with too few results are left
    out.
    """
    late = [row for row in rows if row["timestamp"] % turn_s >= _SETTLES * turn_s]
    found = {}
    for number, several in groupby(late, lambda row: number_of(row["timestamp"], turn_s)):
        of_turn = list(several)
        first, last = of_turn[0], of_turn[-1]
        seconds = last["timestamp"] - first["timestamp"]
        if seconds >= turn_s / 4:
            lags = [lag for row in of_turn if (lag := row["policy_lag"]["mean"]) is not None]
            found[number] = Turn(
                setting_of(number),
                (last["env_steps_trained_total"] - first["env_steps_trained_total"]) / seconds,
                last["ledger"]["sampled"] - first["ledger"]["sampled"],
                sum(last["ledger"]["discarded"].values())
                - sum(first["ledger"]["discarded"].values()),
                sum(lags) / len(lags) if lags else float("nan"),
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Train in turns."""
    turn_s, *words = sys.argv[1:] if argv is None else argv
    updated = Pacing.updated

    def take_turns(pacing: Pacing, waited_s: float, queued: int, now: float) -> None:
        pacing.per_worker = setting_of(number_of(time.time(), float(turn_s)))
        updated(pacing, waited_s, queued, now)

    with patch.object(Pacing, "updated", take_turns):
        return learner_main(words)


if __name__ == "__main__":
    sys.exit(main())
