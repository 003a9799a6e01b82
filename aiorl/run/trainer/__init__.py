"""Training as a library: trainers, which the caller asks for one iteration after the other."""

from __future__ import annotations

from aiorl.config.schema import CommonConfig
from aiorl.run.trainer.algorithm_trainer import AlgorithmTrainer
from aiorl.run.trainer.trainer import Trainer
from aiorl.run.trainer.trainers import (
    A2CTrainer,
    A3CTrainer,
    ApexTrainer,
    APPOTrainer,
    BCTrainer,
    CQLTrainer,
    DQNTrainer,
    IMPALATrainer,
    IQLTrainer,
    MARWILTrainer,
    PGTrainer,
    PPOTrainer,
    SACTrainer,
    TD3Trainer,
)
from aiorl.run.trainer.worker_set import RemoteWorker, WorkerSet

__all__ = [
    "A2CTrainer",
    "A3CTrainer",
    "APPOTrainer",
    "AlgorithmTrainer",
    "ApexTrainer",
    "BCTrainer",
    "CQLTrainer",
    "DQNTrainer",
    "IMPALATrainer",
    "IQLTrainer",
    "MARWILTrainer",
    "PGTrainer",
    "PPOTrainer",
    "RemoteWorker",
    "SACTrainer",
    "TD3Trainer",
    "Trainer",
    "WorkerSet",
    "trainer_class",
    "trainer_for",
]


def trainer_for(config: CommonConfig) -> AlgorithmTrainer:
    """Return a trainer that is made of a config: that of its algorithm.

    Raises:
        ConfigError: the algorithm has none; and what the trainer raises.
    """
    return trainer_class(config.algo)(config)


def trainer_class(algo: str) -> type[AlgorithmTrainer]:
    """The trainer of an algorithm; one of a user's own that has none gets one made.

    Raises:
        ConfigError: there is no such algorithm.
    """
    return AlgorithmTrainer._made_for(algo)
