"""Keys of algorithms that train repeatedly on a replay. Loads no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from aiorl.acting.exploration import Schedule
from aiorl.config.code import is_import_path
from aiorl.config.key import changed, key
from aiorl.config.schema import Activation, CommonConfig, ModelConfig
from aiorl.config.shared_keys import BROADCAST_INTERVAL, ENVS, LENGTH, KeyTable
from aiorl.config.worker import MAX_ROWS
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.replay.sequences import Sequences, SequenceShape

_learning = partial(key, group="Learning")
_replay = partial(key, group="Replay")


class ReplayUpdateKeys(KeyTable):
    """Keys of updates from a replay: the optimiser, n-step returns, the minibatches that are due
    for new rows, target networks, and how far workers sample ahead.
    """

    lr_schedule: list[tuple[float, float]] | None = _learning(None)
    """lr over env steps, as [[env step, value], ...]."""
    grad_clip: float | None = _learning(10.0, gt=0)
    """Largest global norm of a gradient; null: not clipped."""
    adam_epsilon: float = _learning(1e-8, gt=0)
    """Adam's epsilon."""
    n_step: int = _learning(1, unit="steps", ge=1, le=MAX_ROWS)
    """Steps whose rewards are summed before the value of the next observation is added; fewer at
    the end of a fragment."""
    training_intensity: float = _learning(8.0, gt=0, allow_inf_nan=False)
    """Rows trained on per row sampled. It determines how many minibatches are due."""
    fragments_per_update: int = _learning(1, unit="fragments", ge=1)
    """Fragments to store before the minibatches that are due for them are made, in one call."""
    target_update_freq: int = _learning(500, unit="minibatches", ge=1)
    """Minibatches between two updates of the target network."""
    tau: float = _learning(1.0, gt=0, le=1)
    """Share by which the target network moves towards the online network; 1: it becomes a copy."""
    max_env_steps_ahead: int = _learning(4096, unit="env steps", ge=1)
    """Maximum number of env steps that all workers together may sample before they are stored,
    counted in fragments of the usual length (whole episodes can exceed it). Always at least two
    updates' worth."""
    outstanding_fragments_per_worker: int = _learning(4, unit="fragments", ge=1)
    """Maximum number of fragments that a worker owes or has under way at a time, within
    max_env_steps_ahead."""
    broadcast_updates: int = _learning(10, unit="updates", ge=1)
    """Updates, each of fragments_per_update fragments, after which weights are sent to workers."""
    broadcast_interval_ms: float = _learning(50.0, BROADCAST_INTERVAL, unit="ms", gt=0)


class ReplayMemoryKeys(KeyTable):
    """Keys of the replay itself: its size, where it is, and how rows are drawn."""

    replay_capacity: int = _replay(50_000, unit="rows", ge=1)
    """Maximum number of stored rows; beyond it, the oldest are evicted. A sequence counts as its
    trained steps when full."""
    replay_spill_dir: str | None = _replay(None)
    """Directory for memory-mapped files with the rows; null: rows are kept in memory."""
    learning_starts: int | None = _replay(1000, unit="rows", ge=1)
    """Rows to store before training begins; null: as many as the replay holds. With stored
    experience, rows that are read again make minibatches due even before that."""
    prioritized_replay: bool = _replay(False)
    """Sample rows with probabilities that follow their TD errors."""
    prioritized_replay_alpha: float = _replay(0.6, ge=0, le=1, needs="prioritized_replay")
    """Exponent of the priorities: 0 samples all rows alike, 1 in proportion to their errors."""
    prioritized_replay_beta: float = _replay(0.4, ge=0, le=1, needs="prioritized_replay")
    """Initial exponent of the importance weights: 0 doesn't correct for priorities, 1 corrects
    fully."""
    final_prioritized_replay_beta: float = _replay(1.0, ge=0, le=1, needs="prioritized_replay")
    """Final exponent of the importance weights."""
    prioritized_replay_beta_timesteps: int = _replay(
        100_000, unit="env steps", ge=1, needs="prioritized_replay"
    )
    """Env steps over which the exponent of the importance weights moves from its initial to its
    final value."""
    prioritized_replay_eps: float = _replay(1e-6, gt=0, needs="prioritized_replay")
    """Constant added to each error, so that every row is sampled sometimes."""
    checkpoint_replay: bool = _replay(True)
    """Save the replay in checkpoints; if false, a resumed run starts with an empty one."""


class ReplayKeys(ReplayMemoryKeys, ReplayUpdateKeys):
    """Keys of algorithms that store experience and train on minibatches drawn from it.

    Attributes:
        trains_recurrent_models: True if the networks can be recurrent; they are then trained on
            sequences.
        other_model_keys: keys of the model that the algorithm's networks don't support.
        trains_on_what_comes: False, as rows are stored first.
    """

    trains_recurrent_models: ClassVar[bool] = False
    other_model_keys: ClassVar[tuple[str, ...]] = ("free_log_std", "vf_share_layers", "vf_hiddens")
    trains_on_what_comes: ClassVar[bool] = False

    lr: float = changed(CommonConfig, "lr", 5e-4)
    timesteps_per_iteration: int = changed(CommonConfig, "timesteps_per_iteration", 1000)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 4)
    train_batch_size: int = _learning(32, unit="rows", ge=1)
    """Rows in one minibatch; if sequences are trained on, it consists of whole ones with this many
    trained steps."""

    @property
    def input_sources(self) -> Collection[Any]:
        """Sources of rows: "sampler", and stored experience as in `input`."""
        if isinstance(self.input, dict):
            return self.input
        return [self.input]

    @property
    def reads_only_stored(self) -> bool:
        """True if no rows are sampled: all come from stored experience, which is read over and
        over.
        """
        return self.is_offline or "sampler" not in self.input_sources

    def worker_overrides(self) -> dict[str, Any]:
        """See `CommonConfig.worker_overrides`; stored rows get n-step returns, which files don't
        contain.

        The default of input_evaluation, estimates of the policy's return, would need probabilities
        of stored actions, which demonstrations seldom have.
        """
        if self.input == "sampler" or self.is_offline:
            return {}
        estimates: list[str] = []
        if not self.is_default("input_evaluation"):
            estimates = list(self.input_evaluation)
        return {"postprocess_inputs": True, "input_evaluation": estimates}

    @property
    def first_rows(self) -> int:
        """Rows to store before new rows make minibatches due; until then, only rows that are read
        again do.
        """
        return self.replay_capacity if self.learning_starts is None else self.learning_starts

    @property
    def sequence_shape(self) -> SequenceShape | None:
        """Shape of the sequences that a recurrent network is trained on; None for single rows."""
        return None

    def sequences(self, model: ActorCritic) -> Sequences | None:
        """Return the cutter of fragments into the sequences of `model` to store; None if single
        rows are stored.
        """
        return None

    @property
    def entry_steps(self) -> int:
        """Trained steps of one entry of the replay, which is a row or a sequence."""
        shape = self.sequence_shape
        return 1 if shape is None else shape.trained_steps

    @property
    def minibatch_entries(self) -> int:
        """Rows or sequences in one minibatch."""
        return max(1, self.train_batch_size // self.entry_steps)

    @property
    def minibatch_rows(self) -> int:
        """Rows that a minibatch trains on if its sequences are full."""
        return self.minibatch_entries * self.entry_steps

    @property
    def fragment_steps(self) -> int:
        """Env steps in a fragment of the usual length."""
        return self.rollout_fragment_length * self.num_envs_per_worker

    def max_fragments_under_way(self) -> int:
        """Return the number of fragments that `max_env_steps_ahead` allows."""
        return max(2 * self.fragments_per_update, self.max_env_steps_ahead // self.fragment_steps)

    def usual_minibatches(self) -> int:
        """Return the maximum number of minibatches that one update's usual fragments make due."""
        rows = self.fragments_per_update * self.fragment_steps * self.training_intensity
        return max(1, math.ceil(rows / self.minibatch_rows))

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See `CommonConfig.derived_sizes`; fragments are long enough for n_step, and the replay is
        large enough.
        """
        length = self.rollout_fragment_length
        envs = self.num_envs_per_worker
        capacity = self.replay_capacity
        starts = self.learning_starts
        if LENGTH not in fixed and self.is_truncating and self.n_step > length:
            length = 4 * self.n_step
        if "replay_capacity" not in fixed:
            capacity = max(capacity, starts or 0, length * envs)
        elif ENVS not in fixed:
            envs = min(envs, max(1, capacity // (self.fragments_per_update * length)))
        if "learning_starts" not in fixed and starts is not None:
            starts = min(starts, capacity)
        derived = {LENGTH: length, ENVS: envs, "replay_capacity": capacity}
        if starts is not None:
            derived["learning_starts"] = starts
        return {name: size for name, size in derived.items() if size != getattr(self, name)}

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        self._check_capacity()
        if self.n_step > self.rollout_fragment_length and self.is_truncating:
            raise ConfigError(
                f"n_step is {self.n_step}, but fragments end after rollout_fragment_length,"
                f" {self.rollout_fragment_length} steps: no row could sum that many rewards.",
                key="n_step",
                value=self.n_step,
                hint=f"Set rollout_fragment_length to {4 * self.n_step} or more; most rows then"
                " have all n steps.",
            )
        self._check_networks()
        if self.learning_starts is None and self.input_epochs == 1:
            raise ConfigError(
                f"{self.algo} stores all rows in the first pass and trains from the second on: it"
                " would learn nothing.",
                key="input_epochs",
                value=self.input_epochs,
                hint="Leave it out, or set learning_starts.",
            )

    def _check_capacity(self) -> None:
        capacity = self.replay_capacity
        steps = self.fragment_steps
        if self.first_rows > capacity:
            raise ConfigError(
                f"learning_starts is {self.learning_starts}, but the replay holds only {capacity}"
                " rows.",
                key="learning_starts",
                value=self.learning_starts,
                hint="Set a larger replay_capacity.",
            )
        if steps > capacity:
            raise ConfigError(
                f"a fragment has {steps} env steps, but the replay holds only {capacity} rows.",
                key="replay_capacity",
                value=capacity,
                hint="Set a larger one, or a smaller rollout_fragment_length or"
                " num_envs_per_worker.",
            )
        if self.fragments_per_update * steps > capacity:
            raise ConfigError(
                f"each update waits for {self.fragments_per_update} fragments of {steps} env steps,"
                f" but the replay holds only {capacity} rows.",
                key="fragments_per_update",
                value=self.fragments_per_update,
                hint="Set a smaller one.",
            )

    def _check_networks(self) -> None:
        model = self.model
        if model.is_recurrent and not self.trains_recurrent_models:
            keys = ("use_lstm", "use_gru", "custom_state")
            key_name = next(name for name in keys if getattr(model, name))
            raise ConfigError(
                f"{self.algo} can't train recurrent models.",
                key=f"model.{key_name}",
                value=getattr(model, key_name),
                hint="ppo, impala and dqn can.",
            )
        for name in self.other_model_keys:
            value = getattr(model, name)
            if value:
                raise ConfigError(
                    f"{self.algo} has its own networks, which don't support {name}.",
                    key=f"model.{name}",
                    value=value,
                    hint="Leave it out.",
                )


class ReplayConfig(ReplayKeys, CommonConfig):
    """Settings of algorithms that store experience and train on minibatches drawn from it."""


class CriticsModelConfig(ModelConfig):
    """Shape of the networks; the defaults are those of the SAC and IQL papers and of the TD3
    authors' code.
    """

    fcnet_hiddens: tuple[int, ...] = changed(ModelConfig, "fcnet_hiddens", (256, 256))
    fcnet_activation: Activation = changed(ModelConfig, "fcnet_activation", "relu")


if TYPE_CHECKING:
    _OfReplay = ReplayKeys
else:
    _OfReplay = KeyTable


class CriticKeys(_OfReplay):
    """Keys of an actor that learns from critics: its learning rate, the number of critics, and the
    length of the uniform start.
    """

    actor_lr: float | None = _learning(None, gt=0, allow_inf_nan=False)
    """Learning rate of the actor, constant; null: that of the critics, lr with its lr_schedule."""
    twin_q: bool = _learning(True)
    """Train two critics and use the smaller of their values."""
    random_timesteps: int = _learning(100, unit="env steps", ge=0)
    """Env steps, of all workers together, with uniformly random actions at the start."""


class ActorReplayKeys(CriticKeys):
    """Keys of replay algorithms with an actor and critics, and their defaults of common keys."""

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


class ActorReplayConfig(ActorReplayKeys, ReplayKeys, CommonConfig):
    """Settings of replay algorithms with an actor and critics."""


if TYPE_CHECKING:
    _OfActorReplay = ActorReplayKeys
else:
    _OfActorReplay = KeyTable


class OfflineReplayKeys(_OfActorReplay):
    """Keys of algorithms with a replay, an actor and critics that learn from stored experience.

    None is new, but defaults differ: training begins once all rows are stored, and actions are not
    random at the start.

    Attributes:
        action_spaces: kinds of actions that these algorithms support.
        is_offline: True, as they learn from stored experience.
    """

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box", "Discrete")
    is_offline: ClassVar[bool] = True

    rollout_fragment_length: int = changed(ActorReplayConfig, "rollout_fragment_length", 256)
    max_env_steps_ahead: int = changed(ActorReplayConfig, "max_env_steps_ahead", 4096)
    random_timesteps: int = changed(ActorReplayConfig, "random_timesteps", 0)
    learning_starts: int | None = changed(ActorReplayConfig, "learning_starts", None)
    postprocess_inputs: bool = changed(ActorReplayConfig, "postprocess_inputs", True)
    input_evaluation: list[Literal["is", "wis", "simulation"]] = changed(
        ActorReplayConfig, "input_evaluation", []
    )

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        self.refuse_unless(
            "sampler" in self.input_sources,
            ("random_timesteps",),
            "sampled experience",
            hint="Leave it out.",
        )
        if not self.postprocess_inputs:
            raise ConfigError(
                f"{self.algo} learns from n-step returns, which files don't contain.",
                key="postprocess_inputs",
                value=self.postprocess_inputs,
                hint="Leave it out: workers compute them from the rewards while they read.",
            )
        is_mixture = len(self.input_sources) > 1
        is_custom = isinstance(self.input, str) and is_import_path(self.input)
        if self.learning_starts is None and (is_mixture or is_custom):
            raise ConfigError(
                "a mixture or a custom reader doesn't report when all of it has been read once.",
                key="learning_starts",
                value=self.learning_starts,
                hint="Set learning_starts to the number of rows to store before training.",
            )
        if self.shuffle_buffer_size > 0:
            raise ConfigError(
                f"{self.algo} samples rows from a replay, which shuffles them anyway.",
                key="shuffle_buffer_size",
                value=self.shuffle_buffer_size,
                hint="Leave it out.",
            )


class OfflineReplayConfig(OfflineReplayKeys, ActorReplayKeys, ReplayKeys, CommonConfig):
    """Settings of algorithms with an actor and critics that learn from a replay of stored
    experience.
    """
