"""Training as a library: trainers that run one iteration per call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.trainer.algorithm_trainer import AlgorithmTrainer
from aiorl.run.trainer.trainer import Trainer
from aiorl.run.trainer.worker_set import RemoteWorker, WorkerSet

TRAINERS: dict[str, type[AlgorithmTrainer]] = {
    f"{kind}Trainer": type(
        f"{kind}Trainer",
        (AlgorithmTrainer,),
        {
            "__doc__": f"Trainer for {kind}; see `aiorl.learning.algorithms.{algo}`.",
            "__module__": __name__,
            "_default_config": config_class(algo),
        },
    )
    for algo, kind in ALGORITHMS.items()
}
"""Trainers of aiorl's algorithms by name, such as PPOTrainer. This module exports each of them."""

__all__ = ["TRAINERS", "AlgorithmTrainer", "RemoteWorker", "Trainer", "WorkerSet", "trainer_class"]

globals().update(TRAINERS)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Declare the trainers to type checkers."""


def trainer_class(algo: str) -> type[AlgorithmTrainer]:
    """Return the trainer class of an algorithm; a user's own algorithm without a trainer gets a new
    class.

    Args:
        algo: name of the algorithm, or import path of a user's own.

    Returns:
        The trainer class.

    Raises:
        ConfigError: no algorithm has that name.
    """
    return AlgorithmTrainer._made_for(algo)
