"""Base class of algorithms that stream and correct by V-trace for how old the policy is that sampled."""

from __future__ import annotations

import logging
from typing import TypeVar

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.algorithm import SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import previous_columns, state_columns
from aiorl.learning.algorithms.streaming import Streaming
from aiorl.learning.algorithms.vtrace_config import VTraceConfig

__all__ = ["VTraceStreaming"]

_log = logging.getLogger(__name__)

VTraceT = TypeVar("VTraceT", bound=VTraceConfig)

_LEAST_RHO = 0.3
"""With less as the mean of the cut ratios, next to nothing is learned from the samples."""


class VTraceStreaming(Streaming[VTraceT]):
    """Trains on whole sequences of raw transitions; see `aiorl.learning.algorithms.vtrace_loss`."""

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

    remedies = "a kl_stop"
    """What to set where the policy runs away from its samples, other than a smaller number of passes and lag."""
    _has_warned = False

    def after_update(self, metrics: dict[str, float]) -> None:
        """Warn, once, if the policy has moved far from those that sampled."""
        super().after_update(metrics)
        if metrics["mean_rho"] >= _LEAST_RHO * min(1.0, self._config.vtrace_clip_rho_threshold) or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mean_rho was %.2f in an update: the policy is far from those that sampled (1: it is theirs), and learns "
            "little from their samples. Set a smaller num_sgd_iter (now %d) or max_policy_lag (now %s), or %s",
            metrics["mean_rho"], self._config.num_sgd_iter, self._config.max_policy_lag, self.remedies,
        )  # fmt: skip

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            "gamma": own.gamma,
            "rho_bar": own.vtrace_clip_rho_threshold,
            "rho_bar_pg": own.vtrace_clip_pg_rho_threshold,
        }
