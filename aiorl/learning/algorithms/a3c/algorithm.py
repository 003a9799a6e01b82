"""A3C: workers sample and compute gradients without waiting for the learner, which takes a step with each."""

from __future__ import annotations

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.a2c.algorithm import A2C_COLUMNS
from aiorl.learning.algorithms.a2c.update import a2c_spec
from aiorl.learning.algorithms.a3c.config import A3CConfig
from aiorl.learning.algorithms.algorithm import SamplePlan
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import advantage_plan
from aiorl.learning.algorithms.streaming import Streaming

__all__ = ["A3C"]


class A3C(Streaming[A3CConfig]):
    """Asynchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A3CConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """What its loss is made of, which is A2C's: it never leaves the workers."""
        own = cls._own(config)
        return advantage_plan(own, own.lambda_, A2C_COLUMNS)

    def _update_spec(self) -> UpdateSpec:
        return a2c_spec(self._config, self.model, self.buffers)
