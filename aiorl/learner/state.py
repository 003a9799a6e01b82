"""What of a run, besides the algorithm's own state, a checkpoint holds and a resume restores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.errors import CheckpointError
from aiorl.learner.build import Learning
from aiorl.learner.checkpoint import Checkpoint
from aiorl.learner.service import Counters

__all__ = ["RunState"]


@dataclass(frozen=True, slots=True)
class RunState:
    """Counters, episodes and ledger of a run.

    Attributes:
        counters: totals.
        results: `Results.to_state`.
        ledger: `Ledger.to_state`.
    """

    counters: Counters
    results: dict[str, Any]
    ledger: dict[str, Any]

    def to_meta(self) -> dict[str, Any]:
        """As JSON data, for a checkpoint's meta."""
        return {
            "counters": dataclasses.asdict(self.counters),
            "results": self.results,
            "ledger": self.ledger,
        }

    @classmethod
    def from_meta(cls, checkpoint: Checkpoint) -> RunState:
        """What a checkpoint holds.

        Raises:
            CheckpointError: something is missing.
        """
        try:
            meta = checkpoint.meta
            return cls(Counters(**meta["counters"]), dict(meta["results"]), dict(meta["ledger"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(checkpoint.path, f"its meta.json lacks what every run has: {error}") from error

    @staticmethod
    def apply(checkpoint: Checkpoint, learning: Learning) -> None:
        """Give policies and filters back what the checkpoint holds of them.

        Raises:
            CheckpointError: it does not fit.
        """
        tensors = {
            name.removeprefix("algorithm/"): array
            for name, array in checkpoint.tensors.items()
            if name.startswith("algorithm/")
        }
        learning.group.set_state(AlgorithmState(tensors, dict(checkpoint.meta.get("algorithm", {}))))
        for policy_id, own in learning.filters.items():
            prefix = f"filter/{policy_id}/"
            state = {
                name.removeprefix(prefix): array
                for name, array in checkpoint.tensors.items()
                if name.startswith(prefix)
            }
            if state and not own.is_identity:
                own.restore(state)
