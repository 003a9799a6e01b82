"""CQL: SAC on stored experience, with low Q values for actions that are not stored
(docs/algorithms/cql.md).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from aiorl.acting.distributions import Categorical
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_replay import OF_STORED, SEEDS
from aiorl.learning.algorithms.compiled_update import Phase, UpdateSpec
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.replay_config import OfflineReplayConfig
from aiorl.learning.algorithms.sac import OF_CHOICES, SAC, SACConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.critics import (
    conservative_losses,
    multiplier_losses,
    sampled_soft_maximum,
    soft_maximum,
)
from aiorl.learning.losses.q_learning import weighted_mean
from aiorl.learning.models.distributions import SquashedGaussian

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_WEIGHT_LR = "cql_weight_lr"
_GAPS = "gaps"
_LOG_MAX_WEIGHT = math.log(1e6)

_cql = partial(key, group="CQL")


class CQLConfig(OfflineReplayConfig, SACConfig):
    """CQL's own keys, and its defaults of common keys; SAC's keys are in the group SAC."""

    why_no_exploration = "it learns from stored experience"

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
        hint = "Set target_gap, or leave it out."
        self.refuse_unless(self.target_gap is not None, ("cql_weight_lr",), "target_gap", hint=hint)


class CQL(SAC[CQLConfig]):
    """Conservative Q-learning (Kumar et al. 2020) for bounded Boxes and discrete actions."""

    config_class = CQLConfig

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Allocate the replay, the critics, the temperature and the weight; nothing is compiled
        yet.
        """
        self._log_weight = tf.Variable(
            math.log(self.own_config(config).cql_weight), dtype=tf.float32
        )
        super().__init__(config, model)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See `ReplayAlgorithm.coefficients`; adds the learning rate of the penalty's weight."""
        given = super().coefficients(env_steps_total)
        if self.config.target_gap is None:
            return given
        return {
            **given,
            _WEIGHT_LR: given["lr"]
            if self.config.cql_weight_lr is None
            else self.config.cql_weight_lr,
        }

    def other_variables(self) -> dict[str, Any]:
        """See `CompiledBase.other_variables`; includes the weight of the penalty."""
        return super().other_variables() | {"log_cql_weight": self._log_weight}

    def update_spec(self) -> UpdateSpec:
        """Return SAC's update with a penalty in the critics' loss and, with target_gap, a phase for
        its weight.
        """
        sac = super().update_spec()
        target_gap = self.config.target_gap
        is_discrete = isinstance(self.actor.distribution, Categorical)
        soft_maximum_of = self._over_choices if is_discrete else self._over_box

        def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            td_loss, given = sac.loss(minibatch, coefficients)
            gaps = soft_maximum_of(minibatch | given) - given[OF_STORED]
            weight = tf.exp(tf.minimum(tf.convert_to_tensor(self._log_weight), _LOG_MAX_WEIGHT))
            losses = conservative_losses(gaps, weight, target_gap or 0.0)
            penalty = weighted_mean(losses, minibatch[WEIGHTS])
            return td_loss + penalty, {
                **given,
                "cql_loss": penalty,
                "cql_gap": tf.reduce_mean(gaps),
                _GAPS: gaps,
            }

        more = dataclasses.replace(
            sac, loss=critic_loss, metric_names=(*sac.metric_names, "cql_loss", "cql_gap")
        )
        if target_gap is None:
            return more

        def weight_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            free = tf.convert_to_tensor(self._log_weight)
            # keeps a gradient at its upper bound, or it could never come down again
            log_weight_now = free + tf.stop_gradient(tf.minimum(free, _LOG_MAX_WEIGHT) - free)
            losses = multiplier_losses(log_weight_now, minibatch[_GAPS], target_gap)
            return tf.reduce_mean(losses), {"cql_weight": tf.exp(log_weight_now)}

        adam = self.adam_of_multiplier(self.config.adam_epsilon)
        phase = Phase(
            "cql_weight", weight_loss, ("cql_weight",), [self._log_weight], adam, _WEIGHT_LR
        )
        names = (*sac.coefficient_names, _WEIGHT_LR)
        return dataclasses.replace(more, coefficient_names=names, phases=(*sac.phases, phase))

    def _over_choices(self, minibatch: Tensors) -> tf.Tensor:
        _, mask = self.actor.outputs(minibatch[c.OBS])
        return soft_maximum(minibatch[OF_CHOICES], mask)

    def _over_box(self, minibatch: Tensors) -> tf.Tensor:
        actor = self.actor
        critics = self.critics
        num = self.config.cql_actions
        distribution = self.distribution
        obs = minibatch[c.OBS]
        assert isinstance(distribution, SquashedGaussian)
        size = distribution.num_features
        seeds = [
            tf.random.experimental.stateless_fold_in(minibatch[SEEDS][0], way) for way in range(3)
        ]
        drawn = [tf.random.stateless_uniform([obs.shape[0], num, size], seeds[0], -1.0, 1.0)]
        log_densities = [tf.fill([obs.shape[0], num], -size * math.log(2.0))]
        for seen, seed in ((obs, seeds[1]), (minibatch[c.NEW_OBS], seeds[2])):
            inputs = tf.repeat(actor.outputs(seen)[0], num, axis=0)
            actions, logp = distribution.sample_with_logp(inputs, seed)
            drawn.append(tf.reshape(critics.unit(actions), [-1, num, size]))
            log_densities.append(tf.reshape(logp + critics.log_unit, [-1, num]))
        actions = tf.stop_gradient(tf.reshape(tf.concat(drawn, axis=1), [-1, size]))
        q = critics.q(tf.repeat(obs, 3 * num, axis=0), actions)
        return sampled_soft_maximum(
            tf.reshape(q, [q.shape[0], -1, 3 * num]), tf.concat(log_densities, axis=1)
        )
