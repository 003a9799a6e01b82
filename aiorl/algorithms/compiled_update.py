"""One update as one compiled function: all epochs, minibatches and optimiser steps.

The function gets the whole train batch, the order in which rows are visited, and every coefficient as a tensor, so
that nothing a schedule changes makes it compile again. If a loss, a metric or a gradient is not finite, it puts
weights and optimiser back as they were before it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.algorithms.batch_buffers import PACKED, BatchBuffers
from aiorl.errors import ConfigError

__all__ = ["CompiledUpdate", "LossFunction", "UpdateSpec", "unpacked"]

_log = logging.getLogger(__name__)

Tensors = dict[str, tf.Tensor]
LossFunction = Callable[[Tensors, Tensors], tuple[tf.Tensor, Tensors]]
"""(minibatch, coefficients) -> (loss, metrics), all scalars; the metrics by the names the spec lists."""


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """Description of an update to compile.

    Attributes:
        loss: of one minibatch.
        metric_names: what `loss` reports; "loss" and "grad_gnorm" are added.
        coefficient_names: what it may be told anew at each update; "lr" is among them.
        stop_when: (metric, coefficient): the update ends after a minibatch whose metric is above the coefficient.
    """

    loss: LossFunction
    metric_names: tuple[str, ...]
    coefficient_names: tuple[str, ...]
    stop_when: tuple[str, str] | None = None


class CompiledUpdate:
    """The compiled function and what it changes: variables and optimiser.

    Attributes:
        mode: "xla" or "graph", as chosen; final after `warm_up`.
        optimizer: the Keras optimiser.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        variables: list[Any],
        optimizer: Any,  # a Keras optimiser; Keras ships no types
        *,
        grad_clip: float | None,
        xla: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        """Prepare the update; it is compiled at its first call.

        Args:
            spec: the loss and its names.
            variables: to train.
            optimizer: built for them here.
            grad_clip: largest global norm of a gradient; None = not clipped.
            xla: auto takes XLA unless there are convolutions, which are faster without on a CPU.
        """
        self._spec = spec
        self._variables = variables
        self.optimizer = optimizer
        self._grad_clip = grad_clip
        self._xla = xla
        optimizer.build(variables)
        convolutions = any(len(variable.shape) >= 4 for variable in variables)  # kernels [H, W, in, out]
        self.mode: Literal["xla", "graph"] = "graph" if xla == "off" or (xla == "auto" and convolutions) else "xla"
        self._reason = "as set" if xla != "auto" else "convolutions" if convolutions else "dense layers"
        self._metric_names = (*spec.metric_names, "loss", "grad_gnorm")
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return int(self._function.experimental_get_tracing_count())

    def warm_up(self, batch: Mapping[str, NDArray[Any]], order: NDArray[np.int32]) -> float:
        """Compile for batches of this shape; changes nothing.

        Falls back to a plain graph, with a warning, where XLA was picked by `auto` and can't compile the network.

        Returns: seconds it took.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        started = time.perf_counter()
        coefficients = dict.fromkeys(self._spec.coefficient_names, 0.0)
        coefficients["lr"] = float(self.optimizer.learning_rate.numpy())
        try:
            self(batch, order, coefficients, max_steps=0)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError) as error:
            if self.mode == "graph":
                raise
            sentence = str(error).splitlines()[0]
            if self._xla == "on":
                raise ConfigError(
                    f"XLA can't compile this network: {sentence}", key="xla", value="on", hint="Set xla: auto or off."
                ) from error
            _log.warning("XLA can't compile this network (%s); its update runs as a plain graph, slower", sentence)
            self.mode, self._reason = "graph", "XLA can't compile it"
            self._function = self._compiled()
            self(batch, order, coefficients, max_steps=0)
        took_s = time.perf_counter() - started
        _log.info("update compiled as %s (%s) in %.1f s", self.mode, self._reason, took_s)
        return took_s

    def __call__(
        self,
        batch: Mapping[str, NDArray[Any]],
        order: NDArray[np.int32],
        coefficients: Mapping[str, float],
        *,
        max_steps: int | None = None,
    ) -> tuple[dict[str, float], bool]:
        """Run one update.

        Args:
            batch: arrays with the same first dimension.
            order: int32 [K, M]: indices of each of K minibatches.
            coefficients: by the names of the spec.
            max_steps: at most so many minibatches; None = all K.
        Returns: metrics, averaged over the minibatches that were run, with "num_sgd_steps"; and whether the update
            held. If it did not, weights and optimiser are what they were.
        """
        size = len(next(iter(batch.values())))
        if size not in self._sizes:
            if self._sizes:
                _log.info("compiling the update for batches of %d", size)
            self._sizes.add(size)
        values = np.array([coefficients[name] for name in self._spec.coefficient_names], np.float32)
        limit = np.int32(order.shape[0] if max_steps is None else max_steps)
        results = self._function(
            {name: tf.convert_to_tensor(array) for name, array in batch.items()},
            tf.convert_to_tensor(order), tf.convert_to_tensor(values), tf.convert_to_tensor(limit),
        ).numpy()  # fmt: skip
        ok, steps, *sums = results.tolist()
        metrics = {name: total / max(steps, 1.0) for name, total in zip(self._metric_names, sums, strict=True)}
        metrics["num_sgd_steps"] = steps
        return metrics, bool(ok)

    def _compiled(self) -> Any:  # Any: a tf.function
        return tf.function(self._run, autograph=False, jit_compile=True if self.mode == "xla" else None)

    def _run(self, batch: Tensors, order: tf.Tensor, values: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
        names = self._spec.coefficient_names
        coefficients = {name: values[index] for index, name in enumerate(names)}
        self.optimizer.learning_rate.assign(coefficients["lr"])
        changed = [*self._variables, *self.optimizer.variables]
        before = [tf.identity(tf.convert_to_tensor(variable)) for variable in changed]
        zeros = tf.zeros([len(self._metric_names)])

        def body(step: tf.Tensor, ok: tf.Tensor, go_on: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
            minibatch = {name: tf.gather(column, order[step]) for name, column in batch.items()}
            fine, enough, metrics = self._sgd_step(minibatch, coefficients)
            return step + 1, fine, ~enough, sums + metrics

        steps, ok, _, sums = tf.while_loop(
            lambda step, ok, go_on, sums: (step < limit) & ok & go_on,
            body,
            (tf.constant(0), tf.constant(True), tf.constant(True), zeros),
            parallel_iterations=1,
        )
        for variable, old in zip(changed, before, strict=True):
            variable.assign(tf.where(ok, tf.convert_to_tensor(variable), old))
        return tf.concat([[tf.cast(ok, tf.float32)], [tf.cast(steps, tf.float32)], sums], axis=0)

    def _sgd_step(self, minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One optimiser step: whether all was finite, whether to stop here, and the metrics."""
        with tf.GradientTape() as tape:
            loss, metrics = self._spec.loss(minibatch, coefficients)
        gradients = tape.gradient(loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        norm = tf.linalg.global_norm(gradients)
        if self._grad_clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._grad_clip, use_norm=norm)
        self.optimizer.apply(gradients, self._variables)
        ordered = tf.stack([*(metrics[name] for name in self._spec.metric_names), loss, norm])
        fine = tf.reduce_all(tf.math.is_finite(ordered))
        enough = tf.constant(False)
        if self._spec.stop_when is not None:
            metric, coefficient = self._spec.stop_when
            enough = metrics[metric] > coefficients[coefficient]
        return fine, enough, ordered


def unpacked(minibatch: Tensors, buffers: BatchBuffers, *, time_major: bool = False) -> Tensors:
    """The columns of a minibatch by name, each with its own shape and dtype.

    Args:
        minibatch: arrays gathered from a batch of `buffers`.
        buffers: where it came from.
        time_major: sequences [M, T, ...] are turned into [T, M, ...]; extras stay [M, ...].
    """
    packed = _time_major(minibatch[PACKED]) if time_major else minibatch[PACKED]
    columns: Tensors = {extra.name: minibatch[extra.name] for extra in buffers.extras}
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
