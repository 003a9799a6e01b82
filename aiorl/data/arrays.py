"""Operations on arrays and batches: joining, discounted sums, checks for finite numbers, allocation
in one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from aiorl.data.columns import DEFAULT_POLICY_ID, F64, Array, Columns
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.text import shortened

Batch = SampleBatch | MultiAgentBatch

NUMBER_KINDS = frozenset("biuf")
"""Kinds of NumPy's dtypes that are numbers: truth values, integers and floats."""


def described_value(value: Any) -> str:
    """Return a value that is no array of numbers as text for messages, with its type."""
    return f"{shortened(repr(value), 100)} ({type(value).__name__})"


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches in the order given; a single batch is returned itself.

    If plain and multi-agent batches are mixed, the plain ones are rows of the default policy. Such
    mixtures come from callbacks and files; all batches of a sampler are of one type.

    Args:
        batches: at least one.

    Raises:
        ValueError: there are no batches.
        BatchError: batches of one policy have different columns (also a ValueError).
    """
    if not batches:
        raise ValueError("there are no batches to concatenate")
    if len(batches) == 1:
        return batches[0]
    plain = [batch for batch in batches if isinstance(batch, SampleBatch)]
    if len(plain) == len(batches):
        return SampleBatch.concat(plain)
    return MultiAgentBatch.concat(list(map(_as_multi_agent, batches)))


def _as_multi_agent(batch: Batch) -> MultiAgentBatch:
    if isinstance(batch, MultiAgentBatch):
        return batch
    return MultiAgentBatch({DEFAULT_POLICY_ID: batch}, batch.env_steps)


def columns_of(batch: Batch) -> Mapping[str, Any]:
    """Return the columns of a plain batch by name, or each policy's columns of a multi-agent batch
    by policy id.
    """
    if isinstance(batch, MultiAgentBatch):
        return batch.policy_batches
    return batch


def rows_by_policy(batch: Batch) -> Mapping[str, SampleBatch]:
    """Return policy id -> its rows, [B, ...] each; those of a plain batch are of the default
    policy.
    """
    if isinstance(batch, MultiAgentBatch):
        return batch.policy_batches
    return {DEFAULT_POLICY_ID: batch}


def compressed(batch: Batch, *, is_bulk: bool) -> Batch:
    """Return a copy of a batch with compressed observations; the original does not change."""
    packed: Batch
    if isinstance(batch, SampleBatch):
        packed = batch.slice(0, batch.count)
        packed.env_steps = batch.env_steps
    else:
        views = {
            policy_id: rows.slice(0, rows.count) for policy_id, rows in batch.policy_batches.items()
        }
        packed = MultiAgentBatch(views, batch.count)
    packed.compress("bulk" if is_bulk else "rows")
    return packed


def discounted_sums(deltas: F64, decay: F64) -> F64:
    """Return A_t = deltas_t + decay_t A_{t+1} for the columns of [T, N].

    `deltas` may be overwritten.
    """
    steps, width = deltas.shape
    if width == 1:
        # for Python's own floats, a loop is several times faster than for arrays of length 1
        running = 0.0
        sums = []
        backwards = zip(
            deltas[::-1, 0].tolist(),
            decay[::-1, 0].tolist(),
            strict=True,
        )
        for delta, factor in backwards:
            running = delta + factor * running
            sums.append(running)
        return np.array(sums[::-1]).reshape(steps, 1)
    rows = list(deltas)
    factors = list(decay)
    scratch = np.empty(width)
    for step in range(steps - 2, -1, -1):
        np.multiply(factors[step], rows[step + 1], out=scratch)
        np.add(rows[step], scratch, out=rows[step])
    return deltas


_FEW = 16
"""Number of values up to which Python checks them faster than NumPy."""


def all_finite(numbers: Array) -> bool:
    """Return whether all floats of an array are finite."""
    size = numbers.size
    if size <= _FEW and numbers.itemsize <= 8 and math.isfinite(sum(numbers.ravel().tolist())):
        return True  # otherwise there is a NaN or an infinity, or the sum has overflowed
    num_finite = int(np.count_nonzero(np.isfinite(numbers)))
    return num_finite == size


def first_not_finite(columns: Columns) -> str:
    """Return the first column of floats with a NaN or an infinity; "" if there is none."""
    for name, array in columns.items():
        if array.dtype.kind == "f" and not all_finite(array):
            return name
    return ""


ALIGN_BYTES = 8
"""Each array starts at a multiple of this, counted from the first byte of the first array."""


def allocate_together(specs: Sequence[tuple[tuple[int, ...], DTypeLike]]) -> list[Array]:
    """Return uninitialised C-contiguous arrays in one allocation, in this order, with zeros between
    them.

    The allocation lives as long as any of them.

    Args:
        specs: shape and dtype of each array.
    """
    places = []
    gaps = []
    end = 0
    for shape, kind in specs:
        dtype = np.dtype(kind)
        start = end + -end % ALIGN_BYTES
        if start != end:
            gaps.append(slice(end, start))
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        end = start + size
        places.append((shape, dtype, start))
    arena = np.empty(end, np.uint8)
    for gap in gaps:
        arena[gap] = 0
    return [np.ndarray(shape, dtype, arena, start) for shape, dtype, start in places]
