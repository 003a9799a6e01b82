"""Settings of IQL; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.offline_replay_config import OfflineReplayConfig

__all__ = ["IQLConfig"]

_iql = partial(key, group="IQL")


class IQLConfig(OfflineReplayConfig):
    """IQL's own settings, and its defaults of the common ones."""

    other_model_keys: ClassVar[tuple[str, ...]] = ("vf_share_layers",)

    algo: str = changed(OfflineReplayConfig, "algo", "iql")

    expectile: float = _iql(
        0.7, "What values aim at among the Q values of stored actions: 0.5 their mean, near 1 almost the largest.",
        gt=0, lt=1,
    )  # fmt: skip
    beta: float = _iql(
        3.0, "How much more an action counts the better it is than the value; 0: all alike, as in behaviour cloning.",
        ge=0,
    )  # fmt: skip
    max_weight: float = _iql(100.0, "Most that an action can count.", gt=0)
