"""Base classes of algorithms that train on samples of the newest policy, and of those with PPO's
clipped surrogate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiorl.acting.exploration import Schedule
from aiorl.config.key import key
from aiorl.config.schema import CommonConfig
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import LeasePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.compiled_update import LossFunction, UpdateSpec
from aiorl.learning.algorithms.rows import sequence_columns

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_learning = partial(key, group="Learning")


class OnPolicyConfig(ActorCriticConfig):
    """Settings of algorithms that train on exactly one train batch of each policy version.

    Its own keys are lambda of the advantages and Adam's epsilon.
    """

    samples_in_turns = True

    lambda_: float = _learning(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 trusts the value estimates, 1 the returns."""
    adam_epsilon: float = _learning(1e-5, gt=0)
    """Adam's epsilon."""


OnPolicyT = TypeVar("OnPolicyT", bound=OnPolicyConfig)


class OnPolicy(CompiledAlgorithm[OnPolicyT]):
    """Algorithm that trains on exactly one train batch of each policy version."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Return a plan of exactly one train batch, of the size in `config`, for each version."""
        own = cls.own_config(config)
        env_steps = None if own.is_truncating else own.train_batch_size
        return LeasePlan(
            "on_policy", own.fragments_per_batch(), max_policy_lag=0, env_steps_per_batch=env_steps
        )

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of rows with advantages for this `config`; recurrent models also get flags
        and states.
        """
        own = cls.own_config(config)
        return advantage_plan(own, own.lambda_, cls.columns(own))

    @classmethod
    @abstractmethod
    def columns(cls, config: OnPolicyT) -> tuple[str, ...]:
        """Return the columns that the loss needs with this `config`."""

    def make_optimizer(self) -> Any:  # Any: a Keras optimiser
        """Return Adam."""
        return self.adam(self.config.adam_epsilon)


def advantage_plan(config: CommonConfig, lambda_: float, columns: tuple[str, ...]) -> SamplePlan:
    """Return a plan of these columns with GAE advantages; recurrent models also get flags and
    states.
    """
    return SamplePlan(
        "gae", {"gamma": config.gamma, "lam": lambda_}, (*columns, *sequence_columns(config))
    )


_ppo = partial(key, group="PPO")


class SurrogateConfig(ActorCriticConfig):
    """Settings of algorithms with PPO's clipped surrogate.

    Its own keys are the clipping range, and the penalty and limit of the divergence from the old
    policy.
    """

    why_on_learner = "it takes several steps on each batch; with a single one it would be A2C"

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
        for name, (_, points) in self.clips().items():
            if any(value <= 0 for _, value in points or ()):
                key_name = f"{name}_schedule"
                raise ConfigError(
                    f"{key_name} has a value that is not above 0.", key=key_name, value=points
                )
        return {
            name: Schedule.of(*pair, key=f"{name}_schedule") for name, pair in self.clips().items()
        }

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.clip_schedules()


SurrogateT = TypeVar("SurrogateT", bound=SurrogateConfig)

_METRICS = ("policy_loss", "vf_loss", "entropy", "kl", "clip_fraction", "vf_explained_var")
_COEFFICIENTS = ("lr", "entropy_coeff", "kl_coeff")


class Surrogate(CompiledAlgorithm[SurrogateT]):
    """Algorithm with the coefficients of `ppo_loss`; another base class determines the samples."""

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train.
        """
        super().__init__(config, model)
        self._kl_coeff = self.config.kl_coeff
        self._clips = self.config.clip_schedules()

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of an update after `env_steps_total` env steps."""
        clips = {name: schedule.value(env_steps_total) for name, schedule in self._clips.items()}
        return {**super().coefficients(env_steps_total), **clips, "kl_coeff": self._kl_coeff}

    def after_update(self, metrics: dict[str, float]) -> None:
        """Raise the penalty's weight if the policy moved more than twice as far as wanted, lower it
        if less than half.

        The divergence is the mean over the last epoch. Bounds and factors are RLlib's; the paper
        has 1.5 and 1 / 1.5 times the target, and factors 2 and 1/2.

        Source: Schulman et al. 2017, section 4.

        Args:
            metrics: metrics of the update, to which the weight is added.
        """
        super().after_update(metrics)
        metrics["cur_kl_coeff"] = self._kl_coeff
        kl = metrics.get("kl_last_epoch", metrics["kl"])
        if kl > 2.0 * self.config.kl_target:
            self._kl_coeff *= 1.5
        elif kl < 0.5 * self.config.kl_target:
            self._kl_coeff *= 0.5

    def extra_state(self) -> dict[str, Any]:
        """Return the adaptive weight of the penalty."""
        return {"kl_coeff": self._kl_coeff}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Restore the adaptive weight of the penalty from the `values` that `extra_state`
        returned.
        """
        self._kl_coeff = float(values["kl_coeff"])


def surrogate_spec(
    config: SurrogateConfig,
    loss: LossFunction,
    *,
    metrics: Iterable[str] = (),
    coefficients: Iterable[str] = (),
) -> UpdateSpec:
    """Return an update whose loss is built on `aiorl.learning.losses.policy_gradient.ppo_loss`.

    Args:
        config: config of the algorithm.
        loss: loss of one minibatch.
        metrics: metrics that it reports in addition to those of `ppo_loss`.
        coefficients: coefficients that it reads in addition to those of `ppo_loss`.
    """
    return UpdateSpec(
        loss,
        (*_METRICS, *metrics),
        (*_COEFFICIENTS, *config.clips(), *coefficients),
        None if config.kl_stop is None else ("kl", config.kl_stop),
        ("kl", config.num_sgd_iter) if config.kl_coeff > 0 else None,
    )
