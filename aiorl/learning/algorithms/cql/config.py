"""Settings of CQL; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.offline_replay_config import OfflineReplayConfig
from aiorl.learning.algorithms.sac.config import SACConfig

__all__ = ["CQLConfig"]

_cql = partial(key, group="CQL")


class CQLConfig(OfflineReplayConfig, SACConfig):
    """CQL's own settings, and its defaults of the common ones; those of SAC are in the group SAC."""

    why_no_exploration = "it learns from stored experience"

    algo: str = changed(SACConfig, "algo", "cql")
    entropy_backup: bool = changed(SACConfig, "entropy_backup", False)

    cql_weight: float = _cql(
        5.0, "How much it counts that Q values of any actions are above those of stored ones, beside half the squared "
        "TD errors; with target_gap, at first.", gt=0,
    )  # fmt: skip
    target_gap: float | None = _cql(
        None, "How far they are to be above: the weight is learned so that they are; null: the weight stays.",
        allow_inf_nan=False,
    )  # fmt: skip
    cql_weight_lr: float | None = _cql(
        None, "With target_gap: learning rate of the logarithm of the weight, without a schedule; null: lr with its "
        "lr_schedule.", gt=0,
    )  # fmt: skip
    cql_actions: int = _cql(
        10, "Over a Box, actions drawn for each row in each of three ways: uniformly, by the policy, and by the policy "
        "after the step.", unit="actions", ge=1,
    )  # fmt: skip

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        hint = "Set target_gap, or leave it out."
        self.refuse_unless(self.target_gap is not None, ("cql_weight_lr",), "target_gap", hint=hint)
