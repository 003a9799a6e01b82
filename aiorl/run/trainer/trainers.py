"""A trainer for each of aiorl's algorithms."""

from __future__ import annotations

from aiorl.learning.algorithms.a2c.config import A2CConfig
from aiorl.learning.algorithms.a3c.config import A3CConfig
from aiorl.learning.algorithms.apex.config import ApexConfig
from aiorl.learning.algorithms.appo.config import APPOConfig
from aiorl.learning.algorithms.bc.config import BCConfig
from aiorl.learning.algorithms.cql.config import CQLConfig
from aiorl.learning.algorithms.dqn.config import DQNConfig
from aiorl.learning.algorithms.impala.config import IMPALAConfig
from aiorl.learning.algorithms.iql.config import IQLConfig
from aiorl.learning.algorithms.marwil.config import MARWILConfig
from aiorl.learning.algorithms.pg.config import PGConfig
from aiorl.learning.algorithms.ppo.config import PPOConfig
from aiorl.learning.algorithms.sac.config import SACConfig
from aiorl.learning.algorithms.td3.config import TD3Config
from aiorl.run.trainer.algorithm_trainer import AlgorithmTrainer

__all__ = [
    "A2CTrainer",
    "A3CTrainer",
    "APPOTrainer",
    "ApexTrainer",
    "BCTrainer",
    "CQLTrainer",
    "DQNTrainer",
    "IMPALATrainer",
    "IQLTrainer",
    "MARWILTrainer",
    "PGTrainer",
    "PPOTrainer",
    "SACTrainer",
    "TD3Trainer",
]


class PGTrainer(AlgorithmTrainer):
    """Trains with PG, see `aiorl.learning.algorithms.pg`."""

    _default_config = PGConfig


class PPOTrainer(AlgorithmTrainer):
    """Trains with PPO, see `aiorl.learning.algorithms.ppo`."""

    _default_config = PPOConfig


class DQNTrainer(AlgorithmTrainer):
    """Trains with DQN, see `aiorl.learning.algorithms.dqn`."""

    _default_config = DQNConfig


class ApexTrainer(AlgorithmTrainer):
    """Trains with Ape-X, see `aiorl.learning.algorithms.apex`."""

    _default_config = ApexConfig


class SACTrainer(AlgorithmTrainer):
    """Trains with SAC, see `aiorl.learning.algorithms.sac`."""

    _default_config = SACConfig


class TD3Trainer(AlgorithmTrainer):
    """Trains with TD3, see `aiorl.learning.algorithms.td3`."""

    _default_config = TD3Config


class IMPALATrainer(AlgorithmTrainer):
    """Trains with IMPALA, see `aiorl.learning.algorithms.impala`."""

    _default_config = IMPALAConfig


class APPOTrainer(AlgorithmTrainer):
    """Trains with APPO, see `aiorl.learning.algorithms.appo`."""

    _default_config = APPOConfig


class A2CTrainer(AlgorithmTrainer):
    """Trains with A2C, see `aiorl.learning.algorithms.a2c`."""

    _default_config = A2CConfig


class A3CTrainer(AlgorithmTrainer):
    """Trains with A3C, see `aiorl.learning.algorithms.a3c`."""

    _default_config = A3CConfig


class BCTrainer(AlgorithmTrainer):
    """Trains with BC, see `aiorl.learning.algorithms.bc`."""

    _default_config = BCConfig


class MARWILTrainer(AlgorithmTrainer):
    """Trains with MARWIL, see `aiorl.learning.algorithms.marwil`."""

    _default_config = MARWILConfig


class CQLTrainer(AlgorithmTrainer):
    """Trains with CQL, see `aiorl.learning.algorithms.cql`."""

    _default_config = CQLConfig


class IQLTrainer(AlgorithmTrainer):
    """Trains with IQL, see `aiorl.learning.algorithms.iql`."""

    _default_config = IQLConfig
