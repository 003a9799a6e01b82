"""Order of faults: the same for the same seed on any machine.

Kinds of one class come in shuffled rounds, so that each occurs about as often as the others. Two
classes keep a distance, because their effects would add up. A kind that silences a worker makes
on-policy training wait until that worker's leases go to others (5 s); several in a row would be
measured as one long standstill. And a learner that is killed again before it trains never shows its
recovery.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Effect", "Planned", "Planner"]

_PAUSE_S = (1.0, 4.0)


class Effect(StrEnum):
    """Effect of a kind of fault on training."""

    PASSING = "passing"
    SILENCES = "silences a worker"
    ENDS_LEARNER = "ends the learner"


_APART_S = {Effect.SILENCES: (18.0, 26.0), Effect.ENDS_LEARNER: (12.0, 24.0)}


@dataclass(frozen=True, slots=True)
class Planned:
    """One planned fault.

    Attributes:
        number: number from 1, over all parts of the run.
        pause_s: seconds after the previous fault.
        kind: name of its kind.
        seed: seed of all its random choices.
    """

    number: int
    pause_s: float
    kind: str
    seed: int


class Planner:
    """Random planner of faults.

    Args:
        effects: kind -> effect on training; at least one.
        seed: seed of the plan and of each fault in it.
    """

    def __init__(self, effects: Mapping[str, Effect], seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds = {
            effect: sorted(kind for kind, e in effects.items() if e is effect) for effect in Effect
        }
        self._rounds: dict[Effect, list[str]] = {effect: [] for effect in Effect}
        self._number = 0

    def part(self, seconds: float, *, learner_ends: bool) -> list[Planned]:
        """Plan the faults of one part of the run.

        Args:
            seconds: how long faults begin.
            learner_ends: include kinds that end the learner.
        """
        allowed = [effect for effect in Effect if self._kinds[effect]]
        if not learner_ends:
            allowed = [effect for effect in allowed if effect is not Effect.ENDS_LEARNER]
        # The first ones come early, so that short runs get them, too.
        due = {
            effect: self._random.uniform(*_APART_S[effect]) / 3
            for effect in allowed
            if effect in _APART_S
        }
        planned: list[Planned] = []
        now = 0.0
        while allowed:
            pause_s = self._random.uniform(*_PAUSE_S)
            now += pause_s
            if now > seconds:
                break
            effect = min(due, key=due.__getitem__, default=Effect.PASSING)
            if Effect.PASSING in allowed and due.get(effect, now + 1) > now:
                effect = Effect.PASSING
            if effect in due:
                due[effect] = now + self._random.uniform(*_APART_S[effect])
            self._number += 1
            planned.append(
                Planned(self._number, pause_s, self._draw(effect), self._random.getrandbits(32))
            )
        return planned

    def _draw(self, effect: Effect) -> str:
        if not self._rounds[effect]:
            self._rounds[effect] = self._random.sample(
                self._kinds[effect], len(self._kinds[effect])
            )
        return self._rounds[effect].pop()
