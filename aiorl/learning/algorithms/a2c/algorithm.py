"""A2C: leases for exactly one train batch at one policy version, and one step on it."""

from __future__ import annotations

from aiorl.data import columns as c
from aiorl.learning.algorithms.a2c.config import A2CConfig
from aiorl.learning.algorithms.a2c.update import a2c_spec
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy

__all__ = ["A2C", "A2C_COLUMNS"]

A2C_COLUMNS = (c.OBS, c.ACTIONS, c.ADVANTAGES, c.VALUE_TARGETS)
"""What its loss is made of."""


class A2C(OnPolicy[A2CConfig]):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A2CConfig

    @classmethod
    def _columns(cls, config: A2CConfig) -> tuple[str, ...]:
        return A2C_COLUMNS

    def _update_spec(self) -> UpdateSpec:
        return a2c_spec(self._config, self.model, self.buffers)
