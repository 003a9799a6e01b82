"""What is saved of a run, as far as acting needs it: found by any path into the run, read without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from aiorl.acting.acting_state import ActingState, PolicyParts
from aiorl.acting.actor import Actor
from aiorl.acting.checkpoint import Checkpoint, find_checkpoint
from aiorl.acting.observation.filters import ObservationFilter
from aiorl.errors import BatchError, CheckpointError, ConfigError, PolicyError

__all__ = ["SavedRun"]


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The policies of a checkpoint.

    Attributes:
        checkpoint: what was read.
        acting: what workers were told of the policies.
    """

    checkpoint: Checkpoint
    acting: ActingState

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read a checkpoint, or the newest one that is whole of a run or of a directory of checkpoints.

        If somebody else wrote it, a warning shows what code it names before any of that is imported.

        Raises:
            CheckpointError: there is none, or it can't be used.
        """
        found = find_checkpoint(path, ActingState.from_checkpoint)
        return cls(found, ActingState.taken_from(found))

    @property
    def env_steps(self) -> int:
        """Env steps that were trained on; 0 where the checkpoint doesn't say."""
        counters = self.checkpoint.meta.get("counters")
        steps = counters.get("env_steps_trained") if isinstance(counters, Mapping) else None
        return steps if isinstance(steps, int) else 0

    def weights(self, policy_id: str) -> dict[str, NDArray[Any]]:
        """Weights of a policy, by the names its acting graph knows."""
        return self.checkpoint.under(f"algorithm/{policy_id}/weights/")

    def restore_filter(self, policy_id: str, own: ObservationFilter) -> None:
        """Give a filter the statistics that the policy was trained with.

        Raises:
            CheckpointError: they don't fit.
        """
        try:
            own.restore(self.checkpoint.filter_state(policy_id))
        except BatchError as error:
            raise CheckpointError(
                self.checkpoint.path, f"the filter statistics of policy {policy_id!r} don't fit it: {error}"
            ) from error

    def actor(self, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None) -> Actor:
        """Return a policy with its preprocessor and filter, ready to act.

        Args:
            policy_id: which; None is the only one, or the default one of several.
            threads: threads an evaluation of the network may use.
            seed: of its exploration.

        Raises: as `parts`.
        """
        return self.acting.actor(self.parts(policy_id, threads=threads, seed=seed))

    def parts(self, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None) -> PolicyParts:
        """Return what a policy acts with, each part by itself, with the weights and statistics of the checkpoint.

        Args:
            policy_id: which; None is the only one, or the default one of several.
            threads: threads an evaluation of the network may use.
            seed: of its exploration.

        Raises:
            UnknownPolicyError: there is no such policy, or it must be said which of several (also a ValueError).
            PolicyError: it is not one of the learner's networks (also a ValueError).
            CheckpointError: what the checkpoint holds makes no sense.
            ImportError: its network can only be run in TensorFlow, which is not installed.
        """
        policy_id = self.acting.with_network(policy_id, self.checkpoint.path)
        try:
            parts = self.acting.parts_of(policy_id, threads=threads, seed=seed)
            self.restore_filter(policy_id, parts.filter)
            parts.policy.set_weights(self.weights(policy_id))
            parts.policy.on_global_var_update({"timestep": self.env_steps})  # exploration goes by it
        except (PolicyError, ConfigError) as error:
            raise CheckpointError(self.checkpoint.path, f"policy {policy_id!r} can't be made of it: {error}") from error
        return parts
