"""MARWIL: stored experience as it comes; actions that turned out better than expected count for more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.algorithm import SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import sequence_columns
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.imitation import Imitation
from aiorl.learning.algorithms.marwil.config import MARWILConfig
from aiorl.learning.algorithms.marwil.update import marwil_spec

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["MARWIL"]

_MEAN_SQUARE = "advantages_mean_square"


class MARWIL(Imitation[MARWILConfig]):
    """Monotonic advantage re-weighted imitation learning (Wang et al. 2018)."""

    config_class = MARWILConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Observations, actions and discounted returns; flags and states only for recurrent models."""
        own = cls._own(config)
        columns = (c.OBS, c.ACTIONS, c.VALUE_TARGETS, *sequence_columns(own))
        return SamplePlan("gae", {"gamma": own.gamma, "lam": 1.0}, columns, raw_obs=own.is_filtered)

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model)
        self._mean_square = self._config.moving_average_sqd_adv_norm_start

    def _update_spec(self) -> UpdateSpec:
        return marwil_spec(self._config, self.model, self.buffers)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        return super().coefficients(env_steps_total) | {
            "beta": self._config.beta,
            "advantage_scale": self._mean_square**0.5,
        }

    def after_update(self, metrics: dict[str, float]) -> None:
        """Let the mean square of the advantages follow."""
        rate = self._config.moving_average_sqd_adv_norm_update_rate
        self._mean_square += rate * (metrics["vf_loss"] - self._mean_square)
        metrics[_MEAN_SQUARE] = self._mean_square

    def extra_state(self) -> dict[str, Any]:
        """The mean square of the advantages."""
        return {_MEAN_SQUARE: self._mean_square}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take the mean square of the advantages up again.

        Raises: CheckpointError if it is missing.
        """
        if _MEAN_SQUARE not in values:
            raise CheckpointError("values", f"{_MEAN_SQUARE} is missing")
        self._mean_square = float(values[_MEAN_SQUARE])
