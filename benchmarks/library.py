"""What the library costs beyond the command line, and a call of ``train`` beyond its iteration."""

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
_TRAIN = "import aiorl, sys; aiorl.train('CartPole-v1', stop_return=475, seed=int(sys.argv[1]), run_dir=sys.argv[2])"
_QUICK = {"train_batch_size": 2048, "sgd_minibatch_size": 2048, "num_sgd_iter": 1, "min_iter_time_s": 0, "seed": 1}


def library_start() -> list[Figure]:
    """``aiorl.train("CartPole-v1", stop_return=475)`` in a Python of its own, beside the command line, by turns."""
    options = ("-m", "aiorl.learner", "--env=CartPole-v1", "--stop-return=475")
    pairs = [
        (_seconds("-c", _TRAIN, str(seed), last="{}"), _seconds(*options, f"--seed={seed}", last="--run-dir={}"))
        for seed in range(ROUNDS)
    ]
    beyond_s = statistics.median(library - command for library, command in pairs)
    return [Figure("library/start to 475, beyond the command line", beyond_s, "s", target=1.0, smaller_is_better=True)]


def library_iteration() -> list[Figure]:
    """A call of ``Trainer.train`` beyond the iteration that it is for, without workers and with one."""
    return [
        Figure(
            f"library/train() beyond its iteration, {'one worker' if num_workers else 'in process'}",
            run_fresh("benchmarks.library", str(num_workers)),
            "ms",
            target=1.0,
            smaller_is_better=True,
        )
        for num_workers in (0, 1)
    ]


def _seconds(*arguments: str, last: str) -> float:
    """How long a Python takes from start to end; its last argument names the run directory."""
    with tempfile.TemporaryDirectory() as folder:
        return command_seconds([sys.executable, *arguments, last.format(f"{folder}/run")])


def main(num_workers: str) -> None:
    """Measure in this process, and print milliseconds as JSON."""
    from aiorl import PPOConfig

    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {**_QUICK, "num_workers": int(num_workers), "run_dir": f"{folder}/run"}
        with PPOConfig(env="CartPole-v1", **config).build() as trainer:
            beyond_s = []
            for _ in range(CALLS):
                began = time.perf_counter()
                result = trainer.train()
                beyond_s.append(time.perf_counter() - began - result["time_this_iter_s"])
    sys.stdout.write(json.dumps(1000 * statistics.median(beyond_s[CALLS // 4 :])))


if __name__ == "__main__":
    main(sys.argv[1])
