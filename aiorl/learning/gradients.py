"""Gradients of an algorithm's loss, computed apart from its update: by workers, and by users who
drive a policy themselves.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS, Array, Columns
from aiorl.errors import PolicyError
from aiorl.learning.algorithm import Update
from aiorl.learning.batch_buffers import PACKED
from aiorl.learning.compiled import Arguments, CompiledFunction, Mode
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.steps import Descent, metrics_in
from aiorl.learning.train_batches import TrainBatches

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic


class Gradients:
    """Gradient of an algorithm's loss over a fragment, and single steps with gradients.

    Attributes:
        compiled: compiled function of a batch, all of whose rows are one minibatch. It returns the
            metrics in the order in which the loss gives them, the loss as the last of them, then
            the gradient of each variable.
        metric_names: names of the metrics, in order; known once the function was traced.
    """

    def __init__(
        self,
        update: Update,
        batches: TrainBatches,
        model: ActorCritic,
        *,
        xla: Mode,
    ) -> None:
        """Prepare the function without compiling it yet.

        Args:
            update: update whose only step is a `Descent`.
            batches: lays out fragments.
            model: network that is trained.
            xla: mode of compilation.

        Raises:
            NotImplementedError: the update does more than a step against the gradient of one loss.
        """
        step = update.loop.step
        if not isinstance(step, Descent):
            raise NotImplementedError("the algorithm does not update by one gradient of a batch")
        self._descent = step
        self._update = update
        self._batches = batches
        self._model = model
        self._begin, self._unpack = batches.reading(update.loop)
        variables = model.trainable_variables
        is_on_cpu = "CPU" in variables[0].device
        self._arguments = Arguments(list(update.knobs_at(0)), shares_memory=is_on_cpu)
        self.metric_names: tuple[str, ...] = ()
        self.compiled = CompiledFunction(self._run, variables, xla=xla, name="gradient")
        # XLA gains nothing here: there are only the operations of an optimiser
        mode: Mode = "eager" if xla == "eager" else "off"
        self._take_step = CompiledFunction(
            lambda gradients, rate: [self._descent.apply(gradients, {self._descent.lr: rate})],
            variables,
            xla=mode,
            name="step",
        )

    def warm_up(self) -> None:
        """Compile the gradient for fragments of the usual size; changes nothing."""
        batch = self._batches.nominal_batch()
        arguments = self._arguments.tensors(batch, self._arguments.zeros())
        self.compiled.warm_up(partial(self.compiled, len(batch[PACKED]), arguments))

    def trace(self) -> None:
        """Find the names of the metrics without computing anything."""
        batch = self._batches.nominal_batch()
        arguments = self._arguments.tensors(batch, self._arguments.zeros())
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
        tf.function(self._run, autograph=False).get_concrete_function(*specs)

    def compute(self, fragment: Columns, env_steps_total: int) -> dict[str, Array]:
        """Return the gradient of the loss over a fragment at the current weights; changes nothing.

        Args:
            fragment: columns of the sample plan, ``[T, N, ...]``.
            env_steps_total: env steps so far; schedules depend on it.

        Returns:
            Columns to send: the gradient of each weight, in the weight's shape, with metrics
            ``[K]`` and the number of rows ``[1]`` (see `aiorl.data.columns`); empty if no row is a
            transition.

        Raises:
            BatchError: a column is missing or has a wrong shape or dtype.
        """
        buffers = self._batches.buffers
        buffers.check(fragment)
        batch = self._batches.make_batch([fragment])
        num_transitions = np.count_nonzero(buffers.column(batch, c.VALID))
        if not num_transitions:
            return {}
        knobs = self._update.knobs_at(env_steps_total)
        arguments = self._arguments.tensors(batch, knobs)
        metrics, *gradients = self.compiled(len(batch[PACKED]), arguments)
        columns = {NUM_ROWS: np.array([num_transitions], np.int32)}
        if not all(np.isfinite(array).all() for array in (metrics, *gradients)):
            column = buffers.first_not_finite(batch)
            names = self._batches.columns
            culprit = names.index(column) + 1 if column in names else 0
            return {**columns, CULPRIT: np.array([culprit], np.int32)}
        columns[METRICS] = metrics
        for name, gradient in zip(self._model.trainable, gradients, strict=True):
            columns[GRADIENT_OF + name] = gradient
        return columns

    def apply(self, gradients: Columns, env_steps_total: int) -> dict[str, float]:
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
        variables = self._model.trainable
        shapes = {name: tuple(np.shape(gradient)) for name, gradient in gradients.items()}
        if shapes != {name: tuple(variable.shape) for name, variable in variables.items()}:
            raise PolicyError(
                f"no step was taken: gradients {shapes!r:.500} don't match the weights"
            )
        tensors = [tf.constant(gradients[name], tf.float32) for name in variables]
        if not np.isfinite(tf.linalg.global_norm(tensors)):
            raise PolicyError("no step was taken: the norm of the gradients is not finite")
        knobs = self._update.knobs_at(env_steps_total)
        rate = knobs[self._descent.lr]
        (norm,) = self._take_step(0, [tensors, tf.constant(rate, tf.float32)])
        return {"grad_gnorm": float(norm), "cur_lr": rate}

    def _run(self, batch: Tensors, values: tf.Tensor) -> list[tf.Tensor]:
        knobs = self._arguments.by_name(values)
        if self._begin is not None:
            batch = self._begin(batch, knobs)
        gradients, loss, tensors = self._descent.gradients(self._unpack(batch), knobs)
        metrics = metrics_in(tensors)
        self.metric_names = (*metrics, "loss")
        return [tf.stack([*metrics.values(), loss]), *map(tf.convert_to_tensor, gradients)]
