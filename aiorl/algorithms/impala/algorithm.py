"""IMPALA: workers sample without waiting for the learner; V-trace corrects for how old their policy is."""

from __future__ import annotations

from aiorl.algorithms.compiled_update import UpdateSpec
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.impala.update import impala_spec
from aiorl.algorithms.vtrace_streaming import VTraceStreaming

__all__ = ["IMPALA"]


class IMPALA(VTraceStreaming[IMPALAConfig]):
    """Importance-weighted actor-learner architecture (Espeholt et al. 2018)."""

    config_class = IMPALAConfig

    def _update_spec(self) -> UpdateSpec:
        return impala_spec(self._config, self.model, self.buffers)
