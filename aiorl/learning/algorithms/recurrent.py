"""Running a model over a minibatch, a recurrent one over its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import Tensors, unpacked

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["flattened", "rows_forward", "sequence_forward", "sequence_forward_with_last", "state_resets"]


def state_resets(terminateds: tf.Tensor, truncateds: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return where a sequence's state is reset: in the row after one that ended an episode or is no transition.

    Args:
        terminateds: [T, M] float32, 1 or 0; so are the others.
        truncateds: [T, M].
        valid: [T, M].
    Returns: [T, M] bool; False in the first row, which starts from the state that was sent along.
    """
    ended = (terminateds > 0) | (truncateds > 0) | (valid <= 0)
    return tf.concat([tf.zeros_like(ended[:1]), ended[:-1]], axis=0)


def rows_forward(model: ActorCritic, minibatch: Tensors, buffers: BatchBuffers) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
    """Distribution inputs [R, P], values [R] and columns [R, ...] of a minibatch; its sequences as rows, if it has any.

    Args:
        model: a recurrent one runs over sequences.
        minibatch: gathered from a batch of `buffers`.
        buffers: where it came from.
    """
    columns = unpacked(minibatch, buffers, time_major=model.is_recurrent)
    if not model.is_recurrent:
        return *model.forward(columns[c.OBS]), columns
    dist_inputs, values = sequence_forward(model, columns)
    return (
        flattened(dist_inputs),
        flattened(values),
        {spec.name: flattened(columns[spec.name]) for spec in buffers.columns},
    )


def sequence_forward(
    model: ActorCritic, columns: dict[str, tf.Tensor], weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Distribution inputs [T, M, P] and values [T, M] of time-major columns.

    Args:
        model: the network.
        columns: by name.
        weights: tensors by name to be used in place of its own.
    """
    resets = state_resets(columns[c.TERMINATEDS], columns[c.TRUNCATEDS], columns[c.VALID])
    states = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    previous = (columns[c.PREV_ACTIONS], columns[c.PREV_REWARDS]) if model.looks_back else ()
    dist_inputs, values = model.forward_sequence(columns[c.OBS], states, resets, *previous, weights=weights)
    return dist_inputs, values


def flattened(x: tf.Tensor) -> tf.Tensor:
    """[T, M, ...] as rows [T * M, ...]."""
    return tf.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]])


def sequence_forward_with_last(
    model: ActorCritic, columns: dict[str, tf.Tensor], weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Distribution inputs [T, M, P], values [T, M], and values [M] of the observations behind the last step.

    One pass over T + 1 rows; models without state see them all as rows of one batch. The row behind a transition is
    that of the observation that followed it, also where it is no transition itself.

    Args:
        model: the network.
        columns: time-major, by name.
        weights: tensors by name to be used in place of its own.
    """
    obs = tf.concat([columns[c.OBS], columns[c.LAST_OBS][None]], axis=0)
    if model.is_recurrent:
        longer = {name: _with_zero_row(columns[name]) for name in (c.TERMINATEDS, c.TRUNCATEDS, c.VALID)}
        if model.looks_back:
            for name, source in ((c.PREV_ACTIONS, c.ACTIONS), (c.PREV_REWARDS, c.REWARDS)):
                longer[name] = _with_those_before(columns[name], columns[source], longer[c.VALID])
        dist_inputs, values = sequence_forward(model, {**columns, **longer, c.OBS: obs}, weights)
    else:
        flat_inputs, flat_values = model.forward(flattened(obs), weights=weights)
        values = tf.reshape(flat_values, obs.shape[:2])
        dist_inputs = tf.reshape(flat_inputs, [*obs.shape[:2], flat_inputs.shape[-1]])
    return dist_inputs[:-1], values[:-1], values[-1]


def _with_zero_row(x: tf.Tensor) -> tf.Tensor:
    return tf.concat([x, tf.zeros_like(x[:1])], axis=0)


def _with_those_before(previous: tf.Tensor, given: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Previous actions or rewards [T + 1, M, ...]: in rows that are no transitions, those of the row before.

    Args:
        previous: [T, M, ...] as the rows have them.
        given: [T, M, ...] actions or rewards of the rows themselves.
        valid: [T + 1, M] float32, 0 in the last row.
    """
    before = tf.concat([tf.zeros_like(given[:1]), given], axis=0)
    is_valid = tf.reshape(valid > 0, [*valid.shape, *[1] * (len(given.shape) - 2)])
    return tf.where(is_valid, _with_zero_row(previous), before)
