"""Batches that are plain or multi-agent: one from several, what is in one, and one made smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch

__all__ = ["Batch", "columns_of", "compressed", "concat_batches"]

Batch = SampleBatch | MultiAgentBatch


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Rows of all batches in the order given; a single batch is returned as it is.

    Where plain and multi-agent ones meet, the plain ones are rows of the default policy. They come from callbacks and
    files; a sampler's own batches are all of one type.

    Args:
        batches: at least one.

    Raises:
        ValueError: no batches.
        BatchError: batches of one policy whose columns differ (also a ValueError).
    """
    if not batches:
        raise ValueError("there are no batches to concatenate")
    if len(batches) == 1:
        return batches[0]
    plain = [batch for batch in batches if isinstance(batch, SampleBatch)]
    if len(plain) == len(batches):
        return SampleBatch.concat(plain)
    return MultiAgentBatch.concat(
        [
            MultiAgentBatch({DEFAULT_POLICY_ID: batch}, batch.env_steps) if isinstance(batch, SampleBatch) else batch
            for batch in batches
        ]
    )


def columns_of(batch: Batch) -> Mapping[str, Any]:
    """The columns of a plain batch by name; of a multi-agent one, each policy's by its id."""
    return batch if isinstance(batch, SampleBatch) else batch.policy_batches


def compressed(batch: Batch, *, is_bulk: bool) -> Batch:
    """The same batch with compressed observations; who has the one given keeps it as it is."""
    packed: Batch
    if isinstance(batch, SampleBatch):
        packed = batch.slice(0, batch.count)
        packed.env_steps = batch.env_steps
    else:
        parts = {policy_id: rows.slice(0, rows.count) for policy_id, rows in batch.policy_batches.items()}
        packed = MultiAgentBatch(parts, batch.count)
    packed.compress("bulk" if is_bulk else "rows")
    return packed
