"""What of a run, besides the algorithm's own state, a checkpoint holds and a resume restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.errors import BatchError, CheckpointError, InternalError, PolicyError
from aiorl.learner.build import Learning
from aiorl.learner.checkpoint import Checkpoint
from aiorl.learner.service import Counters
from aiorl.observation.filters import ObservationFilter
from aiorl.protocol.ledger import Ledger
from aiorl.report.results import Progress, Results

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
        """What a checkpoint holds, tried out: whatever takes it up later can.

        Raises:
            CheckpointError: something is missing or makes no sense.
        """
        meta = checkpoint.meta
        try:
            state = cls(Counters(**meta["counters"]), dict(meta["results"]), dict(meta["ledger"]))
            dict(meta["algorithm"])
            _check_counts("counters", meta["counters"])
            _check_counts("ledger", state.ledger)
            _check_counts("results", {name: state.results[name] for name in ("training_iteration", "episodes_total")})
            _check_lists("results", state.results)
            Results(1, 0.0).from_state(state.results, 0.0, Progress(0, 0))
            ledger = Ledger.from_state(state.ledger)
        except KeyError as error:
            raise CheckpointError(checkpoint.path, f"its meta.json lacks what every run has: {error}") from error
        except (TypeError, ValueError, AttributeError, OverflowError, InternalError) as error:
            raise CheckpointError(checkpoint.path, f"its meta.json makes no sense: {error}") from error
        if ledger.trained != state.counters.env_steps_trained:
            raise CheckpointError(
                checkpoint.path,
                f"its meta.json makes no sense: {state.counters.env_steps_trained} env steps were trained on by its "
                f"counters, {ledger.trained} by its ledger",
            )
        for name, array in checkpoint.tensors.items():
            if "/weights/" in name and not np.isfinite(array).all():
                raise CheckpointError(checkpoint.path, f"{name!r:.200} holds numbers that are not finite")
        return state

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
        try:
            learning.group.set_state(AlgorithmState(tensors, dict(checkpoint.meta["algorithm"])))
        except (PolicyError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            # what an algorithm makes of values that are none of its own
            raise CheckpointError(checkpoint.path, f"its algorithm's state makes no sense: {error!r:.300}") from error
        for policy_id, own in learning.filters.items():
            own.restore(states[policy_id])


def _check_counts(where: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all values, those of inner mappings too, are counts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_counts(f"{where}.{name}", value)
        elif type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{f'{where}.{name}'!r:.100} is {value!r:.50}")


def _check_lists(where: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless all lists, those of inner mappings too, hold numbers only."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_lists(f"{where}.{name}", value)
        elif isinstance(value, list) and not {type(item) for item in value} <= {int, float}:
            raise ValueError(f"{f'{where}.{name}'!r:.100} holds what is no number")


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
