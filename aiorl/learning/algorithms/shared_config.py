"""Settings that several kinds of algorithms share: names of keys, and noise of the state."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from aiorl.config.key import key, refuse
from aiorl.config.schema import CommonConfig, SDESettings

LENGTH, ENVS, BATCH = "rollout_fragment_length", "num_envs_per_worker", "train_batch_size"
BROADCAST_INTERVAL = (
    "Weights go to workers after the first update so long after the last ones did, if that comes first. "
    "Within one process only broadcast_updates counts, so that runs can be repeated."
)

_exploration = partial(key, group="Exploration")


class SDEConfig(CommonConfig):
    """The settings of noise that is a function of the state.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719.
    """

    why_no_exploration: ClassVar[str] = ""
    """Why there is none, as the rest of "ALGO can't have it: ..."; "" if there is."""

    use_sde: bool = _exploration(False)
    """Explore a Box by noise that is a function of the state and the same function for some steps (gSDE), rather than
    by noise of each step. Deviations are then made of the policy's last features."""
    sde_sample_freq: int = _exploration(-1, unit="steps", ge=-1, needs="use_sde")
    """With use_sde: steps of an environment after which that function is drawn anew; -1: rollout_fragment_length, once
    a fragment. Where environments are polled, an agent's episode begins with a new one, too."""
    sde_initial_log_std: float = _exploration(0.0, ge=-20, le=2, needs="use_sde")
    """With use_sde: logarithm of the standard deviation that each feature's weights begin with."""
    sde_learn_features: bool = _exploration(False, needs="use_sde")
    """With use_sde: the policy's features learn from the deviations, too, and not from the means alone."""

    @property
    def state_dependent_noise(self) -> SDESettings | None:
        """See the base class."""
        if not self.use_sde:
            return None
        return SDESettings(self.sde_initial_log_std, self.sde_learn_features)

    def sampling(self, **settings: Any) -> dict[str, Any]:
        """The exploration of a policy that draws its actions (see `aiorl.acting.exploration`).

        Args:
            **settings: of any kind of exploration.
        """
        if not self.use_sde:
            return {"type": "StochasticSampling", **settings}
        steps = self.rollout_fragment_length if self.sde_sample_freq < 0 else self.sde_sample_freq
        return {"type": "StateDependentNoise", "sample_freq": steps, **settings}

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        refuse(
            self,
            (self.sde_sample_freq == 0, "sde_sample_freq", "sde_sample_freq is 0, expected a number of steps.",
             "Set 1 for noise of each step, or -1 for the same throughout a fragment."),
            (self.use_sde and bool(self.why_no_exploration), "use_sde",
             f"use_sde is for exploring, and {self.algo} doesn't: {self.why_no_exploration}.", "Leave it out."),
            *((self.use_sde and bool(getattr(self.model, name)), f"model.{name}",
               f"use_sde makes deviations of a built-in network's features: model.{name} does not go with it.",
               f"Leave out use_sde or model.{name}.") for name in ("free_log_std", "custom_model")),
        )  # fmt: skip
