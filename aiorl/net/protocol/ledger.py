"""Where every env step that was ever sampled is now.

    sampled = trained + queued + in flight + discarded (with the reason) + lost (with the reason)

*Sampled* is what workers report, cumulatively, so a lost message changes nothing; *in flight* is reported
and not yet received; *queued* is received and neither trained nor discarded; *lost* is what was in flight
when its incarnation ended, or waited in a learner that is no more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.errors import InternalError, RemoteProtocolError

LEARNER_RESTARTED = "learner restarted"
MAX_FRAGMENT_STEPS = 1 << 24
"""Env steps, and rows, that one fragment may hold, whatever the run; the size of messages bounds most far below."""


@dataclass(slots=True)
class _Account:
    reported: int = 0
    received: int = 0

    @property
    def in_flight(self) -> int:
        return self.reported - self.received


class Ledger:
    """The account of env steps; every method moves them from one place to another.

    Attributes:
        sampled: env steps that workers took.
        trained: of those, learned from.
        queued: of those, in the learner and waiting, a batch in the update included.
        in_flight: of those, not received yet.
        discarded: reason -> env steps.
        lost: reason -> env steps.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.queued = 0
        self.in_flight = 0
        self.discarded: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._accounts: dict[str, _Account] = {}

    def open(self, incarnation: str) -> None:
        """Begin the account of a new incarnation."""
        if incarnation in self._accounts:
            raise InternalError(f"incarnation {incarnation} has an account already")
        self._accounts[incarnation] = _Account()

    def report(self, incarnation: str, sampled_total: int, *, max_in_flight: float = math.inf) -> None:
        """Take over what an incarnation says it has sampled so far; lower figures are old news.

        Args:
            incarnation: whose account it is.
            sampled_total: env steps it has taken so far, but for those that it will never send.
            max_in_flight: env steps that it can have taken and not brought.

        Raises: RemoteProtocolError if it took more than that; nothing is changed then.
        """
        account = self._accounts[incarnation]
        fresh = max(0, sampled_total - account.reported)
        if fresh and account.in_flight + fresh > max_in_flight:
            raise RemoteProtocolError(
                f"claims {sampled_total} env steps sampled, {account.received} of which have arrived, where its leases "
                f"allow {max_in_flight:.0f} on their way",
                field="sampled_total",
            )
        account.reported += fresh
        self.sampled += fresh
        self.in_flight += fresh

    def receive(self, incarnation: str, env_steps: int) -> None:
        """In flight -> queued.

        Raises: RemoteProtocolError if more arrives than was reported; nothing is changed then.
        """
        account = self._accounts[incarnation]
        if env_steps > account.in_flight:
            raise RemoteProtocolError(
                f"{env_steps} env steps arrived where {account.in_flight} were in flight", field="sampled_total"
            )
        account.received += env_steps
        self.in_flight -= env_steps
        self.queued += env_steps

    def train(self, env_steps: int) -> None:
        """Queued -> trained."""
        self._take_queued(env_steps)
        self.trained += env_steps

    def discard(self, reason: str, env_steps: int) -> None:
        """Queued -> discarded."""
        self._take_queued(env_steps)
        self.discarded[reason] += env_steps

    def close(self, incarnation: str, reason: str) -> int:
        """End the account of an incarnation; what it had in flight is lost. Returns how much that was."""
        account = self._accounts.pop(incarnation)
        lost = account.in_flight
        self.in_flight -= lost
        if lost:
            self.lost[reason] += lost
        return lost

    def check(self) -> None:
        """Raise InternalError unless the sum balances and nothing is negative."""
        parts = [self.trained, self.queued, self.in_flight, *self.discarded.values(), *self.lost.values()]
        open_in_flight = sum(account.in_flight for account in self._accounts.values())
        if self.sampled != sum(parts) or min(parts) < 0 or open_in_flight != self.in_flight:
            raise InternalError(f"the ledger does not balance: {self.as_dict()}, open accounts {open_in_flight}")

    def as_dict(self) -> dict[str, Any]:
        """The account for results and checkpoints: ints, and ``discarded`` and ``lost`` by reason."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "queued": self.queued,
            "in_flight": self.in_flight,
            "discarded": dict(self.discarded),
            "lost": dict(self.lost),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Ledger:
        """The account as a resumed learner begins it, from `as_dict`: what was queued or in flight then is lost."""
        ledger = cls()
        ledger.sampled = int(state["sampled"])
        ledger.trained = int(state["trained"])
        ledger.discarded.update({str(reason): int(steps) for reason, steps in state["discarded"].items()})
        ledger.lost.update({str(reason): int(steps) for reason, steps in state["lost"].items()})
        gone = int(state["queued"]) + int(state["in_flight"])
        if gone:
            ledger.lost[LEARNER_RESTARTED] += gone
        ledger.check()
        return ledger

    def _take_queued(self, env_steps: int) -> None:
        if not 0 <= env_steps <= self.queued:
            raise InternalError(f"{env_steps} env steps cannot be taken from {self.queued} queued ones")
        self.queued -= env_steps
