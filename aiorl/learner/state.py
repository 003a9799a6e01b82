"""What of a run, besides the algorithm's own state, a checkpoint holds and a resume restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.errors import BatchError, CheckpointError
from aiorl.learner.build import Learning
from aiorl.learner.checkpoint import Checkpoint
from aiorl.learner.service import Counters
from aiorl.observation.filters import ObservationFilter

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
        states = {
            policy_id: {
                name.removeprefix(f"filter/{policy_id}/"): array
                for name, array in checkpoint.tensors.items()
                if name.startswith(f"filter/{policy_id}/")
            }
            for policy_id in learning.filters
        }
        for policy_id, own in learning.filters.items():
            _check_filter(checkpoint, policy_id, own, states[policy_id])
        learning.group.set_state(AlgorithmState(tensors, dict(checkpoint.meta.get("algorithm", {}))))
        for policy_id, own in learning.filters.items():
            own.restore(states[policy_id])


def _check_filter(
    checkpoint: Checkpoint, policy_id: str, own: ObservationFilter, state: Mapping[str, NDArray[Any]]
) -> None:
    """Nothing, where the run's filter can go on from what the checkpoint holds of it.

    The policy has learned from filtered observations or from plain ones, and means nothing to the others.

    Raises:
        CheckpointError: it can't.
    """
    if own.is_identity and state:
        raise CheckpointError(
            checkpoint.path,
            f"policy {policy_id!r} was trained on filtered observations, and observation_filter is 'NoFilter' here; "
            "resume with the filter it was trained with, such as 'MeanStdFilter', or start a new run",
        )
    if not own.is_identity and not state:
        raise CheckpointError(
            checkpoint.path,
            f"policy {policy_id!r} was trained on observations as they are, and observation_filter is "
            f"{type(own).__name__!r} here; resume with observation_filter 'NoFilter', or start a new run",
        )
    try:
        own.copy().restore(state)
    except BatchError as error:
        raise CheckpointError(
            checkpoint.path, f"the filter statistics of policy {policy_id!r} do not fit this run: {error}"
        ) from error
