"""MARWIL: stored actions are imitated, better ones more strongly (docs/algorithms/marwil.md)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.imitation import Imitation, ImitationConfig
from aiorl.learning.algorithms.rows import sequence_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.critics import imitation_weights

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_marwil = partial(key, group="MARWIL")
_MEAN_SQUARE = "advantages_mean_square"


class MARWILConfig(ImitationConfig):
    """MARWIL's own keys, and its defaults of common keys."""

    why_on_learner = "each update changes the scale of the advantages in the next update's loss"

    algo: str = changed(ImitationConfig, "algo", "marwil")
    vf_loss_coeff: float = changed(ImitationConfig, "vf_loss_coeff", 1.0)
    postprocess_inputs: bool = changed(ImitationConfig, "postprocess_inputs", True)

    beta: float = _marwil(1.0, ge=0)
    """Strength of the preference for better actions: weights grow exponentially with beta times the
    advantage. 0: all have the same weight, as in behaviour cloning."""
    max_weight: float = _marwil(20.0, gt=0)
    """Maximum weight of an action."""
    moving_average_sqd_adv_norm_start: float = _marwil(100.0, gt=0)
    """Initial mean square of the advantages; they are divided by its root."""
    moving_average_sqd_adv_norm_update_rate: float = _marwil(0.01, gt=0, le=1)
    """Share of a new train batch in the moving mean square."""

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        hint = "Leave it out: marwil divides advantages by the root of their moving mean square."
        self.refuse_unless(False, ("normalize_advantages",), "algorithms that sample", hint=hint)


class MARWIL(Imitation[MARWILConfig]):
    """Monotonic advantage re-weighted imitation learning (Wang et al. 2018)."""

    config_class = MARWILConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of observations, actions and discounted returns; recurrent models also get
        flags and states.
        """
        own = cls.own_config(config)
        columns = (c.OBS, c.ACTIONS, c.VALUE_TARGETS, *sequence_columns(own))
        return SamplePlan("gae", {"gamma": own.gamma, "lam": 1.0}, columns, raw_obs=own.is_filtered)

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model)
        self._mean_square = self.config.moving_average_sqd_adv_norm_start

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences for recurrent models: better actions have
        larger weights.
        """
        config = self.config

        def weights(
            columns: Tensors, values: tf.Tensor, coefficients: Tensors
        ) -> tuple[tf.Tensor, Tensors]:
            found = imitation_weights(
                columns[c.VALUE_TARGETS] - tf.stop_gradient(values),
                scale=coefficients["advantage_scale"],
                beta=config.beta,
                max_weight=config.max_weight,
            )
            return found, {"mean_weight": masked_mean(found, columns[c.VALID])}

        return self.likelihood_spec(
            weights, ("mean_weight",), ("advantage_scale",), targets=c.VALUE_TARGETS
        )

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of an update after `env_steps_total` env steps."""
        return {**super().coefficients(env_steps_total), "advantage_scale": self._mean_square**0.5}

    def after_update(self, metrics: dict[str, float]) -> None:
        """Update the mean square of the advantages."""
        rate = self.config.moving_average_sqd_adv_norm_update_rate
        self._mean_square += rate * (metrics["vf_loss"] - self._mean_square)
        metrics[_MEAN_SQUARE] = self._mean_square

    def extra_state(self) -> dict[str, Any]:
        """Return the mean square of the advantages."""
        return {_MEAN_SQUARE: self._mean_square}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Restore the mean square of the advantages."""
        self._mean_square = float(values[_MEAN_SQUARE])
