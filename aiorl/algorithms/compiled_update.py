"""One update as one compiled function: all epochs, minibatches and optimiser steps.

The function gets the whole train batch, the order in which rows are visited, and every coefficient as a tensor, so
that nothing a schedule changes makes it compile again. If a loss, a metric or a gradient is not finite, it puts
weights and optimiser back as they were before it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import ops

from aiorl.algorithms.batch_buffers import PACKED, BatchBuffers
from aiorl.errors import ConfigError

__all__ = ["ROWS", "STEPS_BEFORE", "CompiledUpdate", "LossFunction", "Phase", "UpdateSpec", "unpacked"]

_log = logging.getLogger(__name__)

_ROUND = 100_000  # more than is made before; takes some milliseconds to reach

Tensors = dict[str, tf.Tensor]
LossFunction = Callable[[Tensors, Tensors], tuple[tf.Tensor, Tensors]]
"""(minibatch, coefficients) -> (loss, metrics), all scalars; the metrics by the names the spec lists.

Where the spec says ``gives_rows``, there is one result more, ROWS, which has one number for each row."""

ROWS = "rows"
STEPS_BEFORE = "steps_before"
"""Coefficient: steps made before this update, as far as what is made at every so many steps goes by them."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A further optimiser step within each step, of other variables by a loss of their own, after those before it.

    Where it is not due, its variables and its optimiser rest.

    Attributes:
        name: its loss is reported as "NAME_loss", the norm of its gradient as "NAME_grad_gnorm".
        loss: of the minibatch, in which it also finds what losses before it gave beside their metrics, by name.
        metric_names: what `loss` reports.
        variables: to train.
        optimizer: a Keras optimiser, built for them here.
        lr: the coefficient that is its learning rate.
        every: it is due at every so many steps, counted on from the coefficient STEPS_BEFORE.
    """

    name: str
    loss: LossFunction
    metric_names: tuple[str, ...]
    variables: Sequence[Any]
    optimizer: Any  # a Keras optimiser; Keras ships no types
    lr: str = "lr"
    every: int = 1

    def times(self, steps: int, before: int) -> int:
        """How often it is due in so many steps, of which so many were made before."""
        return (before + steps) // self.every - before // self.every


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """Description of an update to compile.

    Attributes:
        loss: of one minibatch.
        metric_names: what `loss` reports; "loss" and "grad_gnorm" are added.
        coefficient_names: what it may be told anew at each update; "lr" is among them.
        stop_when: (metric, coefficient): the update ends after a minibatch whose metric is above the coefficient.
        is_stacked: batches come as minibatches, [K, M, ...], and not as rows that an order puts together.
        gives_rows: `loss` gives a number for each row.
        followers: variables that `follow` changes, such as the weights of a target network.
        follow: called with the number of steps made before this one and the coefficients, after each step.
        phases: further optimiser steps within each step, one after the other.
    """

    loss: LossFunction
    metric_names: tuple[str, ...]
    coefficient_names: tuple[str, ...]
    stop_when: tuple[str, str] | None = None
    is_stacked: bool = False
    gives_rows: bool = False
    followers: tuple[Any, ...] = ()
    follow: Callable[[tf.Tensor, Tensors], None] | None = None
    phases: tuple[Phase, ...] = ()


class CompiledUpdate:
    """The compiled function and what it changes: variables and optimiser.

    Attributes:
        mode: "xla", "graph" or "eager", as chosen; final after `warm_up`.
        optimizer: the Keras optimiser; phases have their own.
        rows: what the loss of the newest update gave for each row, [K, M]; of minibatches that were not run, 0.
    """

    rows: NDArray[np.float32] | None = None

    def __init__(
        self,
        spec: UpdateSpec,
        variables: list[Any],
        optimizer: Any,  # a Keras optimiser; Keras ships no types
        *,
        grad_clip: float | None,
        xla: Literal["auto", "on", "off", "eager"] = "auto",
    ) -> None:
        """Prepare the update; it is compiled at its first call.

        Args:
            spec: the loss and its names.
            variables: to train.
            optimizer: built for them here.
            grad_clip: largest global norm of a gradient; None = not clipped.
            xla: auto takes XLA unless there are convolutions, which are faster without on a CPU; eager compiles
                nothing, so that a debugger may step through.
        """
        self._spec = spec
        self._variables = variables
        self.optimizer = optimizer
        self._grad_clip = grad_clip
        self._xla = xla
        optimizer.build(variables)
        for phase in spec.phases:
            phase.optimizer.build(phase.variables)
        self._trained = [*variables, *(variable for phase in spec.phases for variable in phase.variables)]
        convolutions = any(len(variable.shape) >= 4 for variable in self._trained)  # kernels [H, W, in, out]
        self.mode: Literal["xla", "graph", "eager"] = "xla"
        if xla == "eager":
            self.mode = "eager"
        elif xla == "off" or (xla == "auto" and convolutions):
            self.mode = "graph"
        self._reason = "as set" if xla != "auto" else "convolutions" if convolutions else "dense layers"
        self._metric_names = (*spec.metric_names, "loss", "grad_gnorm")
        self._phase_names = [
            (*phase.metric_names, f"{phase.name}_loss", f"{phase.name}_grad_gnorm") for phase in spec.phases
        ]
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def optimizer_variables(self) -> list[Any]:
        """Those of all optimisers, in an order that doesn't change from run to run."""
        optimizers = [self.optimizer, *(phase.optimizer for phase in self._spec.phases)]
        return [variable for optimizer in optimizers for variable in optimizer.variables]

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return 0 if self.mode == "eager" else int(self._function.experimental_get_tracing_count())

    def warm_up(self, batch: Mapping[str, NDArray[Any]], order: NDArray[np.int32] | None) -> float:
        """Compile for batches of this shape; changes nothing.

        Returns: seconds it took.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        started = time.perf_counter()
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        coefficients["lr"] = float(self.optimizer.learning_rate.numpy())
        coefficients |= {phase.lr: float(phase.optimizer.learning_rate.numpy()) for phase in self._spec.phases}
        self(batch, order, coefficients, max_steps=0)
        took_s = time.perf_counter() - started
        _log.info("update compiled as %s (%s) in %.1f s", self.mode, self._reason, took_s)
        return took_s

    def __call__(
        self,
        batch: Mapping[str, NDArray[Any]],
        order: NDArray[np.int32] | None,
        coefficients: Mapping[str, float],
        *,
        max_steps: int | None = None,
    ) -> tuple[dict[str, float], bool]:
        """Run one update.

        Falls back to a plain graph, with a warning, where XLA was picked by `auto` and can't compile the network, or
        what it compiled can't be kept or taken from where it is kept.

        Args:
            batch: arrays with the same first dimension.
            order: int32 [K, M]: indices of each of K minibatches; None where the batch is stacked.
            coefficients: by the names of the spec.
            max_steps: at most so many minibatches; None = all K.
        Returns: metrics, averaged over the minibatches that were run, with "num_sgd_steps", without those of phases
            that were never due; and whether the update held. If it did not, weights and optimisers are what they were.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        size = len(next(iter(batch.values())))
        is_new = size not in self._sizes
        if is_new and self._sizes:
            _log.info("compiling the update for batches of %d", size)
        self._sizes.add(size)
        if is_new and self.mode == "xla":
            _begin_round_number()
        values = np.array([coefficients[name] for name in self._spec.coefficient_names], np.float32)
        num_minibatches = size if order is None else len(order)
        limit = np.int32(num_minibatches if max_steps is None else max_steps)
        arguments = (
            {name: tf.convert_to_tensor(array) for name, array in batch.items()},
            None if order is None else tf.convert_to_tensor(order),
            tf.convert_to_tensor(values),
            tf.convert_to_tensor(limit),
        )
        try:
            results, rows = self._function(*arguments)
            results = results.numpy()
        except tf.errors.OpError as error:
            if self.mode != "xla" or not is_new:
                raise
            self._do_without_xla(error)
            results, rows = self._function(*arguments)
            results = results.numpy()
        self.rows = None if rows is None else rows.numpy()
        ok, steps, *sums = results.tolist()
        own = len(self._metric_names)
        metrics = {name: total / max(steps, 1.0) for name, total in zip(self._metric_names, sums[:own], strict=True)}
        for phase, names in zip(self._spec.phases, self._phase_names, strict=True):
            given, own = sums[own : own + len(names)], own + len(names)
            if times := phase.times(int(steps), int(coefficients.get(STEPS_BEFORE, 0))):
                metrics |= {name: total / times for name, total in zip(names, given, strict=True)}
        metrics["num_sgd_steps"] = steps
        return metrics, bool(ok)

    def _do_without_xla(self, error: tf.errors.OpError) -> None:
        sentence = str(error).splitlines()[0]
        if self._xla == "on":
            raise ConfigError(
                f"XLA can't compile this network: {sentence}", key="xla", value="on", hint="Set xla: auto or off."
            ) from error
        _log.warning("XLA can't compile this network (%s); its update runs as a plain graph, slower", sentence)
        self.mode, self._reason = "graph", "XLA can't compile it"
        self._function = self._compiled()

    def _compiled(self) -> Any:  # Any: a tf.function
        if self.mode == "eager":
            return self._run
        return tf.function(self._run, autograph=False, jit_compile=True if self.mode == "xla" else None)

    def _run(
        self, batch: Tensors, order: tf.Tensor | None, values: tf.Tensor, limit: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        names = self._spec.coefficient_names
        coefficients = {name: values[index] for index, name in enumerate(names)}
        self.optimizer.learning_rate.assign(coefficients["lr"])
        for phase in self._spec.phases:
            phase.optimizer.learning_rate.assign(coefficients[phase.lr])
        changed = [*self._trained, *self.optimizer_variables, *self._spec.followers]
        before = [tf.identity(tf.convert_to_tensor(variable)) for variable in changed]
        zeros = tf.zeros([len(self._metric_names) + sum(map(len, self._phase_names))])

        def body(
            step: tf.Tensor, ok: tf.Tensor, go_on: tf.Tensor, sums: tf.Tensor, *rows: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            index = step if order is None else order[step]
            minibatch = {name: tf.gather(column, index) for name, column in batch.items()}
            fine, enough, metrics, own_rows = self._sgd_step(step, minibatch, coefficients)
            if self._spec.follow is not None:
                self._spec.follow(step, coefficients)
            written = [tf.tensor_scatter_nd_update(rows[0], [[step]], [own_rows])] if rows else []
            return step + 1, fine, ~enough, sums + metrics, *written

        first = next(iter(batch.values()))
        all_rows = [tf.zeros(first.shape[:2] if order is None else order.shape)] if self._spec.gives_rows else []
        steps, ok, _, sums, *all_rows = tf.while_loop(
            lambda step, ok, go_on, *others: (step < limit) & ok & go_on,
            body,
            (tf.constant(0), tf.constant(True), tf.constant(True), zeros, *all_rows),
            parallel_iterations=1,
        )
        for variable, old in zip(changed, before, strict=True):
            variable.assign(tf.where(ok, tf.convert_to_tensor(variable), old))
        figures = tf.concat([[tf.cast(ok, tf.float32)], [tf.cast(steps, tf.float32)], sums], axis=0)
        return figures, all_rows[0] if all_rows else None

    def _sgd_step(
        self, step: tf.Tensor, minibatch: Tensors, coefficients: Tensors
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """One step with its phases: whether all was finite, whether to stop here, the metrics, and what rows have."""
        spec = self._spec
        found, ordered = self._descend(
            spec.loss, spec.metric_names, self._variables, self.optimizer, minibatch, coefficients
        )
        enough = tf.constant(False)
        if spec.stop_when is not None:
            metric, coefficient = spec.stop_when
            enough = found[metric] > coefficients[coefficient]
        given, figures = minibatch | found, [ordered]
        for phase, names in zip(spec.phases, self._phase_names, strict=True):
            run = partial(
                self._descend, phase.loss, phase.metric_names, phase.variables, phase.optimizer, given, coefficients
            )
            if phase.every == 1:
                more, ordered = run()
                given = given | more
            else:
                made = tf.cast(coefficients[STEPS_BEFORE], tf.int32) + step + 1
                zeros = tf.zeros([len(names)])
                ordered = tf.cond(tf.equal(made % phase.every, 0), lambda: run()[1], lambda: zeros)  # noqa: B023
            figures.append(ordered)
        metrics = tf.concat(figures, axis=0)
        return tf.reduce_all(tf.math.is_finite(metrics)), enough, metrics, found.get(ROWS)

    def _descend(
        self,
        loss_function: LossFunction,
        metric_names: tuple[str, ...],
        variables: Sequence[Any],
        optimizer: Any,
        minibatch: Tensors,
        coefficients: Tensors,
    ) -> tuple[Tensors, tf.Tensor]:
        """One optimiser step: all that the loss gave, and the metrics in order with loss and norm of the gradient."""
        with tf.GradientTape() as tape:
            loss, found = loss_function(minibatch, coefficients)
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        norm = tf.linalg.global_norm(gradients)
        if self._grad_clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._grad_clip, use_norm=norm)
        optimizer.apply(gradients, variables)
        return found, tf.stack([*(found[name] for name in metric_names), loss, norm])


def _begin_round_number() -> None:
    """Let what is traced next have the same names in each run.

    TensorFlow numbers all that it makes in a process, and finds compiled code again by names with such numbers in them
    (`aiorl.learner.compilation_cache`); a resumed run makes more before it compiles than a new one.
    """
    count = getattr(ops, "uid", None)  # no public name: without it, a resumed run may compile once more
    while count is not None and count() % _ROUND:
        pass


def unpacked(minibatch: Tensors, buffers: BatchBuffers, *, time_major: bool = False) -> Tensors:
    """The columns of a minibatch by name, each with its own shape and dtype.

    Args:
        minibatch: arrays gathered from a batch of `buffers`.
        buffers: where it came from.
        time_major: sequences [M, T, ...] are turned into [T, M, ...]; those of sequences stay [M, ...].
    """
    packed = _time_major(minibatch[PACKED]) if time_major else minibatch[PACKED]
    columns: Tensors = {spec.name: minibatch[spec.name] for spec in buffers.of_sequences}
    for spec in buffers.columns:
        if not spec.is_packed:
            own = minibatch[spec.name]
            columns[spec.name] = _time_major(own) if time_major else own
            continue
        place = buffers.slices[spec.name]
        column = packed[..., place] if spec.shape else packed[..., place.start]
        columns[spec.name] = tf.bitcast(column, tf.int32) if spec.dtype == "int32" else column
    return columns


def _time_major(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])
