"""Ledger of env steps: the current place of every env step ever sampled.

    sampled = trained + queued + in flight + discarded (with the reason) + lost (with the reason)

*Sampled* is the cumulative count that workers report, so a lost message changes nothing. *In
flight* means reported and not yet received; *queued* means received and neither trained nor
discarded. *Lost* means in flight when the incarnation ended, or queued or in flight when the
learner process ended.
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
"""Limit of env steps and of rows in one fragment of any run; the message size limit is usually far
lower."""


@dataclass(slots=True)
class Account:
    """Env steps of one incarnation, as it reported them and as they arrived."""

    reported: int = 0
    received: int = 0

    @property
    def in_flight(self) -> int:
        """Env steps reported and not received yet."""
        return self.reported - self.received


class Ledger:
    """Account of env steps; every method moves steps from one place to another.

    Attributes:
        sampled: env steps that workers took.
        trained: env steps used for training.
        queued: env steps received that wait for training, including the batch being trained on.
        in_flight: env steps reported and not received yet.
        discarded: reason -> env steps.
        lost: reason -> env steps.
        accounts: incarnation -> its account, as long as it is open.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.queued = 0
        self.in_flight = 0
        self.discarded: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.accounts: dict[str, Account] = {}

    def open(self, incarnation: str) -> None:
        """Open the account of a new incarnation."""
        if incarnation in self.accounts:
            raise InternalError(f"incarnation {incarnation} has an account already")
        self.accounts[incarnation] = Account()

    def report(
        self, incarnation: str, sampled_total: int, *, max_in_flight: float = math.inf
    ) -> None:
        """Enter the total that an incarnation reports; a total below an earlier one changes
        nothing.

        Args:
            incarnation: owner of the account.
            sampled_total: env steps it has sampled so far, except those that it will never send.
            max_in_flight: limit of env steps reported and not received.

        Raises:
            RemoteProtocolError: when the report exceeds that limit; the ledger stays unchanged.
        """
        account = self.accounts[incarnation]
        fresh = max(0, sampled_total - account.reported)
        if fresh and account.in_flight + fresh > max_in_flight:
            raise RemoteProtocolError(
                f"claims {sampled_total} env steps sampled, of which {account.received} have"
                f" arrived; its leases allow {max_in_flight:.0f} in flight",
                field="sampled_total",
            )
        account.reported += fresh
        self.sampled += fresh
        self.in_flight += fresh

    def receive(self, incarnation: str, env_steps: int) -> None:
        """Move env steps from in flight to queued.

        Raises:
            RemoteProtocolError: when more arrive than were reported; the ledger stays unchanged.
        """
        account = self.accounts[incarnation]
        if env_steps > account.in_flight:
            raise RemoteProtocolError(
                f"{env_steps} env steps arrived, but only {account.in_flight} were in flight",
                field="sampled_total",
            )
        account.received += env_steps
        self.in_flight -= env_steps
        self.queued += env_steps

    def train(self, env_steps: int) -> None:
        """Move env steps from queued to trained."""
        self._take_queued(env_steps)
        self.trained += env_steps

    def discard(self, reason: str, env_steps: int) -> None:
        """Move env steps from queued to discarded."""
        self._take_queued(env_steps)
        self.discarded[reason] += env_steps

    def close(self, incarnation: str, reason: str) -> int:
        """Close the account of an incarnation, count its steps in flight as lost, and return their
        number.
        """
        account = self.accounts.pop(incarnation)
        lost = account.in_flight
        self.in_flight -= lost
        if lost:
            self.lost[reason] += lost
        return lost

    def check(self) -> None:
        """Check that the places add up and that none is negative.

        Raises:
            InternalError: when they do not.
        """
        parts = [
            self.trained,
            self.queued,
            self.in_flight,
            *self.discarded.values(),
            *self.lost.values(),
        ]
        open_in_flight = sum(account.in_flight for account in self.accounts.values())
        if self.sampled != sum(parts) or min(parts) < 0 or open_in_flight != self.in_flight:
            raise InternalError(
                f"the ledger does not balance: {self.as_dict()}, open accounts {open_in_flight}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the account for results and checkpoints: ints, and ``discarded`` and ``lost`` by
        reason.
        """
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
        """Return the account of a resumed learner from `as_dict`; steps queued or in flight then
        are lost.
        """
        ledger = cls()
        ledger.sampled = int(state["sampled"])
        ledger.trained = int(state["trained"])
        ledger.discarded.update(
            {str(reason): int(steps) for reason, steps in state["discarded"].items()}
        )
        ledger.lost.update({str(reason): int(steps) for reason, steps in state["lost"].items()})
        gone = int(state["queued"]) + int(state["in_flight"])
        if gone:
            ledger.lost[LEARNER_RESTARTED] += gone
        ledger.check()
        return ledger

    def _take_queued(self, env_steps: int) -> None:
        if not 0 <= env_steps <= self.queued:
            raise InternalError(
                f"{env_steps} env steps cannot be taken from {self.queued} queued ones"
            )
        self.queued -= env_steps
