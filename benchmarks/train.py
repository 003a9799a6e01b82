"""End to end on this host: env steps sampled and trained per second, learner and workers together.

Each figure runs `python -m aiorl.learner` as a user would. It alternates with a bare pair of
processes that does the same work without aiorl (`benchmarks.bare_pair`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from aiorl.keys import make_keys
from benchmarks.bare_pair import PairSpec
from benchmarks.chaos.link import free_pair
from benchmarks.measure import alternate, learner_rate, run_command
from benchmarks.result import Figure

__all__ = [
    "train_impala",
    "train_impala_encrypted",
    "train_impala_python_envs",
    "train_ppo_1_epoch",
    "train_ppo_10_epochs",
]

ROUNDS = 5
TARGET_RATIO = 0.5
ENCRYPTED_RATIO = 0.97
_IMPALA = PairSpec("vtrace", 1, 1024, True, 32, 32768, threads=1)


def train_ppo_10_epochs() -> list[Figure]:
    """Measure PPO with 10 epochs and minibatches of 4096 on vectorised CartPole."""
    pair = PairSpec("ppo", 2, 1024, True, 32, 65536, epochs=10, minibatch=4096, seconds=8.0)
    return _figure("train/ppo 10 epochs", pair, "ppo")


def train_ppo_1_epoch() -> list[Figure]:
    """Measure PPO with one epoch on vectorised CartPole."""
    pair = PairSpec("ppo", 2, 1024, True, 32, 65536, epochs=1, minibatch=8192)
    return _figure("train/ppo 1 epoch", pair, "ppo")


def train_impala() -> list[Figure]:
    """Measure IMPALA with one worker on vectorised CartPole."""
    return _figure("train/impala", _IMPALA, "impala")


def train_impala_encrypted() -> list[Figure]:
    """Measure IMPALA over TCP on loopback, with keys against without."""
    value, baseline = alternate(
        _encrypted, lambda: _aiorl(_IMPALA, "impala", insecure=None), ROUNDS
    )
    return [
        Figure(
            "train/impala encrypted", value, "env steps/s", baseline, target_ratio=ENCRYPTED_RATIO
        )
    ]


def train_impala_python_envs() -> list[Figure]:
    """Measure IMPALA with 64 Python CartPoles in each of two workers."""
    pair = PairSpec("vtrace", 2, 64, False, 64, 8192, threads=1)
    return _figure("train/impala 64 Python envs", pair, "impala")


def _figure(name: str, pair: PairSpec, algo: str) -> list[Figure]:
    value, baseline = alternate(lambda: _aiorl(pair, algo), lambda: _bare(pair), ROUNDS)
    return [Figure(name, value, "env steps/s", baseline, target_ratio=TARGET_RATIO)]


def _bare(pair: PairSpec) -> float:
    fields = {name: getattr(pair, name) for name in PairSpec.__slots__}
    printed = run_command([sys.executable, "-m", "benchmarks.bare_pair", json.dumps(fields)])
    return float(json.loads(printed)["steps_per_s"])


def _encrypted() -> float:
    """Return steps per second with a worker that is started by hand, because the learner's own
    workers need no keys.
    """
    port = int((pair := free_pair())[0].getsockname()[1])
    for each in pair:
        each.close()
    with tempfile.TemporaryDirectory() as keys:
        make_keys(Path(keys))
        address = f"tcp://127.0.0.1:{port}"
        with subprocess.Popen(
            [sys.executable, "-m", "aiorl.worker", "--connect", address, "--keys", keys]
        ) as worker:
            try:
                return _aiorl(_IMPALA, "impala", keys=keys, bind=address, num_workers=0)
            finally:
                worker.terminate()


def _aiorl(pair: PairSpec, algo: str, **others: object) -> float:
    """Return steps per second of a learner started from the command line, in its second half."""
    options: dict[str, Any] = {
        "env": "CartPole-v1",
        "algo": algo,
        "num-workers": pair.workers,
        "num-envs-per-worker": pair.num_envs,
        "vectorize": "native" if pair.vectorised else "serial",
        "rollout-fragment-length": pair.length,
        "train-batch-size": pair.batch,
        "num-sgd-iter": pair.epochs,
        "sgd-minibatch-size": pair.minibatch or pair.batch,
        "threads": pair.threads,
    }
    options.update({name.replace("_", "-"): value for name, value in others.items()})
    return learner_rate(options, pair.seconds)
