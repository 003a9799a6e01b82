"""Settings that algorithms share which train on what the newest policy sampled; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.config.key import key
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig

__all__ = ["OnPolicyConfig"]

_learning = partial(key, group="Learning")


class OnPolicyConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    samples_in_turns = True

    lambda_: float = _learning(
        0.95, "Lambda of generalised advantage estimation: 0 trusts the values, 1 the returns.", ge=0, le=1
    )
    adam_epsilon: float = _learning(1e-5, "Adam's epsilon.", gt=0)
