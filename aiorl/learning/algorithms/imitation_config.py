"""Settings that algorithms share which learn from stored experience by imitating it; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig

__all__ = ["ImitationConfig"]

_learning = partial(key, group="Learning")


class ImitationConfig(ActorCriticConfig):
    """The settings of such algorithms, and their defaults of the common ones."""

    is_offline: ClassVar[bool] = True
    why_no_exploration = "it learns from stored experience"

    lr: float = changed(ActorCriticConfig, "lr", 1e-3)
    num_envs_per_worker: int = changed(ActorCriticConfig, "num_envs_per_worker", 1)
    rollout_fragment_length: int = changed(ActorCriticConfig, "rollout_fragment_length", 256)
    train_batch_size: int = changed(ActorCriticConfig, "train_batch_size", 2048)
    input_evaluation: list[Literal["is", "wis", "simulation"]] = changed(ActorCriticConfig, "input_evaluation", [])

    adam_epsilon: float = _learning(1e-7, "Adam's epsilon.", gt=0)
    outstanding_fragments_per_worker: int = _learning(
        8, "Fragments that a worker may owe or have under way at a time, within the budget of the whole run.",
        unit="fragments", ge=1,
    )  # fmt: skip

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        if self.is_filtered and self.gradients == "workers":
            raise ConfigError(
                f"{self.algo} filters stored observations on the learner, and gradients come from workers.",
                key="observation_filter", value=self.observation_filter, hint="Set gradients: learner, or NoFilter.",
            )  # fmt: skip
        if (self.model.use_lstm or self.model.use_gru) and not self.postprocess_inputs:
            raise ConfigError(
                "stored rows have no states of this recurrent model.", key="postprocess_inputs",
                value=self.postprocess_inputs,
                hint="Set postprocess_inputs: true, so that workers run the model over the stored episodes.",
            )  # fmt: skip
