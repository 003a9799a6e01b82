"""Training as a library: trainers that run one iteration per call."""

from __future__ import annotations

from typing import Any

from aiorl.learning.algorithms import ALGORITHMS
from aiorl.run.trainer.algorithm_trainer import AlgorithmTrainer, trainer_class
from aiorl.run.trainer.trainer import Trainer
from aiorl.run.trainer.worker_set import RemoteWorker, WorkerSet

_ALGORITHM_OF = {f"{kind}Trainer": algo for algo, kind in ALGORITHMS.items()}

__all__ = ["AlgorithmTrainer", "RemoteWorker", "Trainer", "WorkerSet", "trainer_class"]


def __getattr__(name: str) -> Any:
    """Return the trainer of an algorithm, such as PPOTrainer; its keys take long to import."""
    if name not in _ALGORITHM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return trainer_class(_ALGORITHM_OF[name])
