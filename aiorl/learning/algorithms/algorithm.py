"""Algorithm: the leases it wants, what it takes in, and one update.

Everything outside `aiorl.learning.algorithms` speaks to this interface and knows no algorithm by name. The class
methods take only the config, so that leases and sampling can be planned before TensorFlow is loaded.
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
"""What `make_batch` made of fragments for `update`: a train batch, or what is to be said of what was taken in."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Limits on how much may be sampled, and at which policy version.

    Attributes:
        mode: on_policy deals out exactly one train batch of each version; streaming leases as much as can be trained on
            within ``max_policy_lag``, see `aiorl.net.protocol.pacing`.
        fragments_per_batch: fragments in one train batch.
        env_steps_per_batch: on_policy: fragments have whole episodes and may be longer than asked for, so a train batch
            has no more of them than make up so many env steps; None = they are as long as each other.
        outstanding_per_worker: streaming: fragments a worker may owe at a time, within the budget of the whole run.
        max_policy_lag: a fragment more versions older than this is discarded, not trained on; None = no bound.
        max_under_way: streaming: fragments leased, queued and in the learner's hands at most, all together; None = no
            other bound than that of `max_policy_lag`.
        publish_every: weights go out, as a new version, after so many updates.
        publish_interval_s: or after the first update so long after the last ones went out, whichever comes first; not
            where all is done by turns in one process.
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
        metrics: name -> number, for results.
        skipped: the loss or a gradient was not finite, so weights and optimiser are what they were.
        bad_column: when skipped, the first column of the batch that holds a number that is not finite; "" if all
            are finite and the trouble arose inside.
    """

    metrics: dict[str, float]
    skipped: bool = False
    bad_column: str = ""


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """All that an algorithm must get back to go on as if nothing had happened.

    Attributes:
        tensors: weights and optimiser, name -> array.
        values: counters, random states and adaptive coefficients, as JSON can hold them.
    """

    tensors: dict[str, Array]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observations:
    """What a network gets to see.

    Attributes:
        shape: of one observation's array.
        dtype: "float32" or "uint8".
        layout: how an observation lies in it.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: ObsLayout


def want_stored_experience(config: CommonConfig) -> None:
    """Raise ConfigError if a config names no stored experience."""
    if config.input == "sampler":
        raise ConfigError(
            f"{config.algo} learns from stored experience, and none is named.", key="input", value=config.input,
            hint='Give files, such as --input "data/*.json"; --output DIR of another run writes some.',
        )  # fmt: skip


class Algorithm(ABC):
    """One policy's learning.

    Built in the learner once the spaces are known. All methods but the class methods are called from one thread,
    that of the updates; `warm_up` first.

    Attributes:
        merged_filter: the merged filter of the policy's observations, for those that come raw; set once it is
            made, and merged into by another thread.
    """

    config_class: ClassVar[type[CommonConfig]]
    merged_filter: ObservationFilter = NoFilter()

    @classmethod
    @abstractmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """The leases it wants.

        Raises: ConfigError if whole fragments can't make up a train batch.
        """

    @classmethod
    @abstractmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return what workers have to compute and send."""

    @classmethod
    def return_discount(cls, config: CommonConfig) -> float | None:
        """Discount of the returns whose running deviation rewards are divided by; None leaves them as they are."""
        return None

    @classmethod
    def gradients_from_workers(cls, config: CommonConfig) -> bool:
        """Tell whether workers send a fragment's gradient in place of its rows."""
        return False

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Settings of the policy that acts, beside those of the config, such as "exploration" (see `GraphPolicy`)."""
        return {}

    @classmethod
    def all_acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """`acting_settings`, with the exploration that the config names in place of the algorithm's own."""
        named = {} if config.exploration is None else {"exploration": config.exploration}
        return {**cls.acting_settings(config), **named}

    @classmethod
    def build_model(
        cls, config: CommonConfig, observations: Observations, action_space: spaces.Space[Any], seed: int | None
    ) -> ActorCritic:
        """Build the network: it learns, and what `forward_step` gives acts. Loads TensorFlow.

        Args:
            config: the policy's.
            observations: what it gets to see.
            action_space: of the actions.
            seed: of its initial weights; None = a different one each time.
        Raises: ConfigError for settings that make no network for these observations.
        """
        from aiorl.learning.models.catalog import build_model

        distribution = make_distribution(action_space)
        settings = config.model.model_dump()
        shape, dtype, layout = observations.shape, observations.dtype, observations.layout
        return build_model(
            shape, dtype, distribution, settings, seed=seed, layout=layout, noise=config.state_dependent_noise
        )

    @classmethod
    def trains_on_sequences(cls, config: CommonConfig) -> bool:
        """Whether rows must come as sequences of `config.sequence_length()`; else each stands on its own."""
        return bool(cls.sample_plan(config).of_sequences)

    @classmethod
    def check_room(cls, policies: Sequence[tuple[CommonConfig, ActorCritic]]) -> None:
        """Refuse what this machine has no room for, before any of it is taken; what will be is logged.

        Args:
            policies: config and model of each that learns in the run, by whichever algorithm.
        Raises: ConfigError if there is no room for all of them together.
        """
        return

    @abstractmethod
    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Take the model as it is; the update is compiled by `warm_up` or at the first batch.

        Args:
            config: the run's, or the policy's where it has settings of its own.
            model: to be trained.
        """

    @abstractmethod
    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Take fragments in, in the order given: as one train batch, or into what is stored.

        Args:
            fragments: each holds the columns of the sample plan.
        Returns: for `update`; arrays of fixed shapes, in buffers that the second call after this one writes over again.
        Raises: BatchError if a column is missing or of a wrong shape or dtype.
        """

    @abstractmethod
    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Refuse a fragment that `make_batch` could not use, before it is queued. May be called in any thread.

        Raises: BatchError naming the column at fault.
        """

    @abstractmethod
    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch, or do as many steps as are due by what was taken in.

        Args:
            batch: from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules go by it.
        Raises: TrainingDiverged after too many skipped updates in a row.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the update, so that the first batch needn't wait; changes neither weights nor random states."""

    def hurry(self) -> None:
        """There is no time left: an update that goes on may end at the next state that one can go on from.

        Whichever thread calls; no update follows.
        """
        return

    @abstractmethod
    def get_weights(self) -> dict[str, Array]:
        """Copies of the weights by the names the acting graph knows; always finite."""

    @abstractmethod
    def get_state(self) -> AlgorithmState:
        """Copies of everything that `set_state` needs."""

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """A function that gives the state as it is now, whatever follows; it may be called in any thread.

        Called after every update, so that the state before an update is known while that one runs. Where copies take
        long, they should be left to the function.
        """
        state = self.get_state()
        return lambda: state

    @abstractmethod
    def set_state(self, state: AlgorithmState) -> None:
        """Go on from `state`.

        Raises: CheckpointError if it doesn't fit the model or the algorithm.
        """

    def weights_replaced(self) -> None:
        """Called when `set_state` has brought weights of another origin, for what has to follow them at once."""
        return

    @property
    def stores_experience(self) -> bool:
        """Whether `hold_experience` gives any."""
        return False

    def hold_experience(self) -> Snapshot | None:
        """Stored experience as it is now, which is too much to be held after each update; None if there is none.

        Called between two updates, when a checkpoint is to be written.
        """
        return None

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """Go on with the stored experience that `hold_experience` gave.

        Raises: CheckpointError if it doesn't fit.
        """
        raise CheckpointError("experience", f"{type(self).__name__} stores none")


ConfigT = TypeVar("ConfigT", bound=CommonConfig)

MAX_SKIPS_IN_A_ROW = 10
"""So many updates in a row may be skipped for numbers that are not finite before training ends."""

_SEED_KEY = 0x616C676F  # keeps the algorithm's random numbers apart from the workers' of the same seed


class CompiledBase(Algorithm, Generic[ConfigT]):
    """Has a model, which a compiled update changes or leaves as it is. Subclasses make the update.

    Attributes:
        model: the network.
        compiled: the update.
        targets: name below which its weights are saved -> target network; there before the update is.
    """

    compiled: CompiledUpdate
    targets: Mapping[str, TargetNetwork] = MappingProxyType({})

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Take the model; nothing is compiled yet."""
        self.config = self.own_config(config)
        self.model = model
        self.rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_SEED_KEY,)))
        self.updates = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._lr_is_over = False
        self._read: Callable[[], dict[str, Any]] | None = None  # Any: tensors

    @classmethod
    def own_config(cls, config: CommonConfig) -> ConfigT:
        """Return a config as that of this algorithm.

        Raises: InternalError if it is not.
        """
        if not isinstance(config, cls.config_class):
            raise InternalError(f"{cls.__name__} was given a {type(config).__name__}")
        return cast(ConfigT, config)

    def adam(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Make an Adam with the learning rate and the options of the config."""
        return keras_optimizer("Adam", self.config.optimizer, learning_rate=self.config.lr, epsilon=epsilon)

    def adam_of_multiplier(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Of a single number that weighs losses: what a user sets for networks, such as decay, is not for it."""
        return keras_optimizer("Adam", {}, learning_rate=self.config.lr, epsilon=epsilon)

    def _note_held(self) -> None:
        """Count an update that held."""
        self.updates += 1
        self._skipped_in_a_row = 0

    def _warn_of_last_lr(self, lr: Schedule, env_steps: int) -> None:
        """Warn, once, that the learning rate has ended at 0."""
        if self._lr_is_over or env_steps < lr.end or lr.value(env_steps) > 0:
            return
        self._lr_is_over = True
        _log.warning(
            "the learning rate is 0 from here on, so the policy will not change any more: lr_schedule ends at %s env "
            "steps. To go on learning, let lr_schedule end later or at a value above 0; to end the run there, set "
            "stop_timesteps: %d",
            f"{lr.end:,.0f}", lr.end,
        )  # fmt: skip

    def _note_skipped(self, bad_column: str) -> None:
        """Count an update that was skipped, for a number in a column or, if there is none, in what was computed.

        Raises: TrainingDiverged after `MAX_SKIPS_IN_A_ROW` in a row.
        """
        self._skipped += 1
        self._skipped_in_a_row += 1
        where = (
            f"column {bad_column!r} of the batch"
            if bad_column
            else "the loss or its gradient; the batch itself is finite"
        )
        _log.warning("update skipped: a number in %s is not finite; weights stay as they were", where)
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were skipped because numbers were not finite, the last "
                f"in {where}. The weights are those of the last good update. Check the environment's rewards and "
                "observations, or set a lower lr or a smaller grad_clip."
            )

    def extra_state(self) -> dict[str, Any]:
        """Return further state to save, in a form that JSON can hold."""
        return {}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave."""

    def get_weights(self) -> dict[str, Array]:
        """Copies of the weights by the names the acting graph knows."""
        return self.model.get_weights()

    def get_state(self) -> AlgorithmState:
        """Weights, optimiser, random numbers to come, counters."""
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Algorithm.hold_state`.

        What is read of a variable is immutable; TensorFlow copies it only once the variable changes. One function reads
        all of them, since each alone takes as long as some dozen together.
        """
        if self._read is None:
            variables = {f"weights/{name}": variable for name, variable in self.model.variables.items()}
            variables |= self.other_variables()
            self._read = tf.function(
                lambda: {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}, autograph=False
            )
        tensors = self._read()
        values = {
            "rng": self.rng.bit_generator.state,
            "updates": self.updates,
            "updates_skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            **self.extra_state(),
        }
        return lambda: AlgorithmState({name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, values)

    def set_state(self, state: AlgorithmState) -> None:
        """Go on from `state`; all of it is checked before any of it is taken.

        Raises: CheckpointError if a tensor is missing, left over or of another shape, or a value is missing.
        """
        variables = self.other_variables()
        wanted = {f"weights/{name}": _kind(weight) for name, weight in self.get_weights().items()}
        wanted |= {name: _kind(variable.numpy()) for name, variable in variables.items()}
        given = {name: _kind(tensor) for name, tensor in state.tensors.items()}
        if wanted != given:
            differing = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
            first = differing[0]
            raise CheckpointError(
                "tensors",
                f"they don't fit this model: {first} is {given.get(first, 'missing')} there and "
                f"{wanted.get(first, 'unknown')} here ({len(differing)} differ)",
            )
        try:
            self.set_extra_state(state.values)
            self.rng.bit_generator.state = state.values["rng"]
            self.updates = int(state.values["updates"])
            self._skipped = int(state.values["updates_skipped"])
            self._skipped_in_a_row = int(state.values["skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("values", f"a counter or random state is missing or wrong: {error!r}") from error
        weights = {name: state.tensors[f"weights/{name}"] for name in self.get_weights()}
        self.model.set_weights(weights)
        for name, variable in variables.items():
            variable.assign(state.tensors[name])

    def weights_replaced(self) -> None:
        """The model's target is the same then; those of other networks learn of it as they go on."""
        for target in self.targets.values():
            if target.network is self.model:
                target.take_over()

    def other_variables(self) -> dict[str, Any]:
        """What is saved beside the weights, by names that don't change from run to run: optimisers, target networks."""
        optimizers = self.compiled.optimizer_variables
        found = {f"optimizer/{index:03d}": variable for index, variable in enumerate(optimizers)}
        for prefix, target in self.targets.items():
            found |= {f"{prefix}/{name}": variable for name, variable in target.variables.items()}
        return found


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
