"""Comparison of experiments by the probability of improvement and by normalised scores.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
https://arxiv.org/abs/2108.13264, section 4.3; `rliable.metrics` is the authors' code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aiorl.data.columns import F64
from aiorl.run.report.plot import Experiment, interquartile_mean

_RESAMPLES = 2000
MIN_RUNS = 2
"""Runs without which an experiment is not compared: they vary with the seed."""


class Improvement(NamedTuple):
    """Probability that a run of one experiment ends better than a run of another one.

    Attributes:
        better: name of the experiment whose probability is at least 0.5.
        worse: name of the other one.
        probability: mean over environments of the share of pairs of runs in which `better` has the
            larger return at the end; equal returns count half.
        low: lower end of its 95 % interval.
        high: upper end.
        num_envs: environments in which both have enough runs.
    """

    better: str
    worse: str
    probability: float
    low: float
    high: float
    num_envs: int


def compare(experiments: Sequence[Experiment], rng: np.random.Generator) -> Iterator[Improvement]:
    """Yield the probability of improvement for each two names of experiments that share an
    environment, with MIN_RUNS runs each.

    Args:
        experiments: the experiments; those with the same name are of different environments.
        rng: generator of the bootstrap.
    """
    last_returns: dict[str, dict[str, F64]] = {}
    for experiment in experiments:
        if len(experiment.runs) >= MIN_RUNS:
            last = np.array([run.returns[-1] for run in experiment.runs])
            last_returns.setdefault(experiment.name, {})[experiment.env] = last
    for better, worse in itertools.combinations(last_returns, 2):
        envs = last_returns[better].keys() & last_returns[worse].keys()
        if not envs:
            continue
        tasks = [(last_returns[better][env], last_returns[worse][env]) for env in sorted(envs)]
        probability, low, high = probability_of_improvement(tasks, rng)
        if probability < 0.5:
            better, worse = worse, better
            probability, low, high = 1.0 - probability, 1.0 - high, 1.0 - low
        yield Improvement(
            better=better,
            worse=worse,
            probability=probability,
            low=low,
            high=high,
            num_envs=len(envs),
        )


class Score(NamedTuple):
    """Normalised score of the runs of one name at their ends.

    Attributes:
        name: name of the experiments.
        mean: interquartile mean over all runs.
        low: lower end of its 95 % interval.
        high: upper end.
        num_runs: runs in all environments.
        num_envs: environments.
    """

    name: str
    mean: float
    low: float
    high: float
    num_runs: int
    num_envs: int


def scores_of(
    experiments: Sequence[Experiment],
    ranges: Mapping[str, tuple[float, float]],
    rng: np.random.Generator,
) -> Iterator[Score]:
    """Yield the normalised score of each name: returns at the end are 0 at the lower and 1 at the
    higher number of their environment's range.

    Args:
        experiments: the experiments; those with the same name are of different environments.
        ranges: name of an environment -> two different returns; others are left out.
        rng: generator of the bootstrap, which resamples the runs of each environment.
    """
    tasks: dict[str, list[F64]] = {}
    for experiment in experiments:
        if experiment.env in ranges:
            zero, one = ranges[experiment.env]
            last = np.array([run.returns[-1] for run in experiment.runs])
            tasks.setdefault(experiment.name, []).append((last - zero) / (one - zero))
    for name, scores in tasks.items():
        resampled = [task[rng.integers(len(task), size=(len(task), _RESAMPLES))] for task in scores]
        low, high = np.quantile(interquartile_mean(np.concatenate(resampled)), (0.025, 0.975))
        pooled = np.concatenate(scores)
        yield Score(
            name=name,
            mean=float(interquartile_mean(pooled)),
            low=float(low),
            high=float(high),
            num_runs=len(pooled),
            num_envs=len(scores),
        )


def probability_of_improvement(
    tasks: Sequence[tuple[F64, F64]], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the mean over tasks of P(X > Y) + P(X = Y) / 2, and its 95 % interval by a bootstrap
    that resamples the runs of each task.

    Args:
        tasks: scores [N] of X and [M] of Y in each task.
        rng: generator of the bootstrap.
    """
    probabilities = []
    resampled = np.zeros(_RESAMPLES)
    for scores, others in tasks:
        difference = scores[:, None] - others
        wins = np.where(difference == 0, 0.5, difference > 0)
        probabilities.append(wins.mean())
        # a resample is the number of times that it has each run
        resampled += np.sum((_shares(len(scores), rng) @ wins) * _shares(len(others), rng), axis=1)
    low, high = np.quantile(resampled / len(tasks), (0.025, 0.975))
    return float(np.mean(probabilities)), float(low), float(high)


def _shares(num_runs: int, rng: np.random.Generator) -> F64:
    """Return the share of each run in each resample, [R, N]."""
    shares: F64 = rng.multinomial(num_runs, np.full(num_runs, 1 / num_runs), _RESAMPLES) / num_runs
    return shares
