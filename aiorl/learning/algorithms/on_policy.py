"""Keys of algorithms that train on samples of the newest policy."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.actor_critic_config import ActorCriticKeys
from aiorl.learning.algorithms.shared_config import SDEKeys

_learning = partial(key, group="Learning")


class OnPolicyConfig(ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of algorithms that train on exactly one train batch of each policy version.

    Its own keys are lambda of the advantages and Adam's epsilon.
    """

    samples_in_turns: ClassVar[bool] = True

    lambda_: float = _learning(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 trusts the value estimates, 1 the returns."""
    adam_epsilon: float = _learning(1e-5, gt=0)
    """Adam's epsilon."""
