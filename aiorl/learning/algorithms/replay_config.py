"""Settings of algorithms that train many times on what they store; loads no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from aiorl.acting.exploration import Schedule
from aiorl.config.code import is_import_path
from aiorl.config.key import changed, key, refuse
from aiorl.config.schema import Activation, CommonConfig, ModelConfig
from aiorl.learning.algorithms.shared_config import BROADCAST_INTERVAL, ENVS, LENGTH

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.replay.sequences import Sequences, SequenceShape

_learning = partial(key, group="Learning")
_replay = partial(key, group="Replay")


class ReplayConfig(CommonConfig):
    """The settings of such algorithms, and their defaults of the common ones.

    Attributes:
        trains_recurrent_models: its networks may be recurrent, and are then trained on sequences.
        other_model_keys: switches of networks that its own ones don't have.
    """

    trains_recurrent_models: ClassVar[bool] = False
    other_model_keys: ClassVar[tuple[str, ...]] = ("free_log_std", "vf_share_layers")
    trains_on_what_comes: ClassVar[bool] = False

    lr: float = changed(CommonConfig, "lr", 5e-4)
    timesteps_per_iteration: int = changed(CommonConfig, "timesteps_per_iteration", 1000)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 4)
    train_batch_size: int = _learning(32, unit="rows", ge=1)
    """Rows in one minibatch; whole sequences with as many, where these are trained on."""

    lr_schedule: list[tuple[float, float]] | None = _learning(None)
    """lr over env steps, as [[env step, value], ...]."""
    grad_clip: float | None = _learning(10.0, gt=0)
    """Largest global norm of a gradient; null: not clipped."""
    adam_epsilon: float = _learning(1e-8, gt=0)
    """Adam's epsilon."""
    n_step: int = _learning(1, unit="steps", ge=1)
    """Steps whose rewards are summed before the value of what followed; fewer at the end of a fragment."""
    training_intensity: float = _learning(8.0, gt=0, allow_inf_nan=False)
    """Rows trained on per row sampled: minibatches are made as they become due."""
    fragments_per_update: int = _learning(1, unit="fragments", ge=1)
    """Fragments that are stored before the minibatches that are due by them are made, in one call."""
    target_update_freq: int = _learning(500, unit="minibatches", ge=1)
    """Minibatches after which the target network follows."""
    tau: float = _learning(1.0, gt=0, le=1)
    """How far the target network follows: 1 = it becomes the network that learns."""
    max_env_steps_ahead: int = _learning(4096, unit="env steps", ge=1)
    """Env steps that may be sampled and not yet stored, all workers together, in fragments of their usual length: whole
    episodes may run further ahead; what two updates take in any case."""
    outstanding_fragments_per_worker: int = _learning(4, unit="fragments", ge=1)
    """Fragments that a worker may owe or have under way at a time, within that bound."""
    broadcast_updates: int = _learning(10, unit="updates", ge=1)
    """Weights go to workers after so many updates, each of fragments_per_update fragments."""
    broadcast_interval_ms: float = _learning(50.0, BROADCAST_INTERVAL, unit="ms", gt=0)

    replay_capacity: int = _replay(50_000, unit="rows", ge=1)
    """Rows that are stored; then the oldest ones go. Of a sequence as many count as are trained on when it is full."""
    replay_spill_dir: str | None = _replay(None)
    """Directory of memory-mapped files that hold the rows; null holds them in memory."""
    learning_starts: int | None = _replay(1000, unit="rows", ge=1)
    """Rows that are stored before training begins; null: as many as the replay has room for. Stored experience makes
    minibatches due sooner, as soon as it is read again."""
    prioritized_replay: bool = _replay(False)
    """Draw rows in proportion to their TD errors."""
    prioritized_replay_alpha: float = _replay(0.6, ge=0, le=1, needs="prioritized_replay")
    """How much priorities count: 0 draws all rows alike, 1 in proportion to their errors."""
    prioritized_replay_beta: float = _replay(0.4, ge=0, le=1, needs="prioritized_replay")
    """How much importance weights make up for priorities at first: 0 not at all, 1 fully."""
    final_prioritized_replay_beta: float = _replay(1.0, ge=0, le=1, needs="prioritized_replay")
    """The same in the end."""
    prioritized_replay_beta_timesteps: int = _replay(100_000, unit="env steps", ge=1, needs="prioritized_replay")
    """Env steps over which the one becomes the other."""
    prioritized_replay_eps: float = _replay(1e-6, gt=0, needs="prioritized_replay")
    """Added to each error, so that each row is drawn at times."""
    checkpoint_replay: bool = _replay(True)
    """Checkpoints hold what is stored; else a resumed run stores anew."""

    @property
    def first_rows(self) -> int:
        """Rows that are stored before all that comes makes minibatches due; sooner, what is read again does alone."""
        return self.replay_capacity if self.learning_starts is None else self.learning_starts

    @property
    def sequence_shape(self) -> SequenceShape | None:
        """The sequences that a recurrent network is trained on; None without recurrence: single rows."""
        return None

    def sequences(self, model: ActorCritic) -> Sequences | None:
        """Return what cuts fragments into the sequences that are stored; None where single rows are."""
        return None

    @property
    def entry_steps(self) -> int:
        """Steps that are trained on of what the replay draws as one: a row, or a sequence."""
        return 1 if self.sequence_shape is None else self.sequence_shape.trained_steps

    @property
    def minibatch_entries(self) -> int:
        """Rows or sequences in one minibatch."""
        return max(1, self.train_batch_size // self.entry_steps)

    @property
    def minibatch_rows(self) -> int:
        """Rows that a minibatch trains on, where its sequences are full."""
        return self.minibatch_entries * self.entry_steps

    @property
    def fragment_steps(self) -> int:
        """Env steps of a usual fragment."""
        return self.rollout_fragment_length * self.num_envs_per_worker

    def max_fragments_under_way(self) -> int:
        """Fragments that `max_env_steps_ahead` allows."""
        return max(2 * self.fragments_per_update, self.max_env_steps_ahead // self.fragment_steps)

    def usual_minibatches(self) -> int:
        """Minibatches that become due by one update's usual fragments, at most."""
        rows = self.fragments_per_update * self.fragment_steps * self.training_intensity
        return max(1, math.ceil(rows / self.minibatch_rows))

    def minibatch_cycle(self) -> int:
        """Minibatches after which all that is made at every so many of them begins again."""
        return self.target_update_freq

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See the base class: fragments are long enough for n_step, and the replay holds what it must."""
        length, envs, capacity = self.rollout_fragment_length, self.num_envs_per_worker, self.replay_capacity
        starts = self.learning_starts
        if LENGTH not in fixed and self.is_truncating and self.n_step > length:
            length = 4 * self.n_step
        if "replay_capacity" not in fixed:
            capacity = max(capacity, starts or 0, length * envs)
        elif ENVS not in fixed:
            envs = min(envs, max(1, capacity // (self.fragments_per_update * length)))
        if "learning_starts" not in fixed and starts is not None:
            starts = min(starts, capacity)
        found = {LENGTH: length, ENVS: envs, "replay_capacity": capacity, "learning_starts": starts}
        return {name: size for name, size in found.items() if size is not None and size != getattr(self, name)}

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        model, steps, capacity = self.model, self.fragment_steps, self.replay_capacity
        refuse(
            self,
            (self.first_rows > capacity, "learning_starts",
             f"learning_starts is {self.learning_starts}, and the replay holds {capacity} rows.",
             "Set a larger replay_capacity."),
            (steps > capacity, "replay_capacity",
             f"a fragment has {steps} env steps, and the replay holds {capacity} rows.",
             "Set a larger one, or a smaller rollout_fragment_length or num_envs_per_worker."),
            (self.fragments_per_update * steps > capacity, "fragments_per_update",
             f"each update waits for {self.fragments_per_update} fragments of {steps} env steps, and the replay holds "
             f"{capacity} rows.", "Set a smaller one."),
            (self.n_step > self.rollout_fragment_length and self.is_truncating, "n_step",
             f"n_step is {self.n_step}, and fragments end after rollout_fragment_length, "
             f"{self.rollout_fragment_length} steps: no row would have so many.",
             f"Set rollout_fragment_length to {4 * self.n_step} or more: then most rows have them all."),
            (model.is_recurrent and not self.trains_recurrent_models,
             "model.use_lstm" if model.use_lstm else "model.use_gru",
             f"{self.algo} trains networks without recurrence.", "ppo, impala and dqn take recurrent models."),
            *((getattr(model, name), f"model.{name}", f"{self.algo} trains networks of its own, without {name}.",
               "Leave it out.") for name in self.other_model_keys),
            (self.input != "sampler" and not self.is_offline, "input",
             f"{self.algo} trains on what it samples, not on stored experience.",
             "bc, marwil, cql and iql learn from stored experience."),
        )  # fmt: skip


class CriticsModelConfig(ModelConfig):
    """Shape of the networks, by default as in the papers of SAC and IQL and in the code of TD3's authors."""

    fcnet_hiddens: tuple[int, ...] = changed(ModelConfig, "fcnet_hiddens", (256, 256))
    fcnet_activation: Activation = changed(ModelConfig, "fcnet_activation", "relu")


class ActorReplayConfig(ReplayConfig):
    """The settings of such algorithms, and their defaults of the common ones."""

    model: CriticsModelConfig = changed(ReplayConfig, "model", CriticsModelConfig())
    lr: float = changed(ReplayConfig, "lr", 3e-4)
    num_envs_per_worker: int = changed(ReplayConfig, "num_envs_per_worker", 1)
    rollout_fragment_length: int = changed(ReplayConfig, "rollout_fragment_length", 8)
    train_batch_size: int = changed(ReplayConfig, "train_batch_size", 256)
    grad_clip: float | None = changed(ReplayConfig, "grad_clip", None)
    training_intensity: float = changed(ReplayConfig, "training_intensity", 256.0)
    target_update_freq: int = changed(ReplayConfig, "target_update_freq", 1)
    tau: float = changed(ReplayConfig, "tau", 0.005)
    max_env_steps_ahead: int = changed(ReplayConfig, "max_env_steps_ahead", 64)
    broadcast_updates: int = changed(ReplayConfig, "broadcast_updates", 1)
    replay_capacity: int = changed(ReplayConfig, "replay_capacity", 1_000_000)
    learning_starts: int | None = changed(ReplayConfig, "learning_starts", 100)

    actor_lr: float | None = _learning(None, gt=0, allow_inf_nan=False)
    """Learning rate of the network that acts, without a schedule; null: that of the critics, lr with its
    lr_schedule."""
    twin_q: bool = _learning(True)
    """Two critics, of whose values the smaller one counts."""
    random_timesteps: int = _learning(100, unit="env steps", ge=0)
    """Env steps, of all workers together, of uniformly random actions at first."""


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
        sampled = self.input if isinstance(self.input, dict) else [self.input]
        self.refuse_unless("sampler" in sampled, ("random_timesteps",), "what is sampled", hint="Leave it out.")
        is_mixed = isinstance(self.input, dict) and len(self.input) > 1
        is_own = isinstance(self.input, str) and is_import_path(self.input)
        refuse(
            self,
            (not self.postprocess_inputs, "postprocess_inputs",
             f"{self.algo} learns from n-step returns, which no file has.",
             "Leave it out: workers make them of the rewards as they read."),
            (self.learning_starts is None and self.input_epochs == 1, "input_epochs",
             f"{self.algo} stores all rows first and trains on them from the second pass on: it would learn nothing.",
             "Leave it out, or set learning_starts."),
            (self.learning_starts is None and (is_own or is_mixed), "learning_starts",
             "a mixture, or a reader of your own, doesn't say when all of it was read once.",
             "Set learning_starts: rows that are stored before training."),
            (self.shuffle_buffer_size > 0, "shuffle_buffer_size",
             f"{self.algo} draws its rows from a replay, in no order.", "Leave it out."),
        )  # fmt: skip
