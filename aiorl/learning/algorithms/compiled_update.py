"""One update as one compiled function: all epochs, minibatches and optimiser steps.

The function receives the whole train batch, the order in which rows are visited and every
coefficient as tensors, so a schedule never causes another compilation. If a loss, a metric or a
gradient is not finite, the update restores the weights and the optimiser before it returns.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiorl.errors import ConfigError
from aiorl.learning.lazy import Tensors, tf

if TYPE_CHECKING:
    from aiorl.learning.models.networks import Network

_log = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off", "eager"]

_ALIGN_BYTES = 64
"""Alignment that TensorFlow's kernels expect."""
_ROUND = 100_000  # above all numbers used before; counting up to it takes a few milliseconds


def shareable_zeros(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros in memory that a tensor can share with the array."""
    memory = np.zeros(math.prod(shape) * np.dtype(dtype).itemsize + _ALIGN_BYTES, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGN_BYTES)


class CompiledFunction:
    """Function of tensors that is compiled at its first call, and again for each batch size.

    Attributes:
        mode: "xla", "graph" or "eager"; final after the first call.
    """

    def __init__(
        self, run: Callable[..., Sequence[Any]], variables: Sequence[Any], xla: Mode, name: str
    ) -> None:
        """Store the function; nothing is compiled yet.

        Args:
            run: function that returns tensors, or None in their place.
            variables: variables that the function uses.
            xla: "auto" uses XLA unless there are convolutions, which are faster without it on a
                CPU. "eager" compiles nothing, so that a debugger can step through the function.
            name: name of the function in logs.
        """
        self._run = run
        self._xla = xla
        self._name = name
        convolutions = any(
            len(variable.shape) >= 4 for variable in variables
        )  # kernels [H, W, in, out]
        self.mode: Literal["xla", "graph", "eager"] = "xla"
        if xla == "eager":
            self.mode = "eager"
        elif xla == "off" or (xla == "auto" and convolutions):
            self.mode = "graph"
        self._reason = (
            "as set" if xla != "auto" else "convolutions" if convolutions else "dense layers"
        )
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return 0 if self.mode == "eager" else int(self._function.experimental_get_tracing_count())

    def __call__(self, size: int, *arguments: Any) -> list[NDArray[Any] | None]:
        """Run the function.

        If `auto` picked XLA, the function falls back to a plain graph, with a warning, when XLA
        can't compile it or the compilation cache can't be written or read.

        Args:
            size: size of the batch; each new size is compiled.
            arguments: arguments of the function.

        Raises:
            ConfigError: XLA was requested and can't compile the function.
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
        """Compile the function through `run`, a call that changes nothing."""
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
                f"XLA can't compile this network: {sentence}",
                key="xla",
                value="on",
                hint="Set xla: auto or off.",
            ) from error
        _log.warning(
            "XLA can't compile this network (%s); its %s runs as a plain graph, which is slower",
            sentence,
            self._name,
        )
        self.mode = "graph"
        self._reason = "XLA can't compile it"
        self._function = self._compiled()

    def _compiled(self) -> Any:  # Any: a tf.function
        if self.mode == "eager":
            return self._run
        return tf.function(
            self._run, autograph=False, jit_compile=True if self.mode == "xla" else None
        )


def _begin_round_number() -> None:
    """Make the names that TensorFlow gives to the next trace the same in every run.

    TensorFlow numbers everything created in a process, and the compilation cache looks compiled
    code up by names with these numbers (`aiorl.learning.compilation_cache`). A resumed run creates
    more than a new one before it compiles.
    """
    from tensorflow.python.framework import ops

    count = getattr(ops, "uid", None)  # not public; if it is gone, a resumed run may compile again
    while count is not None and count() % _ROUND:
        pass


LossFunction = Callable[[Tensors, Tensors], tuple["tf.Tensor", Tensors]]
"""(minibatch, coefficients) -> (loss, metrics), all scalars; the spec lists the names of the
metrics.

With ``gives_rows`` in the spec, the metrics also contain ROWS, with one number for each row.
"""

Gradients = Callable[[Tensors, Tensors], tuple[list["tf.Tensor"], "tf.Tensor", Tensors]]
"""(minibatch, coefficients) -> (gradients in the order of the variables, loss, metrics)."""

ROWS = "rows"
_LAST_EPOCH = "last_epoch"
STEPS_BEFORE = "steps_before"
"""Coefficient: steps made before this update. A phase with `every` counts from it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Optimiser step of some variables by a loss of their own, made within each step after the
    earlier phases.

    When the phase is not due, its variables and its optimiser don't change.

    Attributes:
        name: prefix of the reported metrics "NAME_loss" and "NAME_grad_gnorm" (norm of the
            gradient). "" for the spec's own loss, reported as "loss" and "grad_gnorm".
        loss: loss of the minibatch. The minibatch also contains the tensors that earlier losses
            returned in addition to metrics.
        metric_names: metrics that `loss` reports.
        variables: variables to train.
        optimizer: Keras optimiser; it is built for the variables here.
        lr: name of the coefficient that is the learning rate.
        every: the phase is due once every this many steps, counted from the coefficient
            STEPS_BEFORE.
    """

    name: str
    loss: LossFunction
    metric_names: tuple[str, ...]
    variables: Sequence[Any]
    optimizer: Any  # a Keras optimiser; Keras ships no types
    lr: str = "lr"
    every: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics of the phase."""
        prefix = self.name and f"{self.name}_"
        return (*self.metric_names, f"{prefix}loss", f"{prefix}grad_gnorm")

    def times(self, steps: int, before: int) -> int:
        """Return the number of times that the phase is due in `steps` steps that follow `before`
        earlier ones.
        """
        return (before + steps) // self.every - before // self.every


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """Description of an update to compile.

    Attributes:
        loss: loss of one minibatch.
        metric_names: metrics that `loss` reports; "loss" and "grad_gnorm" are added.
        coefficient_names: names of the numbers that can change with each update, including "lr".
        stop_when: (metric, limit): the update ends after a minibatch whose metric exceeds the
            limit.
        last_epoch: (metric, epochs): the steps are this many equal passes over a batch. The
            metric's mean over the last pass that began is also reported, as "METRIC_last_epoch".
        is_stacked: True if a batch is a stack of minibatches [K, M, ...]; False if it has rows from
            which an order makes minibatches.
        gives_rows: True if `loss` returns a number for each row.
        targets: target networks to update, counted from the coefficient STEPS_BEFORE.
        tau: share by which they move, see `TargetNetwork.take_over`.
        target_every: minibatches between two updates of the target networks.
        prepare: function that changes the columns of each minibatch before the loss; None =
            unchanged.
        phases: further optimiser steps within each step, in order.
        begin: (batch, coefficients) -> batch from which minibatches are taken; called once, before
            the first step.
    """

    loss: LossFunction
    metric_names: tuple[str, ...]
    coefficient_names: tuple[str, ...]
    stop_when: tuple[str, float] | None = None
    last_epoch: tuple[str, int] | None = None
    is_stacked: bool = False
    gives_rows: bool = False
    targets: tuple[TargetNetwork, ...] = ()
    tau: float = 1.0
    target_every: int = 1
    phases: tuple[Phase, ...] = ()
    prepare: Callable[[Tensors], Tensors] | None = None
    begin: Callable[[Tensors, Tensors], Tensors] | None = None


class CompiledUpdate:
    """Compiled function along with the variables and optimisers that it changes.

    Attributes:
        optimizer: Keras optimiser of the loss; phases have their own.
        rows: numbers [K, M] that the loss of the newest update returned for each row; 0 for
            minibatches that were not run.
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
        shares_memory: bool = False,
    ) -> None:
        """Prepare the update; it is compiled at its first call.

        Args:
            spec: loss and names.
            variables: variables to train.
            optimizer: optimiser; it is built for the variables here.
            grad_clip: largest global norm of a gradient; None = not clipped.
            xla: see `CompiledFunction`.
            gradients: function that returns the gradients of a minibatch; None = gradients of the
                spec's loss.
            shares_memory: read `shareable_zeros` where they are, on a CPU; no one must write to
                them during an update.
        """
        self._spec = spec
        self.optimizer = optimizer
        self._grad_clip = grad_clip
        self._gradients = gradients or gradients_of(spec.loss, variables)
        self._phases = (Phase("", spec.loss, spec.metric_names, variables, optimizer), *spec.phases)
        for phase in self._phases:
            phase.optimizer.build(phase.variables)
        self._trained = [variable for phase in self._phases for variable in phase.variables]
        self._shares = shares_memory and "CPU" in self._trained[0].device
        self._function = CompiledFunction(self._run, self._trained, xla, "update")

    @property
    def mode(self) -> str:
        """Mode of compilation: "xla", "graph" or "eager"; final after `warm_up`."""
        return self._function.mode

    @property
    def optimizer_variables(self) -> list[Any]:
        """Variables of all optimisers, always in the same order."""
        return [variable for phase in self._phases for variable in phase.optimizer.variables]

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return self._function.traces

    def warm_up(self, batch: Mapping[str, NDArray[Any]], order: NDArray[np.int32] | None) -> None:
        """Compile for batches of this shape; changes nothing.

        Raises:
            ConfigError: XLA was requested and can't compile the update.
        """
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        coefficients |= {
            phase.lr: float(phase.optimizer.learning_rate.numpy()) for phase in self._phases
        }
        self._function.warm_up(partial(self, batch, order, coefficients, max_steps=0))

    def __call__(
        self,
        batch: Mapping[str, NDArray[Any]],
        order: NDArray[np.int32] | None,
        coefficients: Mapping[str, float],
        *,
        max_steps: int | None = None,
    ) -> tuple[dict[str, float], bool]:
        """Run one update. `CompiledFunction` says what happens to networks that XLA can't compile.

        Args:
            batch: arrays with the same first dimension.
            order: int32 [K, M], the indices of each of K minibatches; None if the batch is stacked.
            coefficients: values by the names in the spec.
            max_steps: maximum number of minibatches; None = all K.

        Returns:
            (metrics, held). Metrics are means over the minibatches that were run, along with
            "num_sgd_steps"; those of phases that were never due are missing. `held` is False if the
            update was skipped; weights and optimisers are then unchanged.

        Raises:
            ConfigError: XLA was requested and can't compile the update.
        """
        size = len(next(iter(batch.values())))
        limit = np.int32(
            (size if order is None else len(order)) if max_steps is None else max_steps
        )
        rest = None if order is None else tf.convert_to_tensor(order), tf.convert_to_tensor(limit)
        results, self.rows = self._function(size, *self.tensors(batch, coefficients), *rest)
        assert results is not None
        ok, steps, *sums = results.tolist()
        metrics: dict[str, float] = {}
        for phase in self._phases:
            times = phase.times(int(steps), int(coefficients.get(STEPS_BEFORE, 0)))
            if times or not phase.name:
                metrics |= {
                    name: total / max(times, 1)
                    for name, total in zip(phase.names, sums, strict=False)
                }
            sums = sums[len(phase.names) :]
        metrics["num_sgd_steps"] = steps
        if self._spec.last_epoch is not None and steps:
            name, epochs = self._spec.last_epoch
            metrics[f"{name}_last_epoch"] = sums[0] / ((steps - 1) % max(limit // epochs, 1) + 1)
        return metrics, bool(ok)

    def tensors(
        self, batch: Mapping[str, NDArray[Any]], coefficients: Mapping[str, float]
    ) -> tuple[Tensors, Any]:
        """Return the arguments of a compiled function: the batch, and the coefficients in order."""
        values = np.array([coefficients[name] for name in self._spec.coefficient_names], np.float32)
        return {name: self._tensor(array) for name, array in batch.items()}, tf.convert_to_tensor(
            values
        )

    def _tensor(self, array: NDArray[Any]) -> tf.Tensor:
        if (
            self._shares
            and array.flags.carray
            and not array.ctypes.data % _ALIGN_BYTES
            and array.dtype.kind in "fiu"
        ):
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
        return tf.convert_to_tensor(array)

    def begun(self, batch: Tensors, values: tf.Tensor) -> tuple[Tensors, Tensors]:
        """Return the batch from which minibatches are taken, and the coefficients by name."""
        coefficients = {
            name: values[index] for index, name in enumerate(self._spec.coefficient_names)
        }
        return batch if self._spec.begin is None else self._spec.begin(
            batch, coefficients
        ), coefficients

    def _run(
        self, batch: Tensors, values: tf.Tensor, order: tf.Tensor | None, limit: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        batch, coefficients = self.begun(batch, values)
        for phase in self._phases:
            phase.optimizer.learning_rate.assign(coefficients[phase.lr])
        followers = [
            variable for target in self._spec.targets for variable in target.variables.values()
        ]
        changed = [*self._trained, *self.optimizer_variables, *followers]
        before = [tf.identity(tf.convert_to_tensor(variable)) for variable in changed]
        names = [name for phase in self._phases for name in phase.names]
        zeros = tf.zeros([len(names)])

        def body(
            step: tf.Tensor, ok: tf.Tensor, go_on: tf.Tensor, sums: tf.Tensor, others: Tensors
        ) -> tuple[tf.Tensor | Tensors, ...]:
            index = step if order is None else order[step]
            minibatch = {name: tf.gather(column, index) for name, column in batch.items()}
            if self._spec.prepare is not None:
                minibatch = self._spec.prepare(minibatch)
            fine, enough, metrics, own_rows = self._sgd_step(step, minibatch, coefficients)
            if self._spec.targets:
                _when_due(
                    self._spec.target_every,
                    step,
                    coefficients,
                    self._follow,
                    lambda: tf.constant(0),
                )
            more = {}
            if ROWS in others:
                more[ROWS] = tf.tensor_scatter_nd_update(others[ROWS], [[step]], [own_rows])
            if self._spec.last_epoch is not None:
                metric, epochs = self._spec.last_epoch
                is_first = tf.equal(step % tf.maximum(limit // epochs, 1), 0)
                own = metrics[names.index(metric)]
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
        figures = tf.concat(
            [[tf.cast(ok, tf.float32)], [tf.cast(steps, tf.float32)], sums, last], axis=0
        )
        return figures, others.get(ROWS)

    def _follow(self) -> tf.Tensor:
        for target in self._spec.targets:
            target.take_over(self._spec.tau)
        return tf.constant(0)

    def _sgd_step(
        self, step: tf.Tensor, minibatch: Tensors, coefficients: Tensors
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Make one step with its phases; return (all finite, stop here, metrics, numbers of the
        rows).
        """
        given = minibatch
        figures = []
        for phase in self._phases:
            run = partial(self._descend, phase, given, coefficients)
            if phase.every == 1:
                found, ordered = run()
                given = given | found
            else:
                zeros = tf.zeros([len(phase.names)])
                ordered = _when_due(
                    phase.every,
                    step,
                    coefficients,
                    lambda: run()[1],  # noqa: B023
                    lambda: zeros,  # noqa: B023
                )
            figures.append(ordered)
        enough = tf.constant(False)
        if self._spec.stop_when is not None:
            metric, limit = self._spec.stop_when
            enough = given[metric] > limit
        metrics = tf.concat(figures, axis=0)
        return tf.reduce_all(tf.math.is_finite(metrics)), enough, metrics, given.get(ROWS)

    def _descend(
        self, phase: Phase, minibatch: Tensors, coefficients: Tensors
    ) -> tuple[Tensors, tf.Tensor]:
        """Make one optimiser step; return the loss's tensors, and its metrics followed by loss and
        gradient norm.
        """
        compute = gradients_of(phase.loss, phase.variables) if phase.name else self._gradients
        gradients, loss, found = compute(minibatch, coefficients)
        norm = tf.linalg.global_norm(gradients)
        if self._grad_clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._grad_clip, use_norm=norm)
        phase.optimizer.apply(gradients, phase.variables)
        return found, tf.stack([*(found[name] for name in phase.metric_names), loss, norm])


def _when_due(
    every: int,
    step: tf.Tensor,
    coefficients: Tensors,
    run: Callable[[], Any],
    otherwise: Callable[[], Any],
) -> Any:
    """Run `run` once every `every` steps, counted from the coefficient STEPS_BEFORE, and otherwise
    `otherwise`.
    """
    if every == 1:
        return run()
    made = tf.cast(coefficients[STEPS_BEFORE], tf.int32) + step + 1
    return tf.cond(tf.equal(made % every, 0), run, otherwise)


def gradients_of(loss_function: LossFunction, variables: Sequence[Any]) -> Gradients:
    """Return a function that computes the gradients of a loss; they are 0 for variables that it
    doesn't use.
    """

    def gradients(
        minibatch: Tensors, coefficients: Tensors
    ) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        with tf.GradientTape() as tape:
            loss, found = loss_function(minibatch, coefficients)
        return (
            tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO),
            loss,
            found,
        )

    return gradients


def keras_optimizer(
    name: str, options: Mapping[str, Any], **own: Any
) -> Any:  # Any: Keras ships no types
    """Return a Keras optimiser.

    Args:
        name: name of its class, such as Adam.
        options: further arguments that the user set.
        **own: arguments for which the algorithm has keys.

    Raises:
        ConfigError: an option is also in `own`, or Keras rejects the options.
    """
    import keras

    for option in options:
        if option in own:
            raise ConfigError(
                f"optimizer.{option} can't be set: the algorithm has its own key for it.",
                key=f"optimizer.{option}",
                value=options[option],
            )
    try:
        return getattr(keras.optimizers, name)(**own, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras rejects these options for {name}: {error}.",
            key="optimizer",
            value=dict(options),
            hint=f"See https://keras.io/api/optimizers/{name.lower()}.",
        ) from error


class TargetNetwork:
    """Weights that follow those of a network.

    Attributes:
        network: network that learns; it can run with `tensors` instead of its own weights.
        variables: variables by the names of the network's.
    """

    def __init__(self, network: Network) -> None:
        """Begin with the current weights of `network`."""
        self.network = network
        self.variables: dict[str, Any] = {
            name: tf.Variable(variable, trainable=False)
            for name, variable in network.variables.items()
        }

    def tensors(self) -> Tensors:
        """Return the current weights by name, each of the shape in the network."""
        return {name: tf.convert_to_tensor(variable) for name, variable in self.variables.items()}

    def take_over(self, share: float = 1.0) -> None:
        """Copy the network's weights.

        Args:
            share: share of the way to move towards them; 1 makes a copy.
        """
        for name, variable in self.variables.items():
            online = tf.convert_to_tensor(self.network.variables[name])
            is_whole = (
                share == 1 or not online.dtype.is_floating
            )  # counters of custom layers can't be interpolated
            variable.assign(online if is_whole else variable + share * (online - variable))
