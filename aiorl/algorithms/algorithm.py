"""Algorithm: the leases it wants, the train batches it wants, and one update.

Everything outside `aiorl.algorithms` speaks to this interface and knows no algorithm by name. The class methods
take only the config, so that leases and sampling can be planned before TensorFlow is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from numpy.typing import NDArray

from aiorl.config.schema import CommonConfig
from aiorl.data.sample_plan import SamplePlan

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["Algorithm", "AlgorithmState", "Batch", "LeasePlan", "SamplePlan", "UpdateResult"]

Array = NDArray[Any]
Batch = dict[str, Array]
"""A train batch: what `make_batch` returns and `update` takes."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Limits on how much may be sampled, and at which policy version.

    Attributes:
        mode: on_policy deals out exactly one train batch of each version; streaming leases as much as can be trained on
            within ``max_policy_lag``, see `aiorl.protocol.pacing`.
        fragments_per_batch: fragments in one train batch.
        outstanding_per_worker: streaming: fragments a worker may owe at a time, within the budget of the whole run.
        max_policy_lag: a fragment more versions older than this is discarded, not trained on; None = no bound.
    """

    mode: Literal["on_policy", "streaming"]
    fragments_per_batch: int
    outstanding_per_worker: int = 1
    max_policy_lag: int | None = None


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


class Algorithm(ABC):
    """One policy's learning.

    Built in the learner once the spaces are known. All methods but the class methods are called from one thread,
    that of the updates; `warm_up` first.
    """

    config_class: ClassVar[type[CommonConfig]]

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
    def trains_on_sequences(cls, config: CommonConfig) -> bool:
        """Whether rows must come as sequences of `config.sequence_length()`; else each stands on its own."""
        return bool(cls.sample_plan(config).extras)

    @abstractmethod
    def __init__(self, config: CommonConfig, model: ActorCritic, *, sizes_vary: bool = False) -> None:
        """Take the model as it is; the update is compiled by `warm_up` or at the first batch.

        Args:
            config: the run's, or the policy's where it has settings of its own.
            model: to be trained.
            sizes_vary: fragments come from general sampling: they hold any number of rows [B, 1, ...], or of
                sequences [L, S, ...] of `config.sequence_length()` steps.
        """

    @abstractmethod
    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """One train batch out of fragments, in the order given.

        Args:
            fragments: each holds the columns [T, N, ...] and extras of the sample plan.
        Returns: arrays of fixed shapes, in buffers that the second call after this one writes over again.
        Raises: BatchError if a column is missing or of a wrong shape or dtype.
        """

    @abstractmethod
    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Refuse a fragment that `make_batch` could not use, before it is queued. May be called in any thread.

        Raises: BatchError naming the column at fault.
        """

    @abstractmethod
    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch.

        Args:
            batch: from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules go by it.
        Raises: TrainingDiverged after too many skipped updates in a row.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the update, so that the first batch needn't wait; changes neither weights nor random states."""

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
