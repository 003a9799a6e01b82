"""Parts of algorithms with a policy and values: forward passes over minibatches, a loss of weighted
likelihoods, and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiorl.acting.exploration import Schedule
from aiorl.data import columns as c
from aiorl.learning.algorithm import Adaptation, Update
from aiorl.learning.keys.actor_critic import ActorCriticKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.rows import flattened
from aiorl.learning.steps import Loss, descend, epochs, minibatches

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

Weigh = Callable[[Tensors, "tf.Tensor", Tensors], tuple["tf.Tensor", Tensors]]
"""(columns [R, ...], values [R], knobs) of a minibatch -> (weight [R] of each row, metrics)."""


def schedules(config: ActorCriticKeys) -> dict[str, Schedule]:
    """Return the knobs "lr", "entropy_coeff" and "vf_loss_coeff" of a `config`."""
    return {
        "lr": Schedule.of(config.lr, config.lr_schedule, key="lr_schedule"),
        # for custom losses that read it as a knob
        "vf_loss_coeff": Schedule(config.vf_loss_coeff),
        "entropy_coeff": Schedule.of(
            config.entropy_coeff,
            config.entropy_coeff_schedule,
            key="entropy_coeff_schedule",
        ),
    }


def update_by_loss(
    config: ActorCriticKeys,
    model: ActorCritic,
    loss: Loss,
    optimizer: Any,  # a Keras optimiser; Keras ships no types
    *,
    stop_when: tuple[str, float] | None = None,
    adaptations: Sequence[Adaptation] = (),
) -> Update:
    """Return the update that trains all of a network by one loss, in the epochs and minibatches of
    the config.

    Args:
        config: config of the algorithm.
        model: network to train.
        loss: loss of a minibatch.
        optimizer: optimiser of the network.
        stop_when: see `epochs`.
        adaptations: knobs that depend on earlier updates.
    """
    step = descend(model.trainable_variables, loss, optimizer, clip=config.grad_clip)
    parts = minibatches(config.minibatch_steps(), step)
    return Update(
        loop=epochs(config.num_sgd_iter, parts, stop_when=stop_when),
        knobs=schedules(config),
        reported=("entropy_coeff",),
        adaptations=adaptations,
    )


def likelihood_loss(
    config: ActorCriticKeys,
    model: ActorCritic,
    weigh: Weigh,
    *,
    targets: str = "",
) -> Loss:
    """Return a loss that raises the weighted likelihood of the actions and, with `targets`, fits
    the values. With equal weights it imitates::

        likelihood_loss(config, model, lambda columns, values, knobs: (tf.ones_like(values), {}))

    Args:
        config: config of the algorithm.
        model: network to train.
        weigh: gives the weight of each row.
        targets: column of the value targets; "" = only the policy learns.
    """
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch)
        valid = columns[c.VALID]
        weights, metrics = weigh(columns, values, knobs)
        logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
        logp = tf.where(valid > 0, logp, 0.0)
        policy_loss = -masked_mean(weights * logp, valid)
        entropies = distribution.entropy(dist_inputs)
        if not targets:
            entropy = masked_mean(entropies, valid)
            total = policy_loss - knobs["entropy_coeff"] * entropy
            return total, {"policy_loss": policy_loss, "entropy": entropy, **metrics}
        total, parts = actor_critic_loss(
            policy_loss,
            values,
            columns[targets],
            entropies=entropies,
            valid=valid,
            vf_loss_coeff=config.vf_loss_coeff,
            entropy_coeff=knobs["entropy_coeff"],
        )
        return total, {**parts, **metrics}

    return loss


def state_resets(terminateds: tf.Tensor, truncateds: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return the steps before which the state is reset: those after the end of an episode or after
    padding.

    Args:
        terminateds: [T, M] float32, 1 or 0.
        truncateds: [T, M] float32, 1 or 0.
        valid: [T, M] float32, 1 for transitions, 0 for padding.

    Returns:
        [T, M] bool; False in the first row, which starts from the state that came with the
        sequence.
    """
    ended = (terminateds > 0) | (truncateds > 0) | (valid <= 0)
    return tf.concat([tf.zeros_like(ended[:1]), ended[:-1]], axis=0)


def rows_forward(model: ActorCritic, minibatch: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
    """Return distribution inputs [R, P], values [R] and columns [R, ...] of a minibatch; sequences
    become rows.

    Args:
        model: network; a recurrent one runs over sequences.
        minibatch: columns of rows [R, ...]; or of sequences, [T, M, ...], for a recurrent network.
    """
    if not model.is_recurrent:
        return *model.forward(minibatch[c.OBS]), minibatch
    dist_inputs, values = sequence_forward(model, minibatch)
    rows = {
        name: flattened(column) for name, column in minibatch.items() if not c.is_of_sequences(name)
    }
    return flattened(dist_inputs), flattened(values), rows


def sequence_forward(
    model: ActorCritic, columns: Tensors, weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return distribution inputs [T, M, P] and values [T, M] of time-major columns.

    Args:
        model: network to run.
        columns: columns [T, M, ...] by name.
        weights: tensors by name to use instead of the network's own weights.
    """
    resets = state_resets(columns[c.TERMINATEDS], columns[c.TRUNCATEDS], columns[c.VALID])
    states = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    previous: tuple[tf.Tensor, ...] = ()
    if model.uses_previous_step:
        previous = (columns[c.PREV_ACTIONS], columns[c.PREV_REWARDS])
    return model.forward_sequence(columns[c.OBS], states, resets, *previous, weights=weights)


def sequence_forward_with_last(
    model: ActorCritic, columns: Tensors, weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return distribution inputs [T, M, P], values [T, M], and values [M] of the observations after
    the last step.

    It makes one pass over T + 1 rows; a model without state sees them as the rows of one batch. The
    row after a transition holds the observation that followed, even if that row is padding.

    Args:
        model: network to run.
        columns: time-major columns by name.
        weights: tensors by name to use instead of the network's own weights.
    """
    obs = tf.concat([columns[c.OBS], columns[c.LAST_OBS][None]], axis=0)
    if model.is_recurrent:
        longer = {**columns, c.OBS: obs}
        for name in (c.TERMINATEDS, c.TRUNCATEDS, c.VALID):
            longer[name] = _with_zero_row(columns[name])
        if model.uses_previous_step:
            for name, source in ((c.PREV_ACTIONS, c.ACTIONS), (c.PREV_REWARDS, c.REWARDS)):
                longer[name] = _with_those_before(columns[name], columns[source], longer[c.VALID])
        dist_inputs, values = sequence_forward(model, longer, weights)
    else:
        flat_inputs, flat_values = model.forward(flattened(obs), weights=weights)
        values = tf.reshape(flat_values, obs.shape[:2])
        dist_inputs = tf.reshape(flat_inputs, [*obs.shape[:2], flat_inputs.shape[-1]])
    return dist_inputs[:-1], values[:-1], values[-1]


def _with_zero_row(x: tf.Tensor) -> tf.Tensor:
    return tf.concat([x, tf.zeros_like(x[:1])], axis=0)


def _with_those_before(previous: tf.Tensor, chosen: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return previous actions or rewards [T + 1, M, ...]; padding rows get the action or reward of
    the row before.

    Args:
        previous: [T, M, ...] previous actions or rewards in the rows.
        chosen: [T, M, ...] actions or rewards of the rows themselves.
        valid: [T + 1, M] float32, 0 in the last row.
    """
    before = tf.concat([tf.zeros_like(chosen[:1]), chosen], axis=0)
    is_valid = tf.reshape(valid > 0, [*valid.shape, *[1] * (len(chosen.shape) - 2)])
    return tf.where(is_valid, _with_zero_row(previous), before)
