"""Behaviour cloning: stored actions become more likely (docs/algorithms/bc.md)."""

from __future__ import annotations

from aiorl.config.key import changed
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.imitation import Imitation, ImitationConfig
from aiorl.learning.algorithms.rows import sequence_columns
from aiorl.learning.lazy import tf


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


class BC(Imitation[BCConfig]):
    """Behaviour cloning: maximum likelihood of the stored actions (Pomerleau 1989)."""

    config_class = BCConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of observations and actions; recurrent models also get flags and states."""
        columns = (c.OBS, c.ACTIONS, *sequence_columns(cls.own_config(config)))
        return SamplePlan("none", {}, columns, raw_obs=config.is_filtered)

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences for recurrent models: all actions have the
        same weight.
        """
        return self.likelihood_spec(lambda columns, *_: (tf.ones_like(columns[c.VALID]), {}))
