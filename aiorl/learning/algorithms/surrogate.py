"""Parts of algorithms with PPO's clipped surrogate: their keys, and the penalty on the divergence
from the old policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aiorl.acting.exploration import Schedule
from aiorl.config.key import key
from aiorl.config.shared_keys import KeyTable
from aiorl.errors import ConfigError
from aiorl.learning.actor_critic import schedules
from aiorl.learning.algorithm import Adaptation, Update
from aiorl.learning.steps import Begin, Minibatches, TargetNetwork, epochs

if TYPE_CHECKING:
    from aiorl.learning.keys.actor_critic import ActorCriticKeys as _OfActorCritic
else:
    _OfActorCritic = KeyTable

_ppo = partial(key, group="PPO")


class SurrogateKeys(_OfActorCritic):
    """Keys of algorithms with PPO's clipped surrogate.

    They are the clipping range, and the penalty and limit of the divergence from the old
    policy.
    """

    why_on_learner: ClassVar[str] = (
        "it takes several steps on each batch; with a single one it would be A2C"
    )

    clip_param: float = _ppo(0.2, gt=0)
    """Clipping range: ratios of new to old action probability count from 1 - this to 1 + this."""
    clip_param_schedule: list[tuple[float, float]] | None = _ppo(None)
    """clip_param over env steps, as [[env step, value], ...]."""
    kl_coeff: float = _ppo(0.0, ge=0)
    """Initial weight of the KL divergence from the old policy; it adapts towards kl_target. 0: no
    penalty."""
    kl_target: float = _ppo(0.01, unit="nats", gt=0, needs="kl_coeff")
    """Divergence that kl_coeff adapts towards, measured in the last epoch of an update."""
    kl_stop: float | None = _ppo(None, unit="nats", gt=0)
    """Divergence above which an update ends after the current minibatch; null: never."""

    def clips(self) -> dict[str, tuple[float, list[tuple[float, float]] | None]]:
        """Return the limit of each clipped quantity and its schedule, by the name of the
        coefficient.
        """
        return {"clip_param": (self.clip_param, self.clip_param_schedule)}

    def clip_schedules(self) -> dict[str, Schedule]:
        """Return the schedules of the clipping limits over env steps, by the name of the
        coefficient.

        Raises:
            ConfigError: a schedule is invalid or has a value that is not above 0.
        """
        limits = {}
        for name, (limit, points) in self.clips().items():
            key_name = f"{name}_schedule"
            if any(value <= 0 for _, value in points or ()):
                raise ConfigError(
                    f"{key_name} has a value that is not above 0.", key=key_name, value=points
                )
            limits[name] = Schedule.of(limit, points, key=key_name)
        return limits

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.clip_schedules()


class KLPenalty(Adaptation):
    """Weight of the penalty on the divergence from the old policy, which adapts to the divergence.

    The divergence is the mean over the last epoch. Bounds and factors are RLlib's; the paper has
    1.5 and 1 / 1.5 times the target, and factors 2 and 1/2.

    Source: Schulman et al. 2017, section 4.
    """

    def __init__(self, config: SurrogateKeys) -> None:
        """Begin with the weight of the config."""
        self._target = config.kl_target
        self._kl_coeff = config.kl_coeff

    def knobs(self) -> dict[str, float]:
        """See `Adaptation`."""
        return {"kl_coeff": self._kl_coeff}

    def after_update(self, metrics: dict[str, float], updates: int) -> None:
        """Raise the weight if the policy moved more than twice as far as wanted, lower it if less
        than half.
        """
        self.report(metrics)
        self.update_kl(metrics.get("kl_last_epoch", metrics["kl"]))

    def report(self, metrics: dict[str, float]) -> None:
        """Add the weight to metrics of an update that it had an effect on."""
        metrics["cur_kl_coeff"] = self._kl_coeff

    def update_kl(self, kl: float) -> float:
        """Adapt the weight to a mean divergence, nats; return the new weight."""
        if kl > 2.0 * self._target:
            self._kl_coeff *= 1.5
        elif kl < 0.5 * self._target:
            self._kl_coeff *= 0.5
        return self._kl_coeff

    def state(self) -> dict[str, Any]:
        """See `Adaptation`."""
        return {"kl_coeff": self._kl_coeff}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """See `Adaptation`."""
        self._kl_coeff = float(values["kl_coeff"])


def surrogate_update(
    config: SurrogateKeys,
    parts: Minibatches,
    *,
    begin: Begin | None = None,
    adaptations: tuple[Adaptation, ...] = (),
    targets: Mapping[str, TargetNetwork] | None = None,
) -> Update:
    """Return an update whose loss is built on `aiorl.learning.losses.policy_gradient.ppo_loss`.

    Args:
        config: config of the algorithm.
        parts: minibatches, and the step of each.
        begin: see `epochs`.
        adaptations: knobs that depend on earlier updates, in addition to the penalty's weight.
        targets: target networks by prefix.
    """
    loop = epochs(
        config.num_sgd_iter,
        parts,
        begin=begin,
        stop_when=None if config.kl_stop is None else ("kl", config.kl_stop),
        last_epoch_of="kl" if config.kl_coeff > 0 else "",
    )
    limits = config.clip_schedules()
    return Update(
        loop=loop,
        knobs={**schedules(config), **limits},
        reported=("entropy_coeff", *limits),
        adaptations=(KLPenalty(config), *adaptations),
        targets=targets or {},
    )
