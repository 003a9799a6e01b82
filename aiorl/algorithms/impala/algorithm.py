"""IMPALA: workers sample without waiting for the learner; V-trace corrects for how old their policy is."""

from __future__ import annotations

from aiorl.algorithms.algorithm import SamplePlan
from aiorl.algorithms.compiled_algorithm import previous_columns, state_columns
from aiorl.algorithms.compiled_update import UpdateSpec
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.impala.update import impala_spec
from aiorl.algorithms.streaming import Streaming
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c

__all__ = ["IMPALA"]


class IMPALA(Streaming[IMPALAConfig]):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Raw transitions; values only where an episode was cut from outside."""
        own = cls._own(config)
        columns = (
            c.OBS, c.ACTIONS, c.ACTION_LOGP, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES,
            *previous_columns(own), c.LAST_OBS, *state_columns(own),
        )  # fmt: skip
        return SamplePlan("none", {}, columns)

    def _update_spec(self) -> UpdateSpec:
        return impala_spec(self._config, self.model, self.buffers)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            "gamma": own.gamma,
            "rho_bar": own.vtrace_clip_rho_threshold,
            "rho_bar_pg": own.vtrace_clip_pg_rho_threshold,
        }
