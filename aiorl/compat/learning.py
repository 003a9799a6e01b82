"""Learning with a worker's policies: gradients, updates, and passes over a batch in minibatches.

Each policy learns on its own rows. Only trainable policies learn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from aiorl.acting.policy_map import PolicyMap
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID, F32, F64, Array
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch, columns_of
from aiorl.errors import ConfigError
from aiorl.process.log_once import log_once, report

logger = logging.getLogger(__name__)

_SMALLEST_STD = 1e-4

LearnFn = Callable[[Batch], Mapping[str, Any]]


def compute_gradients(policies: PolicyMap, samples: Batch) -> tuple[Any, dict[str, Any]]:
    """Return gradients and figures with ``batch_count``; both are by policy id for a multi-agent
    batch.

    Raises:
        UnknownPolicyError: the batch is a plain one and there is no default policy (also a
            KeyError).
    """
    report("compute_gradients", columns_of(samples))
    gradients: Any = {}
    info: dict[str, Any] = {}
    if isinstance(samples, MultiAgentBatch):
        for policy_id, batch in _trainable_parts(policies, samples):
            gradients[policy_id], info[policy_id] = policies[policy_id].compute_gradients(batch)
    else:
        gradients, info = policies[DEFAULT_POLICY_ID].compute_gradients(samples)
    report("gradients_out", gradients)
    return gradients, {**info, "batch_count": samples.count}


def apply_gradients(policies: PolicyMap, gradients: Any) -> dict[str, Any]:
    """Apply gradients by policy id, even to policies that are not trainable; other gradients go to
    the default policy.

    The default policy's gradients can also be a dict, by weight name.

    Raises:
        UnknownPolicyError: no policy has that id; no weights change then (also a KeyError).
    """
    report("apply_gradients", gradients)
    if not (isinstance(gradients, Mapping) and _are_by_policy(policies, gradients)):
        return policies[DEFAULT_POLICY_ID].apply_gradients(gradients)
    appliers = {policy_id: policies[policy_id] for policy_id in gradients}
    return {
        policy_id: policy.apply_gradients(gradients[policy_id])
        for policy_id, policy in appliers.items()
    }


def learn_on_batch(policies: PolicyMap, samples: Batch) -> dict[str, Any]:
    """Update policies on a batch, and return the figures, by id of each trainable policy for a
    multi-agent batch.

    Raises:
        UnknownPolicyError: the batch is a plain one and there is no default policy (also a
            KeyError).
    """
    report("learn_on_batch", columns_of(samples))
    if isinstance(samples, SampleBatch):
        info = policies[DEFAULT_POLICY_ID].learn_on_batch(samples)
    else:
        info = {
            policy_id: policies[policy_id].learn_on_batch(batch)
            for policy_id, batch in _trainable_parts(policies, samples)
        }
    report("learn_output", info)
    return info


def _trainable_parts(
    policies: PolicyMap, samples: MultiAgentBatch
) -> Iterator[tuple[str, SampleBatch]]:
    return (item for item in samples.policy_batches.items() if item[0] in policies.trainable_ids)


def _are_by_policy(policies: PolicyMap, gradients: Mapping[str, Any]) -> bool:
    """Return True if the keys are policy ids, known or not; False if they name the default policy's
    weights.
    """
    if not gradients or DEFAULT_POLICY_ID not in policies or policies.keys() & gradients.keys():
        return True
    if (
        not policies.is_multi_agent
        or gradients.keys() & policies[DEFAULT_POLICY_ID].get_weights().keys()
    ):
        return False
    # with several policies, a value of several arrays is the complete gradient of one policy
    return any(isinstance(value, Mapping | list | tuple) for value in gradients.values())


# --- minibatches ---


def check_sgd(
    num_sgd_iter: int, sgd_minibatch_size: int, standardize_fields: Collection[str]
) -> None:
    """Check arguments of `minibatch_sgd`.

    Raises:
        ConfigError: an argument is wrong (also a ValueError).
    """
    for name, value, smallest in (
        ("num_sgd_iter", num_sgd_iter, 1),
        ("sgd_minibatch_size", sgd_minibatch_size, 0),
    ):
        if not isinstance(value, int | np.integer) or value < smallest:
            text = f"{name} is {value!r}, expected a whole number of at least {smallest}."
            raise ConfigError(text, key=name, value=value)
    if isinstance(standardize_fields, str):
        text = f"standardize_fields is {standardize_fields!r}, expected a list of columns."
        raise ConfigError(text, key="standardize_fields", value=standardize_fields)


def minibatch_sgd(
    samples: Batch,
    policy_ids: Collection[str],
    learn_on_batch: LearnFn,
    *,
    num_sgd_iter: int,
    sgd_minibatch_size: int,
    standardize_fields: Collection[str],
    rng: np.random.Generator,
) -> dict[str, dict[str, Any]]:
    """Learn in several passes over each policy's rows.

    Args:
        samples: rows of one or several policies; not modified. A plain batch belongs to the default
            policy, which learns from it even if it is not in ``policy_ids``.
        policy_ids: policies that learn.
        learn_on_batch: function that updates a policy on one minibatch, in the same form as
            ``samples``, and returns its figures; by policy id for a multi-agent batch.
        num_sgd_iter: number of passes over the rows.
        sgd_minibatch_size: rows per minibatch; 0 is all rows.
        standardize_fields: columns to scale to mean 0 and standard deviation 1 first.
        rng: random generator that shuffles rows.

    Returns:
        By policy id, means of the figures over the last pass's minibatches, nested like the
        figures.
    """

    def learn(policy_id: str, minibatch: SampleBatch) -> Mapping[str, Any]:
        if isinstance(samples, SampleBatch):
            return learn_on_batch(minibatch)
        figures: Mapping[str, Any] = learn_on_batch(
            MultiAgentBatch({policy_id: minibatch}, minibatch.count)
        )[policy_id]
        return figures

    if isinstance(samples, SampleBatch):
        parts = {DEFAULT_POLICY_ID: samples}
    else:
        rows = samples.policy_batches
        parts = {policy_id: rows[policy_id] for policy_id in policy_ids if policy_id in rows}
    results: dict[str, dict[str, Any]] = {}
    for policy_id, part in parts.items():
        batch = part.slice(0, part.count)
        for field in standardize_fields:
            batch[field] = standardized(batch[field])
        figures: list[Mapping[str, Any]] = []
        for _ in range(num_sgd_iter):
            figures = [
                learn(policy_id, minibatch)
                for minibatch in minibatches(batch, sgd_minibatch_size, rng)
            ]
        results[policy_id] = _means(figures)
    return results


def minibatches(batch: SampleBatch, size: int, rng: np.random.Generator) -> Iterator[SampleBatch]:
    """Yield the rows in random order, ``size`` at a time; rows of recurrent policies stay in
    order.
    """
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


def standardized(column: Array) -> F32:
    """Scale a column to mean 0 and standard deviation 1; a column of equal numbers becomes
    zeros.
    """
    numbers = np.asarray(column, np.float64)
    scaled: F64 = (numbers - numbers.mean()) / max(_SMALLEST_STD, float(numbers.std()))
    return scaled.astype(np.float32)


def _means(figures: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure that is a number, including those in nested dicts."""
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for of_batch in figures for name in of_batch):
        values = [of_batch[name] for of_batch in figures if name in of_batch]
        nested = [value for value in values if isinstance(value, Mapping)]
        numbers = [float(value) for value in values if _is_number(value)]
        if nested:
            means[name] = _means(nested)
        elif numbers:
            means[name] = float(np.mean(numbers))
    return means


def _is_number(value: Any) -> bool:
    return (
        not isinstance(value, list | tuple)
        and np.ndim(value) == 0
        and np.asarray(value).dtype.kind in "biuf"
    )
