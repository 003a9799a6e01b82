"""Keys of DQN, and the rules that they obey."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from aiorl.acting.exploration import Schedule
from aiorl.config.key import changed, key
from aiorl.config.schema import Activation, CommonConfig, ModelConfig
from aiorl.config.shared_keys import BATCH, LENGTH, KeyTable
from aiorl.data import columns as c
from aiorl.errors import ConfigError
from aiorl.learning.keys.replay import ReplayConfig, ReplayKeys
from aiorl.learning.replay.sequences import Sequences, SequenceShape
from aiorl.learning.rows import (
    model_columns,
    previous_columns,
    state_columns,
)

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_dqn = partial(key, group="DQN")
_LEAST_SEQUENCE = 8
_USUAL_SEQUENCE = 40
# in a minibatch
_LEAST_SEQUENCES = 8
_USUAL_SEQUENCES = 32


class QModelConfig(ModelConfig):
    """Shape of the network of action values."""

    fcnet_activation: Activation = changed(ModelConfig, "fcnet_activation", "relu")


class ActionValueKeys(KeyTable):
    """Keys of the network of action values and of its loss."""

    double_q: bool = _dqn(True)
    """Let the online network choose the next action and the target network value it (double
    Q-learning)."""
    dueling: bool = _dqn(True)
    """Use separate streams for the value of a state and the advantages of actions."""
    dueling_hiddens: tuple[int, ...] = _dqn((), needs="dueling")
    """Width of each hidden layer of both streams, after the shared layers."""
    num_atoms: int = _dqn(1, unit="atoms", ge=1)
    """Atoms of the return distribution (C51); 1 learns only expected returns."""
    v_min: float = _dqn(-10.0, allow_inf_nan=False)
    """Return of the first atom."""
    v_max: float = _dqn(10.0, allow_inf_nan=False)
    """Return of the last atom."""
    noisy: bool = _dqn(False)
    """Give the streams' layers learned noise, drawn for each action and each minibatch (Rainbow).
    It replaces random actions as exploration."""
    sigma0: float = _dqn(0.5, gt=0, needs="noisy")
    """Initial standard deviation of the noise, multiplied by the root of the layer's number of
    inputs."""
    huber_delta: float = _dqn(1.0, gt=0)
    """Absolute TD error up to which the loss is quadratic; beyond it, the loss is linear."""


class QWorkerKeys(KeyTable):
    """Keys of workers that act by action values: random actions, and the priorities they send."""

    epsilon_schedule: list[tuple[float, float]] = _dqn([(0, 1.0), (5_000, 0.05)])
    """Share of random actions over sampled env steps, as [[env step, value], ...]."""
    per_worker_epsilon: bool = _dqn(False)
    """Give each worker its own constant share of random actions, from 0.4 down to 0.4^8, instead of
    epsilon_schedule."""
    worker_priorities: bool = _dqn(False)
    """Let workers send the absolute TD error of each row by their own values (of returns even with
    num_atoms). It is the row's priority until it is trained on; otherwise the first priority is the
    largest error so far."""


class SequenceKeys(KeyTable):
    """Keys of the sequences that a recurrent network is trained on."""

    replay_sequence_length: int | None = _dqn(None, unit="steps", ge=1)
    """Length of the sequences that a recurrent network is trained on, including burn-in; null:
    rollout_fragment_length."""
    burn_in: int = _dqn(0, unit="steps", ge=0)
    """Steps at the start of a sequence that only update its stored state and are not trained on."""
    sequence_overlap: int | None = _dqn(None, unit="steps", ge=0)
    """Steps that a sequence shares with the previous one; null: burn_in."""
    sequence_priority_eta: float = _dqn(0.9, ge=0, le=1, needs="prioritized_replay")
    """Weight of a sequence's largest TD error in its priority; the mean error has the remaining
    weight."""
    value_rescaling: bool = _dqn(False)
    """Learn returns on a scale that shrinks large ones, instead of clipping rewards; targets undo
    it."""


class DQNConfig(SequenceKeys, QWorkerKeys, ActionValueKeys, ReplayKeys, CommonConfig):
    """DQN's own keys, and its defaults of common keys."""

    trains_recurrent_models: ClassVar[bool] = True
    action_spaces: ClassVar[tuple[str, ...] | None] = ("Discrete",)

    algo: str = changed(ReplayConfig, "algo", "dqn")
    model: QModelConfig = changed(ReplayConfig, "model", QModelConfig())
    train_batch_size: int = changed(ReplayConfig, "train_batch_size", 64)
    training_intensity: float = changed(ReplayConfig, "training_intensity", 16.0)

    @property
    def sequence_shape(self) -> SequenceShape | None:
        """See `ReplayConfig.sequence_shape`."""
        if not self.model.is_recurrent:
            return None
        length = self.replay_sequence_length
        if length is None:
            length = self.rollout_fragment_length
        overlap = self.sequence_overlap
        if overlap is None:
            overlap = self.burn_in
        return SequenceShape(length, self.burn_in, overlap)

    def sequences(self, model: ActorCritic) -> Sequences | None:
        """See `ReplayConfig.sequences`."""
        shape = self.sequence_shape
        if shape is None:
            return None
        return Sequences(
            shape,
            tuple(model_columns(model, sequence_rows(self))),
            tuple(model_columns(model, state_columns(self, cells=1))),
            gamma=self.gamma,
            n=self.n_step,
        )

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See `CommonConfig.derived_sizes`; fragments hold whole sequences for a recurrent
        network.
        """
        derived = super().derived_sizes(fixed)
        shape = self.sequence_shape
        if shape is None:
            return derived
        length = derived.get(LENGTH, self.rollout_fragment_length)
        if LENGTH not in fixed:
            if self.replay_sequence_length is None:
                length = max(length, _USUAL_SEQUENCE)
                shape = shape._replace(length=length)
            elif shape.length > length:
                length = shape.length + shape.stride  # of two sequences
        sizes = {LENGTH: length}
        if BATCH not in fixed and self.train_batch_size < _LEAST_SEQUENCES * shape.trained_steps:
            sizes[BATCH] = _USUAL_SEQUENCES * shape.trained_steps
        return derived | {name: size for name, size in sizes.items() if size != getattr(self, name)}

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        Schedule(self.epsilon_schedule, key="epsilon_schedule")
        shape = self.sequence_shape
        self.refuse_unless(
            shape is not None,
            ("replay_sequence_length", "burn_in", "sequence_overlap", "sequence_priority_eta"),
            "recurrent networks, which are trained on sequences",
            hint="Set model.use_lstm or model.use_gru, or leave it out.",
        )
        if shape is not None:
            self._check_recurrent_model(shape)
            self._check_sequences(shape)
        self._check_atoms()
        self._check_exploration()
        if self.worker_priorities:
            self._check_worker_priorities()

    def _check_recurrent_model(self, shape: SequenceShape) -> None:
        if self.replay_sequence_length is None and shape.length < _LEAST_SEQUENCE:
            raise ConfigError(
                f"a recurrent network learns almost nothing from sequences of {shape.length} steps,"
                " the length of a fragment.",
                key="rollout_fragment_length",
                value=self.rollout_fragment_length,
                hint="Set rollout_fragment_length: 40, replay_sequence_length: 24, burn_in: 8 and"
                " train_batch_size: 256, say, or set replay_sequence_length to keep them short.",
            )
        if not self.is_truncating:
            raise ConfigError(
                "a recurrent dqn needs batch_mode truncate_episodes: whole episodes carry no"
                " intermediate states.",
                key="batch_mode",
                value=self.batch_mode,
                hint="Leave batch_mode out, and set rollout_fragment_length.",
            )

    def _check_sequences(self, shape: SequenceShape) -> None:
        length, burn_in, overlap = shape
        if length > self.rollout_fragment_length:
            raise ConfigError(
                f"sequences of {length} steps don't fit into fragments of"
                f" {self.rollout_fragment_length}.",
                key="replay_sequence_length",
                value=self.replay_sequence_length,
                hint="Set a larger rollout_fragment_length.",
            )
        if burn_in >= length:
            raise ConfigError(
                f"burn_in is {burn_in}, but a sequence has {length} steps: none would be trained"
                " on.",
                key="burn_in",
                value=burn_in,
                hint="Set a smaller one, or a larger replay_sequence_length and"
                " rollout_fragment_length.",
            )
        if not burn_in <= overlap < length:
            raise ConfigError(
                f"sequence_overlap is {overlap}; it must be at least burn_in, {burn_in}, to train"
                f" on every step, and less than the {length} steps of a sequence.",
                key="sequence_overlap",
                value=self.sequence_overlap,
                hint=f"Leave it out for {burn_in}, or set {length // 2}.",
            )
        if self.n_step > shape.trained_steps:
            raise ConfigError(
                f"n_step is {self.n_step}, but a sequence trains on {shape.trained_steps} steps.",
                key="n_step",
                value=self.n_step,
                hint="Set longer ones.",
            )
        if self.train_batch_size < shape.trained_steps:
            raise ConfigError(
                f"train_batch_size is {self.train_batch_size}, but one sequence trains on"
                f" {shape.trained_steps} steps.",
                key="train_batch_size",
                value=self.train_batch_size,
                hint=f"Set {_USUAL_SEQUENCES * shape.trained_steps}, say.",
            )

    def _check_atoms(self) -> None:
        has_atoms = self.num_atoms > 1
        self.refuse_unless(
            has_atoms,
            ("v_min", "v_max"),
            "distributions of returns",
            hint="Set num_atoms: 51, or leave it out.",
        )
        self.refuse_unless(
            not has_atoms,
            ("huber_delta",),
            "expected returns; atoms have another loss",
            hint="Leave it out, or set num_atoms: 1.",
        )
        if has_atoms and self.v_min >= self.v_max:
            raise ConfigError(
                f"v_min is {self.v_min:g}, which is not below v_max, {self.v_max:g}.",
                key="v_min",
                value=self.v_min,
                hint="Returns must lie between them.",
            )
        if has_atoms and self.value_rescaling:
            raise ConfigError(
                "value_rescaling is for expected returns; atoms have fixed returns.",
                key="value_rescaling",
                value=self.value_rescaling,
                hint="Leave it out, or set num_atoms: 1.",
            )

    def _check_exploration(self) -> None:
        self.refuse_unless(
            not self.noisy,
            ("epsilon_schedule", "per_worker_epsilon"),
            "networks without noise: noisy layers explore",
            hint="Leave it out, or set noisy: false.",
        )
        self.refuse_unless(
            not self.per_worker_epsilon,
            ("epsilon_schedule",),
            "workers with a common share of random actions",
            hint="Leave it out, or set per_worker_epsilon: false.",
        )
        if not all(0 <= value <= 1 for _, value in self.epsilon_schedule):
            raise ConfigError(
                "epsilon_schedule has a value that is not a probability.",
                key="epsilon_schedule",
                value=self.epsilon_schedule,
            )
        if self.per_worker_epsilon and self.is_alone:
            raise ConfigError(
                "per_worker_epsilon is for workers: in the learner's own process it gives no random"
                " actions.",
                key="per_worker_epsilon",
                value=self.per_worker_epsilon,
                hint="Set num_workers, or bind so that remote workers can join; or turn it off to"
                " use epsilon_schedule.",
            )

    def _check_worker_priorities(self) -> None:
        if not self.prioritized_replay:
            raise ConfigError(
                "worker_priorities needs prioritized_replay: without it all rows are drawn with"
                " equal probability.",
                key="worker_priorities",
                value=self.worker_priorities,
                hint="Set prioritized_replay, or leave worker_priorities out.",
            )
        if self.value_rescaling or self.model.is_recurrent:
            cause = "value_rescaling" if self.value_rescaling else "a recurrent network"
            raise ConfigError(
                f"worker_priorities can't be combined with {cause}: it needs one error per row, in"
                " units of return.",
                key="worker_priorities",
                value=self.worker_priorities,
                hint="Set worker_priorities: false; the first priority of a row is then the largest"
                " error so far.",
            )


def sequence_rows(config: DQNConfig) -> tuple[str, ...]:
    """Return the columns of rows that sequences are cut from."""
    flags = (c.TERMINATEDS, c.TRUNCATEDS)
    return (c.OBS, c.ACTIONS, c.NEW_OBS, c.REWARDS, *flags, *previous_columns(config))
