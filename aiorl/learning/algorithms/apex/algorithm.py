"""Ape-X: DQN whose workers explore each by a share of its own, and say first which rows are worth training on."""

from __future__ import annotations

from aiorl.learning.algorithms.apex.config import ApexConfig
from aiorl.learning.algorithms.dqn.algorithm import DQN

__all__ = ["Apex"]


class Apex(DQN):
    """Distributed prioritised experience replay (Horgan et al. 2018): DQN with these settings."""

    config_class = ApexConfig
