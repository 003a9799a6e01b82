"""Metrics of the episodes that RolloutWorkers have finished."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiorl.actors.references import get
from aiorl.data.metrics import EpisodeColumns, RolloutMetrics
from aiorl.offline.estimators import OffPolicyEstimate
from aiorl.run.report.results import Results


def collect_metrics(
    local_worker: Any = None,
    remote_workers: Sequence[Any] = (),
    timeout_seconds: float = 180,
) -> dict[str, Any]:
    """Return averages over the episodes that have ended since the last call::

        workers = [aiorl.RolloutWorker.as_remote().remote("CartPole-v1", MyPolicy) for _ in range(4)]
        aiorl.get([worker.sample.remote() for worker in workers])
        print(aiorl.collect_metrics(remote_workers=workers)["episode_reward_mean"])

    Args:
        local_worker: worker of this process; None for none.
        remote_workers: handles of others.
        timeout_seconds: longest time to wait for remote workers, seconds.

    Returns:
        ``episode_reward_mean``, ``episode_len_mean`` and others; NaN if no episode has ended.

    Raises:
        ActorLost: a remote worker was lost.
        TimeoutError: a remote worker has not answered in time.
    """
    refs = [worker.get_metrics.remote() for worker in remote_workers]
    answers = [] if local_worker is None else [local_worker.get_metrics()]
    answers += get(refs, timeout=timeout_seconds)
    now = time.monotonic()
    return averages(Results(max(1, sum(map(len, answers))), now), answers, now)


def averages(results: Results, answers: Iterable[Sequence[Any]], now: float) -> dict[str, Any]:
    """Add metrics to those of earlier episodes, and return the averages.

    Args:
        results: collector, which keeps the earlier ones.
        answers: what `get_metrics` of each worker has returned.
        now: time of a monotonic clock, seconds.
    """
    metrics = [item for answer in answers for item in answer]
    episodes = [item for item in metrics if isinstance(item, RolloutMetrics)]
    estimates = [item for item in metrics if isinstance(item, OffPolicyEstimate)]
    results.add_episodes(EpisodeColumns.of(episodes, estimates))
    return {**results.take_episodes(now), "sampler_perf": _mean_perf(episodes)}


def _mean_perf(episodes: Iterable[RolloutMetrics]) -> dict[str, float]:
    """Return means of the samplers' figures over the episodes that have them."""
    figures: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.perf_stats.items():
            figures.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in figures.items()}
