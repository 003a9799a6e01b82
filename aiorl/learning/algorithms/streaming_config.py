"""Settings that algorithms share whose workers sample without waiting for the learner; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import Literal

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.replay_config import ReplayConfig

__all__ = ["StreamingConfig"]

_learning = partial(key, group="Learning")


class StreamingConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    opt_type: Literal["adam", "rmsprop"] = _learning("adam", "Optimizer.")
    epsilon: float = _learning(
        1e-5, "The optimizer's epsilon. With rmsprop the papers take 0.1, for losses that are sums over rows; here "
        "they are means over the n rows of a minibatch, for which that is 0.1 / n^2.", gt=0,
    )  # fmt: skip
    decay: float = _learning(0.99, "rmsprop: decay of the mean square.", ge=0, lt=1)
    momentum: float = _learning(0.0, "rmsprop: momentum.", ge=0, lt=1)
    max_policy_lag: int | None = _learning(
        10, "A fragment sampled more policy versions ago than this is discarded; null: never.", unit="versions", ge=0
    )
    outstanding_fragments_per_worker: int = _learning(
        3, "Fragments that a worker may owe or have under way at a time, within the budget of the whole run.",
        unit="fragments", ge=1,
    )  # fmt: skip
    broadcast_updates: int = _learning(1, "Weights go to workers after so many updates.", unit="updates", ge=1)
    broadcast_interval_ms: float = changed(ReplayConfig, "broadcast_interval_ms", 50.0)

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        hint = "Set opt_type: rmsprop, or leave it out."
        self.refuse_unless(self.opt_type == "rmsprop", ("decay", "momentum"), "rmsprop", hint=hint)
