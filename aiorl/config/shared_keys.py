"""Keys that several kinds of algorithms share: their names, and those of state-dependent noise.

Tables of keys, named ``...Keys``, are mixed into the configs of algorithms, next to `CommonConfig`.
A type checker sees them as configs; at run time they are nothing but their own keys and rules, so
that a config has few ancestors and each table can be read by itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig, SDESettings
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    KeyTable = CommonConfig
else:
    KeyTable = BaseModel

LENGTH = "rollout_fragment_length"
ENVS = "num_envs_per_worker"
BATCH = "train_batch_size"
BROADCAST_INTERVAL = (
    "Time after which the next update sends weights to workers even if broadcast_updates is not"
    " reached. Ignored within one process, so that runs are repeatable."
)

_exploration = partial(key, group="Exploration")


class SDEKeys(KeyTable):
    """Keys of state-dependent noise.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719.
    """

    why_no_exploration: ClassVar[str] = ""
    """Reason why the algorithm doesn't explore, as the end of "ALGO doesn't explore because ...";
    "" if it does."""

    use_sde: bool = _exploration(False)
    """Explore a Box with noise that is a function of the state and is kept for several steps
    (gSDE), instead of independent noise at each step. The standard deviations are then computed
    from the policy's last features."""
    sde_sample_freq: int = _exploration(-1, unit="steps", ge=-1, needs="use_sde")
    """With use_sde: steps of an environment after which a new noise function is drawn; -1:
    rollout_fragment_length, which is once per fragment. With polled environments, each episode of
    an agent also begins with a new function."""
    sde_initial_log_std: float = _exploration(0.0, ge=-20, le=2, needs="use_sde")
    """With use_sde: initial logarithm of the standard deviation of each feature's weights."""
    sde_learn_features: bool = _exploration(False, needs="use_sde")
    """With use_sde: train the policy's features on the deviations too, not only on the means."""

    @property
    def state_dependent_noise(self) -> SDESettings | None:
        """See `CommonConfig.state_dependent_noise`."""
        if not self.use_sde:
            return None
        return SDESettings(self.sde_initial_log_std, self.sde_learn_features)

    def sampling(self, **settings: Any) -> dict[str, Any]:
        """Return the exploration of a policy that samples its actions (see
        `aiorl.acting.exploration`).

        Args:
            **settings: settings that every kind of exploration has.
        """
        if not self.use_sde:
            return {"type": "StochasticSampling", **settings}
        steps = self.sde_sample_freq
        if steps < 0:
            steps = self.rollout_fragment_length
        return {"type": "StateDependentNoise", "sample_freq": steps, **settings}

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        if self.sde_sample_freq == 0:
            raise ConfigError(
                "sde_sample_freq is 0, expected a number of steps.",
                key="sde_sample_freq",
                value=self.sde_sample_freq,
                hint="Set 1 for new noise at each step, or -1 to keep it for a whole fragment.",
            )
        if self.use_sde:
            self._check_use_sde()

    def _check_use_sde(self) -> None:
        if self.why_no_exploration:
            raise ConfigError(
                f"use_sde has no effect: {self.algo} doesn't explore because"
                f" {self.why_no_exploration}.",
                key="use_sde",
                value=self.use_sde,
                hint="Leave it out.",
            )
        if self.model.free_log_std:
            raise ConfigError(
                "use_sde computes the deviations of actions from features, and model.free_log_std"
                " makes them weights.",
                key="model.free_log_std",
                value=True,
                hint="Leave out use_sde or model.free_log_std.",
            )
