"""One update, or one gradient, as one compiled function: all epochs, minibatches and optimiser steps.

The function gets the whole train batch, the order in which rows are visited, and every coefficient as a tensor, so
that nothing a schedule changes makes it compile again. If a loss, a metric or a gradient is not finite, an update puts
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
from numpy.typing import NDArray

from aiorl.errors import ConfigError
from aiorl.learning.lazy import Tensors, tf

_log = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off", "eager"]

_ROUND = 100_000  # more than is made before; takes some milliseconds to reach


class CompiledFunction:
    """A function of tensors that is compiled at its first call, and once for each size of batches.

    Attributes:
        mode: "xla", "graph" or "eager", as chosen; final after the first call.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], variables: Sequence[Any], xla: Mode, name: str) -> None:
        """Nothing is compiled yet.

        Args:
            run: gives tensors, or None.
            variables: that it is about.
            xla: auto takes XLA unless there are convolutions, which are faster without on a CPU; eager compiles
                nothing, so that a debugger may step through.
            name: what logs call it.
        """
        self._run = run
        self._xla = xla
        self._name = name
        convolutions = any(len(variable.shape) >= 4 for variable in variables)  # kernels [H, W, in, out]
        self.mode: Literal["xla", "graph", "eager"] = "xla"
        if xla == "eager":
            self.mode = "eager"
        elif xla == "off" or (xla == "auto" and convolutions):
            self.mode = "graph"
        self._reason = "as set" if xla != "auto" else "convolutions" if convolutions else "dense layers"
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return 0 if self.mode == "eager" else int(self._function.experimental_get_tracing_count())

    def __call__(self, size: int, *arguments: Any) -> list[NDArray[Any] | None]:
        """Run it.

        Falls back to a plain graph, with a warning, where XLA was picked by `auto` and can't compile the function, or
        what it compiled can't be kept or taken from where it is kept.

        Args:
            size: of the batch: for another one it is compiled anew.
            arguments: of the function.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        is_new = size not in self._sizes
        if is_new and self._sizes:
            _log.info("compiling the %s for batches of %d", self._name, size)
        self._sizes.add(size)
        if is_new and self.mode == "xla":
            _begin_round_number()
        try:
            return self._results(arguments)
        except tf.errors.OpError as error:
            if self.mode != "xla" or not is_new:
                raise
            self._do_without_xla(error)
            return self._results(arguments)

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Compile it by a call that changes nothing."""
        started = time.perf_counter()
        run()
        took_s = time.perf_counter() - started
        _log.info("%s compiled as %s (%s) in %.1f s", self._name, self.mode, self._reason, took_s)

    def _results(self, arguments: Sequence[Any]) -> list[NDArray[Any] | None]:
        return [None if result is None else result.numpy() for result in self._function(*arguments)]

    def _do_without_xla(self, error: tf.errors.OpError) -> None:
        sentence = str(error).splitlines()[0]
        if self._xla == "on":
            raise ConfigError(
                f"XLA can't compile this network: {sentence}", key="xla", value="on", hint="Set xla: auto or off."
            ) from error
        _log.warning(
            "XLA can't compile this network (%s); its %s runs as a plain graph, slower", sentence, self._name
        )  # fmt: skip
        self.mode, self._reason = "graph", "XLA can't compile it"
        self._function = self._compiled()

    def _compiled(self) -> Any:  # Any: a tf.function
        if self.mode == "eager":
            return self._run
        return tf.function(self._run, autograph=False, jit_compile=True if self.mode == "xla" else None)


def _begin_round_number() -> None:
    """Give what is traced next the same names in each run.

    TensorFlow numbers all that it makes in a process, and finds compiled code again by names with these numbers
    (`aiorl.learning.compilation_cache`). A resumed run makes more before it compiles than a new one.
    """
    from tensorflow.python.framework import ops

    count = getattr(ops, "uid", None)  # no public name: without it, a resumed run may compile once more
    while count is not None and count() % _ROUND:
        pass


LossFunction = Callable[[Tensors, Tensors], tuple["tf.Tensor", Tensors]]
"""(minibatch, coefficients) -> (loss, metrics), all scalars; the metrics by the names the spec lists.

Where the spec says ``gives_rows``, there is one result more, ROWS, which has one number for each row."""

Gradients = Callable[[Tensors, Tensors], tuple[list["tf.Tensor"], "tf.Tensor", Tensors]]
"""(minibatch, coefficients) -> (gradients in the order of the variables, loss, metrics)."""

ROWS = "rows"
_LAST_EPOCH = "last_epoch"
STEPS_BEFORE = "steps_before"
"""Coefficient: the number of steps made before this update, from which a phase with `every` counts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A further optimiser step within each step, of other variables by a loss of their own, after those before it.

    Where it is not due, its variables and its optimiser rest.

    Attributes:
        name: its loss is reported as "NAME_loss", the norm of its gradient as "NAME_grad_gnorm".
        loss: of the minibatch, which also has by name the tensors that earlier losses returned and that are no metrics.
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
        coefficient_names: numbers that may change with each update; "lr" is among them.
        stop_when: (metric, limit): the update ends after a minibatch whose metric is above the limit.
        last_epoch: (metric, epochs): steps are so many equal passes over a batch, and the metric's mean over the last
            one that was begun is reported, too, as "METRIC_last_epoch".
        is_stacked: batches come as minibatches, [K, M, ...], and not as rows that an order puts together.
        gives_rows: `loss` gives a number for each row.
        followers: variables that `follow` changes, for example the weights of a target network.
        follow: called with the number of steps made before this one and the coefficients, after each step.
        prepare: changes the columns of each minibatch first; None leaves them as they are.
        phases: further optimiser steps within each step, one after the other.
        begin: (batch, coefficients) -> the batch that minibatches are taken from; called once, before the first step.
    """

    loss: LossFunction
    metric_names: tuple[str, ...]
    coefficient_names: tuple[str, ...]
    stop_when: tuple[str, float] | None = None
    last_epoch: tuple[str, int] | None = None
    is_stacked: bool = False
    gives_rows: bool = False
    followers: tuple[Any, ...] = ()
    follow: Callable[[tf.Tensor, Tensors], None] | None = None
    phases: tuple[Phase, ...] = ()
    prepare: Callable[[Tensors], Tensors] | None = None
    begin: Callable[[Tensors, Tensors], Tensors] | None = None


class CompiledUpdate:
    """The compiled function and what it changes: variables and optimiser.

    Attributes:
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
        xla: Mode = "auto",
        gradients: Gradients | None = None,
    ) -> None:
        """Prepare the update; it is compiled at its first call.

        Args:
            spec: the loss and its names.
            variables: to train.
            optimizer: built for them here.
            grad_clip: largest global norm of a gradient; None = not clipped.
            xla: see `CompiledFunction`.
            gradients: of a minibatch; None = those of the spec's loss.
        """
        self._spec = spec
        self._variables = variables
        self.optimizer = optimizer
        self._grad_clip = grad_clip
        self._gradients = gradients
        optimizer.build(variables)
        for phase in spec.phases:
            phase.optimizer.build(phase.variables)
        self._trained = [*variables, *(variable for phase in spec.phases for variable in phase.variables)]
        self._metric_names = (*spec.metric_names, "loss", "grad_gnorm")
        self._phase_names = [
            (*phase.metric_names, f"{phase.name}_loss", f"{phase.name}_grad_gnorm") for phase in spec.phases
        ]
        self._function = CompiledFunction(self._run, self._trained, xla, "update")
        self._gradient_function = CompiledFunction(self._run_gradient, variables, xla, "gradient")

    @property
    def mode(self) -> str:
        """How it is compiled: "xla", "graph" or "eager"; final after `warm_up`."""
        return self._function.mode

    @property
    def optimizer_variables(self) -> list[Any]:
        """Those of all optimisers, in an order that doesn't change from run to run."""
        optimizers = [self.optimizer, *(phase.optimizer for phase in self._spec.phases)]
        return [variable for optimizer in optimizers for variable in optimizer.variables]

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far, for updates and for gradients."""
        return self._function.traces + self._gradient_function.traces

    def warm_up(self, batch: Mapping[str, NDArray[Any]], order: NDArray[np.int32] | None) -> None:
        """Compile for batches of this shape; changes nothing.

        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        coefficients["lr"] = float(self.optimizer.learning_rate.numpy())
        coefficients |= {phase.lr: float(phase.optimizer.learning_rate.numpy()) for phase in self._spec.phases}
        self._function.warm_up(partial(self, batch, order, coefficients, max_steps=0))

    def __call__(
        self,
        batch: Mapping[str, NDArray[Any]],
        order: NDArray[np.int32] | None,
        coefficients: Mapping[str, float],
        *,
        max_steps: int | None = None,
    ) -> tuple[dict[str, float], bool]:
        """Run one update; see `CompiledFunction` for what becomes of networks that XLA can't compile.

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
        limit = np.int32((size if order is None else len(order)) if max_steps is None else max_steps)
        results, self.rows = self._function(
            size,
            *self._tensors(batch, coefficients),
            None if order is None else tf.convert_to_tensor(order),
            tf.convert_to_tensor(limit),
        )
        assert results is not None
        ok, steps, *sums = results.tolist()
        own = len(self._metric_names)
        metrics = {name: total / max(steps, 1.0) for name, total in zip(self._metric_names, sums[:own], strict=True)}
        for phase, names in zip(self._spec.phases, self._phase_names, strict=True):
            given, own = sums[own : own + len(names)], own + len(names)
            if times := phase.times(int(steps), int(coefficients.get(STEPS_BEFORE, 0))):
                metrics |= {name: total / times for name, total in zip(names, given, strict=True)}
        metrics["num_sgd_steps"] = steps
        if self._spec.last_epoch is not None and steps:
            name, epochs = self._spec.last_epoch
            metrics[f"{name}_last_epoch"] = sums[-1] / ((steps - 1) % max(limit // epochs, 1) + 1)
        return metrics, bool(ok)

    def gradient(
        self, batch: Mapping[str, NDArray[Any]], coefficients: Mapping[str, float]
    ) -> list[NDArray[np.float32]]:
        """Compute the gradients of the loss over a batch, all of whose rows are one minibatch; changes nothing.

        Returns: the metrics in the order of the spec with the loss as the last, then the gradient of each variable.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        found = self._gradient_function(len(next(iter(batch.values()))), *self._tensors(batch, coefficients))
        return [np.asarray(array) for array in found]

    def warm_up_gradient(self, batch: Mapping[str, NDArray[Any]]) -> None:
        """Compile `gradient` for batches of this shape.

        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        self._gradient_function.warm_up(partial(self.gradient, batch, coefficients))

    def _run_gradient(self, batch: Tensors, values: tf.Tensor) -> list[tf.Tensor]:
        batch, coefficients = self._begun(batch, values)
        gradients, loss, found = gradients_of(self._spec.loss, self._variables)(batch, coefficients)
        metrics = tf.stack([*(found[name] for name in self._spec.metric_names), loss])
        return [metrics, *map(tf.convert_to_tensor, gradients)]

    def _tensors(self, batch: Mapping[str, NDArray[Any]], coefficients: Mapping[str, float]) -> tuple[Tensors, Any]:
        """Arguments of a compiled function: the batch, and the coefficients in their order."""
        values = np.array([coefficients[name] for name in self._spec.coefficient_names], np.float32)
        return {name: tf.convert_to_tensor(array) for name, array in batch.items()}, tf.convert_to_tensor(values)

    def _begun(self, batch: Tensors, values: tf.Tensor) -> tuple[Tensors, Tensors]:
        """The batch that minibatches are taken from, and the coefficients by name."""
        coefficients = {name: values[index] for index, name in enumerate(self._spec.coefficient_names)}
        return batch if self._spec.begin is None else self._spec.begin(batch, coefficients), coefficients

    def _run(
        self, batch: Tensors, values: tf.Tensor, order: tf.Tensor | None, limit: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        batch, coefficients = self._begun(batch, values)
        self.optimizer.learning_rate.assign(coefficients["lr"])
        for phase in self._spec.phases:
            phase.optimizer.learning_rate.assign(coefficients[phase.lr])
        changed = [*self._trained, *self.optimizer_variables, *self._spec.followers]
        before = [tf.identity(tf.convert_to_tensor(variable)) for variable in changed]
        zeros = tf.zeros([len(self._metric_names) + sum(map(len, self._phase_names))])

        def body(
            step: tf.Tensor, ok: tf.Tensor, go_on: tf.Tensor, sums: tf.Tensor, others: Tensors
        ) -> tuple[tf.Tensor | Tensors, ...]:
            index = step if order is None else order[step]
            minibatch = {name: tf.gather(column, index) for name, column in batch.items()}
            if self._spec.prepare is not None:
                minibatch = self._spec.prepare(minibatch)
            fine, enough, metrics, own_rows = self._sgd_step(step, minibatch, coefficients)
            if self._spec.follow is not None:
                self._spec.follow(step, coefficients)
            more = {}
            if ROWS in others:
                more[ROWS] = tf.tensor_scatter_nd_update(others[ROWS], [[step]], [own_rows])
            if self._spec.last_epoch is not None:
                metric, epochs = self._spec.last_epoch
                is_first = tf.equal(step % tf.maximum(limit // epochs, 1), 0)
                own = metrics[self._metric_names.index(metric)]
                more[_LAST_EPOCH] = own + tf.where(is_first, 0.0, others[_LAST_EPOCH])
            return step + 1, fine, ~enough, sums + metrics, more

        first = next(iter(batch.values()))
        others = {}
        if self._spec.gives_rows:
            others[ROWS] = tf.zeros(first.shape[:2] if order is None else order.shape)
        if self._spec.last_epoch is not None:
            others[_LAST_EPOCH] = tf.constant(0.0)
        steps, ok, _, sums, others = tf.while_loop(
            lambda step, ok, go_on, *_: (step < limit) & ok & go_on,
            body,
            (tf.constant(0), tf.constant(True), tf.constant(True), zeros, others),
            parallel_iterations=1,
        )
        for variable, old in zip(changed, before, strict=True):
            variable.assign(tf.where(ok, tf.convert_to_tensor(variable), old))
        last = [others[_LAST_EPOCH]] if _LAST_EPOCH in others else []
        figures = tf.concat([[tf.cast(ok, tf.float32)], [tf.cast(steps, tf.float32)], sums, last], axis=0)
        return figures, others.get(ROWS)

    def _sgd_step(
        self, step: tf.Tensor, minibatch: Tensors, coefficients: Tensors
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """One step with its phases: whether all was finite, whether to stop here, the metrics, and what rows have."""
        spec = self._spec
        gradients = self._gradients or gradients_of(spec.loss, self._variables)
        found, ordered = self._descend(
            gradients, spec.metric_names, self._variables, self.optimizer, minibatch, coefficients
        )
        enough = tf.constant(False)
        if spec.stop_when is not None:
            metric, limit = spec.stop_when
            enough = found[metric] > limit
        given, figures = minibatch | found, [ordered]
        for phase, names in zip(spec.phases, self._phase_names, strict=True):
            gradients = gradients_of(phase.loss, phase.variables)
            run = partial(
                self._descend, gradients, phase.metric_names, phase.variables, phase.optimizer, given, coefficients
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
        gradients_of_minibatch: Gradients,
        metric_names: tuple[str, ...],
        variables: Sequence[Any],
        optimizer: Any,
        minibatch: Tensors,
        coefficients: Tensors,
    ) -> tuple[Tensors, tf.Tensor]:
        """One optimiser step: all that the loss gave, and the metrics in order with loss and norm of the gradient."""
        gradients, loss, found = gradients_of_minibatch(minibatch, coefficients)
        norm = tf.linalg.global_norm(gradients)
        if self._grad_clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._grad_clip, use_norm=norm)
        optimizer.apply(gradients, variables)
        return found, tf.stack([*(found[name] for name in metric_names), loss, norm])


def gradients_of(loss_function: LossFunction, variables: Sequence[Any]) -> Gradients:
    """The gradients of a loss, 0 for variables that it doesn't depend on."""

    def gradients(minibatch: Tensors, coefficients: Tensors) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        with tf.GradientTape() as tape:
            loss, found = loss_function(minibatch, coefficients)
        return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO), loss, found

    return gradients
