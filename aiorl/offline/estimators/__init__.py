"""Importance sampling: the return of a policy, estimated from episodes that another policy played.

`ImportanceSamplingEstimator` and `WeightedImportanceSamplingEstimator` estimate from the episodes
that a run's workers read, one by one (``input_evaluation``). `aiorl.offline.estimators.judgement`
has five estimators over a whole data set (``aiorl estimate``); two of them need a fitted Q
(`aiorl.offline.estimators.fitted_q`).

Definitions for an episode of T steps with rewards r_t and discount g; p_t is the product over steps
0..t of the new policy's probability of the action taken divided by the old policy's:

* the old policy's return is ``V_prev = sum_t g^t r_t``;
* IS is ``sum_t g^t p_t r_t``: each reward is weighted with the ratio up to it, without bias but
  with a high variance. The literature calls it per-decision IS, and `judgement` calls it ``pdis``;
* WIS is ``sum_t g^t (p_t / w_t) r_t`` with w_t the mean of p_t over the episodes seen so far that
  reached step t, including this one. The variance is much lower, but there is a bias, which more
  episodes do not remove if the policies differ in the length of episodes, because finished episodes
  do not count in w_t. (With a reward of 1 for each step it equals ``V_prev``, whatever the
  policies.) `Ratios` counts them.

Source: Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation", sections
2 and 3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from gymnasium import spaces

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout, Space, leaf_spaces
from aiorl.data.columns import F64, I64, Array, Bools
from aiorl.data.sample_batch import Batch, SampleBatch
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.offline.io import IOContext

ACTION_PROB = "action_prob"
"""The old policy's probability of the action taken; ``action_logp`` can replace it."""
_MAX_ROWS_NAMED = 5
ROUNDING = 1e-4
"""Amount by which a logarithm of a probability can exceed 0, because it was summed in float32."""
_MAX_DISAGREEMENT = 1e-2
"""Largest difference between ``action_logp`` and the logarithm of ``action_prob``."""


@runtime_checkable
class ActionLikelihoods(Protocol):
    """Policy that computes the probabilities of given actions; users' policies can implement it."""

    def compute_log_likelihoods(
        self,
        actions: Array,
        obs: Array,
        state_batches: list[Array],
        prev_action_batch: Array | None,
        prev_reward_batch: Array | None,
    ) -> Array:
        """Return log-probabilities [B] of actions [B, ...] at observations [B, ...]."""


def action_log_likelihoods(policy: Policy, batch: SampleBatch) -> F64:
    """Return log-probabilities [B], under a policy without exploration, of the actions in a batch.

    A recurrent policy gets the states in the batch.

    Raises:
        PolicyError: the policy does not compute probabilities of actions.
        BatchError: actions outside its space; the message names the rows (a ValueError).
    """
    actions = batch[c.ACTIONS]
    obs = batch[c.OBS]
    prev_actions = batch.get(c.PREV_ACTIONS)
    prev_rewards = batch.get(c.PREV_REWARDS)
    states: list[Array] = []
    while c.state_in(len(states)) in batch:
        states.append(batch[c.state_in(len(states))])
    if isinstance(policy, ActionLikelihoods):
        logp = policy.compute_log_likelihoods(
            actions,
            obs,
            states,
            prev_actions,
            prev_rewards,
        )
    elif isinstance(policy, GraphPolicy):
        actions = check_actions(batch, policy.layout)
        # the columns of compute_actions describe the distribution; the actions chosen don't matter
        _, _, columns = policy.compute_actions(
            obs,
            states,
            prev_actions,
            prev_rewards,
            explore=False,
        )
        logp = policy.distribution.logp(columns[c.ACTION_DIST_INPUTS], actions)
    else:
        raise PolicyError(
            f"{type(policy).__name__} does not compute probabilities of actions, which off-policy"
            " estimation needs; add a method compute_log_likelihoods(actions, obs, state_batches,"
            " prev_action_batch, prev_reward_batch)"
        )
    return np.asarray(logp, np.float64)


def check_actions(batch: SampleBatch, layout: ActionLayout) -> Array:
    """Return the actions of a batch, in column form.

    Raises:
        BatchError: an action is outside the space; the message names the rows (a ValueError).
    """
    actions = layout.to_column(batch[c.ACTIONS])
    for leaf, is_wrong in layout.misfits(actions):
        _refuse(batch, c.ACTIONS, is_wrong, f"actions of {leaf}")
    return actions


def behaviour_log_likelihoods(
    batch: SampleBatch,
    action_space: Space,
) -> F64:
    """Return log-probabilities [B] of the actions under the policy that took them; densities if
    they are continuous.

    Raises:
        BatchError: they are missing, impossible (not above 0, above 1 except for densities, not
            finite), or stored twice with different values; the message names the rows (a
            ValueError).
    """
    has_logp = c.ACTION_LOGP in batch
    has_prob = ACTION_PROB in batch
    if not (has_logp or has_prob):
        raise BatchError(
            ACTION_PROB,
            f"it or {c.ACTION_LOGP!r} to exist for off-policy estimation",
            sorted(batch),
        )
    is_density = any(isinstance(leaf, spaces.Box) for leaf in leaf_spaces(action_space))
    logp = np.zeros(batch.count)
    if has_prob:
        logp = np.log(_checked_probabilities(batch, is_density=is_density))
    if has_logp:
        stored_logp = _checked_logarithms(batch, is_density=is_density)
        if has_prob:
            differs = np.abs(stored_logp - logp) > _MAX_DISAGREEMENT
            expected = f"the logarithm of {ACTION_PROB!r}, which is stored too"
            _refuse(batch, c.ACTION_LOGP, differs, expected)
        logp = stored_logp
    return logp if is_density else np.minimum(logp, 0.0)


def _checked_probabilities(batch: SampleBatch, *, is_density: bool) -> F64:
    prob = _numbers(batch, ACTION_PROB)
    limit = np.exp(ROUNDING)
    expected = "probabilities in (0, 1]"
    if is_density:
        limit = np.inf
        expected = "finite densities above 0"
    is_possible = (prob > 0.0) & (prob <= limit) & np.isfinite(prob)
    _refuse(batch, ACTION_PROB, ~is_possible, expected)
    return prob


def _checked_logarithms(batch: SampleBatch, *, is_density: bool) -> F64:
    logp = _numbers(batch, c.ACTION_LOGP)
    is_possible = np.isfinite(logp)
    expected = "finite logarithms of densities"
    if not is_density:
        is_possible &= logp <= ROUNDING
        expected = "finite logarithms of probabilities, at most 0"
    _refuse(batch, c.ACTION_LOGP, ~is_possible, expected)
    return logp


def _numbers(batch: SampleBatch, name: str) -> F64:
    column = batch[name]
    if column.dtype.kind not in "fiub" or column.ndim != 1:
        raise BatchError(
            name,
            "one number for each row",
            f"{column.dtype} {list(column.shape)}",
        )
    return column.astype(np.float64)


def _refuse(
    batch: SampleBatch,
    name: str,
    is_wrong: Bools,
    expected: str,
) -> None:
    """Raise BatchError naming the first wrong rows, if there are any."""
    rows = np.flatnonzero(is_wrong)
    if not len(rows):
        return
    values = batch[name]
    first_rows = rows[:_MAX_ROWS_NAMED].tolist()
    text = ", ".join(f"row {row}: {_text(values[row])}" for row in first_rows)
    if len(rows) > len(first_rows):
        text += f" and {len(rows) - len(first_rows)} more"
    if c.EPS_ID in batch:
        text += f" of episode {batch[c.EPS_ID][rows[0]]}"
    raise BatchError(name, expected, text)


def _text(value: Any) -> str:
    if np.ndim(value) == 0:
        return f"{value:.6g}"
    return f"{np.asarray(value).tolist()!r:.60}"


LARGEST_LOG_RATIO = 500.0
"""Default limit of the logarithm of a ratio, so that sums of ratios stay finite."""
_CONFIDENCE = 0.95
MAX_BLOCK = 1 << 22
"""Numbers in one block of a bootstrap's tables."""


class Trajectories:
    """Rewards of E whole episodes in R rows, one episode after the other.

    Attributes:
        rewards: float64 [R].
        lengths: [E], at least 1 each.
        gamma: discount.
        starts: [E], first row of each episode.
        steps: [R], step within the episode, from 0.
        discounts: [R], ``gamma ** steps``.
    """

    def __init__(
        self,
        rewards: F64,
        lengths: I64,
        gamma: float,
    ) -> None:
        """Compute starts, steps and discounts."""
        self.rewards = rewards
        self.lengths = lengths
        self.gamma = gamma
        self.starts: I64 = np.cumsum(lengths) - lengths
        start_of_row = np.repeat(self.starts, lengths)
        self.steps: I64 = np.arange(len(rewards)) - start_of_row
        self.discounts: F64 = np.power(gamma, self.steps, dtype=np.float64)

    def __len__(self) -> int:
        """Return E, the number of episodes."""
        return len(self.lengths)

    def totals(self, per_row: F64) -> F64:
        """Return [E]: the sum over each episode's rows of ``g^t`` times the row's number."""
        sums: F64 = np.add.reduceat(self.discounts * per_row, self.starts)
        return sums

    @property
    def returns(self) -> F64:
        """Discounted return of each episode under the policy that played it."""
        return self.totals(self.rewards)


class Ratios:
    """Probability ratios of episodes, and the estimates that result from them.

    E episodes of T_i steps follow each other in R rows. With rewards r_t and discount g, and with
    p_t the product over steps 0..t of the new policy's probability of the action taken divided by
    the old policy's, an episode's value is

    * ``ordinary``: ``p_(T-1) sum_t g^t r_t``, the whole return weighted with the whole ratio;
    * ``per_decision``: ``sum_t g^t p_t r_t``, each reward weighted with the ratio up to it: also
      without bias, with less variance;
    * ``weighted``: ``sum_t g^t (p_t / w_t) r_t`` with ``w_t`` the mean of p_t over **all**
      episodes. An episode that ended before t counts with its last ratio, p_(T-1). So the weights
      of a step add up to E, and the bias vanishes with more episodes, even if the policies differ
      in the length of episodes;
    * ``doubly_robust``: ``V(s_0) + sum_t g^t p_t (r_t + g V(s_(t+1)) - Q(s_t, a_t))``: the value by
      a model Q, corrected for its errors; without bias for any Q, and without variance if Q is
      exact and nothing is random.

    An estimate is the mean of the episodes' values.

    Sources: Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation";
    Jiang, Li 2016, "Doubly robust off-policy value evaluation for reinforcement learning",
    https://arxiv.org/abs/1511.03722; Thomas, Brunskill 2016, https://arxiv.org/abs/1604.00923
    (finished episodes keep their ratio).

    Attributes:
        of: the episodes.
        ratios: p_t, float64 [R].
        is_clipped: [R], True if p_t was above the limit.
    """

    def __init__(
        self,
        of: Trajectories,
        log_ratios: F64,
        *,
        clip: float | None = None,
    ) -> None:
        """Multiply the ratios of each episode.

        Args:
            of: the episodes.
            log_ratios: [R], new log-probability of the action taken minus the old one; -inf if it
                is now impossible.
            clip: limit of each p_t; None clips only to keep sums finite.
        """
        self.of = of
        sums = np.empty(len(log_ratios))
        for start, length in zip(of.starts.tolist(), of.lengths.tolist(), strict=True):
            rows = slice(start, start + length)
            np.cumsum(log_ratios[rows], out=sums[rows])
        bound = LARGEST_LOG_RATIO
        if clip is not None:
            bound = min(math.log(clip), LARGEST_LOG_RATIO)
        # a ratio of exactly the limit is not clipped, whatever its rounding
        self.is_clipped: Bools = sums > bound + 1e-9
        self.ratios: F64 = np.exp(np.minimum(sums, bound))

    @property
    def last(self) -> F64:
        """Ratio p_(T-1) of each whole episode."""
        last: F64 = self.ratios[self.of.starts + self.of.lengths - 1]
        return last

    @property
    def effective_sample_size(self) -> float:
        """Number of episodes of equal weight with the same information: ``(sum p)^2 / sum p^2``, 0
        or from 1 to E.

        Source: Kish 1965, "Survey Sampling".
        """
        largest = self.last.max()
        if largest == 0.0:
            return 0.0
        scaled = self.last / largest  # the squares of unscaled ratios can overflow
        return float(scaled.sum() ** 2 / (scaled * scaled).sum())

    @property
    def num_clipped_episodes(self) -> int:
        """Number of episodes with a ratio above the limit."""
        return int(np.logical_or.reduceat(self.is_clipped, self.of.starts).sum())

    def ordinary(self) -> F64:
        """Return values [E] by ordinary importance sampling."""
        values: F64 = self.last * self.of.returns
        return values

    def per_decision(self) -> F64:
        """Return values [E] by per-decision importance sampling."""
        return self.of.totals(self.ratios * self.of.rewards)

    def weights(self) -> F64:
        """Return [R]: ``p_t / w_t``; 0 if all ratios of the step are 0."""
        of = self.of
        longest = int(of.lengths.max())
        sums = np.bincount(of.steps, self.ratios, longest)
        # episodes that ended before
        last_ratios = np.bincount(of.lengths, self.last, longest + 1)
        sums += np.cumsum(last_ratios)[:longest]
        means = sums[of.steps] / len(of)
        return _quotients(self.ratios, means)

    def weighted(self) -> F64:
        """Return values [E] by weighted importance sampling."""
        return self.of.totals(self.weights() * self.of.rewards)

    def doubly_robust(
        self,
        q: F64,
        v: F64,
        v_next: F64,
    ) -> F64:
        """Return values [E] by the doubly robust estimator.

        Args:
            q: [R], the model's value of the action taken.
            v: [R], its value of the observation under the new policy.
            v_next: [R], its value of the next observation; 0 if the episode terminated.
        """
        of = self.of
        errors = of.rewards + of.gamma * v_next - q
        values: F64 = v[of.starts] + of.totals(self.ratios * errors)
        return values

    def bootstrap_weighted(self, num_resamples: int, seed: int) -> F64:
        """Return [num_resamples]: the weighted estimates for episodes drawn with replacement."""
        of = self.of
        gains = self.ratios * of.rewards * of.discounts
        longest = int(of.lengths.max())
        width = max(1, MAX_BLOCK // len(of))
        estimates = []
        for counts in _resamples(len(of), num_resamples, seed):
            values = np.zeros(len(counts))
            for begin in range(0, longest, width):
                steps = np.arange(begin, min(begin + width, longest))
                # an episode that ended before counts with its last ratio, and without a gain
                is_step = steps < of.lengths[:, None]
                rows = of.starts[:, None] + np.minimum(steps, of.lengths[:, None] - 1)
                sums_of_gains = counts @ np.where(is_step, gains[rows], 0.0)
                sums_of_ratios = counts @ self.ratios[rows]
                values += _quotients(sums_of_gains, sums_of_ratios).sum(1)
            estimates.append(values)
        return np.concatenate(estimates)


def _quotients(numerators: F64, denominators: F64) -> F64:
    """Return quotients of any shape; 0 where the denominator is 0."""
    return np.divide(
        numerators,
        denominators,
        out=np.zeros_like(numerators),
        where=denominators > 0.0,
    )


def bootstrap_means(
    values: F64,
    num_resamples: int,
    seed: int,
) -> F64:
    """Return [num_resamples] means of values [E] drawn with replacement."""
    resamples = _resamples(len(values), num_resamples, seed)
    return np.concatenate([counts @ values / len(values) for counts in resamples])


def interval_of(estimates: F64) -> tuple[float, float]:
    """Return the range of the middle 95 % of a bootstrap's estimates."""
    outside = 50.0 * (1.0 - _CONFIDENCE)
    low, high = np.percentile(estimates, [outside, 100.0 - outside])
    return float(low), float(high)


def _resamples(
    num_episodes: int,
    num_resamples: int,
    seed: int,
) -> Iterator[F64]:
    """Yield the number of times each episode is in each resample, [n, E] per block; equal for equal
    seeds.
    """
    rng = np.random.default_rng(seed)
    at_once = max(1, MAX_BLOCK // num_episodes)
    for begin in range(0, num_resamples, at_once):
        count = min(at_once, num_resamples - begin)
        drawn = rng.integers(num_episodes, size=(count, num_episodes))
        # each resample has numbers of its own, so that one call counts all of them
        drawn += np.arange(count)[:, None] * num_episodes
        counts = np.bincount(drawn.ravel(), minlength=count * num_episodes)
        yield counts.reshape(count, num_episodes).astype(np.float64)


_DEFAULT_GAMMA = 0.99
SMALLEST_RETURN = 1e-8
"""Smallest return to divide a gain by; smaller returns are replaced by it."""


class OffPolicyEstimate(NamedTuple):
    """Estimate for one episode.

    Attributes:
        estimator_name: ``"is"`` or ``"wis"``.
        metrics: ``V_prev``, ``V_step_IS`` or ``V_step_WIS``, and ``V_gain_est``, their quotient.
    """

    estimator_name: str
    metrics: dict[str, float]


class OffPolicyEstimator(ABC):
    """Estimator that takes episodes and returns their estimates.

    Attributes:
        policy: the new policy.
        gamma: discount.
        name: its name in ``input_evaluation``.
    """

    name = ""

    def __init__(self, policy: Policy, gamma: float) -> None:
        """Start without episodes.

        Args:
            policy: the new policy.
            gamma: discount.
        """
        self.policy = policy
        self.gamma = gamma
        self._estimates: list[OffPolicyEstimate] = []

    @classmethod
    def create(cls, context: IOContext) -> OffPolicyEstimator:
        """Return an estimator for the default policy of a worker, with the discount of its config.

        Args:
            context: surroundings of the worker's reader.

        Raises:
            ConfigError: the worker has no default policy.
        """
        policy = context.worker.get_policy()
        if policy is None:
            raise ConfigError(
                f"input_evaluation {cls.name!r} judges the policy {c.DEFAULT_POLICY_ID!r}, which"
                " does not exist.",
                key="input_evaluation",
                value=cls.name,
                hint="Leave input_evaluation empty for multi-agent input.",
            )
        return cls(policy, float(context.config.get("gamma", _DEFAULT_GAMMA)))

    def process(self, episode: Batch) -> None:
        """Add one `episode`, a batch of rows ``[T, ...]``.

        Raises:
            BatchError: the batch is multi-agent, or the old policy's action probabilities are
                missing or impossible; the message names the rows (a ValueError).
            PolicyError: the policy does not compute probabilities of actions.
        """
        episode = single_agent(episode)
        if not episode.count:
            return
        old_logp = behaviour_log_likelihoods(episode, self.policy.action_space)
        log_ratios = action_log_likelihoods(self.policy, episode) - old_logp
        rewards = np.asarray(episode[c.REWARDS], np.float64)
        # limited, so that their sums stay finite
        log_products = np.minimum(np.cumsum(log_ratios), LARGEST_LOG_RATIO)
        weights = self._weights(np.exp(log_products))
        discounted = self.gamma ** np.arange(len(rewards)) * rewards
        old_return = float(discounted.sum())
        new_return = float((weights * discounted).sum())
        metrics = {
            "V_prev": old_return,
            f"V_step_{self.name.upper()}": new_return,
            "V_gain_est": new_return / max(SMALLEST_RETURN, old_return),
        }
        self._estimates.append(OffPolicyEstimate(self.name, metrics))

    def get_metrics(self) -> list[OffPolicyEstimate]:
        """Return the estimates since the last call."""
        estimates = self._estimates
        self._estimates = []
        return estimates

    @abstractmethod
    def _weights(self, ratios: F64) -> F64:
        """Return the weight [T] of each reward of an episode from its ratios p_t [T]."""


class ImportanceSamplingEstimator(OffPolicyEstimator):
    """Importance sampling (IS); see the module."""

    name = "is"

    def _weights(self, ratios: F64) -> F64:
        return ratios


class WeightedImportanceSamplingEstimator(OffPolicyEstimator):
    """Weighted importance sampling (WIS); see the module."""

    name = "wis"

    def __init__(self, policy: Policy, gamma: float) -> None:
        """Start without episodes."""
        super().__init__(policy, gamma)
        self._sums = np.zeros(0)
        self._counts = np.zeros(0)

    def _weights(self, ratios: F64) -> F64:
        length = len(ratios)
        longer = max(0, length - len(self._sums))
        self._sums = np.pad(self._sums, (0, longer))
        self._counts = np.pad(self._counts, (0, longer))
        self._sums[:length] += ratios
        self._counts[:length] += 1.0
        means = self._sums[:length] / self._counts[:length]
        # if a mean is 0, all its ratios are 0
        return _quotients(ratios, means)


ESTIMATORS: dict[str, type[OffPolicyEstimator]] = {
    ImportanceSamplingEstimator.name: ImportanceSamplingEstimator,
    WeightedImportanceSamplingEstimator.name: WeightedImportanceSamplingEstimator,
}
"""Estimators by their names in ``input_evaluation``."""


def single_agent(batch: Batch) -> SampleBatch:
    """Return a batch of rows [T, ...] unchanged, which must be of one agent.

    Raises:
        BatchError: it is multi-agent.
    """
    if isinstance(batch, SampleBatch):
        return batch
    raise BatchError(
        "policy_batches",
        "a single-agent batch for off-policy estimation",
        "a MultiAgentBatch",
    )


def episode_parts(batch: Batch) -> list[Batch]:
    """Return one part for each episode of a plain batch; a multi-agent batch is returned whole."""
    if isinstance(batch, SampleBatch):
        return list(batch.split_by_episode())
    return [batch]
