"""IMPALA: workers sample without waiting for the learner; V-trace corrects for how old their policy is."""

from __future__ import annotations

from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.impala.config import IMPALAConfig
from aiorl.learning.algorithms.impala.update import impala_spec
from aiorl.learning.algorithms.vtrace_streaming import VTraceStreaming

__all__ = ["IMPALA"]


class IMPALA(VTraceStreaming[IMPALAConfig]):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig
    remedies = "a kl_stop; or take algo: appo, which bounds how far an update moves the policy"

    def _update_spec(self) -> UpdateSpec:
        return impala_spec(self._config, self.model, self.buffers)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        kl_stop = self._config.kl_stop
        return super().coefficients(env_steps_total) | {"kl_stop": float("inf") if kl_stop is None else kl_stop}
