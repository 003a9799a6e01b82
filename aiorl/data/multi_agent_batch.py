"""MultiAgentBatch: one SampleBatch per policy and the number of environment steps they came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from aiorl.data.columns import DEFAULT_POLICY_ID, NEW_OBS, OBS
from aiorl.data.sample_batch import SampleBatch

__all__ = ["MultiAgentBatch"]


class MultiAgentBatch:
    """Rows of several policies.

    Attributes:
        policy_batches: policy id -> its rows.
        count: environment steps (not rows).
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], count: int) -> None:
        """Keep the batches as they are.

        Raises:
            ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"count is {count}, expected environment steps >= 0")
        self.policy_batches = dict(policy_batches)
        self.count = int(count)

    @property
    def env_steps(self) -> int:
        """Environment steps: ``count``."""
        return self.count

    def total(self) -> int:
        """Agent steps: rows of all policies together."""
        return sum(batch.count for batch in self.policy_batches.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(batch.nbytes for batch in self.policy_batches.values())

    def compress(self, mode: Literal["rows", "bulk"] = "rows", columns: Collection[str] = (OBS, NEW_OBS)) -> None:
        """Compress columns of every policy's batch in place; see `SampleBatch.compress`."""
        for batch in self.policy_batches.values():
            batch.compress(mode, columns)

    def decompress(self) -> None:
        """Replace every compressed column by its array."""
        for batch in self.policy_batches.values():
            batch.decompress()

    @staticmethod
    def concat_samples(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Concatenate batches, as `concat` does; the name that users of RLlib know."""
        return MultiAgentBatch.concat(batches)

    @staticmethod
    def concat(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Counts added; rows concatenated per policy in the order given."""
        by_policy: dict[str, list[SampleBatch]] = {}
        for batch in batches:
            for policy_id, rows in batch.policy_batches.items():
                by_policy.setdefault(policy_id, []).append(rows)
        joined = {policy_id: SampleBatch.concat(rows) for policy_id, rows in by_policy.items()}
        return MultiAgentBatch(joined, sum(batch.count for batch in batches))

    @staticmethod
    def wrap_as_needed(policy_batches: Mapping[str, SampleBatch], count: int) -> SampleBatch | MultiAgentBatch:
        """The plain batch when at most the default policy is there, with ``env_steps`` set; else a MultiAgentBatch.

        Where there are several policies, whether their batches should be plain must not depend on who has rows: make
        a MultiAgentBatch instead.
        """
        if policy_batches.keys() <= {DEFAULT_POLICY_ID}:
            plain = policy_batches.get(DEFAULT_POLICY_ID, SampleBatch())
            plain.env_steps = count
            return plain
        return MultiAgentBatch(policy_batches, count)

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.count} env steps, {self.policy_batches})"
