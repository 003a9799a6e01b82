"""Settings of algorithms that can explore by noise of the state (gSDE); loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig, SDESettings
from aiorl.errors import ConfigError

__all__ = ["SDEConfig"]

_exploration = partial(key, group="Exploration")


class SDEConfig(CommonConfig):
    """The settings of such noise.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719.
    """

    why_no_exploration: ClassVar[str] = ""
    """Why there is none, as the rest of "ALGO can't have it: ..."; "" if there is."""

    use_sde: bool = _exploration(
        False, "Explore a Box by noise that is a function of the state and the same function for some steps (gSDE), "
        "rather than by noise of each step. Deviations are then made of the policy's last features.",
    )  # fmt: skip
    sde_sample_freq: int = _exploration(
        -1, "With use_sde: steps of an environment after which that function is drawn anew; -1: "
        "rollout_fragment_length, once a fragment. Where environments are polled, an agent's episode begins with a new "
        "one, too.", unit="steps", ge=-1,
    )  # fmt: skip
    sde_initial_log_std: float = _exploration(
        0.0, "With use_sde: logarithm of the standard deviation that each feature's weights begin with.", ge=-20, le=2
    )
    sde_learn_features: bool = _exploration(
        False, "With use_sde: the policy's features learn from the deviations, too, and not from the means alone."
    )

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
        names = ("sde_sample_freq", "sde_initial_log_std", "sde_learn_features")
        self.refuse_unless(self.use_sde, names, "use_sde", hint="Set use_sde: true.")
        if self.sde_sample_freq == 0:
            raise ConfigError(
                "sde_sample_freq is 0, expected a number of steps.", key="sde_sample_freq", value=0,
                hint="Set 1 for noise of each step, or -1 for the same throughout a fragment.",
            )  # fmt: skip
        if not self.use_sde:
            return
        if self.why_no_exploration:
            raise ConfigError(
                f"use_sde is a way to explore, and {self.algo} can't have it: {self.why_no_exploration}.",
                key="use_sde", value=True, hint="Leave it out.",
            )  # fmt: skip
        for name in ("free_log_std", "custom_model"):
            if getattr(self.model, name):
                raise ConfigError(
                    f"use_sde makes deviations of a built-in network's features: model.{name} does not go with it.",
                    key=f"model.{name}", value=getattr(self.model, name), hint=f"Leave out use_sde or model.{name}.",
                )  # fmt: skip
