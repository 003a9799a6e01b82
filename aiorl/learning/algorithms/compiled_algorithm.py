"""Base class of algorithms that train on fragments as they arrive, and forward passes for their
losses.

A train batch is laid out once, and one `CompiledUpdate` visits its rows or sequences in random
order.
"""

from __future__ import annotations

import logging
import math
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
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import Array, Batch, CompiledBase, UpdateResult
from aiorl.learning.algorithms.batch_buffers import (
    PACKED,
    BatchBuffers,
    GradientBuffers,
    rounded_up,
    unpacked,
)
from aiorl.learning.algorithms.compiled_update import (
    CompiledFunction,
    CompiledUpdate,
    UpdateSpec,
    gradients_of,
)
from aiorl.learning.algorithms.rows import flattened, model_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import actor_critic_loss
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.process.machine import available_bytes

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=ActorCriticConfig)
Weigh = Callable[[Tensors, "tf.Tensor", Tensors], tuple["tf.Tensor", Tensors]]

_ROOMY = 4
"""Maximum ratio of a batch's allocated size to its own; a larger buffer is reused up to this, to
save compilations."""

_MAX_PADDED = 1 << 24
_MAX_PADDING = 8
"""Maximum rows of a padded batch of sequences; more are allowed up to this multiple of its
fragments' rows."""

_COPIES = 2
"""A train batch is in memory as fragments, and laid out."""

_NUMBERS_OF_A_ROW = 5
"""Numbers that each row has at least besides observation and action: its likelihood, value, return
and so on."""

_REPORTED = ("clip_param", "vf_clip_param")
"""Coefficients that only some algorithms have."""


class CompiledAlgorithm(CompiledBase[ConfigT]):
    """Algorithm that runs a compiled update over minibatches of a train batch in random order.

    Batches hold the columns of the sample plan, as rows or, if the plan has columns of sequences,
    as sequences. Subclasses define the update and its coefficients.

    If workers compute the gradients, a train batch consists of these, and the learner takes one
    step with their mean.

    Attributes:
        distribution: action distribution, for losses.
        buffers: layout of the train batch, or of the rows of which gradients are computed.
        gradient: compiled function of a batch, all of whose rows are one minibatch. It returns the
            metrics in the order of the spec, the loss as the last of them, then the gradient of
            each variable.
    """

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train.
        """
        super().__init__(config, model)
        self.distribution = to_tf_distribution(model.distribution)
        config = self.config
        self.buffers = BatchBuffers(model_columns(model, self.sample_plan(config).columns))
        self._lr = Schedule.of(config.lr, config.lr_schedule, key="lr_schedule")
        self._entropy = Schedule.of(
            config.entropy_coeff, config.entropy_coeff_schedule, key="entropy_coeff_schedule"
        )
        self._has_sequences = self.trains_on_sequences(config)
        self._usual_size = config.train_batch_size
        if self._has_sequences:
            in_fragment = config.num_envs_per_worker if config.is_truncating else 1
            self._usual_size = config.fragments_per_batch() * in_fragment
        self._multiple = config.minibatch_steps()
        if self._has_sequences:
            self._multiple = max(1, self._multiple // config.sequence_length())
        self._fragment_length = (
            config.sequence_length() if self._has_sequences and config.is_truncating else None
        )
        self._capacities: set[int] = set()
        self._spec = spec = self.update_spec()
        self._received = None
        if config.gradients == "workers":
            shapes = {name: tuple(variable.shape) for name, variable in model.trainable.items()}
            columns = self.sample_plan(config).columns
            self._received = GradientBuffers(
                shapes, spec.metric_names, columns, config.fragments_per_batch()
            )
        self.compiled = CompiledUpdate(
            spec,
            model.trainable_variables,
            self.make_optimizer(),
            grad_clip=config.grad_clip,
            xla=config.update_mode,
            gradients=None if self._received is None else self._received.mean,
            shares_memory=True,
        )
        self.gradient = CompiledFunction(
            self._run_gradient, model.trainable_variables, config.update_mode, "gradient"
        )

    @classmethod
    def check_room(cls, policies: Sequence[tuple[CommonConfig, ActorCritic]]) -> None:
        """Check that there is room for the train batch of each policy.

        Args:
            policies: config and model of every policy that learns in the run, with any algorithm.

        Raises:
            ConfigError: there is no room.
        """
        for config, model in policies:
            if not isinstance(config, ActorCriticConfig) or config.gradients == "workers":
                continue
            size = config.train_batch_size
            needed = _COPIES * size * _least_row_bytes(model)
            available = available_bytes()
            if needed > available:
                raise ConfigError(
                    f"train batches of {size:,} env steps need at least {needed / 1e9:.3g} GB of "
                    f"memory, and {available / 1e9:.3g} GB are free.",
                    key="train_batch_size",
                    value=size,
                    hint="Set a smaller train_batch_size.",
                )

    @classmethod
    def return_discount(cls, config: CommonConfig) -> float | None:
        """See `Algorithm.return_discount`."""
        own = cls.own_config(config)
        return own.gamma if own.normalize_rewards else None

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """See `Algorithm.acting_settings`; names an exploration if noise depends on the state."""
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
        """Return the coefficients of an update after `env_steps_total` env steps; subclasses add
        theirs.
        """
        return {
            "lr": self._lr.value(env_steps_total),
            # for custom losses that read it as a coefficient
            "vf_loss_coeff": self.config.vf_loss_coeff,
            "entropy_coeff": self._entropy.value(env_steps_total),
        }

    def likelihood_spec(
        self,
        weigh: Weigh,
        metrics: Iterable[str] = (),
        coefficients: Iterable[str] = (),
        *,
        targets: str = "",
    ) -> UpdateSpec:
        """Return an update that raises the weighted likelihood of the actions and, with `targets`,
        fits the values.

        Args:
            weigh: (columns, values, coefficients) of a minibatch -> (weight of each row, metrics).
            metrics: names of these metrics.
            coefficients: names of the coefficients that `weigh` reads.
            targets: column of the value targets; "" = only the policy learns.
        """
        config = self.config
        distribution = self.distribution

        def loss(minibatch: Tensors, given: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, values, columns = rows_forward(self.model, minibatch, self.buffers)
            valid = columns[c.VALID]
            weights, more = weigh(columns, values, given)
            logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
            policy_loss = -masked_mean(weights * logp, valid)
            entropies = distribution.entropy(dist_inputs)
            if not targets:
                entropy = masked_mean(entropies, valid)
                parts = {"policy_loss": policy_loss, "entropy": entropy}
                return policy_loss - given["entropy_coeff"] * entropy, parts | more
            total, parts = actor_critic_loss(
                policy_loss,
                values,
                columns[targets],
                entropies,
                valid,
                vf_loss_coeff=config.vf_loss_coeff,
                entropy_coeff=given["entropy_coeff"],
            )
            return total, parts | more

        of_values = ("vf_loss", "vf_explained_var") if targets else ()
        return UpdateSpec(
            loss,
            ("policy_loss", "entropy", *of_values, *metrics),
            ("lr", "entropy_coeff", *coefficients),
        )

    @property
    def minibatch_size(self) -> int:
        """Rows or sequences in one minibatch."""
        return self.config.minibatch_steps() if self.visits_rows else self._multiple

    @property
    def visits_rows(self) -> bool:
        """True if a minibatch consists of rows, False if it consists of whole sequences."""
        return not self._has_sequences

    @property
    def shuffles(self) -> bool:
        """True if rows are visited in random order."""
        return True

    def after_update(self, metrics: dict[str, float]) -> None:  # optional
        """Adapt coefficients after an update that was not skipped; can add to its `metrics`."""

    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Lay out the rows of all fragments one after the other, or their sequences, one
        environment after the other.

        Fragments of whole episodes have different lengths; their batches are padded to one of a few
        sizes. Gradients from workers are laid out one after the other.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Columns ``[R, ...]`` of rows, or ``[M, T, ...]`` of sequences. The second call after
            this one overwrites them.
        """
        return (
            self.lay_out(fragments) if self._received is None else self._received.batch(fragments)
        )

    def lay_out(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Lay fragments out as rows or as sequences.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Columns ``[R, ...]`` of rows, or ``[M, T, ...]`` of sequences.
        """
        shapes = [self.buffers.shape_of(fragment) for fragment in fragments]
        if not self._has_sequences:
            return self.buffers.rows(
                fragments, self.fitted(sum(steps * num_envs for steps, num_envs in shapes))
            )
        kept = _without_far_longer_ones(shapes)
        num_sequences = self.fitted(sum(shapes[number][1] for number in kept))
        length = rounded_up(
            max(shapes[number][0] for number in kept), self.config.sequence_length()
        )
        return self.buffers.sequences([fragments[number] for number in kept], num_sequences, length)

    def nominal_batch(self) -> Batch:
        """Return a batch of zeros of the usual shape: columns ``[R, ...]`` of rows, or ``[M, T,
        ...]`` of sequences.
        """
        length = [self.config.sequence_length()] if self._has_sequences else []
        return self.buffers.zeros(self.fitted(self._usual_size), *length)

    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Check that `make_batch` can use a fragment, before it is queued. Can be called in any
        thread.

        Args:
            fragment: columns ``[T, N, ...]`` by name.

        Raises:
            BatchError: a column is wrong; the error names it.
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
                    c.OBS,
                    f"sequences of {length} steps, or one longer one",
                    f"{num_sequences} of {steps} steps",
                )

    def warm_up(self) -> None:
        """Compile the update for batches of the usual shape; changes neither weights nor random
        states.
        """
        if self._received is None:
            batch = self.nominal_batch()
            order = np.zeros(self._order_shape(batch), np.int32)
        else:
            batch = self._received.zeros()
            order = _all_at_once(batch)
        self.compiled.warm_up(batch, order)

    def warm_up_gradients(self) -> None:
        """Compile `compute_gradients` for fragments of the usual size; changes nothing."""
        batch = self.nominal_batch()
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        arguments = self.compiled.tensors(batch, coefficients)
        self.gradient.warm_up(partial(self.gradient, len(batch[PACKED]), *arguments))

    def _run_gradient(self, batch: Tensors, values: tf.Tensor) -> list[tf.Tensor]:
        batch, coefficients = self.compiled.begun(batch, values)
        gradients, loss, found = gradients_of(self._spec.loss, self.model.trainable_variables)(
            batch, coefficients
        )
        metrics = tf.stack([*(found[name] for name in self._spec.metric_names), loss])
        return [metrics, *map(tf.convert_to_tensor, gradients)]

    def compute_gradients(
        self, fragment: Mapping[str, Array], env_steps_total: int
    ) -> dict[str, Array]:
        """Return the gradient of the loss over a fragment at the current weights; changes nothing.

        Args:
            fragment: columns of the sample plan, ``[T, N, ...]``.
            env_steps_total: env steps so far; schedules depend on it.

        Returns:
            Columns to send: the gradient of each weight, in the weight's shape, with metrics
                ``[K]`` and the number of
            rows ``[1]`` (see `aiorl.data.columns`); empty if no row is a transition.

        Raises:
            BatchError: a column is missing or has a wrong shape or dtype.
        """
        self.buffers.check(fragment)
        batch = self.lay_out([fragment])
        if not self.buffers.num_filled(batch):
            return {}
        arguments = self.compiled.tensors(batch, self.coefficients(env_steps_total))
        found = [np.asarray(array) for array in self.gradient(len(batch[PACKED]), *arguments)]
        rows = np.array([np.count_nonzero(self.buffers.column(batch, c.VALID))], np.int32)
        if not all(np.isfinite(array).all() for array in found):
            column = self.buffers.first_not_finite(batch)
            names = self.sample_plan(self.config).columns
            culprit = names.index(column) + 1 if column in names else 0
            return {NUM_ROWS: rows, CULPRIT: np.array([culprit], np.int32)}
        named = zip(self.model.trainable, found[1:], strict=True)
        return {
            NUM_ROWS: rows,
            METRICS: found[0],
            **{GRADIENT_OF + name: gradient for name, gradient in named},
        }

    def apply_gradients(
        self, gradients: Mapping[str, Array], env_steps_total: int
    ) -> dict[str, float]:
        """Take one step of the optimiser.

        Args:
            gradients: weight name -> gradient, float32, in the weight's shape, for every trainable
                weight.
            env_steps_total: env steps so far; schedules depend on it.

        Returns:
            Metrics.

        Raises:
            PolicyError: the gradients don't match the weights or are not finite; nothing is changed
                then.
        """
        variables = self.model.trainable
        limit = self.config.grad_clip
        shapes = {name: tuple(np.shape(gradient)) for name, gradient in gradients.items()}
        wanted = {name: tuple(variable.shape) for name, variable in variables.items()}
        if shapes != wanted:
            raise PolicyError(
                f"no step was taken: gradients {shapes!r:.500} don't match the weights"
            )
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
        """Names, in order, of the metrics that come with a gradient."""
        return (*self._spec.metric_names, "loss")

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch; skip it if a loss or gradient is not finite.

        Args:
            batch: batch from `make_batch`, of the same shapes.
            env_steps_total: env steps trained on before this batch; schedules depend on it.

        Returns:
            Metrics of the update, and whether it was skipped.

        Raises:
            TrainingDiverged: `MAX_SKIPS_IN_A_ROW` updates in a row were skipped.
        """
        coefficients = self.coefficients(env_steps_total)
        self._warn_of_last_lr(self._lr, env_steps_total)
        if self._received is None:
            order, num_minibatches = self._order(batch)
        else:
            order = _all_at_once(batch)
            num_minibatches = min(1, self._received.num_filled(batch))
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
        return UpdateResult(
            {**reported, "updates_skipped": float(self._skipped)}, skipped=True, bad_column=column
        )

    def fitted(self, count: int) -> int:
        """Return the number of rows or sequences to allocate; a known size that fits is reused to
        save compilations.

        Args:
            count: number that must fit.

        Returns:
            A multiple of the minibatch size.
        """
        size = self._multiple
        wanted = rounded_up(-(-count // size), -(-self._usual_size // size))
        # an unusually large batch must not enlarge all later ones
        known = [capacity for capacity in self._capacities if wanted <= capacity <= _ROOMY * wanted]
        capacity = min(known, default=wanted)
        self._capacities.add(capacity)
        return size * capacity

    def _order_shape(self, batch: Batch) -> tuple[int, int]:
        size = int(np.prod(batch[PACKED].shape[:-1])) if self.visits_rows else len(batch[PACKED])
        return self.config.num_sgd_iter * -(-size // self.minibatch_size), self.minibatch_size

    def _order(self, batch: Batch) -> tuple[NDArray[np.int32], int]:
        """Return the indices of every minibatch, in a new permutation each epoch, and the number of
        minibatches.

        The last minibatch of an epoch is filled up with empty rows or sequences from the end of the
        batch. If rows of sequences are visited, only transitions are, and the minibatch is filled
        up with the first ones of the epoch. The array always has room for all minibatches that the
        batch can make, so that the update isn't compiled again.
        """
        order = np.zeros(self._order_shape(batch), np.int32)
        size = self.minibatch_size
        if self.visits_rows and self._has_sequences:
            visited = np.flatnonzero(self.buffers.column(batch, c.VALID))
        else:
            visited = np.arange(-(-self.buffers.num_filled(batch) // size) * size)
        if not len(visited):
            return order, 0
        per_epoch = -(-len(visited) // size)
        for minibatches in order[: self.config.num_sgd_iter * per_epoch].reshape(
            self.config.num_sgd_iter, -1
        ):
            picked = self.rng.permutation(visited) if self.shuffles else visited
            minibatches[...] = (
                picked if len(picked) == len(minibatches) else np.resize(picked, len(minibatches))
            )
        return order, self.config.num_sgd_iter * per_epoch


def _least_row_bytes(model: ActorCritic) -> int:
    """Return the bytes of a row in a train batch that every algorithm needs: observation, action,
    some numbers.
    """
    obs_bytes = math.prod(model.obs_shape) * np.dtype(model.obs_dtype).itemsize
    action_size = math.prod(model.distribution.action_shape)
    return obs_bytes + 4 * (action_size + _NUMBERS_OF_A_ROW)


def _without_far_longer_ones(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of the fragments to lay out, in order; `shapes` has the steps and
    sequences of each.

    The longest fragments are left out if the batch would otherwise be mostly padding.
    """
    kept = list(range(len(shapes)))
    while True:
        longest = max(kept, key=lambda number: shapes[number][0])
        padded = shapes[longest][0] * sum(shapes[number][1] for number in kept)
        rows = sum(shapes[number][0] * shapes[number][1] for number in kept)
        if padded <= max(_MAX_PADDED, _MAX_PADDING * rows):
            return kept
        logger.warning(
            "left a sequence of %d steps out of a train batch: the others are far shorter",
            shapes[longest][0],
        )
        kept.remove(longest)


def _all_at_once(batch: Batch) -> NDArray[np.int32]:
    """Return the order of a batch of gradients: one minibatch with all of them."""
    return np.arange(len(batch[NUM_ROWS]), dtype=np.int32)[None]


def state_resets(terminateds: tf.Tensor, truncateds: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return the steps before which the state is reset: those after the end of an episode or after
    padding.

    Args:
        terminateds: [T, M] float32, 1 or 0.
        truncateds: [T, M] float32, 1 or 0.
        valid: [T, M] float32, 1 for transitions, 0 for padding.

    Returns:
        [T, M] bool; False in the first row, which starts from the state that came with the
        sequence.
    """
    ended = (terminateds > 0) | (truncateds > 0) | (valid <= 0)
    return tf.concat([tf.zeros_like(ended[:1]), ended[:-1]], axis=0)


def rows_forward(
    model: ActorCritic, minibatch: Tensors, buffers: BatchBuffers
) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
    """Return distribution inputs [R, P], values [R] and columns [R, ...] of a minibatch; sequences
    become rows.

    Args:
        model: network; a recurrent one runs over sequences.
        minibatch: minibatch gathered from a batch of `buffers`: ``[R, ...]`` of rows, or ``[M, T,
            ...]`` of sequences.
        buffers: layout of the batch.
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
    """Return distribution inputs [T, M, P] and values [T, M] of time-major columns.

    Args:
        model: network to run.
        columns: columns by name.
        weights: tensors by name to use instead of the network's own weights.
    """
    resets = state_resets(columns[c.TERMINATEDS], columns[c.TRUNCATEDS], columns[c.VALID])
    states = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    previous = (columns[c.PREV_ACTIONS], columns[c.PREV_REWARDS]) if model.looks_back else ()
    dist_inputs, values = model.forward_sequence(
        columns[c.OBS], states, resets, *previous, weights=weights
    )
    return dist_inputs, values


def sequence_forward_with_last(
    model: ActorCritic, columns: dict[str, tf.Tensor], weights: Mapping[str, Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return distribution inputs [T, M, P], values [T, M], and values [M] of the observations after
    the last step.

    It makes one pass over T + 1 rows; a model without state sees them as the rows of one batch. The
    row after a transition holds the observation that followed, even if that row is padding.

    Args:
        model: network to run.
        columns: time-major columns by name.
        weights: tensors by name to use instead of the network's own weights.
    """
    obs = tf.concat([columns[c.OBS], columns[c.LAST_OBS][None]], axis=0)
    if model.is_recurrent:
        longer = {
            name: _with_zero_row(columns[name]) for name in (c.TERMINATEDS, c.TRUNCATEDS, c.VALID)
        }
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
    """Return previous actions or rewards [T + 1, M, ...]; padding rows get the action or reward of
    the row before.

    Args:
        previous: [T, M, ...] previous actions or rewards in the rows.
        given: [T, M, ...] actions or rewards of the rows themselves.
        valid: [T + 1, M] float32, 0 in the last row.
    """
    before = tf.concat([tf.zeros_like(given[:1]), given], axis=0)
    is_valid = tf.reshape(valid > 0, [*valid.shape, *[1] * (len(given.shape) - 2)])
    return tf.where(is_valid, _with_zero_row(previous), before)
