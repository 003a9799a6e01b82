"""The formulas of estimators that weigh stored episodes by how much likelier the new policy's actions are.

E episodes of T_i steps lie one behind the other in R rows. With rewards r_t, discount g and p_t the product over steps
0..t of the new policy's probability of the action taken over the old one's, an episode's value is

* ``ordinary``: ``p_(T-1) sum_t g^t r_t``, the whole return by the whole ratio;
* ``per_decision``: ``sum_t g^t p_t r_t``, each reward by the ratio up to it: as free of bias, of less variance;
* ``weighted``: ``sum_t g^t (p_t / w_t) r_t`` with ``w_t`` the mean of p_t over **all** episodes. Episodes are ragged:
  one that ended before t counts with its last ratio, p_(T-1). So the weights of a step add up to E, and the bias
  vanishes as episodes become more, also where the policies differ in how long episodes last;
* ``doubly_robust``: ``V(s_0) + sum_t g^t p_t (r_t + g V(s_(t+1)) - Q(s_t, a_t))``: what a model Q says, with its
  errors weighed in; free of bias whatever Q is, without variance where Q is exact and nothing is by chance.

An estimate is the mean of the episodes' values.

Sources: Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation"; Jiang, Li 2016, "Doubly
robust off-policy value evaluation for reinforcement learning", https://arxiv.org/abs/1511.03722; Thomas, Brunskill
2016, https://arxiv.org/abs/1604.00923 (episodes that ended keep their ratio).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_LOG_RATIO", "Ratios", "Trajectories", "bootstrap_means", "interval_of"]

F64 = NDArray[np.float64]

LARGEST_LOG_RATIO = 500.0
"""Bound on the logarithm of a ratio where none is asked for, so that sums of ratios stay finite."""

_CONFIDENCE = 0.95
_BLOCK = 1 << 22
"""Numbers of one block of a bootstrap's tables."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Rewards of E whole episodes in R rows, one episode behind the other.

    Attributes:
        rewards: float64 [R].
        lengths: [E], at least 1 each.
        gamma: discount.
        starts: [E], first row of each.
        steps: [R], step within the episode, from 0.
        discounts: [R], ``gamma ** steps``.
    """

    rewards: F64
    lengths: NDArray[np.int64]
    gamma: float
    starts: NDArray[np.int64] = field(init=False)
    steps: NDArray[np.int64] = field(init=False)
    discounts: F64 = field(init=False)

    def __post_init__(self) -> None:
        """Count steps."""
        starts = np.cumsum(self.lengths) - self.lengths
        steps = np.arange(len(self.rewards)) - np.repeat(starts, self.lengths)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "discounts", self.gamma**steps)

    def __len__(self) -> int:
        """E, the number of episodes."""
        return len(self.lengths)

    def totals(self, per_row: F64) -> F64:
        """Sum over each episode's rows of ``g^t`` times a number for each row: [E]."""
        sums: F64 = np.add.reduceat(self.discounts * per_row, self.starts)
        return sums

    @property
    def returns(self) -> F64:
        """Discounted return of each episode under the policy that played it."""
        return self.totals(self.rewards)


class Ratios:
    """The ratios of episodes, and what they make of rewards.

    Attributes:
        of: the episodes.
        ratios: p_t, float64 [R].
        is_clipped: [R], where p_t was above the bound.
    """

    def __init__(self, of: Trajectories, log_ratios: F64, *, clip: float | None = None) -> None:
        """Multiply up.

        Args:
            of: the episodes.
            log_ratios: [R], new log-probability of the action taken minus the old one; -inf where it is impossible now.
            clip: bound on each p_t; None for none but what keeps sums finite.
        """
        self.of = of
        sums = np.empty(len(log_ratios))
        for start, length in zip(of.starts.tolist(), of.lengths.tolist(), strict=True):
            np.cumsum(log_ratios[start : start + length], out=sums[start : start + length])
        bound = LARGEST_LOG_RATIO if clip is None else min(math.log(clip), LARGEST_LOG_RATIO)
        # a ratio of exactly the bound is none too many, whatever its rounding
        self.is_clipped: NDArray[np.bool_] = sums > bound + 1e-9
        self.ratios: F64 = np.exp(np.minimum(sums, bound))

    @property
    def last(self) -> F64:
        """p_(T-1), the ratio of each whole episode."""
        last: F64 = self.ratios[self.of.starts + self.of.lengths - 1]
        return last

    @property
    def effective_sample_size(self) -> float:
        """How many episodes of equal weight tell as much: ``(sum p)^2 / sum p^2``, from 1 to E; 0 if all are 0.

        Source: Kish 1965, "Survey Sampling".
        """
        largest = self.last.max()
        if largest == 0.0:
            return 0.0
        scaled = self.last / largest  # the squares of ratios may not be finite
        return float(scaled.sum() ** 2 / (scaled * scaled).sum())

    @property
    def num_clipped_episodes(self) -> int:
        """Episodes with a ratio above the bound."""
        return int(np.logical_or.reduceat(self.is_clipped, self.of.starts).sum())

    def ordinary(self) -> F64:
        """Values [E] by ordinary importance sampling."""
        values: F64 = self.last * self.of.returns
        return values

    def per_decision(self) -> F64:
        """Values [E] by per-decision importance sampling."""
        return self.of.totals(self.ratios * self.of.rewards)

    def weights(self) -> F64:
        """[R]: ``p_t / w_t``; 0 where no episode has a ratio above 0."""
        of = self.of
        longest = int(of.lengths.max())
        means = np.bincount(of.steps, self.ratios, longest)
        means += np.cumsum(np.bincount(of.lengths, self.last, longest + 1))[:longest]  # of those that ended before
        at_row = means[of.steps] / len(of)
        return np.divide(self.ratios, at_row, out=np.zeros(len(at_row)), where=at_row > 0.0)

    def weighted(self) -> F64:
        """Values [E] by weighted importance sampling."""
        return self.of.totals(self.weights() * self.of.rewards)

    def doubly_robust(self, q: F64, v: F64, v_next: F64) -> F64:
        """Values [E] by the doubly robust estimator.

        Args:
            q: [R], the model's value of the action taken.
            v: [R], its value of the observation under the new policy.
            v_next: [R], its value of what followed; 0 where the episode terminated.
        """
        of = self.of
        return v[of.starts] + of.totals(self.ratios * (of.rewards + of.gamma * v_next - q))

    def bootstrap_weighted(self, num_resamples: int, seed: int) -> F64:
        """[num_resamples]: the weighted estimate anew for episodes drawn with replacement."""
        of = self.of
        gains = self.ratios * of.rewards * of.discounts
        longest = int(of.lengths.max())
        width = max(1, _BLOCK // len(of))
        estimates = []
        for counts in _resamples(len(of), num_resamples, seed):
            found = np.zeros(len(counts))
            for begin in range(0, longest, width):
                steps = np.arange(begin, min(begin + width, longest))
                rows = of.starts[:, None] + np.minimum(steps, of.lengths[:, None] - 1)
                above = counts @ np.where(steps < of.lengths[:, None], gains[rows], 0.0)
                below = counts @ self.ratios[rows]
                found += np.divide(above, below, out=np.zeros_like(above), where=below > 0.0).sum(1)
            estimates.append(found)
        return np.concatenate(estimates)


def bootstrap_means(values: F64, num_resamples: int, seed: int) -> F64:
    """[num_resamples]: means of values [E] drawn with replacement."""
    return np.concatenate([counts @ values / len(values) for counts in _resamples(len(values), num_resamples, seed)])


def interval_of(estimates: F64) -> tuple[float, float]:
    """The range that holds the middle 95 % of a bootstrap's estimates."""
    outside = 50.0 * (1.0 - _CONFIDENCE)
    low, high = np.percentile(estimates, [outside, 100.0 - outside])
    return float(low), float(high)


def _resamples(num_episodes: int, num_resamples: int, seed: int) -> Iterator[F64]:
    """How often each episode is in each resample, [some, E] at a time; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    at_once = max(1, _BLOCK // num_episodes)
    for begin in range(0, num_resamples, at_once):
        count = min(at_once, num_resamples - begin)
        drawn = rng.integers(num_episodes, size=(count, num_episodes))
        drawn += np.arange(count)[:, None] * num_episodes
        yield np.bincount(drawn.ravel(), minlength=count * num_episodes).reshape(count, num_episodes).astype(np.float64)
