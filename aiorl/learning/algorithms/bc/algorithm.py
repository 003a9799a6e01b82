"""BC: stored experience as it comes, whichever policy made it, and its actions made more likely."""

from __future__ import annotations

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.algorithm import SamplePlan
from aiorl.learning.algorithms.bc.config import BCConfig
from aiorl.learning.algorithms.bc.update import bc_spec
from aiorl.learning.algorithms.compiled_algorithm import sequence_columns
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.imitation import Imitation

__all__ = ["BC"]


class BC(Imitation[BCConfig]):
    """Behaviour cloning: maximum likelihood of the stored actions (Pomerleau 1989)."""

    config_class = BCConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Observations and actions; flags and states only for recurrent models."""
        columns = (c.OBS, c.ACTIONS, *sequence_columns(cls._own(config)))
        return SamplePlan("none", {}, columns, raw_obs=config.is_filtered)

    def _update_spec(self) -> UpdateSpec:
        return bc_spec(self.model, self.buffers)
