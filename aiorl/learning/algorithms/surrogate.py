"""Base class of algorithms that move a policy by PPO's clipped surrogate: schedules, a penalty that adapts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.compiled_update import LossFunction, UpdateSpec
from aiorl.learning.algorithms.surrogate_config import SurrogateConfig

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["Surrogate", "surrogate_spec"]

SurrogateT = TypeVar("SurrogateT", bound=SurrogateConfig)

_METRICS = ("policy_loss", "vf_loss", "entropy", "kl", "clip_fraction", "vf_explained_var")
_COEFFICIENTS = ("lr", "vf_loss_coeff", "entropy_coeff", "kl_coeff", "kl_stop")


class Surrogate(CompiledAlgorithm[SurrogateT]):
    """Has the coefficients of `aiorl.learning.losses.ppo.ppo_loss`; another base class says what it trains on."""

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model)
        self._kl_coeff = self._config.kl_coeff
        self._clips = self._config.clip_schedules()

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            **{name: schedule.value(env_steps_total) for name, schedule in self._clips.items()},
            "kl_coeff": self._kl_coeff,
            "kl_stop": float("inf") if own.kl_stop is None else own.kl_stop,
        }

    def after_update(self, metrics: dict[str, float]) -> None:
        """Adapt the penalty's weight: more where the policy moved more than twice as far as wanted, and back.

        The divergence is the mean over the last epoch. Bounds and factors are RLlib's; those of the paper are 1.5 and
        1 / 1.5 times the target, and 2 and 1/2.

        Source: Schulman et al. 2017, section 4.
        """
        super().after_update(metrics)
        metrics["cur_kl_coeff"] = self._kl_coeff
        kl = metrics.get("kl_last_epoch", metrics["kl"])
        if kl > 2.0 * self._config.kl_target:
            self._kl_coeff *= 1.5
        elif kl < 0.5 * self._config.kl_target:
            self._kl_coeff *= 0.5

    def extra_state(self) -> dict[str, Any]:
        """The adaptive penalty."""
        return {"kl_coeff": self._kl_coeff}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take the adaptive penalty up again.

        Raises: CheckpointError if it is missing.
        """
        if "kl_coeff" not in values:
            raise CheckpointError("values", "kl_coeff is missing")
        self._kl_coeff = float(values["kl_coeff"])


def surrogate_spec(
    config: SurrogateConfig, loss: LossFunction, *, metrics: Iterable[str] = (), coefficients: Iterable[str] = ()
) -> UpdateSpec:
    """Return an update whose loss is made by `aiorl.learning.losses.ppo.ppo_loss`.

    Args:
        config: the algorithm's.
        loss: of one minibatch.
        metrics: what it reports beside the parts of that.
        coefficients: what it is told beside the coefficients of that.
    """
    return UpdateSpec(
        loss,
        (*_METRICS, *metrics),
        (*_COEFFICIENTS, *config.clips(), *coefficients),
        None if config.kl_stop is None else ("kl", "kl_stop"),
        ("kl", config.num_sgd_iter) if config.kl_coeff > 0 else None,
    )
