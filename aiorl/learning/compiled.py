"""One update as one compiled function: all epochs, minibatches and optimiser steps.

The function receives the whole train batch, the order in which rows are visited and every knob as
tensors, so a schedule never causes another compilation. If a loss, a metric or a gradient is not
finite, the update restores the weights and the optimiser before it returns.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from aiorl.config.schema import CommonConfig
from aiorl.data.columns import I32, Array
from aiorl.errors import ConfigError
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.steps import MAX_METRICS, Loop, guarded

_log = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off", "eager"]

_ALIGN_BYTES = 64
"""Alignment that TensorFlow's kernels expect."""
_ROUND = 100_000  # above all numbers used before; counting up to it takes a few milliseconds


def shareable_zeros(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return zeros in memory that a tensor can share with the array."""
    memory = np.zeros(math.prod(shape) * np.dtype(dtype).itemsize + _ALIGN_BYTES, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGN_BYTES)


def is_shareable(array: Array) -> bool:
    """Return True if a tensor can share the memory of `array`."""
    is_aligned = not array.ctypes.data % _ALIGN_BYTES
    return bool(array.flags.carray) and is_aligned and array.dtype.kind in "fiu"


class CompiledFunction:
    """Function of tensors that is compiled at its first call, and again for each batch size.

    Attributes:
        mode: "xla", "graph" or "eager"; final after the first call.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        variables: Sequence[Any],
        *,
        xla: Mode,
        name: str,
    ) -> None:
        """Store the function; nothing is compiled yet.

        Args:
            run: function that returns tensors.
            variables: variables that the function uses.
            xla: "auto" uses XLA unless there are convolutions, which are faster without it on a
                CPU. "eager" compiles nothing, so that a debugger can step through the function.
            name: name of the function in logs.
        """
        self._run = run
        self._xla = xla
        self._name = name
        self.mode: Literal["xla", "graph", "eager"] = "xla"
        self._reason = "as set"
        if xla == "eager":
            self.mode = "eager"
        elif xla == "off":
            self.mode = "graph"
        elif xla == "auto":
            self._reason = "dense layers"
            # kernels of convolutions are [H, W, in, out]
            if any(len(variable.shape) >= 4 for variable in variables):
                self.mode = "graph"
                self._reason = "convolutions"
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return 0 if self.mode == "eager" else int(self._function.experimental_get_tracing_count())

    def __call__(self, size: int, arguments: Sequence[Any]) -> list[Array]:
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
        manner = f"{self.mode} ({self._reason})"
        _log.info("%s compiled as %s in %.1f s", self._name, manner, took_s)

    def _results(self, arguments: Sequence[Any]) -> list[Array]:
        return [result.numpy() for result in self._function(*arguments)]

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


class Arguments:
    """Makes tensors of the arrays and the knobs of a call."""

    def __init__(self, knob_names: Sequence[str], *, shares_memory: bool) -> None:
        """Store how arguments are passed.

        Args:
            knob_names: numbers that can change with each call, including learning rates.
            shares_memory: read `shareable_zeros` where they are; no one must write to them during a
                call.
        """
        self._knob_names = tuple(knob_names)
        self._shares = shares_memory

    def tensors(self, columns: Mapping[str, Any], knobs: Mapping[str, float]) -> tuple[Any, Any]:
        """Return the columns as tensors, and the knobs as one tensor."""
        values = np.array([knobs[name] for name in self._knob_names], np.float32)
        return self._tensors(columns), tf.convert_to_tensor(values)

    def zeros(self) -> dict[str, float]:
        """Return 0 for each knob."""
        return dict.fromkeys(self._knob_names, 0.0)

    def by_name(self, values: tf.Tensor) -> Tensors:
        """Return the knobs as scalars, from the tensor that `tensors` returned."""
        return {name: values[index] for index, name in enumerate(self._knob_names)}

    def _tensors(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        # tf.nest does this too, and takes a noticeable part of a short call
        return {
            name: self._tensors(part) if isinstance(part, Mapping) else self._tensor(part)
            for name, part in columns.items()
        }

    def _tensor(self, array: Array) -> tf.Tensor:
        if self._shares and is_shareable(array):
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
        return tf.convert_to_tensor(array)


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of one call of a compiled update.

    Attributes:
        metrics: means of the metrics over the minibatches in which they were measured, with
            "num_sgd_steps"; metrics that were never measured are missing. Without any minibatch, all
            known ones are 0.
        is_kept: False if the update was skipped because a number was not finite; all variables are
            then unchanged.
        written: [K, M, ...] by name, columns to write back to where the minibatches were drawn.
    """

    metrics: dict[str, float]
    is_kept: bool
    written: dict[str, Array]


class CompiledUpdate:
    """Compiled loop of an update, along with the variables and optimisers that it changes.

    Attributes:
        arguments: makes tensors of the arrays and knobs of a call.
    """

    def __init__(
        self,
        loop: Loop,
        knob_names: Sequence[str],
        *,
        xla: Mode = "auto",
        shares_memory: bool = False,
    ) -> None:
        """Prepare the update; it is compiled at its first call.

        Args:
            loop: steps of the update.
            knob_names: numbers that can change with each call, including learning rates.
            xla: see `CompiledFunction`.
            shares_memory: read `shareable_zeros` where they are, on a CPU; no one must write to
                them during an update.
        """
        self._loop = loop
        self._guarded = guarded(loop)
        variables = loop.step.variables
        is_on_cpu = "CPU" in variables[0].device
        self.arguments = Arguments(knob_names, shares_memory=shares_memory and is_on_cpu)
        self._function = CompiledFunction(self._run, variables, xla=xla, name="update")

    @property
    def mode(self) -> str:
        """Mode of compilation: "xla", "graph" or "eager"; final after `warm_up`."""
        return self._function.mode

    @property
    def optimizers(self) -> Sequence[Any]:
        """Keras optimisers of the update, always in the same order."""
        return self._loop.step.optimizers

    @property
    def optimizer_variables(self) -> list[Any]:
        """Variables of all optimisers, always in the same order."""
        return self._loop.optimizer_variables

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return self._function.traces

    def warm_up(self, columns: Mapping[str, Any], order: I32 | None) -> None:
        """Compile for `columns` and an `order` of these shapes; changes nothing.

        Raises:
            ConfigError: XLA was requested and can't compile the update.
        """
        run = partial(self, columns, order, self.arguments.zeros(), max_steps=0)
        self._function.warm_up(run)

    def __call__(
        self,
        columns: Mapping[str, Any],
        order: I32 | None,
        knobs: Mapping[str, float],
        *,
        max_steps: int,
    ) -> CallResult:
        """Run one update. `CompiledFunction` says what happens to networks that XLA can't compile.

        Args:
            columns: arrays by name, or by policy id and name, all with the same first dimension.
            order: int32 [K, M], the rows of each of K minibatches; None if the arrays are stacks of
                minibatches [K, M, ...].
            knobs: values by the names given at the start.
            max_steps: maximum number of minibatches.

        Raises:
            ConfigError: XLA was requested and can't compile the update.
        """
        tensors, values = self.arguments.tensors(columns, knobs)
        first = next(iter(columns.values()))
        if isinstance(first, Mapping):  # several policies
            first = next(iter(first.values()))
        rows = None if order is None else tf.convert_to_tensor(order)
        limit = tf.convert_to_tensor(np.int32(max_steps))
        figures, *written = self._function(len(first), (tensors, values, rows, limit))
        is_kept, *measured = figures.tolist()
        return CallResult(
            metrics=self._metrics(*measured, max_steps=max_steps),
            is_kept=bool(is_kept),
            written=dict(zip(self._loop.write_back, written, strict=True)),
        )

    def _run(
        self,
        columns: Tensors,
        values: tf.Tensor,
        order: tf.Tensor | None,
        limit: tf.Tensor,
    ) -> list[tf.Tensor]:
        result = self._guarded(columns, self.arguments.by_name(values), order, limit)
        figures = tf.concat(
            [
                [tf.cast(result.is_finite, tf.float32)],
                [tf.cast(result.num_steps, tf.float32)],
                [result.last_epoch],
                tf.reshape(result.totals, [2 * MAX_METRICS]),
            ],
            axis=0,
        )
        return [figures, *result.written.values()]

    def _metrics(
        self, num_steps: float, last_epoch: float, *totals: float, max_steps: int
    ) -> dict[str, float]:
        """Return the metrics of a `CallResult`.

        Args:
            num_steps: minibatches made.
            last_epoch: sum of a metric over the last epoch.
            totals: sum and number of each metric, one after the other.
            max_steps: maximum number of minibatches.
        """
        loop = self._loop
        measured = zip(loop.table.names, totals[::2], totals[1::2], strict=False)
        metrics = {
            name: total / max(count, 1) for name, total, count in measured if count or not num_steps
        }
        metrics["num_sgd_steps"] = num_steps
        if loop.last_epoch_of and num_steps:
            per_epoch = max(max_steps // loop.num_epochs, 1)
            num_in_last = (int(num_steps) - 1) % per_epoch + 1
            metrics[f"{loop.last_epoch_of}_last_epoch"] = last_epoch / num_in_last
        return metrics


def keras_optimizer(
    name: str, options: Mapping[str, Any], **of_keys: Any
) -> Any:  # Any: Keras ships no types
    """Return a Keras optimiser.

    Args:
        name: name of its class, such as Adam.
        options: further arguments that the user set.
        **of_keys: arguments for which the algorithm has keys.

    Raises:
        ConfigError: an option is also in `of_keys`, or Keras rejects the options.
    """
    import keras

    for option in options:
        if option in of_keys:
            raise ConfigError(
                f"optimizer.{option} can't be set: the algorithm has its own key for it.",
                key=f"optimizer.{option}",
                value=options[option],
            )
    try:
        return getattr(keras.optimizers, name)(**of_keys, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras rejects these options for {name}: {error}.",
            key="optimizer",
            value=dict(options),
            hint=f"See https://keras.io/api/optimizers/{name.lower()}.",
        ) from error


def adam(config: CommonConfig, epsilon: float) -> Any:  # Any: a Keras optimiser
    """Return Adam with this `epsilon`, and the learning rate and the optimiser options of a
    `config`.
    """
    return keras_optimizer("Adam", config.optimizer, learning_rate=config.lr, epsilon=epsilon)


def adam_of_multiplier(config: CommonConfig, epsilon: float) -> Any:  # Any: a Keras optimiser
    """Return Adam with this `epsilon` for a single number that weighs losses.

    It takes the learning rate of a `config` and ignores the user's options, which are for networks.
    """
    return keras_optimizer("Adam", {}, learning_rate=config.lr, epsilon=epsilon)
