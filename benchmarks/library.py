"""Cost of the library compared with the command line, and of a call of ``train`` compared with its
iteration.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks.measure import command_seconds, run_fresh
from benchmarks.result import Figure

__all__ = ["library_iteration", "library_start"]

ROUNDS = 5
CALLS = 200
_TRAIN = (
    "import aiorl, sys; aiorl.train('CartPole-v1', stop_return=475, seed=int(sys.argv[1]),"
    " run_dir=sys.argv[2])"
)
_QUICK = {
    "train_batch_size": 2048,
    "sgd_minibatch_size": 2048,
    "num_sgd_iter": 1,
    "min_iter_time_s": 0,
    "seed": 1,
}


def library_start() -> list[Figure]:
    """Measure ``aiorl.train("CartPole-v1", stop_return=475)`` in a new Python, alternating with the
    command line.
    """
    options = ("-m", "aiorl.learner", "--env=CartPole-v1", "--stop-return=475")
    pairs = [
        (
            _seconds("-c", _TRAIN, str(seed), last="{}"),
            _seconds(*options, f"--seed={seed}", last="--run-dir={}"),
        )
        for seed in range(ROUNDS)
    ]
    ratio = statistics.median(library / command for library, command in pairs)
    baseline = statistics.median(command for _, command in pairs)
    return [
        Figure(
            "library/start to 475",
            ratio * baseline,
            "s",
            baseline,
            target_ratio=1.15,
            smaller_is_better=True,
        )
    ]


def library_iteration() -> list[Figure]:
    """Measure a call of ``Trainer.train`` against its own iteration, without workers and with
    one.
    """
    figures = []
    for num_workers, where in ((0, "in process"), (1, "one worker")):
        value, baseline = run_fresh("benchmarks.library", str(num_workers))
        name = f"library/train(), {where}"
        figures.append(
            Figure(name, value, "ms", baseline, target_ratio=1.1, smaller_is_better=True)
        )
    return figures


def _seconds(*arguments: str, last: str) -> float:
    """Return how long a Python process takes from start to end; its last argument names the run
    directory.
    """
    with tempfile.TemporaryDirectory() as folder:
        return command_seconds([sys.executable, *arguments, last.format(f"{folder}/run")])


def main(num_workers: str) -> None:
    """Measure in this process and print milliseconds as JSON."""
    from aiorl import PPOConfig

    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            **_QUICK,
            "num_workers": int(num_workers),
            "run_dir": f"{folder}/run",
        }
        with PPOConfig(env="CartPole-v1", **config).build() as trainer:
            calls, iterations = [], []
            for _ in range(CALLS):
                began = time.perf_counter()
                result = trainer.train()
                calls.append(time.perf_counter() - began)
                iterations.append(result["time_this_iter_s"])
    sys.stdout.write(
        json.dumps([1000 * statistics.median(times[CALLS // 4 :]) for times in (calls, iterations)])
    )


if __name__ == "__main__":
    main(sys.argv[1])
