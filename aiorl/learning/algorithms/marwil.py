"""MARWIL: stored actions are imitated, better ones more strongly (docs/algorithms/marwil.md)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.actor_critic import likelihood_loss, update_by_loss
from aiorl.learning.algorithm import Adaptation, Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.imitation import ImitationConfig, stored
from aiorl.learning.compiled import adam
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import imitation_weights
from aiorl.learning.rows import sequence_columns

_marwil = partial(key, group="MARWIL")
_MEAN_SQUARE = "advantages_mean_square"


class MARWILConfig(ImitationConfig):
    """MARWIL's own keys, and its defaults of common keys."""

    why_on_learner: ClassVar[str] = (
        "each update changes the scale of the advantages in the next update's loss"
    )

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


class MARWIL(Algorithm[MARWILConfig]):
    """Monotonic advantage re-weighted imitation learning (Wang et al. 2018)."""

    config_class = MARWILConfig

    @staticmethod
    def experience(config: MARWILConfig) -> Experience:
        """Return stored observations, actions and discounted returns; see `Algorithm.experience`."""
        columns = (c.OBS, c.ACTIONS, c.VALUE_TARGETS, *sequence_columns(config))
        parameters = {"gamma": config.gamma, "lam": 1.0}
        return stored(config, SamplePlan("gae", parameters, columns, raw_obs=config.is_filtered))

    @staticmethod
    def update(config: MARWILConfig, networks: Networks) -> Update:
        """Return the loss over rows, or over sequences for recurrent models: better actions have
        larger weights; see `Algorithm.update`.
        """

        def weigh(columns: Tensors, values: tf.Tensor, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            weights = imitation_weights(
                columns[c.VALUE_TARGETS] - tf.stop_gradient(values),
                scale=knobs["advantage_scale"],
                beta=config.beta,
                max_weight=config.max_weight,
            )
            return weights, {"mean_weight": masked_mean(weights, columns[c.VALID])}

        model = networks.model
        loss = likelihood_loss(config, model, weigh, targets=c.VALUE_TARGETS)
        optimizer = adam(config, config.adam_epsilon)
        return update_by_loss(config, model, loss, optimizer, adaptations=(AdvantageScale(config),))


class AdvantageScale(Adaptation):
    """Root of the moving mean square of the advantages, by which they are divided."""

    def __init__(self, config: MARWILConfig) -> None:
        """Begin with the mean square of the config."""
        self._rate = config.moving_average_sqd_adv_norm_update_rate
        self._mean_square = config.moving_average_sqd_adv_norm_start

    def knobs(self) -> dict[str, float]:
        """See `Adaptation`."""
        return {"advantage_scale": self._mean_square**0.5}

    def after_update(self, metrics: dict[str, float], updates: int) -> None:
        """Update the mean square of the advantages."""
        self._mean_square += self._rate * (metrics["vf_loss"] - self._mean_square)
        metrics[_MEAN_SQUARE] = self._mean_square

    def state(self) -> dict[str, Any]:
        """See `Adaptation`."""
        return {_MEAN_SQUARE: self._mean_square}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """See `Adaptation`."""
        self._mean_square = float(values[_MEAN_SQUARE])
