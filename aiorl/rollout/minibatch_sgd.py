"""Several passes over a batch in minibatches, for policies that learn by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.log_once import log_once

__all__ = ["minibatch_sgd", "minibatches", "standardized"]

logger = logging.getLogger(__name__)

_SMALLEST_STD = 1e-4

LearnFn = Callable[[MultiAgentBatch], Mapping[str, Mapping[str, Any]]]


def minibatch_sgd(
    samples: Batch,
    policy_ids: Collection[str],
    learn_on_batch: LearnFn,
    *,
    num_sgd_iter: int,
    sgd_minibatch_size: int,
    standardize_fields: Collection[str],
    rng: np.random.Generator,
) -> dict[str, dict[str, float]]:
    """Learn on each policy's rows, again and again.

    Args:
        samples: rows of one or several policies; not modified.
        policy_ids: policies that learn.
        learn_on_batch: updates one policy on one minibatch; gives figures by policy id.
        num_sgd_iter: passes over the rows.
        sgd_minibatch_size: rows of a minibatch; 0 = all rows at once.
        standardize_fields: columns brought to mean 0 and deviation 1 before.
        rng: shuffles rows.
    Returns: policy id -> means of the figures over the last pass's minibatches.
    """
    by_policy = {c.DEFAULT_POLICY_ID: samples} if isinstance(samples, SampleBatch) else samples.policy_batches
    results: dict[str, dict[str, float]] = {}
    for policy_id in policy_ids:
        if policy_id not in by_policy:
            continue
        batch = by_policy[policy_id].slice(0, by_policy[policy_id].count)
        for field in standardize_fields:
            batch[field] = standardized(batch[field])
        figures: list[Mapping[str, Any]] = []
        for _ in range(num_sgd_iter):
            figures = [
                learn_on_batch(MultiAgentBatch({policy_id: minibatch}, minibatch.count))[policy_id]
                for minibatch in minibatches(batch, sgd_minibatch_size, rng)
            ]
        results[policy_id] = _means(figures)
    return results


def minibatches(batch: SampleBatch, size: int, rng: np.random.Generator) -> Iterator[SampleBatch]:
    """The rows in random order, ``size`` at a time; those of recurrent policies stay in order."""
    if not size:
        yield batch
        return
    if c.state_in(0) in batch:
        if log_once("ordered_minibatches"):
            logger.warning("Rows of a recurrent policy are not shuffled for minibatches")
    else:
        batch = batch.shuffled(rng)
    for start in range(0, batch.count, size):
        yield batch.slice(start, min(start + size, batch.count))


def standardized(column: NDArray[Any]) -> NDArray[np.float32]:
    """Mean 0 and standard deviation 1; a column of equal numbers becomes zeros."""
    numbers = np.asarray(column, np.float64)
    scaled: NDArray[np.float64] = (numbers - numbers.mean()) / max(_SMALLEST_STD, float(numbers.std()))
    return scaled.astype(np.float32)


def _means(figures: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each figure that is a number."""
    numbers: dict[str, list[float]] = {}
    for one in figures:
        for name, value in one.items():
            if np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
                numbers.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in numbers.items()}
