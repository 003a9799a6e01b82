"""One batch from several, plain or multi-agent."""

from __future__ import annotations

from collections.abc import Sequence

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch

__all__ = ["Batch", "concat_batches"]

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
