"""Training as a library: trainers, which the caller asks for one iteration after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.trainer.algorithm_trainer import AlgorithmTrainer, RemoteWorker, WorkerSet
from aiorl.run.trainer.trainer import Trainer

TRAINERS: dict[str, type[AlgorithmTrainer]] = {
    f"{kind}Trainer": type(
        f"{kind}Trainer",
        (AlgorithmTrainer,),
        {
            "__doc__": f"Trains with {kind}, see `aiorl.learning.algorithms.{algo}`.",
            "__module__": __name__,
            "_default_config": config_class(algo),
        },
    )
    for algo, kind in ALGORITHMS.items()
}
"""Trainers of aiorl's algorithms by name, such as PPOTrainer; each is a name of this module, too."""

__all__ = ["TRAINERS", "AlgorithmTrainer", "RemoteWorker", "Trainer", "WorkerSet", "trainer_class"]

globals().update(TRAINERS)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Tell type checkers of the trainers."""


def trainer_class(algo: str) -> type[AlgorithmTrainer]:
    """The trainer of an algorithm; one of a user's own that has none gets one made.

    Raises:
        ConfigError: there is no such algorithm.
    """
    return AlgorithmTrainer._made_for(algo)
