"""Base class of algorithms whose workers never wait: V-trace corrects for how old the policy is that sampled."""

from __future__ import annotations

from typing import Any, TypeVar

from aiorl.algorithms.algorithm import LeasePlan, SamplePlan
from aiorl.algorithms.compiled_algorithm import CompiledAlgorithm, previous_columns, state_columns
from aiorl.algorithms.optimizers import make_optimizer
from aiorl.algorithms.streaming_config import StreamingConfig
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c

__all__ = ["Streaming"]

StreamingT = TypeVar("StreamingT", bound=StreamingConfig)


class Streaming(CompiledAlgorithm[StreamingT]):
    """Trains on fragments as they come, each of a policy that is at most so many versions old."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Leases that are kept topped up."""
        own = cls._own(config)
        return LeasePlan(
            "streaming", own.fragments_per_batch(), own.outstanding_fragments_per_worker, own.max_policy_lag
        )

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Raw transitions; values only where an episode was cut from outside."""
        own = cls._own(config)
        columns = (
            c.OBS, c.ACTIONS, c.ACTION_LOGP, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES,
            *previous_columns(own), c.LAST_OBS, *state_columns(own),
        )  # fmt: skip
        return SamplePlan("none", {}, columns)

    def _optimizer(self) -> Any:  # Any: a Keras optimiser
        own = self._config
        if own.opt_type == "adam":
            return self._adam(own.epsilon)
        options = {"learning_rate": own.lr, "epsilon": own.epsilon, "rho": own.decay, "momentum": own.momentum}
        return make_optimizer("RMSprop", own.optimizer, **options)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            "gamma": own.gamma,
            "rho_bar": own.vtrace_clip_rho_threshold,
            "rho_bar_pg": own.vtrace_clip_pg_rho_threshold,
        }
