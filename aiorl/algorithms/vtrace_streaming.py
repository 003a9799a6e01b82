"""Base class of algorithms that stream and correct by V-trace for how old the policy is that sampled."""

from __future__ import annotations

from typing import TypeVar

from aiorl.algorithms.algorithm import SamplePlan
from aiorl.algorithms.compiled_algorithm import previous_columns, state_columns
from aiorl.algorithms.streaming import Streaming
from aiorl.algorithms.vtrace_config import VTraceConfig
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c

__all__ = ["VTraceStreaming"]

VTraceT = TypeVar("VTraceT", bound=VTraceConfig)


class VTraceStreaming(Streaming[VTraceT]):
    """Trains on whole sequences of raw transitions; see `aiorl.algorithms.vtrace_loss`."""

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Raw transitions; values only where an episode was cut from outside.

        A network that looks back sees rewards as they are, also the last one of a sequence: so they are sent beside
        those that are learned from.
        """
        own = cls._own(config)
        previous = previous_columns(own)
        scaled = (c.SCALED_REWARDS,) if previous and own.normalize_rewards else ()
        columns = (
            c.OBS, c.ACTIONS, c.ACTION_LOGP, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES,
            *previous, *scaled, c.LAST_OBS, *state_columns(own),
        )  # fmt: skip
        return SamplePlan("none", {}, columns)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            "gamma": own.gamma,
            "rho_bar": own.vtrace_clip_rho_threshold,
            "rho_bar_pg": own.vtrace_clip_pg_rho_threshold,
        }
