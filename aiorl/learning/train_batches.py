"""Train batches: fragments that are laid out once, and visited in minibatches of random order.

Batches are of rows or, if the sample plan has columns of sequences, of sequences. If workers
compute the gradients, a train batch consists of these, one row for each gradient, and the learner
takes one step with their mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.data import columns as c
from aiorl.data.columns import (
    CULPRIT,
    GRADIENT_OF,
    I32,
    METRICS,
    NUM_ROWS,
    Array,
    Columns,
    first_not_finite,
    num_rows,
)
from aiorl.data.fragment import SamplePlan
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithm import Batch, Feed, Round
from aiorl.learning.batch_buffers import BatchBuffers, Layout, num_filled, rounded_up
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.rows import model_columns
from aiorl.learning.steps import Begin, Descent, Loop, prepare

if TYPE_CHECKING:
    from aiorl.learning.keys.actor_critic import ActorCriticKeys
    from aiorl.learning.models.actor_critic import ActorCritic

_log = logging.getLogger(__name__)

_ROOMY = 4
"""Maximum ratio of a batch's allocated size to its own; a larger buffer is reused up to this, to
save compilations."""

_MAX_PADDED = 1 << 24
_MAX_PADDING = 8
"""Maximum rows of a padded batch of sequences; more are allowed up to this multiple of its
fragments' rows."""

_GRADIENTS = "gradients"


class TrainBatches(Feed):
    """Fragments laid out as train batches of rows or sequences.

    Attributes:
        columns: names of the columns of a fragment.
        buffers: layout of the train batch.
        has_sequences: True if batches are of sequences [M, T, ...], False if of rows [R, ...].
        minibatch_size: rows or sequences in one minibatch.
    """

    shares_memory = True

    def __init__(
        self,
        config: ActorCriticKeys,
        plan: SamplePlan,
        model: ActorCritic,
        loop: Loop,
        rng: np.random.Generator,
    ) -> None:
        """Lay out the train batch.

        Args:
            config: sizes of fragments and train batches.
            plan: columns of a fragment.
            model: network, which determines shapes of columns.
            loop: epochs and minibatches.
            rng: generator of the random orders.

        Raises:
            ConfigError: the loop is over minibatches from a replay.
        """
        if loop.is_drawn:
            raise ConfigError(
                "the update draws its minibatches, but the experience is not kept in a replay.",
                key="algo",
                hint=(
                    "Set loop=epochs(number, minibatches(env_steps, step)) in the Update, or return"
                    " replayed(config) from experience."
                ),
            )
        self.columns = plan.columns
        self.buffers = BatchBuffers(model_columns(model, plan.columns))
        self.has_sequences = bool(plan.of_sequences)
        self._filters_obs = plan.raw_obs
        self._loop = loop
        self._rng = rng
        self._length = config.sequence_length()
        self._usual_size = config.train_batch_size
        self._multiple = loop.minibatch_steps
        self._is_truncating = config.is_truncating
        # whole episodes rarely end where a batch is full; env steps can have rows of several agents
        self._has_varying_sizes = not config.is_truncating or bool(config.multiagent.policies)
        if self.has_sequences:
            self._usual_size = config.fragments_per_batch()
            if config.is_truncating:  # each environment makes a sequence of its own
                self._usual_size *= config.num_envs_per_worker
            self._multiple = max(1, loop.minibatch_steps // self._length)
        self.minibatch_size = loop.minibatch_steps if self.visits_rows else self._multiple
        self._capacities: set[int] = set()

    @property
    def visits_rows(self) -> bool:
        """True if a minibatch consists of rows, False if it consists of whole sequences."""
        return self._loop.of_rows or not self.has_sequences

    def fit(self, loop: Loop) -> Loop:
        """See `Feed.fit`: minibatches are taken from packed arrays, and steps see columns by name,
        rows [R, ...] or sequences [T, M, ...].
        """
        begin, unpack = self.reading(loop)
        return dataclasses.replace(loop, begin=begin, step=prepare(unpack, loop.step))

    def reading(self, loop: Loop) -> tuple[Begin | None, Callable[[Tensors], Tensors]]:
        """Return a loop's `begin` for packed arrays, and what unpacks its minibatches."""
        layout: Layout = self.buffers
        time_major = not self.visits_rows
        begin = loop.begin
        if begin is None:
            return None, partial(layout.unpack, time_major=time_major)
        num_leading = 2 if time_major else 1
        # the columns that `begin` makes are known only when it is traced
        traced = layout

        def repacked(batch: Tensors, knobs: Tensors) -> Tensors:
            nonlocal traced
            columns = begin(layout.unpack(batch), knobs)
            traced = Layout.of_tensors(columns, num_leading=num_leading)
            return traced.pack(columns)

        def unpacked(minibatch: Tensors) -> Tensors:
            return traced.unpack(minibatch, time_major=time_major)

        return repacked, unpacked

    def check_fragment(self, fragment: Columns) -> None:
        """See `Feed.check_fragment`."""
        if not self.has_sequences:
            self.buffers.check(fragment)
            return
        self.buffers.check(fragment, self._length if self._is_truncating else None)
        steps, num_sequences = self.buffers.shape_of(fragment)
        if steps != self._length and (num_sequences > 1 or steps < self._length):
            raise BatchError(
                c.OBS,
                f"sequences of {self._length} steps, or one longer one",
                f"{num_sequences} of {steps} steps",
            )

    def make_batch(self, fragments: Sequence[Columns]) -> Batch:
        """Lay out the rows of all fragments one after the other, or their sequences, one
        environment after the other.

        Fragments of whole episodes have different lengths; their batches are padded to one of a few
        sizes. Stored observations that arrive unfiltered are filtered here.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Columns ``[R, ...]`` of rows, or ``[M, T, ...]`` of sequences. The second call after
            this one overwrites them.
        """
        if self._filters_obs and isinstance(self.merged_filter, MeanStdFilter):
            normalise = Normalisation.of(self.merged_filter)
            fragments = [{**fragment, c.OBS: normalise(fragment[c.OBS])} for fragment in fragments]
        shapes = [self.buffers.shape_of(fragment) for fragment in fragments]
        if not self.has_sequences:
            count = sum(steps * num_envs for steps, num_envs in shapes)
            return self.buffers.rows(fragments, self.fitted(count))
        chosen = _without_far_longer_ones(shapes)
        num_sequences = self.fitted(sum(shapes[number][1] for number in chosen))
        longest = max(shapes[number][0] for number in chosen)
        length = rounded_up(longest, self._length)
        return self.buffers.sequences(
            [fragments[number] for number in chosen], num_sequences, length
        )

    def rounds(self, batch: Batch, env_steps_total: int) -> Iterator[Round]:
        """See `Feed.rounds`: one round, with all epochs."""
        order, num_minibatches = self.order(self.buffers.column(batch, c.VALID))
        yield Round(batch, order, num_minibatches)

    def nominal(self) -> Round:
        """See `Feed.nominal`."""
        batch = self.nominal_batch()
        order, _ = self.order(self.buffers.column(batch, c.VALID))
        return Round(batch, order, 0)

    def nominal_batch(self) -> Batch:
        """Return a batch of zeros of the usual shape: columns ``[R, ...]`` of rows, or ``[M, T,
        ...]`` of sequences. Where sizes vary, it has room for most batches of rows.
        """
        if self.has_sequences:
            return self.buffers.zeros(self.fitted(self._usual_size), self._length)
        size = 2 * self._usual_size if self._has_varying_sizes else self._usual_size
        return self.buffers.zeros(self.fitted(size))

    def first_not_finite(self, minibatches: Round) -> str:
        """See `Feed.first_not_finite`."""
        return self.buffers.first_not_finite(minibatches.columns)

    def fitted(self, count: int) -> int:
        """Return the number of rows or sequences to allocate; a known size that fits is reused to
        save compilations.

        Args:
            count: number that must fit.

        Returns:
            A multiple of the minibatch size.
        """
        size = self._multiple
        least = rounded_up(math.ceil(count / size), math.ceil(self._usual_size / size))
        # an unusually large batch must not enlarge all later ones
        fitting = [room for room in self._capacities if least <= room <= _ROOMY * least]
        capacity = min(fitting, default=least)
        self._capacities.add(capacity)
        return size * capacity

    def order(self, valid: Array) -> tuple[I32, int]:
        """Return the indices of every minibatch, in a new permutation each epoch, and the number of
        minibatches; zeros and 0 if no row is a transition.

        The last minibatch of an epoch is filled up with empty rows or sequences from the end of the
        batch. If rows of sequences are visited, only transitions are, and the minibatch is filled
        up with the first ones of the epoch. The array always has room for all minibatches that the
        batch can make, so that the update isn't compiled again.

        Args:
            valid: VALID of the batch, [R] of rows or [S, T] of sequences.
        """
        size = self.minibatch_size
        num_entries = valid.size if self.visits_rows else len(valid)
        per_epoch = math.ceil(num_entries / size)
        order = np.zeros((self._loop.num_epochs * per_epoch, size), np.int32)
        if self.visits_rows and self.has_sequences:
            visited = np.flatnonzero(valid)
        else:
            visited = np.arange(math.ceil(num_filled(valid) / size) * size)
        if not len(visited):
            return order, 0
        num_minibatches = self._loop.num_epochs * math.ceil(len(visited) / size)
        for epoch in order[:num_minibatches].reshape(self._loop.num_epochs, -1):
            entries = self._rng.permutation(visited) if self._loop.shuffles else visited
            if len(entries) < len(epoch):
                entries = np.resize(entries, len(epoch))
            epoch[...] = entries
        return order, num_minibatches


def _without_far_longer_ones(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of the fragments to lay out, in order; `shapes` has the steps and
    sequences of each.

    The longest fragments are left out if the batch would otherwise be mostly padding.
    """
    chosen = list(range(len(shapes)))
    while True:
        longest = max(chosen, key=lambda number: shapes[number][0])
        length, _ = shapes[longest]
        num_sequences = sum(shapes[number][1] for number in chosen)
        rows = sum(math.prod(shapes[number]) for number in chosen)
        if length * num_sequences <= max(_MAX_PADDED, _MAX_PADDING * rows):
            return chosen
        _log.warning(
            "left a sequence of %d steps out of a train batch: the others are far shorter", length
        )
        chosen.remove(longest)


class GradientBatches(Feed):
    """Gradients that workers computed, collected as train batches; two buffers alternate.

    The step uses their mean, in which each gradient is weighted by its number of transitions, so
    the mean is the gradient over all transitions together.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        metric_names: Sequence[str],
        columns: Sequence[str],
        num_fragments: int,
    ) -> None:
        """Lay the gradients out.

        Args:
            shapes: weight name -> shape, in the order of the trainable variables.
            metric_names: metrics of the loss, without the loss itself.
            columns: columns of the sample plan; a worker refers to them by number.
            num_fragments: F, maximum number of gradients in a train batch.
        """
        self._metric_names = tuple(metric_names)
        self._columns = tuple(columns)
        self._num_fragments = num_fragments
        self._shapes = {GRADIENT_OF + name: shape for name, shape in shapes.items()}
        self._shapes[METRICS] = (len(metric_names) + 1,)
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()]).tolist()
        self._places = [slice(*bounds) for bounds in itertools.pairwise([0, *ends])]
        self._sets = itertools.cycle([self.zeros(), self.zeros()])

    def fit(self, loop: Loop) -> Loop:
        """See `Feed.fit`: the step takes the mean gradient of the batch in place of its loss's."""
        assert isinstance(loop.step, Descent), "only such updates are planned with gradients"
        return dataclasses.replace(loop, step=dataclasses.replace(loop.step, gradients=self.mean))

    def zeros(self) -> Batch:
        """Return a batch without gradients, in new arrays."""
        return {
            _GRADIENTS: np.zeros((self._num_fragments, self._places[-1].stop), np.float32),
            NUM_ROWS: np.zeros(self._num_fragments, np.float32),
            CULPRIT: np.zeros(self._num_fragments, np.int32),
        }

    def make_batch(self, fragments: Sequence[Columns]) -> Batch:
        """Return a batch of up to F checked gradients; a gradient that was not finite is NaN.

        Returns:
            Arrays [F, ...], valid until the second call after this one.
        """
        batch = next(self._sets)
        for array in batch.values():
            array[...] = 0
        for row, fragment in enumerate(fragments):
            batch[NUM_ROWS][row] = fragment[NUM_ROWS][0]
            if CULPRIT in fragment:
                batch[CULPRIT][row] = fragment[CULPRIT][0]
                batch[_GRADIENTS][row] = np.nan
                continue
            for name, place in zip(self._shapes, self._places, strict=True):
                batch[_GRADIENTS][row, place] = fragment[name].reshape(-1)
        return batch

    def check_fragment(self, fragment: Columns) -> None:
        """Check that a fragment is a gradient of these weights. Safe in any thread.

        Raises:
            BatchError: a column is wrong; the error names it.
        """
        num_rows(fragment)
        dtype = "float32"
        shapes = self._shapes
        if CULPRIT in fragment:
            dtype = "int32"
            shapes = {CULPRIT: (1,)}
        unknown = sorted(fragment.keys() - shapes.keys() - {NUM_ROWS})
        if unknown:
            raise BatchError(
                "batches",
                f"no other columns than {', '.join(sorted(shapes))}",
                f"{unknown[0]!r:.100}",
            )
        for name, shape in shapes.items():
            column = fragment.get(name)
            if column is None:
                raise BatchError(name, f"{dtype} {shape}", "none")
            if column.shape != shape or column.dtype != dtype:
                raise BatchError(name, f"{dtype} {shape}", f"{column.dtype} {column.shape}")
        if CULPRIT in fragment and not 0 <= fragment[CULPRIT][0] <= len(self._columns):
            raise BatchError(CULPRIT, f"from 0 to {len(self._columns)}", f"{fragment[CULPRIT][0]}")
        bad_column = first_not_finite(fragment)
        if bad_column:
            raise BatchError(bad_column, "finite numbers", "a number that is not finite")

    def rounds(self, batch: Batch, env_steps_total: int) -> Iterator[Round]:
        """See `Feed.rounds`: one minibatch with all gradients."""
        has_any = bool(np.count_nonzero(batch[NUM_ROWS]))
        yield Round(batch, self._order(), int(has_any))

    def nominal(self) -> Round:
        """See `Feed.nominal`."""
        return Round(self.zeros(), self._order(), 0)

    def first_not_finite(self, minibatches: Round) -> str:
        """Return the first column that a worker reported as not finite; "" if there is none."""
        culprits = minibatches.columns[CULPRIT]
        reported = culprits[culprits > 0]
        if not len(reported):
            return ""
        return self._columns[int(reported[0]) - 1]

    def mean(
        self, minibatch: Tensors, knobs: Tensors
    ) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        """Return the mean gradient of a batch, the loss and the metrics, as a `Descent` expects
        them.
        """
        weights = minibatch[NUM_ROWS] / tf.maximum(tf.reduce_sum(minibatch[NUM_ROWS]), 1.0)
        flat = tf.linalg.matvec(minibatch[_GRADIENTS], weights, transpose_a=True)
        parts = zip(self._places, self._shapes.values(), strict=True)
        *gradients, figures = [tf.reshape(flat[place], shape) for place, shape in parts]
        *metrics, loss = tf.unstack(figures)
        return gradients, loss, dict(zip(self._metric_names, metrics, strict=True))

    def _order(self) -> I32:
        return np.arange(self._num_fragments, dtype=np.int32)[None]
