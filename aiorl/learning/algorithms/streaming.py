"""Base class of algorithms whose workers sample without waiting for the learner."""

from __future__ import annotations

from typing import Any, TypeVar

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.algorithm import LeasePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.optimizers import make_optimizer
from aiorl.learning.algorithms.streaming_config import StreamingConfig

__all__ = ["Streaming"]

StreamingT = TypeVar("StreamingT", bound=StreamingConfig)


class Streaming(CompiledAlgorithm[StreamingT]):
    """Trains on fragments as they come, of policies that are a little old."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Leases that are kept topped up."""
        own = cls._own(config)
        return LeasePlan(
            "streaming",
            own.fragments_per_batch(),
            own.outstanding_fragments_per_worker,
            own.max_policy_lag,
            publish_every=own.broadcast_updates,
            publish_interval_s=own.broadcast_interval_ms / 1000,
        )

    def _optimizer(self) -> Any:  # Any: a Keras optimiser
        own = self._config
        if own.opt_type == "adam":
            return self._adam(own.epsilon)
        options = {"learning_rate": own.lr, "epsilon": own.epsilon, "rho": own.decay, "momentum": own.momentum}
        return make_optimizer("RMSprop", own.optimizer, **options)
