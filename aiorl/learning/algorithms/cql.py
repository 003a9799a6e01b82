"""CQL: SAC on stored experience, with low Q values for actions that are not stored
(docs/algorithms/cql.md).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.algorithm import Algorithm, Networks, Update
from aiorl.learning.algorithms.critic_update import OF_STORED, descend_with_adam, rate_of
from aiorl.learning.algorithms.sac import OF_CHOICES, SAC, SACConfig, SoftParts
from aiorl.learning.compiled import adam_of_multiplier
from aiorl.learning.keys.replay import OfflineReplayKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.off_policy_actor_critic import (
    conservative_losses,
    multiplier_losses,
    sampled_soft_maximum,
    soft_maximum,
)
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.steps import SEEDS, WEIGHTS, Loss, descend, weighted_mean

_WEIGHT_LR = "cql_weight_lr"
_GAPS = "gaps"
_LOG_MAX_WEIGHT = math.log(1e6)

_cql = partial(key, group="CQL")


class CQLConfig(OfflineReplayKeys, SACConfig):
    """CQL's own keys, and its defaults of common keys; SAC's keys are in the group SAC."""

    why_no_exploration: ClassVar[str] = "it learns from stored experience"

    algo: str = changed(SACConfig, "algo", "cql")
    entropy_backup: bool = changed(SACConfig, "entropy_backup", False)

    cql_weight: float = _cql(5.0, gt=0)
    """Weight of the penalty on Q values of other actions above those of stored ones, relative to
    half the squared TD errors; with target_gap, its initial value."""
    target_gap: float | None = _cql(None, allow_inf_nan=False)
    """Wanted difference between Q values of other actions and of stored ones, for which the weight
    is learned; null: the weight is constant."""
    cql_weight_lr: float | None = _cql(None, gt=0)
    """With target_gap: constant learning rate of the logarithm of the weight; null: lr with its
    lr_schedule."""
    cql_actions: int = _cql(10, unit="actions", ge=1)
    """For a Box: actions drawn for each row in each of three ways: uniformly, by the policy, and by
    the policy for the next observation."""

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.refuse_unless(
            self.target_gap is not None,
            ("cql_weight_lr",),
            "target_gap",
            hint="Set target_gap, or leave it out.",
        )


class CQL(Algorithm[CQLConfig]):
    """Conservative Q-learning (Kumar et al. 2020) for bounded Boxes and discrete actions."""

    config_class = CQLConfig

    experience = staticmethod(SAC.experience)
    acting_settings = staticmethod(SAC.acting_settings)
    build_model = staticmethod(SAC.build_model)

    @staticmethod
    def update(config: CQLConfig, networks: Networks) -> Update:
        """Return SAC's update with a penalty in the critics' loss and, with target_gap, a step of
        its weight; see `Algorithm.update`.
        """
        soft = SoftParts(config, networks.model)
        sac_critic_loss, actor_loss = soft.losses()
        target_gap = config.target_gap
        log_weight = tf.Variable(math.log(config.cql_weight), dtype=tf.float32)

        def critic_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            td_loss, tensors = sac_critic_loss(columns, knobs)
            if soft.is_discrete:
                _, mask = soft.actor.outputs(columns[c.OBS])
                maximum = soft_maximum(tensors[OF_CHOICES], mask)
            else:
                maximum = _soft_maximum_over_box(config, soft, columns)
            gaps = maximum - tensors[OF_STORED]
            weight = tf.exp(tf.minimum(tf.convert_to_tensor(log_weight), _LOG_MAX_WEIGHT))
            losses = conservative_losses(gaps, weight, target_gap or 0.0)
            penalty = weighted_mean(losses, columns[WEIGHTS])
            metrics = {"cql_loss": penalty, "cql_gap": tf.reduce_mean(gaps)}
            return td_loss + penalty, {**tensors, **metrics, _GAPS: gaps}

        steps = [
            descend_with_adam(config, soft.critics.trainable_variables, critic_loss),
            *soft.policy_steps(actor_loss),
        ]
        knobs = {}
        if target_gap is not None:
            knobs[_WEIGHT_LR] = rate_of(config, config.cql_weight_lr)
            optimizer = adam_of_multiplier(config, config.adam_epsilon)
            steps.append(
                descend(
                    [log_weight],
                    _weight_loss(log_weight, target_gap),
                    optimizer,
                    clip=config.grad_clip,
                    lr=_WEIGHT_LR,
                    name="cql_weight",
                )
            )
        return soft.update(*steps, knobs=knobs, saved={"log_cql_weight": log_weight})


def _weight_loss(log_weight: tf.Variable, target_gap: float) -> Loss:
    """Return the loss of the logarithm of the penalty's weight, which raises it where gaps are
    above their target.
    """

    def loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        free = tf.convert_to_tensor(log_weight)
        # keeps a gradient at its upper bound, or it could never come down again
        log_weight_now = free + tf.stop_gradient(tf.minimum(free, _LOG_MAX_WEIGHT) - free)
        losses = multiplier_losses(log_weight_now, columns[_GAPS], target_gap)
        return tf.reduce_mean(losses), {"cql_weight": tf.exp(log_weight_now)}

    return loss


def _soft_maximum_over_box(config: CQLConfig, soft: SoftParts, columns: Tensors) -> tf.Tensor:
    """Return the soft maximum [C, B] of Q values over a Box, from actions drawn in three ways."""
    num = config.cql_actions
    critics = soft.critics
    distribution: Any = to_tf_distribution(soft.actor.distribution)  # a SquashedGaussian
    size = distribution.num_features
    obs = columns[c.OBS]
    num_rows = obs.shape[0]
    seeds = [tf.random.experimental.stateless_fold_in(columns[SEEDS][0], way) for way in range(3)]
    actions = [tf.random.stateless_uniform([num_rows, num, size], seeds[0], -1.0, 1.0)]
    log_densities = [tf.fill([num_rows, num], -size * math.log(2.0))]
    for policy_obs, seed in ((obs, seeds[1]), (columns[c.NEW_OBS], seeds[2])):
        inputs, _ = soft.actor.outputs(policy_obs)
        sampled, logp = distribution.sample_with_logp(tf.repeat(inputs, num, axis=0), seed)
        actions.append(tf.reshape(critics.unit(sampled), [-1, num, size]))
        log_densities.append(tf.reshape(logp + critics.log_unit, [-1, num]))
    flat_actions = tf.stop_gradient(tf.reshape(tf.concat(actions, axis=1), [-1, size]))
    q = critics.q(tf.repeat(obs, 3 * num, axis=0), flat_actions)
    q = tf.reshape(q, [q.shape[0], -1, 3 * num])
    return sampled_soft_maximum(q, tf.concat(log_densities, axis=1))
