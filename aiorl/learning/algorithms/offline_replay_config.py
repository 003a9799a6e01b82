"""Settings that algorithms share which keep stored experience in a replay; loads no TensorFlow."""

from __future__ import annotations

from typing import ClassVar, Literal

from aiorl.config.code import is_import_path
from aiorl.config.key import changed
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_replay_config import ActorReplayConfig

__all__ = ["OfflineReplayConfig"]


class OfflineReplayConfig(ActorReplayConfig):
    """The settings of such algorithms, and their defaults of the common ones."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box", "Discrete")
    is_offline: ClassVar[bool] = True

    rollout_fragment_length: int = changed(ActorReplayConfig, "rollout_fragment_length", 256)
    max_env_steps_ahead: int = changed(ActorReplayConfig, "max_env_steps_ahead", 4096)
    random_timesteps: int = changed(ActorReplayConfig, "random_timesteps", 0)
    learning_starts: int | None = changed(ActorReplayConfig, "learning_starts", None)
    postprocess_inputs: bool = changed(ActorReplayConfig, "postprocess_inputs", True)
    input_evaluation: list[Literal["is", "wis", "simulation"]] = changed(ActorReplayConfig, "input_evaluation", [])

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        if not self.postprocess_inputs:
            raise ConfigError(
                f"{self.algo} learns from n-step returns, which no file has.", key="postprocess_inputs", value=False,
                hint="Leave it out: workers make them of the rewards as they read.",
            )  # fmt: skip
        sampled = self.input if isinstance(self.input, dict) else [self.input]
        self.refuse_unless("sampler" in sampled, ("random_timesteps",), "what is sampled", hint="Leave it out.")
        if self.learning_starts is None and self.input_epochs == 1:
            raise ConfigError(
                f"{self.algo} stores all rows first, and trains as they come again: with one pass it would learn "
                "nothing.", key="input_epochs", value=1, hint="Leave it out, or set learning_starts.",
            )  # fmt: skip
        is_own = isinstance(self.input, str) and is_import_path(self.input)
        if self.learning_starts is None and (is_own or (isinstance(self.input, dict) and len(self.input) > 1)):
            raise ConfigError(
                "of a mixture, or a reader of your own, nobody knows when all of it was read once.",
                key="learning_starts", value=None, hint="Set learning_starts: rows that are stored before training.",
            )  # fmt: skip
        if self.shuffle_buffer_size:
            raise ConfigError(
                f"{self.algo} draws its rows from a replay, in no order.", key="shuffle_buffer_size",
                value=self.shuffle_buffer_size, hint="Leave it out.",
            )  # fmt: skip
