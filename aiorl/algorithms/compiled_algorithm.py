"""Base class of algorithms whose update is one `CompiledUpdate`: guard, counters, random order, state."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.algorithms.algorithm import Algorithm, AlgorithmState, Array, Batch, UpdateResult
from aiorl.algorithms.batch_buffers import PACKED, BatchBuffers, ColumnSpec, rounded_up
from aiorl.algorithms.compiled_update import CompiledUpdate
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import CheckpointError, TrainingDiverged

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["MAX_SKIPS_IN_A_ROW", "CompiledAlgorithm", "model_columns", "previous_columns", "state_columns"]

_log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 10
"""So many updates in a row may be skipped for numbers that are not finite before training ends."""

_ROOMY = 4
"""Batches are laid out in room for so many times their size at most, rather than compile for another size."""

_SEED_KEY = 0x616C676F  # keeps the algorithm's random numbers apart from the workers' of the same seed


class CompiledAlgorithm(Algorithm):
    """Runs a compiled update over minibatches of a train batch in a random order.

    Subclasses set `buffers` and `compiled`, lay out batches, and say which coefficients hold.
    """

    buffers: BatchBuffers
    compiled: CompiledUpdate

    def __init__(self, config: CommonConfig, model: ActorCritic, *, sizes_vary: bool = False) -> None:
        """Take config and model; subclasses then build `buffers` and `compiled`."""
        self._fragment_shape: tuple[int | None, int | None] = (None, 1)
        if sizes_vary and self.trains_on_sequences(config):
            self._fragment_shape = (config.sequence_length(), None)
        elif not sizes_vary and config.batch_mode == "truncate_episodes":
            self._fragment_shape = (config.rollout_fragment_length, config.num_envs_per_worker)
        self.model = model
        self._capacities: set[int] = set()
        self._rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_SEED_KEY,)))
        self._updates = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._read: Callable[[], dict[str, Any]] | None = None  # Any: tensors

    @abstractmethod
    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""

    @abstractmethod
    def nominal_batch(self) -> Batch:
        """A batch of zeros of the usual shape."""

    @property
    @abstractmethod
    def minibatch_size(self) -> int:
        """Rows or sequences in one minibatch."""

    @property
    @abstractmethod
    def num_epochs(self) -> int:
        """Passes over each train batch."""

    @property
    def shuffles(self) -> bool:
        """Whether rows are visited in a random order."""
        return True

    def after_update(self, metrics: dict[str, float]) -> None:  # most have nothing to do
        """Called after each update that held, for coefficients that adapt; may add metrics."""

    def extra_state(self) -> dict[str, Any]:
        """Return further state to save, in a form that JSON can hold."""
        return {}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave."""

    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Refuse a fragment that `make_batch` could not use, before it is queued. May be called in any thread.

        Raises: BatchError naming the column at fault.
        """
        self.buffers.check(fragment, *self._fragment_shape)

    def warm_up(self) -> None:
        """Compile the update for batches of the usual shape; changes neither weights nor random states."""
        batch = self.nominal_batch()
        size = len(batch[PACKED])
        self.compiled.warm_up(batch, np.zeros(self._order_shape(size), np.int32))
        self.hold_state()

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch; skip it if a loss or gradient is not finite.

        Raises: TrainingDiverged after `MAX_SKIPS_IN_A_ROW` skipped updates in a row.
        """
        coefficients = self.coefficients(env_steps_total)
        order, num_minibatches = self._order(len(batch[PACKED]), self.buffers.num_filled(batch))
        metrics, held = self.compiled(batch, order, coefficients, max_steps=num_minibatches)
        reported = {
            "cur_lr": coefficients["lr"],
            "entropy_coeff": coefficients["entropy_coeff"],
            "num_sgd_steps": metrics["num_sgd_steps"],
        }
        if held:
            self._updates += 1
            self._skipped_in_a_row = 0
            if num_minibatches:
                self.after_update(metrics)
            return UpdateResult({**metrics, **reported, "updates_skipped": float(self._skipped)})
        self._skipped += 1
        self._skipped_in_a_row += 1
        column = self.buffers.first_not_finite(batch)
        where = f"column {column!r} of the batch" if column else "the loss or its gradient; the batch itself is finite"
        _log.warning("update skipped: a number in %s is not finite; weights stay as they were", where)
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were skipped because numbers were not finite, the last "
                f"in {where}. The weights are those of the last good update. Check the environment's rewards and "
                "observations, or set a lower lr or a smaller grad_clip."
            )
        return UpdateResult({**reported, "updates_skipped": float(self._skipped)}, skipped=True, bad_column=column)

    def get_weights(self) -> dict[str, Array]:
        """Copies of the weights by the names the acting graph knows."""
        return self.model.get_weights()

    def get_state(self) -> AlgorithmState:
        """Weights, optimiser, order of rows to come, counters."""
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Algorithm.hold_state`.

        What is read of a variable is immutable; TensorFlow copies it only once the variable changes. One function reads
        all of them, since each alone takes as long as some dozen together.
        """
        if self._read is None:
            variables = {f"weights/{name}": variable for name, variable in self.model.variables.items()}
            variables |= {f"optimizer/{name}": variable for name, variable in self._optimizer_variables().items()}
            self._read = tf.function(
                lambda: {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}, autograph=False
            )
        tensors = self._read()
        values = {
            "rng": self._rng.bit_generator.state,
            "updates": self._updates,
            "updates_skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            **self.extra_state(),
        }
        return lambda: AlgorithmState({name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, values)

    def set_state(self, state: AlgorithmState) -> None:
        """Go on from `state`; all of it is checked before any of it is taken.

        Raises: CheckpointError if a tensor is missing, left over or of another shape, or a value is missing.
        """
        variables = self._optimizer_variables()
        wanted = {f"weights/{name}": _kind(weight) for name, weight in self.get_weights().items()}
        wanted |= {f"optimizer/{name}": _kind(variable.numpy()) for name, variable in variables.items()}
        given = {name: _kind(tensor) for name, tensor in state.tensors.items()}
        if wanted != given:
            differing = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
            first = differing[0]
            raise CheckpointError(
                "tensors",
                f"they don't fit this model: {first} is {given.get(first, 'missing')} there and "
                f"{wanted.get(first, 'unknown')} here ({len(differing)} differ)",
            )
        self._set_values(state.values)
        weights = {name: state.tensors[f"weights/{name}"] for name in self.get_weights()}
        self.model.set_weights(weights)
        for name, variable in variables.items():
            variable.assign(state.tensors[f"optimizer/{name}"])

    def _set_values(self, values: Mapping[str, Any]) -> None:
        try:
            self.set_extra_state(values)
            self._rng.bit_generator.state = values["rng"]
            self._updates = int(values["updates"])
            self._skipped = int(values["updates_skipped"])
            self._skipped_in_a_row = int(values["skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("values", f"a counter or random state is missing or wrong: {error!r}") from error

    def _optimizer_variables(self) -> dict[str, Any]:
        """Keras variables of the optimiser by names that don't change from run to run."""
        return {f"{index:03d}": variable for index, variable in enumerate(self.compiled.optimizer.variables)}

    def fitted(self, count: int, usual: int) -> int:
        """Rows or sequences to make room for: as before, where that fits, so that few sizes have to be compiled.

        Args:
            count: what has to fit.
            usual: of a usual batch.
        Returns: whole minibatches.
        """
        size = self.minibatch_size
        wanted = rounded_up(-(-count // size), -(-usual // size))
        # one batch of an unusual size must not make all that follow as large
        known = [capacity for capacity in self._capacities if wanted <= capacity <= _ROOMY * wanted]
        capacity = min(known, default=wanted)
        self._capacities.add(capacity)
        return size * capacity

    def _order_shape(self, size: int) -> tuple[int, int]:
        steps, rest = divmod(size, self.minibatch_size)
        if rest:
            raise AssertionError(f"{size} rows are no whole number of minibatches of {self.minibatch_size}")
        return self.num_epochs * steps, self.minibatch_size

    def _order(self, size: int, filled: int) -> tuple[NDArray[np.int32], int]:
        """Indices of every minibatch, each epoch a new permutation of the filled rows; and how many there are.

        What is needed to fill the last minibatch comes from the empty rows behind. The array has room for as many
        minibatches as `size` rows make, whatever is filled, so that the update needs no other compilation.
        """
        order = np.zeros(self._order_shape(size), np.int32)
        used = -(-filled // self.minibatch_size) * self.minibatch_size
        rows = np.tile(np.arange(used, dtype=np.int32), (self.num_epochs, 1))
        if self.shuffles:
            rows = self._rng.permuted(rows, axis=1)
        minibatches = rows.reshape(-1, self.minibatch_size)
        order[: len(minibatches)] = minibatches
        return order, len(minibatches)


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def model_columns(model: ActorCritic) -> dict[str, ColumnSpec]:
    """The columns and extras whose shape or dtype the model decides."""
    distribution = model.distribution
    action_dtype: Literal["int32", "float32"] = "int32" if distribution.action_dtype.kind in "iu" else "float32"
    specs = [
        ColumnSpec(c.OBS, model.obs_shape, "uint8" if model.obs_dtype == "uint8" else "float32"),
        ColumnSpec(c.LAST_OBS, model.obs_shape, "uint8" if model.obs_dtype == "uint8" else "float32"),
        ColumnSpec(c.ACTIONS, distribution.action_shape, action_dtype),
        ColumnSpec(c.PREV_ACTIONS, distribution.action_shape, action_dtype),
        ColumnSpec(c.ACTION_DIST_INPUTS, (distribution.num_inputs,)),
        *(ColumnSpec(c.state_in(index), shape) for index, shape in enumerate(model.state_shapes)),
    ]
    return {spec.name: spec for spec in specs}


def previous_columns(config: CommonConfig) -> tuple[str, ...]:
    """Names of the columns that a network which looks back needs beside the others."""
    return (c.PREV_ACTIONS, c.PREV_REWARDS) if config.model.lstm_use_prev_action_reward else ()


def state_columns(config: CommonConfig) -> tuple[str, ...]:
    """Names of the recurrent states that a fragment must bring along; known without the model."""
    cells = 1 if config.model.vf_share_layers else 2  # policy and value have a cell each
    components = 2 * config.model.use_lstm + config.model.use_gru
    return tuple(c.state_in(index) for index in range(cells * components))
