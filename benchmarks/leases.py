"""What leases achieve: hardly a sample is made to be thrown away, and the learner is kept as busy as it can be.

Streaming runs with few and many workers, each with several settings of ``outstanding_fragments_per_worker``: the
default must come up to the best of them. With 1 to 64 real local workers, and with 1,000 in simulated time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aiorl.algorithms.algorithm import LeasePlan
from aiorl.algorithms.impala.config import IMPALAConfig
from benchmarks.lease_simulation import Simulation
from benchmarks.measure import learner_rows, rate_of
from benchmarks.result import Figure

__all__ = ["SPEEDS_DIFFER_BY", "leases_real", "leases_simulated", "simulate", "spread"]

WORKERS = (1, 4, 16, 64)
SETTINGS = (1, 8)
"""Beside the default."""
SPEEDS_DIFFER_BY = 50.0
MAX_DISCARDED, MIN_RATIO = 0.01, 0.97
SECONDS = 8.0

_DEFAULT = IMPALAConfig().outstanding_fragments_per_worker
_LEARNER_BOUND: dict[str, Any] = {"env": "CartPole-v1", "vectorize": "native", "num-envs-per-worker": 64}
_WORKER_BOUND: dict[str, Any] = {
    "env": "benchmarks.chaos.env:PacedCartPole",
    "env-config.step_s": 0.02,
    "num-envs-per-worker": 1,
    "rollout-fragment-length": 32,
}


def leases_simulated() -> list[Figure]:
    """1,000 workers, the slowest 50 times slower than the fastest, for 90 s of simulated time."""
    fragment_s = spread(1000, 0.2)
    return [
        *_compare("1,000 simulated, learner-bound", lambda k: simulate(fragment_s, 64, k, 0.1, 90.0)),
        *_compare("1,000 simulated, worker-bound", lambda k: simulate(fragment_s, 256, k, 0.05, 90.0)),
    ]


def leases_real() -> list[Figure]:
    """IMPALA with 1 to 64 worker processes on this machine."""
    figures = []
    for workers in WORKERS:
        batch = 32 * workers  # a fragment of each: some 1.5 updates a second
        worker_bound = {**_WORKER_BOUND, "train-batch-size": batch, "sgd-minibatch-size": batch}
        figures += _compare(f"{workers} workers, learner-bound", lambda k: _train(_LEARNER_BOUND, workers, k))  # noqa: B023
        figures += _compare(f"{workers} workers, worker-bound", lambda k: _train(worker_bound, workers, k))  # noqa: B023
    return figures


def spread(count: int, fastest_s: float) -> list[float]:
    """Seconds that each of so many workers takes for a fragment, evenly spread on a logarithmic scale."""
    order = [fastest_s * SPEEDS_DIFFER_BY ** (number / (count - 1)) for number in range(count)]
    random.Random(0).shuffle(order)
    return order


def simulate(
    fragment_s: Sequence[float], fragments_per_batch: int, per_worker: int, update_s: float, seconds: float
) -> tuple[float, float, float]:
    """Fragments trained on per second, share discarded, mean policy lag, after a third of the time."""
    plan = LeasePlan("streaming", fragments_per_batch, per_worker, 10)
    found = Simulation(fragment_s, plan, update_s).run(seconds, seconds / 3)
    return found.fragments_per_s, found.discarded, sum(found.lags) / max(1, len(found.lags))


def _train(options: dict[str, Any], workers: int, per_worker: int) -> tuple[float, float, float]:
    """Env steps trained on per second, share discarded and mean policy lag of the late part of a run."""
    start_s = 12.0 + 0.8 * workers  # two cores start 64 processes
    rows = learner_rows(
        {**options, "algo": "impala", "num-workers": workers, "outstanding-fragments-per-worker": per_worker},
        SECONDS,
        start_s=start_s,
    )
    first, last = rows[0]["ledger"], rows[-1]["ledger"]
    sampled = last["sampled"] - first["sampled"]
    discarded = sum(last["discarded"].values()) - sum(first["discarded"].values())
    lags = [row["policy_lag"]["mean"] for row in rows if row["policy_lag"]]
    return rate_of(rows), discarded / max(1, sampled), sum(lags) / max(1, len(lags))


def _compare(name: str, run: Any) -> list[Figure]:
    rate, discarded, lag = run(_DEFAULT)
    best = max(rate, *(run(setting)[0] for setting in SETTINGS))
    return [
        Figure(f"leases/{name}", rate, "trained/s", best, None, MIN_RATIO),
        Figure(f"leases/{name}: discarded", discarded, "of sampled", None, MAX_DISCARDED, smaller_is_better=True),
        Figure(f"leases/{name}: policy lag", lag, "versions"),
    ]
