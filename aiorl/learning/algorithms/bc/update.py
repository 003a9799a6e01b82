"""The loss of behaviour cloning over one minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import Tensors, UpdateSpec
from aiorl.learning.algorithms.recurrent import rows_forward
from aiorl.learning.losses.masked import masked_mean
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["bc_spec"]

_METRICS = ("policy_loss", "entropy")
_COEFFICIENTS = ("lr", "entropy_coeff")


def bc_spec(model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that BC compiles: its loss over rows, or over sequences if the model is recurrent."""
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, _, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
        policy_loss = -masked_mean(logp, valid)
        entropy = masked_mean(distribution.entropy(dist_inputs), valid)
        total = policy_loss - coefficients["entropy_coeff"] * entropy
        return total, {"policy_loss": policy_loss, "entropy": entropy}

    return UpdateSpec(loss, _METRICS, _COEFFICIENTS)
