"""Base class of algorithms that train on fragments as they come, and what their losses run the network with.

A train batch is laid out once, and one `CompiledUpdate` visits its rows or sequences in a random order.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.exploration import Schedule
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS
from aiorl.errors import BatchError, PolicyError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import Array, Batch, CompiledBase, UpdateResult
from aiorl.learning.algorithms.batch_buffers import PACKED, BatchBuffers, GradientBuffers, rounded_up, unpacked
from aiorl.learning.algorithms.compiled_update import CompiledFunction, CompiledUpdate, UpdateSpec, gradients_of
from aiorl.learning.algorithms.rows import flattened, model_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=ActorCriticConfig)
Weigh = Callable[[Tensors, "tf.Tensor", Tensors], tuple["tf.Tensor", Tensors]]

_ROOMY = 4
"""Batches are laid out in room for so many times their size at most, rather than compile for another size."""

_MAX_PADDED, _MAX_PADDING = 1 << 24, 8
"""Rows of a batch of sequences, where they are more than so many times those of its fragments."""

_REPORTED = ("clip_param", "vf_clip_param")
"""Coefficients that only some algorithms have."""


class CompiledAlgorithm(CompiledBase[ConfigT]):
    """Runs a compiled update over minibatches of a train batch in a random order.

    Batches hold the columns of the sample plan, row by row, or as sequences where it names something of these.
    Subclasses give the update, and say which coefficients hold.

    Where workers compute the gradients, a train batch is made of these: there is one step with their mean.

    Attributes:
        distribution: of the actions, for losses.
        buffers: layout of the train batch, or of the rows that gradients are computed of.
        gradient: gives the metrics in the order of the spec with the loss as the last, then the gradient of each
            variable, over a batch all of whose rows are one minibatch.
    """

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model)
        self.distribution = to_tf_distribution(model.distribution)
        config = self.config
        self.buffers = BatchBuffers(model_columns(model, self.sample_plan(config).columns))
        self._lr = Schedule.of(config.lr, config.lr_schedule, key="lr_schedule")
        self._entropy = Schedule.of(config.entropy_coeff, config.entropy_coeff_schedule, key="entropy_coeff_schedule")
        self._has_sequences = self.trains_on_sequences(config)
        self._usual_size = config.train_batch_size
        if self._has_sequences:
            in_fragment = config.num_envs_per_worker if config.is_truncating else 1
            self._usual_size = config.fragments_per_batch() * in_fragment
        self._multiple = config.minibatch_steps()
        if self._has_sequences:
            self._multiple = max(1, self._multiple // config.sequence_length())
        self._fragment_length = config.sequence_length() if self._has_sequences and config.is_truncating else None
        self._capacities: set[int] = set()
        self._spec = spec = self.update_spec()
        self._received = None
        if config.gradients == "workers":
            shapes = {name: tuple(variable.shape) for name, variable in model.trainable.items()}
            columns = self.sample_plan(config).columns
            self._received = GradientBuffers(shapes, spec.metric_names, columns, config.fragments_per_batch())
        self.compiled = CompiledUpdate(
            spec, model.trainable_variables, self.make_optimizer(), grad_clip=config.grad_clip, xla=config.update_mode,
            gradients=None if self._received is None else self._received.mean,
        )  # fmt: skip
        self.gradient = CompiledFunction(self._run_gradient, model.trainable_variables, config.update_mode, "gradient")

    @classmethod
    def return_discount(cls, config: CommonConfig) -> float | None:
        """See `Algorithm.return_discount`."""
        own = cls.own_config(config)
        return own.gamma if own.normalize_rewards else None

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Actions drawn from the distribution; where they are by noise of the state, an exploration says so."""
        own = cls.own_config(config)
        return {"exploration": own.sampling()} if own.use_sde else {}

    @classmethod
    def gradients_from_workers(cls, config: CommonConfig) -> bool:
        """See `Algorithm.gradients_from_workers`."""
        return cls.own_config(config).gradients == "workers"

    @abstractmethod
    def update_spec(self) -> UpdateSpec:
        """Return the update to compile."""

    @abstractmethod
    def make_optimizer(self) -> Any:  # Any: a Keras optimiser
        """Return the optimiser to train with."""

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps; subclasses add theirs."""
        return {
            "lr": self._lr.value(env_steps_total),
            "vf_loss_coeff": self.config.vf_loss_coeff,  # for losses of users' own that take it as a coefficient
            "entropy_coeff": self._entropy.value(env_steps_total),
        }

    def likelihood_spec(
        self, weigh: Weigh, metrics: Iterable[str] = (), coefficients: Iterable[str] = (), *, targets: str = ""
    ) -> UpdateSpec:
        """Return an update that makes actions more likely, each by its weight, and perhaps learns values.

        Args:
            weigh: (columns, values, coefficients) of a minibatch -> weights of its rows, and metrics.
            metrics: names of these.
            coefficients: names of those that it takes.
            targets: column of what values should be; "" = the policy learns alone.
        """
        config, distribution = self.config, self.distribution

        def loss(minibatch: Tensors, given: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(self.model, minibatch, self.buffers)
            valid = columns[c.VALID]
            weights, more = weigh(columns, values, given)
            logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
            policy_loss, entropies = -masked_mean(weights * logp, valid), distribution.entropy(dist_inputs)
            if not targets:
                entropy = masked_mean(entropies, valid)
                parts = {"policy_loss": policy_loss, "entropy": entropy}
                return policy_loss - given["entropy_coeff"] * entropy, parts | more
            total, parts = actor_critic_loss(
                policy_loss, values, columns[targets], entropies, valid,
                vf_loss_coeff=config.vf_loss_coeff, entropy_coeff=given["entropy_coeff"],
            )  # fmt: skip
            return total, parts | more

        of_values = ("vf_loss", "vf_explained_var") if targets else ()
        return UpdateSpec(
            loss, ("policy_loss", "entropy", *of_values, *metrics), ("lr", "entropy_coeff", *coefficients)
        )

    @property
    def minibatch_size(self) -> int:
        """Rows or sequences in one minibatch."""
        return self.config.minibatch_steps() if self.visits_rows else self._multiple

    @property
    def visits_rows(self) -> bool:
        """Return whether a minibatch is made of rows; else of whole sequences."""
        return not self._has_sequences

    @property
    def shuffles(self) -> bool:
        """Whether rows are visited in a random order."""
        return True

    def after_update(self, metrics: dict[str, float]) -> None:  # most have nothing to do
        """Called after each update that held, for coefficients that adapt; may add metrics."""

    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Rows of all fragments one after the other, or their sequences, one environment's after the other's.

        Fragments of whole episodes differ in length; such batches are padded to one of few sizes. Gradients of workers
        come one after the other.
        """
        return self.lay_out(fragments) if self._received is None else self._received.batch(fragments)

    def lay_out(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Lay fragments out as rows, or as sequences."""
        shapes = [self.buffers.shape_of(fragment) for fragment in fragments]
        if not self._has_sequences:
            return self.buffers.rows(fragments, self.fitted(sum(steps * num_envs for steps, num_envs in shapes)))
        kept = _without_far_longer_ones(shapes)
        num_sequences = self.fitted(sum(shapes[number][1] for number in kept))
        length = rounded_up(max(shapes[number][0] for number in kept), self.config.sequence_length())
        return self.buffers.sequences([fragments[number] for number in kept], num_sequences, length)

    def nominal_batch(self) -> Batch:
        """A batch of zeros of the usual shape, of rows or sequences."""
        length = [self.config.sequence_length()] if self._has_sequences else []
        return self.buffers.zeros(self.fitted(self._usual_size), *length)

    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Refuse a fragment that `make_batch` could not use, before it is queued. May be called in any thread.

        Raises: BatchError naming the column at fault.
        """
        if self._received is not None:
            self._received.check(fragment)
            return
        self.buffers.check(fragment, self._fragment_length)
        if self._has_sequences:
            steps, num_sequences = self.buffers.shape_of(fragment)
            length = self.config.sequence_length()
            if steps != length and (num_sequences > 1 or steps < length):
                raise BatchError(
                    c.OBS, f"sequences of {length} steps, or one of more", f"{num_sequences} of {steps} steps"
                )

    def warm_up(self) -> None:
        """Compile the update for batches of the usual shape; changes neither weights nor random states."""
        if self._received is None:
            batch = self.nominal_batch()
            order = np.zeros(self._order_shape(batch), np.int32)
        else:
            batch = self._received.zeros()
            order = _all_at_once(batch)
        self.compiled.warm_up(batch, order)
        self.hold_state()

    def warm_up_gradients(self) -> None:
        """Compile `compute_gradients` for fragments of the usual size; changes nothing."""
        batch, coefficients = self.nominal_batch(), dict.fromkeys(self._spec.coefficient_names, 0.0)
        arguments = self.compiled.tensors(batch, coefficients)
        self.gradient.warm_up(partial(self.gradient, len(batch[PACKED]), *arguments))

    def _run_gradient(self, batch: Tensors, values: tf.Tensor) -> list[tf.Tensor]:
        batch, coefficients = self.compiled.begun(batch, values)
        gradients, loss, found = gradients_of(self._spec.loss, self.model.trainable_variables)(batch, coefficients)
        metrics = tf.stack([*(found[name] for name in self._spec.metric_names), loss])
        return [metrics, *map(tf.convert_to_tensor, gradients)]

    def compute_gradients(self, fragment: Mapping[str, Array], env_steps_total: int) -> dict[str, Array]:
        """The gradient of the loss over a fragment, at the weights as they are; changes nothing.

        Args:
            fragment: the columns of the sample plan.
            env_steps_total: env steps that schedules go by.
        Returns: columns of `aiorl.data.columns`, as they are sent; none if no row is a transition.
        Raises: BatchError if a column is missing or of a wrong shape or dtype.
        """
        self.buffers.check(fragment)
        batch = self.lay_out([fragment])
        if not self.buffers.num_filled(batch):
            return {}
        arguments = self.compiled.tensors(batch, self.coefficients(env_steps_total))
        found = [np.asarray(array) for array in self.gradient(len(batch[PACKED]), *arguments)]
        rows = np.array([np.count_nonzero(self.buffers.column(batch, c.VALID))], np.int32)
        if not all(np.isfinite(array).all() for array in found):
            column, names = self.buffers.first_not_finite(batch), self.sample_plan(self.config).columns
            culprit = names.index(column) + 1 if column in names else 0
            return {NUM_ROWS: rows, CULPRIT: np.array([culprit], np.int32)}
        named = zip(self.model.trainable, found[1:], strict=True)
        return {NUM_ROWS: rows, METRICS: found[0], **{GRADIENT_OF + name: gradient for name, gradient in named}}

    def apply_gradients(self, gradients: Mapping[str, Array], env_steps_total: int) -> dict[str, float]:
        """Take one step of the optimiser.

        Args:
            gradients: weight name -> gradient, float32, of all weights that are trained.
            env_steps_total: env steps that schedules go by.
        Returns: metrics.
        Raises: PolicyError if they are not those of the weights, or not finite; nothing is changed then.
        """
        variables, limit = self.model.trainable, self.config.grad_clip
        shapes = {name: tuple(np.shape(gradient)) for name, gradient in gradients.items()}
        wanted = {name: tuple(variable.shape) for name, variable in variables.items()}
        if shapes != wanted:
            raise PolicyError(f"no step was taken: gradients {shapes!r:.500} are not those of the weights")
        found = [tf.constant(gradients[name], tf.float32) for name in variables]
        norm = tf.linalg.global_norm(found)
        if not np.isfinite(norm):
            raise PolicyError("no step was taken: the norm of the gradients is not finite")
        if limit is not None:
            found, _ = tf.clip_by_global_norm(found, limit, use_norm=norm)
        lr = self.coefficients(env_steps_total)["lr"]
        self.compiled.optimizer.learning_rate.assign(lr)
        self.compiled.optimizer.apply(found, list(variables.values()))
        self._note_held()
        return {"grad_gnorm": float(norm), "cur_lr": lr}

    @property
    def gradient_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that come with a gradient, in their order."""
        return (*self._spec.metric_names, "loss")

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch; skip it if a loss or gradient is not finite.

        Raises: TrainingDiverged after `MAX_SKIPS_IN_A_ROW` skipped updates in a row.
        """
        coefficients = self.coefficients(env_steps_total)
        self._warn_of_last_lr(self._lr, env_steps_total)
        if self._received is None:
            order, num_minibatches = self._order(batch)
        else:
            order, num_minibatches = _all_at_once(batch), min(1, self._received.num_filled(batch))
        metrics, held = self.compiled(batch, order, coefficients, max_steps=num_minibatches)
        reported = {
            "cur_lr": coefficients["lr"],
            "entropy_coeff": coefficients["entropy_coeff"],
            **{name: coefficients[name] for name in _REPORTED if name in coefficients},
            "num_sgd_steps": metrics["num_sgd_steps"],
        }
        if held:
            self._note_held()
            if num_minibatches:
                self.after_update(metrics)
            return UpdateResult({**metrics, **reported, "updates_skipped": float(self._skipped)})
        column = (self._received or self.buffers).first_not_finite(batch)
        self._note_skipped(column)
        return UpdateResult({**reported, "updates_skipped": float(self._skipped)}, skipped=True, bad_column=column)

    def fitted(self, count: int) -> int:
        """Rows or sequences to make room for: as before, where that fits, so that few sizes have to be compiled.

        Args:
            count: what has to fit.
        Returns: as many as whole minibatches have.
        """
        size = self._multiple
        wanted = rounded_up(-(-count // size), -(-self._usual_size // size))
        # one batch of an unusual size must not make all that follow as large
        known = [capacity for capacity in self._capacities if wanted <= capacity <= _ROOMY * wanted]
        capacity = min(known, default=wanted)
        self._capacities.add(capacity)
        return size * capacity

    def _order_shape(self, batch: Batch) -> tuple[int, int]:
        size = int(np.prod(batch[PACKED].shape[:-1])) if self.visits_rows else len(batch[PACKED])
        return self.config.num_sgd_iter * -(-size // self.minibatch_size), self.minibatch_size

    def _order(self, batch: Batch) -> tuple[NDArray[np.int32], int]:
        """Indices of every minibatch, each epoch a new permutation of what is filled; and how many there are.

        What is needed to fill the last minibatch comes from the empty rows or sequences behind; where rows of sequences
        are visited, only transitions are, and the first ones of the epoch again. The array has room for as many
        minibatches as the batch can make, whatever is filled, so that the update needs no other compilation.
        """
        order = np.zeros(self._order_shape(batch), np.int32)
        size = self.minibatch_size
        if self.visits_rows and self._has_sequences:
            visited = np.flatnonzero(self.buffers.column(batch, c.VALID))
        else:
            visited = np.arange(-(-self.buffers.num_filled(batch) // size) * size)
        if not len(visited):
            return order, 0
        count, per_epoch = len(visited), -(-len(visited) // size)
        for minibatches in order[: self.config.num_sgd_iter * per_epoch].reshape(self.config.num_sgd_iter, -1):
            picked = self.rng.permutation(count) if self.shuffles else np.arange(count)
            minibatches[...] = visited[np.resize(picked, per_epoch * size)]
        return order, self.config.num_sgd_iter * per_epoch


def _without_far_longer_ones(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the fragments that are laid out, in order, of so many steps and sequences each.

    The longest ones are left out of a batch that would be next to nothing but padding.
    """
    kept = list(range(len(shapes)))
    while True:
        longest = max(kept, key=lambda number: shapes[number][0])
        padded = shapes[longest][0] * sum(shapes[number][1] for number in kept)
        rows = sum(shapes[number][0] * shapes[number][1] for number in kept)
        if padded <= max(_MAX_PADDED, _MAX_PADDING * rows):
            return kept
        logger.warning(
            "a sequence of %d steps is left out of a train batch: the others are far shorter", shapes[longest][0]
        )
        kept.remove(longest)


def _all_at_once(batch: Batch) -> NDArray[np.int32]:
    """The order of a batch of gradients: one minibatch of all of them."""
    return np.arange(len(batch[NUM_ROWS]), dtype=np.int32)[None]


def state_resets(terminateds: tf.Tensor, truncateds: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return where a sequence's state is reset: in the row after one that ended an episode or is no transition.

    Args:
        terminateds: [T, M] float32, 1 or 0; so are the others.
        truncateds: [T, M].
        valid: [T, M].
    Returns: [T, M] bool; False in the first row, which starts from the state that was sent along.
    """
    ended = (terminateds > 0) | (truncateds > 0) | (valid <= 0)
    return tf.concat([tf.zeros_like(ended[:1]), ended[:-1]], axis=0)


def rows_forward(model: ActorCritic, minibatch: Tensors, buffers: BatchBuffers) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
    """Distribution inputs [R, P], values [R] and columns [R, ...] of a minibatch; its sequences as rows, if it has any.

    Args:
        model: a recurrent one runs over sequences.
        minibatch: gathered from a batch of `buffers`.
        buffers: where it came from.
    """
    columns = unpacked(minibatch, buffers, time_major=model.is_recurrent)
    if not model.is_recurrent:
        return *model.forward(columns[c.OBS]), columns
    dist_inputs, values = sequence_forward(model, columns)
    return (
        flattened(dist_inputs),
        flattened(values),
        {spec.name: flattened(columns[spec.name]) for spec in buffers.columns},
    )


def sequence_forward(
    model: ActorCritic, columns: dict[str, tf.Tensor], weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Distribution inputs [T, M, P] and values [T, M] of time-major columns.

    Args:
        model: the network.
        columns: by name.
        weights: tensors by name to be used in place of its own.
    """
    resets = state_resets(columns[c.TERMINATEDS], columns[c.TRUNCATEDS], columns[c.VALID])
    states = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    previous = (columns[c.PREV_ACTIONS], columns[c.PREV_REWARDS]) if model.looks_back else ()
    dist_inputs, values = model.forward_sequence(columns[c.OBS], states, resets, *previous, weights=weights)
    return dist_inputs, values


def sequence_forward_with_last(
    model: ActorCritic, columns: dict[str, tf.Tensor], weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Distribution inputs [T, M, P], values [T, M], and values [M] of the observations behind the last step.

    One pass over T + 1 rows; models without state see them all as rows of one batch. The row behind a transition is
    that of the observation that followed it, also where it is no transition itself.

    Args:
        model: the network.
        columns: time-major, by name.
        weights: tensors by name to be used in place of its own.
    """
    obs = tf.concat([columns[c.OBS], columns[c.LAST_OBS][None]], axis=0)
    if model.is_recurrent:
        longer = {name: _with_zero_row(columns[name]) for name in (c.TERMINATEDS, c.TRUNCATEDS, c.VALID)}
        if model.looks_back:
            for name, source in ((c.PREV_ACTIONS, c.ACTIONS), (c.PREV_REWARDS, c.REWARDS)):
                longer[name] = _with_those_before(columns[name], columns[source], longer[c.VALID])
        dist_inputs, values = sequence_forward(model, {**columns, **longer, c.OBS: obs}, weights)
    else:
        flat_inputs, flat_values = model.forward(flattened(obs), weights=weights)
        values = tf.reshape(flat_values, obs.shape[:2])
        dist_inputs = tf.reshape(flat_inputs, [*obs.shape[:2], flat_inputs.shape[-1]])
    return dist_inputs[:-1], values[:-1], values[-1]


def _with_zero_row(x: tf.Tensor) -> tf.Tensor:
    return tf.concat([x, tf.zeros_like(x[:1])], axis=0)


def _with_those_before(previous: tf.Tensor, given: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Previous actions or rewards [T + 1, M, ...]: in rows that are no transitions, those of the row before.

    Args:
        previous: [T, M, ...] as the rows have them.
        given: [T, M, ...] actions or rewards of the rows themselves.
        valid: [T + 1, M] float32, 0 in the last row.
    """
    before = tf.concat([tf.zeros_like(given[:1]), given], axis=0)
    is_valid = tf.reshape(valid > 0, [*valid.shape, *[1] * (len(given.shape) - 2)])
    return tf.where(is_valid, _with_zero_row(previous), before)
