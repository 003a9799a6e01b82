"""Settings of DQN; loads no TensorFlow."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import ClassVar

from aiorl.acting.schedules import Schedule
from aiorl.config.key import changed, key
from aiorl.config.schema import Activation, ModelConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.replay_config import ReplayConfig
from aiorl.learning.algorithms.sizes import BATCH, LENGTH
from aiorl.learning.replay.sequences import SequenceShape

__all__ = ["DQNConfig", "QModelConfig"]

_dqn = partial(key, group="DQN")
_LEAST_SEQUENCE = 8
_USUAL_SEQUENCE = 40
_LEAST_SEQUENCES, _USUAL_SEQUENCES = 8, 32  # of a minibatch


class QModelConfig(ModelConfig):
    """Shape of the network of action values."""

    fcnet_activation: Activation = changed(ModelConfig, "fcnet_activation", "relu")


class DQNConfig(ReplayConfig):
    """DQN's own settings, and its defaults of the common ones."""

    trains_recurrent_models: ClassVar[bool] = True
    action_spaces: ClassVar[tuple[str, ...] | None] = ("Discrete",)

    algo: str = changed(ReplayConfig, "algo", "dqn")
    model: QModelConfig = changed(ReplayConfig, "model", QModelConfig())
    train_batch_size: int = changed(ReplayConfig, "train_batch_size", 64)
    training_intensity: float = changed(ReplayConfig, "training_intensity", 16.0)

    double_q: bool = _dqn(True, "The network that learns chooses the action whose value the target network gives.")
    dueling: bool = _dqn(True, "Streams of the network for the value of a state and for the advantages of actions.")
    dueling_hiddens: tuple[int, ...] = _dqn((), "Width of each hidden layer of both streams, behind the shared ones.")
    num_atoms: int = _dqn(
        1, "Atoms of the distribution of returns (C51); 1 learns expected returns only.", unit="atoms", ge=1
    )
    v_min: float = _dqn(-10.0, "Return of the first atom.", allow_inf_nan=False)
    v_max: float = _dqn(10.0, "Return of the last atom.", allow_inf_nan=False)
    huber_delta: float = _dqn(1.0, "Size of a TD error up to which its loss is square, and linear beyond.", gt=0)
    epsilon_schedule: list[tuple[float, float]] = _dqn(
        [(0, 1.0), (5_000, 0.05)], "Share of random actions over env steps sampled, as [[env step, value], ...]."
    )
    per_worker_epsilon: bool = _dqn(
        False, "Each worker has a share of random actions of its own, 0.4 down to 0.4^8, and epsilon_schedule none."
    )
    worker_priorities: bool = _dqn(
        False, "Workers send the size of each row's TD error by their own values, of returns also with num_atoms; the "
        "replay draws it by that until it is trained on. Else it is first drawn by the largest error so far.",
    )  # fmt: skip

    replay_sequence_length: int | None = _dqn(
        None, "Steps of the sequences that a recurrent network is trained on, burn-in included; null takes "
        "rollout_fragment_length.", unit="steps", ge=1,
    )  # fmt: skip
    burn_in: int = _dqn(
        0, "Steps at the beginning of a sequence that only bring its stored state up to date.", unit="steps", ge=0
    )
    sequence_overlap: int | None = _dqn(
        None, "Steps that a sequence has in common with the one before; null takes burn_in.", unit="steps", ge=0
    )
    sequence_priority_eta: float = _dqn(
        0.9, "Share of the largest TD error of a sequence in its priority; the rest is that of their mean.",
        ge=0, le=1,
    )  # fmt: skip
    value_rescaling: bool = _dqn(
        False, "Learn returns in a scale that shrinks large ones, in place of clipping rewards, and undo it in targets."
    )

    @property
    def sequence_shape(self) -> SequenceShape | None:
        """See the base class."""
        if not self.model.is_recurrent:
            return None
        length = self.rollout_fragment_length if self.replay_sequence_length is None else self.replay_sequence_length
        return SequenceShape(
            length, self.burn_in, self.burn_in if self.sequence_overlap is None else self.sequence_overlap
        )

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See the base class: recurrent networks get fragments that hold sequences, and minibatches of as many."""
        made = super().derived_sizes(fixed)
        shape = self.sequence_shape
        if shape is None:
            return made
        length = made.get(LENGTH, self.rollout_fragment_length)
        if LENGTH not in fixed:
            if self.replay_sequence_length is None:
                length = max(length, _USUAL_SEQUENCE)
                shape = shape._replace(length=length)
            elif shape.length > length:
                length = 2 * shape.length - shape.overlap  # of two sequences
        sizes = {LENGTH: length}
        if BATCH not in fixed and self.train_batch_size < _LEAST_SEQUENCES * shape.trained_steps:
            sizes[BATCH] = _USUAL_SEQUENCES * shape.trained_steps
        return made | {name: size for name, size in sizes.items() if size != getattr(self, name)}

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        self._check_sequences()
        self._check_network()
        Schedule(self.epsilon_schedule, key="epsilon_schedule")
        if not all(0 <= value <= 1 for _, value in self.epsilon_schedule):
            raise ConfigError(
                "epsilon_schedule must have probabilities.", key="epsilon_schedule", value=self.epsilon_schedule
            )
        if self.per_worker_epsilon and self.is_alone:
            raise ConfigError(
                "per_worker_epsilon is for workers: who samples in the learner's process never acts at random by it.",
                key="per_worker_epsilon", value=True,
                hint="Set num_workers, or bind for workers from elsewhere; or turn it off for epsilon_schedule.",
            )  # fmt: skip
        self.refuse_unless(
            not self.per_worker_epsilon, ("epsilon_schedule",), "workers that have one share of random actions",
            hint="Leave it out, or set per_worker_epsilon: false.",
        )  # fmt: skip
        if self.worker_priorities and not self.prioritized_replay:
            raise ConfigError(
                "worker_priorities has workers find by what rows are drawn, and without prioritized_replay all are "
                "drawn alike.",
                key="worker_priorities", value=True, hint="Set prioritized_replay, or leave worker_priorities out.",
            )  # fmt: skip
        if self.worker_priorities and (self.sequence_shape is not None or self.value_rescaling):
            other = "value_rescaling" if self.value_rescaling else "a recurrent network"
            raise ConfigError(
                f"worker_priorities are errors of single rows in units of returns, and {other} trains on others.",
                key="worker_priorities", value=True,
                hint="Set worker_priorities: false; rows are first drawn by the largest error so far then.",
            )  # fmt: skip
        if self.num_atoms > 1 and self.v_min >= self.v_max:
            raise ConfigError(
                f"v_min is {self.v_min:g}, which is not below v_max, {self.v_max:g}.", key="v_min", value=self.v_min,
                hint="Returns that are to be told apart lie between them.",
            )  # fmt: skip
        if self.num_atoms > 1 and self.value_rescaling:
            raise ConfigError(
                "value_rescaling is for expected returns; atoms have returns of their own.", key="value_rescaling",
                value=True, hint="Leave it out, or set num_atoms: 1.",
            )  # fmt: skip

    def _check_network(self) -> None:
        """Refuse settings of networks, or of their loss, that these don't have.

        Raises: ConfigError naming the key that should change.
        """
        has_atoms = self.num_atoms > 1
        hint = "Set num_atoms: 51, say, or leave it out."
        self.refuse_unless(has_atoms, ("v_min", "v_max"), "distributions of returns", hint=hint)
        hint = "Leave it out, or set num_atoms: 1."
        self.refuse_unless(not has_atoms, ("huber_delta",), "expected returns; atoms have another loss", hint=hint)
        self.refuse_unless(self.dueling, ("dueling_hiddens",), "dueling", hint="Set dueling, or leave it out.")

    def _check_sequences(self) -> None:
        """Refuse sequences that there can't be.

        Raises: ConfigError naming the key that should change.
        """
        shape = self.sequence_shape
        names = ("replay_sequence_length", "burn_in", "sequence_overlap", "sequence_priority_eta")
        self.refuse_unless(
            shape is not None, names, "recurrent networks, which are trained on sequences",
            hint="Set model.use_lstm or model.use_gru, or leave it out.",
        )  # fmt: skip
        if shape is None:
            return
        if self.replay_sequence_length is None and shape.length < _LEAST_SEQUENCE:
            raise ConfigError(
                f"a recurrent network learns next to nothing from sequences of {shape.length} steps, a whole fragment.",
                key="rollout_fragment_length", value=self.rollout_fragment_length,
                hint="Set rollout_fragment_length: 40, replay_sequence_length: 24, burn_in: 8 and train_batch_size: "
                "256, say, or replay_sequence_length if you mean it.",
            )  # fmt: skip
        self.refuse_unless(
            self.prioritized_replay, ("sequence_priority_eta",), "prioritized_replay",
            hint="Set prioritized_replay, or leave it out.",
        )  # fmt: skip
        if not self.is_truncating:
            raise ConfigError(
                "a recurrent dqn needs batch_mode truncate_episodes: of whole episodes there are no recurrent states "
                "where sequences begin.", key="batch_mode", value=self.batch_mode,
                hint="Leave batch_mode out, and set rollout_fragment_length.",
            )  # fmt: skip
        if shape.length > self.rollout_fragment_length:
            raise ConfigError(
                f"sequences of {shape.length} steps don't fit into fragments of {self.rollout_fragment_length}.",
                key="replay_sequence_length", value=shape.length, hint="Set a larger rollout_fragment_length.",
            )  # fmt: skip
        if shape.burn_in >= shape.length:
            raise ConfigError(
                f"burn_in is {shape.burn_in}, and a sequence has {shape.length} steps: none would be trained on.",
                key="burn_in", value=shape.burn_in,
                hint="Set a smaller one, or a larger replay_sequence_length and rollout_fragment_length.",
            )  # fmt: skip
        if not shape.burn_in <= shape.overlap < shape.length:
            raise ConfigError(
                f"sequence_overlap is {shape.overlap}; it is at least burn_in, {shape.burn_in}, so that every step is "
                f"trained on, and less than the {shape.length} steps of a sequence.",
                key="sequence_overlap", value=shape.overlap,
                hint=f"Leave it out for {shape.burn_in}, or take {shape.length // 2}.",
            )  # fmt: skip
        if self.n_step > shape.trained_steps:
            raise ConfigError(
                f"n_step is {self.n_step}, and a sequence trains on {shape.trained_steps} steps: none would have so "
                "many behind it.",
                key="n_step", value=self.n_step, hint="Set longer sequences.",
            )  # fmt: skip
        if self.train_batch_size < shape.trained_steps:
            raise ConfigError(
                f"train_batch_size is {self.train_batch_size}, and one sequence trains on {shape.trained_steps} steps.",
                key="train_batch_size", value=self.train_batch_size, hint=f"Set {32 * shape.trained_steps}, say.",
            )  # fmt: skip
