"""PG: leases for exactly one train batch at one policy version, and one step on it."""

from __future__ import annotations

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.algorithm import SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import sequence_columns
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy
from aiorl.learning.algorithms.pg.config import PGConfig
from aiorl.learning.algorithms.pg.update import pg_spec

__all__ = ["PG"]


class PG(OnPolicy[PGConfig]):
    """Policy gradient with the rewards to go, without a baseline (Williams 1992)."""

    config_class = PGConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Rows with discounted returns; flags and states only for recurrent models."""
        own = cls._own(config)
        return SamplePlan("returns", {"gamma": own.gamma}, (*cls._columns(own), *sequence_columns(own)))

    @classmethod
    def _columns(cls, config: PGConfig) -> tuple[str, ...]:
        return c.OBS, c.ACTIONS, c.ADVANTAGES

    def _update_spec(self) -> UpdateSpec:
        return pg_spec(self._config, self.model, self.buffers)
