"""Five estimators of a policy's return on stored episodes, each with its interval.

judgement = judge(policy, episodes, methods=("pdis", "dr"), gamma=0.99)
print(judgement.estimates["dr"].value, judgement.v_prev)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.columns import F64, I64, Array
from aiorl.data.sample_batch import Batch, SampleBatch
from aiorl.errors import BatchError, ConfigError
from aiorl.offline.estimators import (
    SMALLEST_RETURN,
    Ratios,
    Trajectories,
    behaviour_log_likelihoods,
    bootstrap_means,
    interval_of,
    single_agent,
)
from aiorl.offline.estimators.fitted_q import (
    FeatureBank,
    FittedQ,
    QRows,
    evaluate_policy,
    has_terminated,
    log_likelihoods,
)

METHODS = {
    "is": "ordinary importance sampling: each return times the whole episode's ratio",
    "wis": (
        "weighted: each reward times the ratio up to it, divided by the mean ratio of all episodes"
    ),
    "pdis": "per-decision: each reward times the ratio up to it",
    "dm": "direct: the value of first observations by a fitted Q",
    "dr": "doubly robust: a fitted Q, corrected for its errors",
}
"""Estimators by name, each with its description."""

WITH_RATIOS = frozenset({"is", "wis", "pdis", "dr"})
"""Estimators that need the old policy's action probabilities."""
_WITH_Q = {"dm", "dr"}
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Estimate:
    """Result of one estimator.

    Attributes:
        value: expected discounted return of an episode under the policy.
        interval: range of 95 % of the bootstrap's estimates; None for a single episode, or without
            a bootstrap.
        gain: the value divided by ``max(1e-8, V_prev)``.
        values: float64 [E], one for each episode; their mean is the value.
    """

    value: float
    interval: tuple[float, float] | None
    gain: float
    values: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Estimates of a policy from stored episodes.

    Attributes:
        gamma: discount.
        clip: limit of ratios; None if there is none.
        seed: seed of features, folds and bootstrap.
        num_episodes: E, whole episodes used.
        num_rows: steps in them.
        v_prev: mean discounted return of the stored episodes.
        v_prev_interval: its interval, see `Estimate.interval`.
        effective_sample_size: episodes of equal weight with the same information, see `Ratios`;
            None without ratios.
        num_clipped_episodes: episodes with a ratio above the limit.
        num_clipped_ratios: ratios above the limit, out of ``num_rows``.
        estimates: estimates by method.
        fitted_q: the Q of ``dm``, and of ``dr`` if there are too few episodes for folds; None
            without either.
        is_cross_fitted: True if ``dr`` uses for each half of the episodes the Q of the other half.
    """

    gamma: float
    clip: float | None
    seed: int
    num_episodes: int
    num_rows: int
    v_prev: float
    v_prev_interval: tuple[float, float] | None
    effective_sample_size: float | None
    num_clipped_episodes: int
    num_clipped_ratios: int
    estimates: dict[str, Estimate]
    fitted_q: FittedQ | None
    is_cross_fitted: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as JSON data."""
        names = ("gamma", "clip", "seed", "num_episodes", "num_rows", "effective_sample_size")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data["V_prev"] = self.v_prev
        data["V_prev_interval"] = self.v_prev_interval
        data["clipped_episodes"] = self.num_clipped_episodes
        data["clipped_ratios"] = self.num_clipped_ratios
        data["estimates"] = {
            name: {
                "V_est": estimate.value,
                "interval": estimate.interval,
                "V_gain_est": estimate.gain,
                "episodes": estimate.values.tolist(),
            }
            for name, estimate in self.estimates.items()
        }
        if self.fitted_q is not None:
            data["fitted_q"] = {
                "iterations": self.fitted_q.num_iterations,
                "has_converged": self.fitted_q.has_converged,
                "error": self.fitted_q.error,
                "is_cross_fitted": self.is_cross_fitted,
            }
        return data


def judge(
    policy: Policy,
    episodes: Iterable[Batch],
    *,
    methods: Collection[str] = tuple(METHODS),
    gamma: float = 0.99,
    clip: float | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
    cut_is_end: bool = False,
    observe: Callable[[Sequence[Any]], Array] | None = None,
) -> Judgement:
    """Estimate the return of a policy from episodes that another policy played.

    ``is``, ``wis`` and ``pdis`` estimate the return up to the point where episodes were cut; ``dm``
    and ``dr`` also the return after a cut, unless ``cut_is_end``. The interval of ``dm`` shows how
    much first observations differ, not the errors of its Q. ``dr`` uses for each half of the
    episodes a Q that was fitted to the other half.

    Args:
        policy: the policy, which samples actions from its distribution.
        episodes: whole episodes, one after the other; read once, and few at a time.
        methods: any of `METHODS`.
        gamma: discount, 0 to 1; with 0 only the first reward counts.
        clip: limit of the ratios of probabilities up to a step; None for no limit.
        num_resamples: number of resamples in the bootstrap for intervals; 0 for no intervals.
        seed: seed of all random numbers; equal seeds give equal results.
        cut_is_end: the value after a time limit is 0.
        observe: function that turns observations as stored from the environment into network
            inputs; None if they are stored as network inputs, as aiorl does.

    Raises:
        BatchError: columns are missing, behaviour probabilities are impossible (the message names
            the rows), or a batch is multi-agent (a ValueError).
        ConfigError: arguments are invalid, or there is no episode (a ValueError).
        PolicyError: the policy does not compute probabilities of its actions (a ValueError).
    """
    _check(methods, gamma, clip, num_resamples)
    bank = FeatureBank(seed)
    wants_ratios = bool(WITH_RATIOS.intersection(methods))
    wants_q = bool(_WITH_Q.intersection(methods))
    rewards = []
    lengths = []
    log_ratios = [np.zeros(0)]
    has_next_value = []
    for chunk in _chunks(episodes):
        for episode in chunk:
            rewards.append(_rewards(episode))
            lengths.append(episode.count)
            has_next_value.append(not (cut_is_end or has_terminated(episode)))
        old_logp: list[F64] = []
        if wants_ratios:
            # check the stored columns first, because they can be wrong
            old_logp = [behaviour_log_likelihoods(part, policy.action_space) for part in chunk]
        if wants_q:
            outputs = evaluate_policy(policy, chunk, observe, need_ends=not cut_is_end)
            bank.add(outputs)
        if wants_ratios:
            new_logp = outputs.logp if wants_q else log_likelihoods(policy, chunk, observe)
            log_ratios.append(new_logp - np.concatenate(old_logp))
    if not lengths:
        raise ConfigError(
            "there is no whole episode in the data.",
            hint="Episodes end with a row that is done.",
        )
    of = Trajectories(
        np.concatenate(rewards),
        np.array(lengths),
        gamma,
    )
    ratios: Ratios | None = None
    rows: QRows | None = None
    fitted: FittedQ | None = None
    folds: list[I64] = []
    if wants_ratios:
        ratios = Ratios(of, np.concatenate(log_ratios), clip=clip)
    if wants_q:
        rows = bank.rows(of, np.array(has_next_value))
        if "dr" in methods:
            folds = _folds(len(of), seed)
        # ``dr`` needs a Q of all episodes only if there are too few of them for folds
        if "dm" in methods or not folds:
            fitted = FittedQ(rows)
    values = _values(
        of=of,
        ratios=ratios,
        rows=rows,
        folds=folds,
        fitted=fitted,
    )

    def interval(name: str, per_episode: F64) -> tuple[float, float] | None:
        if num_resamples == 0 or len(per_episode) < 2:
            return None
        if name == "wis" and ratios is not None:
            return interval_of(ratios.bootstrap_weighted(num_resamples, seed))
        return interval_of(bootstrap_means(per_episode, num_resamples, seed))

    v_prev = float(of.returns.mean())
    estimates = {}
    for name in METHODS:
        if name in methods:
            value = float(values[name].mean())
            estimates[name] = Estimate(
                value=value,
                interval=interval(name, values[name]),
                gain=value / max(SMALLEST_RETURN, v_prev),
                values=values[name],
            )
    return Judgement(
        gamma=gamma,
        clip=clip,
        seed=seed,
        num_episodes=len(of),
        num_rows=len(of.rewards),
        v_prev=v_prev,
        v_prev_interval=interval("V_prev", of.returns),
        effective_sample_size=None if ratios is None else ratios.effective_sample_size,
        num_clipped_episodes=0 if ratios is None else ratios.num_clipped_episodes,
        num_clipped_ratios=0 if ratios is None else int(ratios.is_clipped.sum()),
        estimates=estimates,
        fitted_q=fitted,
        is_cross_fitted=bool(folds),
    )


def _values(
    of: Trajectories,
    ratios: Ratios | None,
    rows: QRows | None,
    folds: Sequence[I64],
    fitted: FittedQ | None,
) -> dict[str, F64]:
    """Return the values [E] of all estimators for which there are ratios and a Q, requested or
    not.
    """
    values: dict[str, F64] = {}
    if ratios is not None:
        values = {"is": ratios.ordinary(), "wis": ratios.weighted(), "pdis": ratios.per_decision()}
    if rows is not None and fitted is not None:
        values["dm"] = fitted.values(rows)[1][of.starts]
    if rows is not None and ratios is not None and (folds or fitted):
        values["dr"] = ratios.doubly_robust(*_cross_fitted(rows, folds, fitted))
    return values


def _folds(num_episodes: int, seed: int) -> list[I64]:
    """Return two random halves of the episodes, or none if there are too few episodes."""
    if num_episodes < 4:
        return []
    half = num_episodes // 2
    drawn = np.random.default_rng([seed, 1]).permutation(num_episodes)
    return [np.sort(drawn[:half]), np.sort(drawn[half:])]


def _cross_fitted(
    rows: QRows,
    folds: Sequence[I64],
    fitted: FittedQ | None,
) -> tuple[F64, F64, F64]:
    """Return Q, V and V after each step, [R] each, for each half of the episodes with the Q of the
    other half.
    """
    if not folds:
        assert fitted is not None  # without folds it is always fitted
        return fitted.values(rows)
    values = np.zeros((3, len(rows.choices)))
    for evaluated, trained_on in (folds, folds[::-1]):
        is_evaluated = np.zeros(len(rows.of), bool)
        is_evaluated[evaluated] = True
        fitted_to_rest = FittedQ(rows.of_episodes(trained_on))
        steps = np.repeat(is_evaluated, rows.of.lengths)
        values[:, steps] = fitted_to_rest.values(rows.of_episodes(evaluated))
    return values[0], values[1], values[2]


def _check(
    methods: Collection[str],
    gamma: float,
    clip: float | None,
    num_resamples: int,
) -> None:
    """Raise ConfigError for the first argument of `judge` that is invalid."""
    all_methods = ", ".join(METHODS)
    if not methods:
        raise ConfigError(
            f"no estimator is given; known: {all_methods}.",
            key="methods",
            value=list(methods),
        )
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(
            f"gamma is {gamma}, expected a number from 0 to 1.",
            key="gamma",
            value=gamma,
        )
    if clip is not None and not clip > 0.0:
        raise ConfigError(
            f"clip is {clip}, expected above 0.",
            key="clip",
            value=clip,
        )
    if num_resamples < 0:
        raise ConfigError(
            f"{num_resamples} resamples, expected 0 or more.",
            key="bootstrap",
            value=num_resamples,
        )
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ConfigError(
            f"there is no estimator {unknown[:1]}; known: {all_methods}.",
            key="methods",
            value=unknown,
        )


def _chunks(episodes: Iterable[Batch]) -> Iterator[list[SampleBatch]]:
    """Yield a few episodes at a time."""
    chunk: list[SampleBatch] = []
    num_rows = 0
    for episode in map(single_agent, episodes):
        if episode.count:
            chunk.append(episode)
            num_rows += episode.count
        if num_rows >= _ROWS_AT_ONCE:
            yield chunk
            chunk = []
            num_rows = 0
    if chunk:
        yield chunk


def _rewards(episode: SampleBatch) -> F64:
    rewards = np.asarray(episode[c.REWARDS], np.float64)
    if rewards.ndim != 1 or not np.isfinite(rewards).all():
        raise BatchError(
            c.REWARDS,
            "a finite number for each row",
            f"{rewards.shape}: {rewards.ravel()[:5]}",
        )
    return rewards
