"""CQL: SAC on stored experience, whose critics trust no action that is not stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.cql.config import CQLConfig
from aiorl.learning.algorithms.cql.update import WEIGHT_LR, cql_spec
from aiorl.learning.algorithms.sac.algorithm import SAC

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["CQL"]


class CQL(SAC[CQLConfig]):
    """Conservative Q-learning (Kumar et al. 2020) over bounded Boxes and over choices."""

    config_class = CQLConfig

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay, critics, temperature and weight; nothing is compiled yet."""
        self._log_weight = tf.Variable(math.log(self._own(config).cql_weight), dtype=tf.float32)
        super().__init__(config, model)

    def _update_spec(self) -> UpdateSpec:
        own = self._config
        spec = super()._update_spec()
        optimizer = self._adam_of_multiplier(own.adam_epsilon)
        return cql_spec(own, spec, self.actor, self.critics, self._log_weight, optimizer)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See the base class."""
        given = super().coefficients(env_steps_total)
        if self._config.target_gap is None:
            return given
        return {**given, WEIGHT_LR: given["lr"] if self._config.cql_weight_lr is None else self._config.cql_weight_lr}

    def _other_variables(self) -> dict[str, Any]:
        return super()._other_variables() | {"log_cql_weight": self._log_weight}
