"""Interface of an algorithm: which leases it wants, which data it takes and how it updates the
weights.

Everything outside `aiorl.learning.algorithms` uses this interface and knows no algorithm by name.
The class methods take only the config, so that leases and sampling can be planned before TensorFlow
is loaded.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import make_distribution
from aiorl.acting.exploration import Schedule
from aiorl.acting.filters import NoFilter, ObservationFilter
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import Piece
from aiorl.data.fragment import SamplePlan
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import CheckpointError, ConfigError, InternalError, TrainingDiverged
from aiorl.learning.algorithms.compiled_update import CompiledUpdate, TargetNetwork, keras_optimizer
from aiorl.learning.lazy import tf

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.replay.ring import Snapshot

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Batch = dict[str, Array]
"""Data that `make_batch` prepares for `update`: a train batch, arrays by name; or counts of the
rows stored."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Limits on how much is sampled and with which policy versions.

    Attributes:
        mode: "on_policy" hands out exactly one train batch for each version; "streaming" leases as
            much as can be trained on within ``max_policy_lag`` (see `aiorl.net.protocol.pacing`).
        fragments_per_batch: fragments in one train batch.
        env_steps_per_batch: on_policy: env steps after which a train batch is full. Used for
            fragments of whole episodes, which can be longer than requested. None if all fragments
            have the same length.
        outstanding_per_worker: streaming: maximum number of fragments that a worker owes at a time,
            within the budget of the whole run.
        max_policy_lag: maximum age of a fragment in policy versions; older ones are discarded. None
            = no limit.
        max_under_way: streaming: maximum number of fragments that are leased, queued or held by the
            learner, all together. None = limited by `max_policy_lag` only.
        publish_every: updates after which the weights are published as a new version.
        publish_interval_s: seconds after which an update publishes the weights even if
            `publish_every` is not reached. Ignored when one process samples and trains in turn.
    """

    mode: Literal["on_policy", "streaming"]
    fragments_per_batch: int
    outstanding_per_worker: int = 1
    max_policy_lag: int | None = None
    max_under_way: int | None = None
    publish_every: int = 1
    publish_interval_s: float = math.inf
    env_steps_per_batch: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of one update.

    Attributes:
        metrics: numbers to report, by name.
        skipped: True if the loss or a gradient was not finite; the weights and the optimiser are
            then unchanged.
        bad_column: first column of a skipped batch with a non-finite number; "" if the batch is
            finite and the computation was not.
    """

    metrics: dict[str, float]
    skipped: bool = False
    bad_column: str = ""


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """State that an algorithm needs to continue as if it had never stopped.

    Attributes:
        tensors: weights and optimiser variables, name -> array.
        values: counters, random states and adaptive coefficients, JSON-serialisable.
    """

    tensors: dict[str, Array]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations that a network receives.

    Attributes:
        shape: shape of one observation's array.
        dtype: "float32" or "uint8".
        layout: layout of an observation in the array.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: ObsLayout


def want_stored_experience(config: CommonConfig) -> None:
    """Raise ConfigError if the config names no stored experience."""
    if config.input == "sampler":
        raise ConfigError(
            f"{config.algo} learns from stored experience, but input names none.",
            key="input",
            value=config.input,
            hint='Name files, such as --input "data/*.json". A run with --output DIR writes them.',
        )


class Algorithm(ABC):
    """Learner of one policy.

    It is created in the learner process once the spaces are known. One thread, which runs the
    updates, calls `warm_up` and then all other methods, class methods excepted.

    Attributes:
        config_class: class of the algorithm's config.
        merged_filter: merged filter of the policy's observations, for observations that arrive
            unfiltered. It is set once the filter exists; another thread merges into it.
    """

    config_class: ClassVar[type[CommonConfig]]
    merged_filter: ObservationFilter = NoFilter()

    @classmethod
    @abstractmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Return the leases that the algorithm wants with this `config`.

        Raises:
            ConfigError: whole fragments can't make up a train batch.
        """

    @classmethod
    @abstractmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return the columns that workers must compute and send with this `config`."""

    @classmethod
    def return_discount(cls, config: CommonConfig) -> float | None:
        """Return the discount of the returns by which this `config` scales rewards; None =
        unscaled.

        Rewards are divided by the running deviation of these returns.
        """
        return None

    @classmethod
    def gradients_from_workers(cls, config: CommonConfig) -> bool:
        """Return True if, with this `config`, workers send the gradient of a fragment instead of
        its rows.
        """
        return False

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Return settings of the acting policy in addition to those in `config`, such as
        "exploration".
        """
        return {}

    @classmethod
    def all_acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Return `acting_settings`, in which the exploration in `config`, if any, replaces the
        algorithm's own.
        """
        named = {} if config.exploration is None else {"exploration": config.exploration}
        return {**cls.acting_settings(config), **named}

    @classmethod
    def build_model(
        cls,
        config: CommonConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the network that is trained; its `forward_step` acts. Loads TensorFlow.

        Args:
            config: config of the policy.
            observations: observations that the network receives.
            action_space: space of the actions.
            seed: seed of the initial weights; None = random.

        Raises:
            ConfigError: the settings can't make a network for these observations.
        """
        from aiorl.learning.models.catalog import build_model

        distribution = make_distribution(action_space, scale=config.normalize_actions)
        settings = config.model.model_dump()
        shape = observations.shape
        dtype = observations.dtype
        layout = observations.layout
        return build_model(
            shape,
            dtype,
            distribution,
            settings,
            seed=seed,
            layout=layout,
            noise=config.state_dependent_noise,
        )

    @classmethod
    def trains_on_sequences(cls, config: CommonConfig) -> bool:
        """Return True if rows must come as sequences of `config.sequence_length()` steps, not one
        by one.
        """
        return bool(cls.sample_plan(config).of_sequences)

    @classmethod
    def check_room(cls, policies: Sequence[tuple[CommonConfig, ActorCritic]]) -> None:
        """Check that this machine has room for all policies before allocating anything, and log how
        much they take.

        Args:
            policies: config and model of every policy that learns in the run, with any algorithm.

        Raises:
            ConfigError: there is no room for all of them together.
        """
        return

    @abstractmethod
    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Take over the model without changing it; `warm_up` or the first batch compiles the
        update.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train.
        """

    @abstractmethod
    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Take fragments in the given order: lay them out as one train batch, or add them to the
        replay.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Batch for `update`, with arrays of fixed shapes. The second call after this one
            overwrites its buffers.

        Raises:
            BatchError: a column is missing or has a wrong shape or dtype.
        """

    @abstractmethod
    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Check that `make_batch` can use a `fragment`, before it is queued. Can be called in any
        thread.

        Args:
            fragment: columns ``[T, N, ...]`` by name.

        Raises:
            BatchError: a column is wrong; the error names it.
        """

    @abstractmethod
    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch, or make all the optimiser steps that are due for the rows
        stored.

        Args:
            batch: batch of any shape from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules depend on it.

        Returns:
            Metrics of the update, and whether it was skipped.

        Raises:
            TrainingDiverged: too many updates in a row were skipped.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the update so that the first batch doesn't wait.

        Changes neither weights nor random states.
        """

    def hurry(self) -> None:
        """Ask a running update to end early, in a state from which training can continue.

        Can be called in any thread. No update follows.
        """
        return

    @abstractmethod
    def get_weights(self) -> dict[str, Array]:
        """Return copies of the weights, of any shape, by the names that the acting graph uses;
        always finite.
        """

    def get_state(self) -> AlgorithmState:
        """Return copies of everything that `set_state` needs."""
        return self.hold_state()()

    @abstractmethod
    def hold_state(self) -> Callable[[], AlgorithmState]:
        """Return a function that returns the current state, even after later updates. It can be
        called in any thread.

        Called after every update, so that the state before an update stays available while that
        update runs. If copying is slow, leave it to the returned function.
        """

    @abstractmethod
    def set_state(self, state: AlgorithmState) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: it doesn't fit the model or the algorithm.
        """

    def weights_replaced(self) -> None:
        """Adapt to weights that `set_state` took from elsewhere, for example in a target
        network.
        """
        return

    @property
    def stores_experience(self) -> bool:
        """True if `hold_experience` returns stored experience."""
        return False

    def hold_experience(self) -> Snapshot | None:
        """Return the stored experience as it is now; None if there is none.

        Called between two updates when a checkpoint will be written. It is too large to be held
        after each update.
        """
        return None

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """Continue with the stored experience that `hold_experience` returned.

        Args:
            values: values of the snapshot, possibly read back from JSON.
            pieces: pieces of the snapshot, in any order.

        Raises:
            CheckpointError: it doesn't fit.
        """
        raise CheckpointError("experience", f"{type(self).__name__} stores no experience")


ConfigT = TypeVar("ConfigT", bound=CommonConfig)

MAX_SKIPS_IN_A_ROW = 10
"""Maximum number of consecutive updates that may be skipped for non-finite numbers; then training
ends."""

_SEED_KEY = (
    0x616C676F  # separates the algorithm's random numbers from those of workers with the same seed
)


class CompiledBase(Algorithm, Generic[ConfigT]):
    """Algorithm with a model and a compiled update, which changes the model or leaves it unchanged.

    Subclasses create the update.

    Attributes:
        config: config of the run, or of the policy if it has its own settings.
        model: network to train.
        rng: generator of the algorithm's random numbers.
        updates: number of updates so far that were not skipped.
        compiled: compiled update.
        targets: target networks, by the prefix of the names under which their weights are saved.
            Set before `compiled`.
    """

    compiled: CompiledUpdate
    targets: Mapping[str, TargetNetwork] = MappingProxyType({})

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Take over the model; nothing is compiled yet.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train.
        """
        self.config = self.own_config(config)
        self.model = model
        self.rng = np.random.default_rng(
            np.random.SeedSequence(config.seed, spawn_key=(_SEED_KEY,))
        )
        self.updates = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._lr_is_over = False
        self._held: list[tuple[str, Any, Any]] = []  # name, handle and dtype of each variable

    @classmethod
    def own_config(cls, config: CommonConfig) -> ConfigT:
        """Return a `config`, typed as this algorithm's.

        Raises:
            InternalError: it belongs to another algorithm.
        """
        if not isinstance(config, cls.config_class):
            raise InternalError(f"{cls.__name__} was given a {type(config).__name__}")
        return cast(ConfigT, config)

    def adam(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Return Adam with this `epsilon`, and the learning rate and the optimiser options of the
        config.
        """
        return keras_optimizer(
            "Adam", self.config.optimizer, learning_rate=self.config.lr, epsilon=epsilon
        )

    def adam_of_multiplier(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Return Adam with this `epsilon` for a single number that weighs losses.

        It ignores the user's options, which are for networks.
        """
        return keras_optimizer("Adam", {}, learning_rate=self.config.lr, epsilon=epsilon)

    def _note_held(self) -> None:
        """Count an update that was not skipped."""
        self.updates += 1
        self._skipped_in_a_row = 0

    def _warn_of_last_lr(self, lr: Schedule, env_steps: int) -> None:
        """Warn, once, that the learning rate has reached 0 for good."""
        if self._lr_is_over or env_steps < lr.end or lr.value(env_steps) > 0:
            return
        self._lr_is_over = True
        _log.warning(
            "the learning rate is now 0 and the policy won't change any more: lr_schedule ended at"
            " %s env steps. To keep learning, let lr_schedule end later or at a value above 0. To"
            " end the run there, set stop_timesteps: %d",
            f"{lr.end:,.0f}",
            lr.end,
        )

    def _note_skipped(self, bad_column: str) -> None:
        """Count a skipped update: a number in `bad_column`, or if that is "" in the computation,
        was not finite.

        Raises:
            TrainingDiverged: `MAX_SKIPS_IN_A_ROW` updates in a row were skipped.
        """
        self._skipped += 1
        self._skipped_in_a_row += 1
        where = (
            f"column {bad_column!r} of the batch"
            if bad_column
            else "the loss or its gradient; the batch itself is finite"
        )
        _log.warning(
            "update skipped: a number in %s is not finite; the weights are unchanged", where
        )
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were skipped because numbers were not"
                f" finite, the last time in {where}. The weights are those of the last good update."
                " Check the environment's rewards and observations, or set a lower lr or a smaller"
                " grad_clip."
            )

    def extra_state(self) -> dict[str, Any]:
        """Return further state to save, JSON-serialisable."""
        return {}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Restore the values that `extra_state` returned."""

    def get_weights(self) -> dict[str, Array]:
        """Return copies of the weights, of any shape, by the names that the acting graph uses."""
        return self.model.get_weights()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Algorithm.hold_state`.

        A tensor read from a variable is immutable; TensorFlow copies it only when the variable
        changes.
        """
        if not self._held:
            variables = {
                f"weights/{name}": variable for name, variable in self.model.variables.items()
            }
            variables |= self.other_variables()
            self._held = [
                (name, item.handle, tf.as_dtype(item.dtype)) for name, item in variables.items()
            ]
        read = tf.raw_ops.ReadVariableOp  # takes a fraction of the time of a variable's own method
        tensors = {name: read(resource=handle, dtype=dtype) for name, handle, dtype in self._held}
        values = {
            "rng": self.rng.bit_generator.state,
            "updates": self.updates,
            "updates_skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            **self.extra_state(),
        }
        return lambda: AlgorithmState(
            {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, values
        )

    def set_state(self, state: AlgorithmState) -> None:
        """Continue from `state`. All of it is checked before any of it is used.

        Raises:
            CheckpointError: a tensor is missing, superfluous or has another shape, or a value is
                missing.
        """
        variables = self.other_variables()
        wanted = {f"weights/{name}": _kind(weight) for name, weight in self.get_weights().items()}
        wanted |= {name: _kind(variable.numpy()) for name, variable in variables.items()}
        given = {name: _kind(tensor) for name, tensor in state.tensors.items()}
        if wanted != given:
            differing = sorted(
                name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)
            )
            first = differing[0]
            raise CheckpointError(
                "tensors",
                f"they don't fit this model: {first} is {given.get(first, 'missing')} in the"
                f" checkpoint and {wanted.get(first, 'unknown')} in the model ({len(differing)}"
                " tensors differ)",
            )
        try:
            self.set_extra_state(state.values)
            self.rng.bit_generator.state = state.values["rng"]
            self.updates = int(state.values["updates"])
            self._skipped = int(state.values["updates_skipped"])
            self._skipped_in_a_row = int(state.values["skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "values", f"a counter or random state is missing or wrong: {error!r}"
            ) from error
        self.model.set_weights(
            {name: state.tensors[f"weights/{name}"] for name in self.model.variables}
        )
        for name, variable in variables.items():
            variable.assign(state.tensors[name])

    def weights_replaced(self) -> None:
        """Copy the weights to the model's target network.

        Targets of other networks catch up during training.
        """
        for target in self.targets.values():
            if target.network is self.model:
                target.take_over()

    def other_variables(self) -> dict[str, Any]:
        """Return the variables to save along with the weights, by names that never change."""
        optimizers = self.compiled.optimizer_variables
        found = {f"optimizer/{index:03d}": variable for index, variable in enumerate(optimizers)}
        for prefix, target in self.targets.items():
            found |= {f"{prefix}/{name}": variable for name, variable in target.variables.items()}
        return found


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
