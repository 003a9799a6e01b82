"""Parts of algorithms with a replay, an actor, and critics with target networks.

The model, which goes to the workers, acts; critics and targets stay on the learner. Critics learn
first in each minibatch, so that the actor learns from updated critics. Each has its own optimiser
and learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import Categorical, make_distribution
from aiorl.acting.exploration import Schedule
from aiorl.data import columns as c
from aiorl.learning.algorithm import Observations, Update
from aiorl.learning.compiled import adam
from aiorl.learning.keys.replay import ActorReplayKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.q_learning import chosen
from aiorl.learning.replayed import replay_knobs
from aiorl.learning.steps import (
    Descent,
    Loss,
    Step,
    TargetNetwork,
    chain,
    descend,
    drawn,
    every,
    follow,
    per_row,
)

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.critics import Critics

ACTOR_LR = "actor_lr"
"""Knob: learning rate of the actor."""
SEEDS_SHAPE = (2, 2)
"""Two seeds for the random numbers of a minibatch, for next actions and current ones."""
OF_STORED = "q_of_stored"
"""Tensor that the critics' loss hands on: the Q values [C, B] of the stored actions."""

# separates the critics' initial weights from other random numbers with the same seed
_CRITICS_KEY = 0x63726974


def build_actor(
    config: ActorReplayKeys,
    observations: Observations,
    action_space: spaces.Space[Any],
    seed: int | None,
    *,
    is_deterministic: bool = False,
) -> ActorCritic:
    """Build a model that is only an actor; see `Algorithm.build_model`.

    Raises:
        UnsupportedSpaceError: a Box has no bounds.
        ConfigError: noise is state-dependent but actions are discrete.
    """
    from aiorl.learning.models.critics import Actor

    return Actor(
        observations.layout,
        observations.dtype,
        make_distribution(action_space, squash=True),
        config.model,
        rng=np.random.default_rng(seed),
        is_deterministic=is_deterministic,
        noise=config.state_dependent_noise,
    )


def make_critics(
    config: ActorReplayKeys,
    model: ActorCritic,
    *,
    num_critics: int | None = None,
    num_outputs: int = 1,
) -> Critics:
    """Return networks of Q values with the seed and the shape of a config.

    Args:
        config: config of the algorithm.
        model: network whose observations and actions they judge.
        num_critics: their number, such as 10 for REDQ; None = 2 with twin_q, else 1.
        num_outputs: outputs for each value, such as the quantiles of TQC.
    """
    from aiorl.learning.models.critics import Critics

    sequence = np.random.SeedSequence(config.seed, spawn_key=(_CRITICS_KEY,))
    return Critics(
        model.layout,
        model.obs_dtype,
        model.distribution,
        config.model,
        rng=np.random.default_rng(sequence),
        num_critics=num_critics or (2 if config.twin_q else 1),
        num_outputs=num_outputs,
    )


def rate_of(config: ActorReplayKeys, rate: float | None) -> Schedule:
    """Return the schedule of a learning rate: a constant; None = that of the critics, "lr"."""
    if rate is None:
        return replay_knobs(config)["lr"]
    return Schedule(rate)


def critic_step(
    config: ActorReplayKeys,
    critics: Critics,
    judge: Callable[[Tensors], tuple[tf.Tensor, tf.Tensor, Tensors]],
) -> Descent:
    """Return the step of the critics towards their targets.

    Args:
        config: config of the algorithm.
        critics: networks of Q values.
        judge: columns [B, ...] -> (Q values [C, B] of the stored actions; values [B] of the
            observations after the rewards, through which no gradient flows; further tensors).
    """
    return descend_with_adam(config, critics.trainable_variables, td_loss(judge))


def descend_with_adam(
    config: ActorReplayKeys, variables: Any, loss: Loss, *, lr: str = "lr", name: str = ""
) -> Descent:
    """Return a step of an Adam of its own, with the epsilon and the clipping of the config."""
    optimizer = adam(config, config.adam_epsilon)
    return descend(variables, loss, optimizer, clip=config.grad_clip, lr=lr, name=name)


def td_loss(judge: Callable[[Tensors], tuple[tf.Tensor, tf.Tensor, Tensors]]) -> Loss:
    """Return half the squared errors of the critics' Q values of stored actions.

    The priority of a row is the mean error of its critics.

    Args:
        judge: columns -> (Q values [C, B] of the stored actions; values [B] of the observations
            after the rewards, through which no gradient flows; further tensors).
    """

    def losses(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
        q, next_values, tensors = judge(columns)
        targets = columns[c.N_STEP_RETURNS] + columns[c.DISCOUNTS] * next_values
        targets = tf.stop_gradient(targets)
        errors = tf.reduce_mean(tf.abs(tf.stop_gradient(q) - targets), axis=0)
        squares = 0.5 * tf.reduce_sum(tf.square(q - targets), axis=0)
        return squares, errors, {"mean_q": tf.reduce_mean(q), OF_STORED: q, **tensors}

    return per_row(losses)


def q_of_stored_choices(
    critics: Critics, model: ActorCritic, columns: Tensors, weights: Tensors | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the Q values [C, B] of stored actions, and [C, B, A] of all actions, for discrete
    actions.

    Args:
        critics: networks of Q values.
        model: model, whose distribution numbers the actions.
        columns: columns [B, ...] by name.
        weights: weights of the critics by name, of their shapes; None takes the current ones.
    """
    assert isinstance(model.distribution, Categorical)
    actions = columns[c.ACTIONS] - model.distribution.start
    values = critics.q(columns[c.OBS], weights=weights)
    return tf.stack([chosen(of_critic, actions) for of_critic in tf.unstack(values)]), values


def update_with_critics(
    config: ActorReplayKeys,
    critics: Critics,
    *steps: Step,
    targets: Mapping[str, TargetNetwork],
    knobs: Mapping[str, Schedule] | None = None,
    saved: Mapping[str, Any] | None = None,
    seeds: tuple[int, ...] | None = None,
) -> Update:
    """Return an update that makes the steps for each drawn minibatch, then moves all targets.

    Args:
        config: config of the algorithm.
        critics: networks of Q values; their weights are saved.
        *steps: steps in order, the critics' first.
        targets: target networks by prefix, all of which follow.
        knobs: knobs in addition to "lr" and "actor_lr".
        saved: further variables to save, by name.
        seeds: see `drawn`.
    """
    moves = follow(list(targets.values()), tau=config.tau)
    of_critics = {f"critics/{name}": item for name, item in critics.variables.items()}
    return Update(
        loop=drawn(chain(*steps, every(config.target_update_freq, moves)), seeds=seeds),
        knobs={
            **replay_knobs(config),
            ACTOR_LR: rate_of(config, config.actor_lr),
            **(knobs or {}),
        },
        targets=targets,
        saved={**of_critics, **(saved or {})},
    )
