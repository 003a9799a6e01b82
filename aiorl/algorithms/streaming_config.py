"""Settings that algorithms share which train on a stream of fragments of older policies; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import Literal

from aiorl.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.config.key import key
from aiorl.errors import ConfigError

__all__ = ["StreamingConfig"]

_learning = partial(key, group="Learning")
_vtrace = partial(key, group="V-trace")


class StreamingConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    opt_type: Literal["adam", "rmsprop"] = _learning("adam", "Optimizer.")
    epsilon: float = _learning(1e-5, "The optimizer's epsilon; with rmsprop IMPALA's paper takes 0.1.", gt=0)
    decay: float = _learning(0.99, "rmsprop: decay of the mean square.", ge=0, lt=1)
    momentum: float = _learning(0.0, "rmsprop: momentum.", ge=0, lt=1)
    max_policy_lag: int | None = _learning(
        10, "A fragment sampled more policy versions ago than this is discarded; null: never.", unit="versions", ge=0
    )
    outstanding_fragments_per_worker: int = _learning(
        3, "Fragments that a worker may owe or have under way at a time, within the budget of the whole run.",
        unit="fragments", ge=1,
    )  # fmt: skip

    vtrace: bool = _vtrace(True, "Correct for old policies by V-trace; false takes all importance ratios as 1.")
    vtrace_clip_rho_threshold: float = _vtrace(1.0, "Cut of the importance ratios in the value targets.", gt=0)
    vtrace_clip_pg_rho_threshold: float = _vtrace(1.0, "Cut of the importance ratios of the policy gradient.", gt=0)
    lambda_: float = _vtrace(
        1.0, "Decay of the trace; 1 is V-trace as published, less trusts the values more.", ge=0, le=1
    )

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        given = self.sgd_minibatch_size
        if given is not None and given % self.rollout_fragment_length:
            raise ConfigError(
                f"sgd_minibatch_size {given} is no multiple of rollout_fragment_length "
                f"{self.rollout_fragment_length}: a minibatch of V-trace holds whole sequences.",
                key="sgd_minibatch_size", value=given, hint="Leave it out to have it chosen.",
            )  # fmt: skip
