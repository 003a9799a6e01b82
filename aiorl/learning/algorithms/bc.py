"""Behaviour cloning: stored actions become more likely (docs/algorithms/bc.md)."""

from __future__ import annotations

from aiorl.config.key import changed
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.actor_critic import likelihood_loss, update_by_loss
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.imitation import ImitationConfig, stored
from aiorl.learning.compiled import adam
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.rows import sequence_columns


class BCConfig(ImitationConfig):
    """BC's own keys, and its defaults of common keys."""

    algo: str = changed(ImitationConfig, "algo", "bc")

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        names = ("vf_loss_coeff", "normalize_advantages", "normalize_rewards")
        hint = "Leave it out: bc treats all stored actions as equally good. marwil learns a value."
        self.refuse_unless(False, names, "algorithms that learn a value", hint=hint)


class BC(Algorithm[BCConfig]):
    """Behaviour cloning: maximum likelihood of the stored actions (Pomerleau 1989)."""

    config_class = BCConfig

    @staticmethod
    def experience(config: BCConfig) -> Experience:
        """Return stored observations and actions; see `Algorithm.experience`."""
        columns = (c.OBS, c.ACTIONS, *sequence_columns(config))
        return stored(config, SamplePlan("none", {}, columns, raw_obs=config.is_filtered))

    @staticmethod
    def update(config: BCConfig, networks: Networks) -> Update:
        """Return the loss over rows, or over sequences for recurrent models: all actions have the
        same weight; see `Algorithm.update`.
        """

        def weigh(columns: Tensors, values: tf.Tensor, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            return tf.ones_like(columns[c.VALID]), {}

        loss = likelihood_loss(config, networks.model, weigh)
        optimizer = adam(config, config.adam_epsilon)
        return update_by_loss(config, networks.model, loss, optimizer)
