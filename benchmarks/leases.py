"""Effect of leases: hardly a sample is discarded, and the learner is as busy as it can be.

Streaming runs have few and many workers, each with several settings of
``outstanding_fragments_per_worker``; the default must match the best of them. Runs with 1 to 64
real local workers change the setting in turns (`benchmarks.lease_turns`); 1,000 workers run in
simulated time.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiorl.learning.algorithm import LeasePlan
from aiorl.learning.algorithms.impala import IMPALAConfig
from benchmarks.lease_simulation import Simulation
from benchmarks.lease_turns import SETTINGS, Turn, number_of, turns_of
from benchmarks.result import Figure

__all__ = [
    "SPEEDS_DIFFER_BY",
    "figures_of",
    "leases_real_01",
    "leases_real_04",
    "leases_real_16",
    "leases_real_64",
    "leases_simulated",
    "simulate",
    "spread",
]

SPEEDS_DIFFER_BY = 50.0
MAX_DISCARDED, MIN_RATIO = 0.01, 0.97

_DEFAULT = IMPALAConfig().outstanding_fragments_per_worker
_START_S, _START_OF_EACH_S = 60.0, 2.0  # limit; two cores start 64 processes in a minute
_BUILDS_S = 0.2  # for each worker: from its registration to its first fragment
_ENDS_S = 60.0
_MOST = 3


@dataclass(frozen=True, slots=True)
class _Kind:
    """Bottleneck of a run.

    Attributes:
        name: name of the figure.
        options: options of the learner.
        turn_s: seconds for which a setting is in force: tens of train batches.
        rounds: turns of each setting.
    """

    name: str
    options: dict[str, Any]
    turn_s: float
    rounds: int


_LEARNER_BOUND = _Kind(
    "learner-bound",
    {
        "env": "CartPole-v1",
        "vectorize": "native",
        "num-envs-per-worker": 64,
        "min-iter-time-s": 0.1,
    },
    2.0,
    20,
)
_WORKER_BOUND = _Kind(
    "worker-bound",
    {
        "env": "benchmarks.chaos.env:PacedCartPole",
        "env-config.step_s": 0.02,
        "num-envs-per-worker": 1,
        "rollout-fragment-length": 16,
        "min-iter-time-s": 0,
    },
    16.0,
    4,
)


def leases_simulated() -> list[Figure]:
    """Simulate 1,000 workers for 90 s; the slowest is 50 times slower than the fastest."""
    fragment_s = spread(1000, 0.2)
    return [
        *_compare(
            "1,000 simulated, learner-bound", lambda k: simulate(fragment_s, 64, k, 0.1, 90.0)
        ),
        *_compare(
            "1,000 simulated, worker-bound", lambda k: simulate(fragment_s, 256, k, 0.05, 90.0)
        ),
    ]


def leases_real_01() -> list[Figure]:
    """Measure IMPALA with one worker process on this machine."""
    return _real(1)


def leases_real_04() -> list[Figure]:
    """Measure IMPALA with four worker processes."""
    return _real(4)


def leases_real_16() -> list[Figure]:
    """Measure IMPALA with 16 worker processes."""
    return _real(16)


def leases_real_64() -> list[Figure]:
    """Measure IMPALA with 64 worker processes."""
    return _real(64)


def _real(workers: int) -> list[Figure]:
    batch = 16 * workers  # one fragment of each: about three updates a second
    batches = {"train-batch-size": batch, "sgd-minibatch-size": batch}
    return [
        *figures_of(f"{workers} workers, learner-bound", _train(_LEARNER_BOUND, workers, {})),
        *figures_of(f"{workers} workers, worker-bound", _train(_WORKER_BOUND, workers, batches)),
    ]


def spread(count: int, fastest_s: float) -> list[float]:
    """Return seconds per fragment for each worker, evenly spread on a logarithmic scale."""
    order = [fastest_s * SPEEDS_DIFFER_BY ** (number / (count - 1)) for number in range(count)]
    random.Random(0).shuffle(order)
    return order


def simulate(
    fragment_s: Sequence[float],
    fragments_per_batch: int,
    per_worker: int,
    update_s: float,
    seconds: float,
) -> tuple[float, float, float]:
    """Return fragments trained on per second, share discarded and mean policy lag, after a third of
    the time.
    """
    plan = LeasePlan("streaming", fragments_per_batch, per_worker, 10)
    found = Simulation(fragment_s, plan, update_s).run(seconds, seconds / 3)
    return found.fragments_per_s, found.discarded, sum(found.lags) / max(1, len(found.lags))


def figures_of(name: str, turns: Iterable[Turn]) -> list[Figure]:
    """Return the figures of the default setting, from turns of all settings.

    Turns are short and alternate, and each setting counts by all its turns together. The best of a
    few single measurements would only be the one that the machine happened to favour.
    """
    by_setting = _by_setting(turns)
    own = by_setting[_DEFAULT]
    rates = {setting: [round(turn.rate) for turn in turns] for setting, turns in by_setting.items()}
    print(json.dumps({"what": name, "rates": rates}), flush=True)
    means = _means(by_setting)
    discarded = sum(turn.discarded for turn in own) / sum(turn.sampled for turn in own)
    lag = statistics.mean(turn.lag for turn in own)
    return _figures(name, means[_DEFAULT], max(means.values()), discarded, lag)


def _by_setting(turns: Iterable[Turn]) -> dict[int, list[Turn]]:
    found: dict[int, list[Turn]] = {setting: [] for setting in SETTINGS}
    for turn in turns:
        found[turn.setting].append(turn)
    return found


def _means(by_setting: Mapping[int, Sequence[Turn]]) -> dict[int, float]:
    return {
        setting: statistics.mean(turn.rate for turn in turns)
        for setting, turns in by_setting.items()
    }


def _train(kind: _Kind, workers: int, more: dict[str, Any]) -> list[Turn]:
    """Train; return the turns after all workers have joined, the same number for each setting.

    If the default seems to fall short, the run continues, and as many turns again are counted as
    well. Of three equally good settings, noise always puts one ahead.
    """
    with tempfile.TemporaryDirectory() as folder, Path(folder, "learner.txt").open("wb") as log:
        results = Path(folder, "run", "result.jsonl")
        added = {"algo": "impala", "num-workers": workers, "seed": 1, "run-dir": results.parent}
        words = [f"--{name}={value}" for name, value in {**kind.options, **more, **added}.items()]
        command = [sys.executable, "-m", "benchmarks.lease_turns", str(kind.turn_s), *words]
        learner = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _START_S + _START_OF_EACH_S * workers
            while not any(row["num_healthy_workers"] == workers for row in _rows(results)):
                if learner.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{workers} workers do not train: {Path(log.name).read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            first = number_of(time.time() + _BUILDS_S * workers, kind.turn_s) + 1
            first += -first % len(SETTINGS)
            for times in range(1, _MOST + 1):
                last = first + times * kind.rounds * len(SETTINGS)
                time.sleep(last * kind.turn_s - time.time() + 1.0)
                turns = turns_of(_rows(results), kind.turn_s)
                missing = [number for number in range(first, last) if number not in turns]
                if missing:
                    said = f"too few results in {len(missing)} of {last - first} turns"
                    raise RuntimeError(f"{kind.name}, {workers} workers: {said}")
                found = [turns[number] for number in range(first, last)]
                means = _means(_by_setting(found))
                if means[_DEFAULT] >= MIN_RATIO * max(means.values()):
                    break
        finally:
            learner.terminate()
            try:
                learner.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                learner.kill()
                learner.wait()
    return found


def _rows(results: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    if not results.exists():
        return []
    lines = results.read_bytes().split(b"\n")[:-1]  # the last one may be half written
    return [json.loads(line) for line in lines]


def _compare(name: str, run: Callable[[int], tuple[float, float, float]]) -> list[Figure]:
    found = {setting: run(setting) for setting in SETTINGS}
    rate, discarded, lag = found[_DEFAULT]
    return _figures(name, rate, max(each[0] for each in found.values()), discarded, lag)


def _figures(name: str, rate: float, best: float, discarded: float, lag: float) -> list[Figure]:
    return [
        Figure(f"leases/{name}", rate, "trained/s", best, target_ratio=MIN_RATIO),
        Figure(
            f"leases/{name}: discarded",
            discarded,
            "of sampled",
            target=MAX_DISCARDED,
            smaller_is_better=True,
        ),
        Figure(f"leases/{name}: policy lag", lag, "versions"),
    ]
