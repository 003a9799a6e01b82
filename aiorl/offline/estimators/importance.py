"""What the current policy would have earned in episodes as they are read: importance sampling, one by one.

Per episode of T steps, with rewards r_t, discount g and p_t the product over steps 0..t of the new policy's
probability of the action taken over the old one's:

* old policy's return ``V_prev = sum_t g^t r_t``;
* IS: ``sum_t g^t p_t r_t``, each reward by the ratio up to it: without bias but of great variance. It is what the
  literature calls per-decision IS, and ``pdis`` in `judgement`;
* WIS: ``sum_t g^t (p_t / w_t) r_t`` with w_t the mean of p_t over those episodes seen that reached step t, this
  one included: much less variance, but a bias that more episodes do not remove where the policies differ in how long
  episodes last, since episodes that have ended do not count in w_t. (A reward of 1 for each step makes it ``V_prev``,
  whatever the policies.) `ratios` counts them.

Source: Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation", sections 2 and 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, ConfigError
from aiorl.offline.estimators.likelihoods import action_log_likelihoods, behaviour_log_likelihoods
from aiorl.offline.estimators.ratios import LARGEST_LOG_RATIO
from aiorl.offline.io import IOContext

__all__ = [
    "ESTIMATORS",
    "SMALLEST_RETURN",
    "ImportanceSamplingEstimator",
    "OffPolicyEstimate",
    "OffPolicyEstimator",
    "WeightedImportanceSamplingEstimator",
    "episode_parts",
]

F64 = NDArray[np.float64]

_DEFAULT_GAMMA = 0.99
SMALLEST_RETURN = 1e-8
"""Returns below it count as it, where a gain is divided by them."""


class OffPolicyEstimate(NamedTuple):
    """What an estimator says about one episode.

    Attributes:
        estimator_name: ``"is"`` or ``"wis"``.
        metrics: ``V_prev``, ``V_step_IS`` or ``V_step_WIS``, and ``V_gain_est``, their quotient.
    """

    estimator_name: str
    metrics: dict[str, float]


class OffPolicyEstimator(ABC):
    """Fed with episodes, drained of estimates.

    Attributes:
        policy: the new policy.
        gamma: discount.
    """

    name = ""

    def __init__(self, policy: Policy, gamma: float) -> None:
        """Nothing seen yet."""
        self.policy = policy
        self.gamma = gamma
        self._estimates: list[OffPolicyEstimate] = []

    @classmethod
    def create(cls, context: IOContext) -> OffPolicyEstimator:
        """An estimator for a worker's default policy; the discount is that of its config.

        Raises:
            ConfigError: the worker has no default policy.
        """
        policy = context.worker.get_policy()
        if policy is None:
            raise ConfigError(
                f"input_evaluation {cls.name!r} judges the policy {c.DEFAULT_POLICY_ID!r}, and there is none.",
                key="input_evaluation",
                value=cls.name,
                hint="Leave input_evaluation empty for multi-agent input.",
            )
        return cls(policy, float(context.config.get("gamma", _DEFAULT_GAMMA)))

    def process(self, episode: Batch) -> None:
        """Take in one episode.

        Raises:
            BatchError: a multi-agent batch, or one without the old policy's action probabilities or with impossible
                ones, whose rows are named (a ValueError).
            PolicyError: the policy cannot tell how likely an action is.
        """
        if not isinstance(episode, SampleBatch):
            raise BatchError("policy_batches", "a single-agent batch for off-policy estimation", "a MultiAgentBatch")
        if episode.count:
            old = behaviour_log_likelihoods(episode, self.policy.action_space)
            log_ratios = action_log_likelihoods(self.policy, episode) - old
            rewards = np.asarray(episode[c.REWARDS], np.float64)
            # bounded, so that sums of them stay finite
            ratios = np.exp(np.minimum(np.cumsum(log_ratios), LARGEST_LOG_RATIO))
            self._estimates.append(self._estimate(ratios, rewards))

    def get_metrics(self) -> list[OffPolicyEstimate]:
        """Estimates since the last call."""
        estimates, self._estimates = self._estimates, []
        return estimates

    @abstractmethod
    def _estimate(self, ratios: F64, rewards: F64) -> OffPolicyEstimate:
        """Judge an episode by p_t [T] and rewards [T]."""

    def _compare(self, key: str, weights: F64, rewards: F64) -> OffPolicyEstimate:
        discounted = self.gamma ** np.arange(len(rewards)) * rewards
        old, new = float(discounted.sum()), float((weights * discounted).sum())
        return OffPolicyEstimate(self.name, {"V_prev": old, key: new, "V_gain_est": new / max(SMALLEST_RETURN, old)})


class ImportanceSamplingEstimator(OffPolicyEstimator):
    """IS, see the module."""

    name = "is"

    def _estimate(self, ratios: F64, rewards: F64) -> OffPolicyEstimate:
        return self._compare("V_step_IS", ratios, rewards)


class WeightedImportanceSamplingEstimator(OffPolicyEstimator):
    """WIS, see the module."""

    name = "wis"

    def __init__(self, policy: Policy, gamma: float) -> None:
        """Nothing seen yet."""
        super().__init__(policy, gamma)
        self._sums = np.zeros(0)
        self._counts = np.zeros(0)

    def _estimate(self, ratios: F64, rewards: F64) -> OffPolicyEstimate:
        length = len(ratios)
        longer = max(0, length - len(self._sums))
        self._sums = np.pad(self._sums, (0, longer))
        self._counts = np.pad(self._counts, (0, longer))
        self._sums[:length] += ratios
        self._counts[:length] += 1.0
        means = self._sums[:length] / self._counts[:length]
        # a mean of 0 has a ratio of 0 above it
        weights = np.divide(ratios, means, out=np.zeros(length), where=means > 0.0)
        return self._compare("V_step_WIS", weights, rewards)


ESTIMATORS: dict[str, type[OffPolicyEstimator]] = {
    ImportanceSamplingEstimator.name: ImportanceSamplingEstimator,
    WeightedImportanceSamplingEstimator.name: WeightedImportanceSamplingEstimator,
}
"""Estimators by their names in ``input_evaluation``."""


def episode_parts(batch: Batch) -> list[Batch]:
    """What estimators are fed: one part per episode of a plain batch; a multi-agent one as it is."""
    return list(batch.split_by_episode()) if isinstance(batch, SampleBatch) else [batch]
