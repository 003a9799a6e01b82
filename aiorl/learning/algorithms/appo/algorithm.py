"""APPO: workers sample without waiting for the learner, which makes several epochs over each train batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.appo.config import APPOConfig
from aiorl.learning.algorithms.appo.update import appo_spec
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.surrogate import Surrogate
from aiorl.learning.algorithms.target_network import TargetNetwork
from aiorl.learning.algorithms.vtrace_streaming import VTraceStreaming

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["APPO"]


class APPO(Surrogate[APPOConfig], VTraceStreaming[APPOConfig]):
    """Asynchronous proximal policy optimisation, with a target network (IMPACT; Luo et al. 2020)."""

    config_class = APPOConfig

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch, copy the network; nothing is compiled yet."""
        self._target = TargetNetwork(model)
        self.targets = {"target": self._target}
        super().__init__(config, model)

    def _update_spec(self) -> UpdateSpec:
        return appo_spec(self._config, self.model, self.buffers, self._target)

    @property
    def visits_rows(self) -> bool:
        """Return whether a minibatch is made of rows: the target network judges a batch before it is taken apart."""
        return not self._config.model.is_recurrent

    def after_update(self, metrics: dict[str, float]) -> None:
        """See the base class; the target network follows."""
        super().after_update(metrics)
        if self._updates % self._config.target_update_freq == 0:
            self._target.take_over()
