"""Steps of an update, which are composed and then traced into one compiled call.

A loss is a function of a minibatch and of knobs, which are numbers that can change from update to
update. `descend` makes a step of it. Combinators make larger steps of steps, and `epochs` or
`drawn` run a step over all minibatches of a call::

    def critic_loss(minibatch, knobs):
        errors = minibatch["value_targets"] - critic(minibatch["obs"])
        return tf.reduce_mean(tf.square(errors)), {"priorities": tf.abs(errors)}

    first = descend(critic.trainable_variables, critic_loss, Adam(), name="critic")
    second = descend(actor.trainable_variables, actor_loss, Adam(), name="actor", lr="actor_lr")
    loop = drawn(chain(first, every(2, second), follow([TargetNetwork(critic)], tau=0.005)))

Everything in this module runs while TensorFlow traces, once for each shape of a batch; the compiled
call runs none of it again. `aiorl.learning.compiled.CompiledUpdate` compiles a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiorl.data.columns import PRIORITIES
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.optimised import Clip, Group, Part, Reduce, clipped, groups_of, of_tensorflow
from aiorl.learning.step_checks import (
    check_not_repeated,
    check_parts,
    check_positive,
    check_rate,
    check_written,
    checked_pair,
    found_metric,
)

if TYPE_CHECKING:
    from aiorl.learning.models.networks import Network

__all__ = [
    "SEEDS",
    "STEPS_BEFORE",
    "WEIGHTS",
    "Composed",
    "Descent",
    "FigureTable",
    "Loop",
    "LoopResult",
    "Loss",
    "Outcome",
    "Step",
    "TargetNetwork",
    "chain",
    "descend",
    "drawn",
    "epochs",
    "every",
    "follow",
    "guarded",
    "minibatches",
    "of_policy",
    "per_row",
    "prepare",
    "weighted_mean",
]

Loss = Callable[[Tensors, Tensors], tuple["tf.Tensor", Tensors]]
"""(columns [M, ...] of a minibatch by name, knobs by name) -> (loss to minimise, further tensors by
name).

The loss is a scalar. So is each knob, float32. Of the further tensors, scalars are metrics; all
others are for the steps that follow in a `chain` and for `drawn` to write back.
"""

ComputeGradients = Callable[[Tensors, Tensors], tuple[list["tf.Tensor"], "tf.Tensor", Tensors]]
"""(columns, knobs) -> (gradients in the order of the variables, loss, further tensors)."""

STEPS_BEFORE = "steps_before"
"""Knob: minibatches made before this call, from which `every` counts; 0 if it is missing."""
WEIGHTS = "weights"
"""Column of a drawn minibatch: importance weight of each row."""
SEEDS = "seeds"
"""Column of a drawn minibatch: seeds for its random numbers, of the shape that `drawn` was given."""

MAX_METRICS = 64
"""Metrics that an update can have."""


class Outcome(NamedTuple):
    """Result of a step.

    Attributes:
        metrics: [2] float32 by name, the sum of a metric's values and their number.
        tensors: further tensors by name.
    """

    metrics: Tensors
    tensors: Tensors


class Step(Protocol):
    """Part of an update that is made for each minibatch."""

    @property
    def variables(self) -> Sequence[Any]:
        """Variables that the step changes, without those of its optimisers."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """Keras optimisers of the step, always in the same order."""

    @property
    def period(self) -> int:
        """Number of minibatches after which what the step does repeats; 1 = each does the same."""

    def run(self, columns: Tensors, knobs: Tensors, count: tf.Tensor) -> Outcome:
        """Make the step.

        Args:
            columns: columns [M, ...] of the minibatch by name; in a `chain`, also the tensors of
                earlier steps.
            knobs: float32 scalars by name.
            count: scalar int32, number of this minibatch, from 1.

        Returns:
            Metrics, and tensors for later steps.
        """


@dataclass(frozen=True)
class Composed:
    """Step that a combinator returns.

    Attributes:
        compute: (`steps`, columns, knobs, count) -> outcome, see `Step.run`.
        steps: the steps that it is made of.
        interval: minibatches from one time that they are made to the next.
        changed: variables that it changes besides those of the steps.
    """

    compute: Callable[[tuple[Step, ...], Tensors, Tensors, tf.Tensor], Outcome]
    steps: tuple[Step, ...]
    interval: int = 1
    changed: tuple[Any, ...] = ()

    @property
    def variables(self) -> Sequence[Any]:
        """See `Step`."""
        return [*self.changed, *(item for step in self.steps for item in step.variables)]

    @property
    def optimizers(self) -> Sequence[Any]:
        """See `Step`."""
        return [optimizer for step in self.steps for optimizer in step.optimizers]

    @property
    def period(self) -> int:
        """See `Step`."""
        return math.lcm(self.interval, *(step.period for step in self.steps))

    def run(self, columns: Tensors, knobs: Tensors, count: tf.Tensor) -> Outcome:
        """See `Step.run`."""
        return self.compute(self.steps, columns, knobs, count)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Step of an optimiser against the gradient of a loss; `descend` makes it.

    Attributes:
        loss: loss of a minibatch.
        variables: variables that it trains.
        optimizer: optimiser of the variables that are in no part.
        parts: variables with learning rates, optimisers or clipping of their own, as `descend` got
            them.
        groups: variables by optimiser; each variable is in one.
        clip: clips all gradients together.
        reduce: changes the gradients before they are clipped.
        lr: knob with the learning rate.
        name: prefix of the metrics "NAME_loss" and "NAME_grad_gnorm".
        gradients: computes the gradients, by default those of the loss.
    """

    loss: Loss
    variables: Sequence[Any]
    optimizer: Any  # a Keras optimiser; Keras ships no types
    parts: tuple[Part, ...]
    groups: tuple[Group, ...]
    clip: Clip
    reduce: Reduce
    lr: str
    name: str
    gradients: ComputeGradients

    @property
    def optimizers(self) -> Sequence[Any]:
        """See `Step`."""
        return [group.optimizer for group in self.groups]

    @property
    def period(self) -> int:
        """See `Step`."""
        return 1

    def run(self, columns: Tensors, knobs: Tensors, count: tf.Tensor) -> Outcome:
        """See `Step.run`."""
        gradients, loss, tensors = self.gradients(columns, knobs)
        norm = self.apply(gradients, knobs)
        prefix = f"{self.name}_" if self.name else ""
        metrics = {
            **metrics_in(tensors),
            f"{prefix}loss": loss,
            f"{prefix}grad_gnorm": norm,
        }
        counted = {name: tf.stack([value, 1.0]) for name, value in metrics.items()}
        for_later_steps = {name: tensor for name, tensor in tensors.items() if len(tensor.shape)}
        return Outcome(counted, for_later_steps)

    def apply(self, gradients: list[tf.Tensor], knobs: Tensors) -> tf.Tensor:
        """Reduce and clip `gradients`, and take a step with them and the learning rate in `knobs`;
        return their norm, a scalar, before they were clipped.

        Raises:
            ConfigError: the learning rate is not among the knobs.
        """
        gradients = self.reduce(gradients)
        norm = tf.linalg.global_norm(gradients)
        gradients = clipped(gradients, self.clip, norm)
        for group in self.groups:
            check_rate(group.lr, knobs)
            group.optimizer.learning_rate.assign(group.rate * knobs[group.lr])
            of_group = [gradients[place] for place in group.places]
            group.optimizer.apply(clipped(of_group, group.clip), group.variables)
        return norm


def metrics_in(tensors: Tensors) -> Tensors:
    """Return the tensors of a loss that are metrics: its scalars."""
    return {name: tensor for name, tensor in tensors.items() if not len(tensor.shape)}


def descend(
    variables: Sequence[Any],
    loss: Loss,
    optimizer: Any,  # a Keras optimiser; Keras ships no types
    *,
    parts: Sequence[Part] = (),
    clip: Clip = None,
    reduce: Reduce = list,
    lr: str = "lr",
    name: str = "",
) -> Descent:
    """Return a step of an optimiser against the gradient of a loss::

        step = descend(model.trainable_variables, loss, keras.optimizers.Adam(), clip=0.5)

    Args:
        variables: variables to train, TensorFlow's or Keras's. Their gradients are 0 where the loss
            doesn't use them.
        loss: loss of a minibatch.
        optimizer: optimiser of these variables alone; it is built for them here.
        parts: variables among them with learning rates, optimisers or clipping of their own.
        clip: clips the gradients of all variables together: their largest global norm, or a
            function of them.
        reduce: function of the gradients, called before they are clipped. It stands where several
            learners would take the mean of theirs.
        lr: knob with the learning rate.
        name: prefix of the metrics "NAME_loss" and "NAME_grad_gnorm" (norm of the gradient before
            it is clipped); without a name they are "loss" and "grad_gnorm".

    Raises:
        ConfigError: a part has a variable that the step doesn't train, or that is in another part.
            Or, when it is traced, the loss doesn't return a scalar and further tensors by name, or
            `lr` is not among the knobs.
    """
    variables = of_tensorflow(variables)
    return Descent(
        loss=loss,
        variables=variables,
        optimizer=optimizer,
        parts=tuple(parts),
        groups=tuple(groups_of(variables, optimizer, parts, lr)),
        clip=clip,
        reduce=reduce,
        lr=lr,
        name=name,
        gradients=gradients_of(loss, variables),
    )


def gradients_of(loss: Loss, variables: Sequence[Any]) -> ComputeGradients:
    """Return a function that computes the gradients of a loss; they are 0 for variables that it
    doesn't use.
    """

    def gradients(columns: Tensors, knobs: Tensors) -> tuple[list[tf.Tensor], tf.Tensor, Tensors]:
        with tf.GradientTape() as tape:
            value, tensors = checked_pair(loss(columns, knobs), loss)
        of_variables = tape.gradient(
            value, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return of_variables, value, {name: _converted(item) for name, item in tensors.items()}

    return gradients


def _converted(value: Any) -> tf.Tensor:
    """Return a tensor; float32 if it is a scalar, which is a metric."""
    tensor = tf.convert_to_tensor(value)
    if len(tensor.shape):
        return tensor
    return tf.cast(tensor, tf.float32)


def chain(*steps: Step) -> Step:
    """Return a step that makes all `steps` in order.

    Each also sees the tensors of earlier ones as columns, in place of columns of the same name. If
    the loss of `critic` returns ``{"advantages": ...}``, the loss of `actor` reads
    ``minibatch["advantages"]`` in::

        chain(critic, actor)

    Raises:
        ConfigError: when it is traced, two steps give a metric of the same name.
    """

    def compute(
        steps: tuple[Step, ...], columns: Tensors, knobs: Tensors, count: tf.Tensor
    ) -> Outcome:
        metrics: Tensors = {}
        tensors: Tensors = {}
        for step in steps:
            outcome = step.run({**columns, **tensors}, knobs, count)
            check_not_repeated(metrics, outcome.metrics)
            metrics |= outcome.metrics
            tensors |= outcome.tensors
        return Outcome(metrics, tensors)

    return Composed(compute, steps)


def every(period: int, step: Step) -> Step:
    """Return a step that makes a `step` once every `period` minibatches; in between, its variables
    and its optimisers don't change.

    In a loop of `drawn`, minibatches of earlier calls count, too; in a loop of `epochs`, those of
    the same update alone. Its metrics are means over the times that it was made. If `period` is
    above 1, later steps don't see its tensors.

    Raises:
        ConfigError: `period` is not a positive integer.
    """
    check_positive(period, "every(period, step)", "period")
    if period == 1:
        return step
    table = FigureTable()

    def compute(
        steps: tuple[Step, ...], columns: Tensors, knobs: Tensors, count: tf.Tensor
    ) -> Outcome:
        (step,) = steps

        def make() -> tf.Tensor:
            return table.stacked(step.run(columns, knobs, count).metrics)

        totals = tf.cond(tf.equal(count % period, 0), make, table.zeros)
        return Outcome(table.by_name(totals), {})

    return Composed(compute, (step,), interval=period)


def follow(targets: Sequence[TargetNetwork], *, tau: float = 1.0) -> Step:
    """Return a step that moves target networks, `targets`, by the share `tau` towards the networks
    that they follow; 1 makes copies.
    """

    def compute(
        steps: tuple[Step, ...], columns: Tensors, knobs: Tensors, count: tf.Tensor
    ) -> Outcome:
        for target in targets:
            target.take_over(tau)
        return Outcome({}, {})

    moved = [variable for target in targets for variable in target.variables.values()]
    return Composed(compute, (), changed=tuple(moved))


def prepare(change: Callable[[Tensors], Tensors], step: Step) -> Step:
    """Return a step that makes a `step` with the columns that `change` makes of those of the
    minibatch, [M, ...]::

        prepare(lambda columns: {**columns, "obs": columns["obs"] / scale}, step)
    """

    def compute(
        steps: tuple[Step, ...], columns: Tensors, knobs: Tensors, count: tf.Tensor
    ) -> Outcome:
        (step,) = steps
        return step.run(change(columns), knobs, count)

    return Composed(compute, (step,))


def of_policy(policy_id: str, step: Step) -> Step:
    """Return a step that makes a `step` with the columns of one policy, `policy_id`.

    A minibatch of several policies is a mapping from the policies' ids to their columns, in which
    rows of the same number belong together. The step also sees tensors of earlier steps that saw
    all policies; as in a `chain`, they stand in place of columns of the same name. Its own metrics
    and tensors get the prefix "ID/". With a critic that sees all policies::

        chain(critic, of_policy("left", left_actor), of_policy("right", right_actor))
    """

    def compute(
        steps: tuple[Step, ...], columns: Tensors, knobs: Tensors, count: tf.Tensor
    ) -> Outcome:
        (step,) = steps
        shared = {name: part for name, part in columns.items() if not isinstance(part, Mapping)}
        outcome = step.run({**columns[policy_id], **shared}, knobs, count)
        metrics = {f"{policy_id}/{name}": metric for name, metric in outcome.metrics.items()}
        tensors = {f"{policy_id}/{name}": tensor for name, tensor in outcome.tensors.items()}
        return Outcome(metrics, tensors)

    return Composed(compute, (step,))


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
            # counters of custom layers can't be interpolated
            if share == 1 or not online.dtype.is_floating:
                variable.assign(online)
            else:
                variable.assign(variable + share * (online - variable))


class FigureTable:
    """Places of metrics in an array of fixed size, in the order in which they are first traced.

    The size is fixed because a loop needs it before its first step has been traced.

    Attributes:
        names: names of the metrics.
    """

    def __init__(self) -> None:
        """Begin without metrics."""
        self.names: list[str] = []

    def zeros(self) -> tf.Tensor:
        """Return [MAX_METRICS, 2] zeros."""
        return tf.zeros([MAX_METRICS, 2])

    def stacked(self, metrics: Tensors) -> tf.Tensor:
        """Return metrics as [MAX_METRICS, 2], 0 for those that are missing.

        Raises:
            ValueError: there are more than MAX_METRICS.
        """
        self.names += [name for name in metrics if name not in self.names]
        if len(self.names) > MAX_METRICS:
            raise ValueError(f"an update can have {MAX_METRICS} metrics, not {len(self.names)}")
        if not self.names:
            return self.zeros()
        missing = tf.zeros([2])
        rows = tf.stack([metrics.get(name, missing) for name in self.names])
        return tf.pad(rows, [[0, MAX_METRICS - len(self.names)], [0, 0]])

    def by_name(self, table: tf.Tensor) -> Tensors:
        """Return the metrics, [2] each, of a `table` [MAX_METRICS, 2] that `stacked` or `zeros`
        returned.
        """
        return {name: table[index] for index, name in enumerate(self.names)}


class LoopResult(NamedTuple):
    """Result of all minibatches of a call.

    Attributes:
        is_finite: scalar bool, False if a loss, a metric or a gradient was not finite.
        num_steps: scalar int32, minibatches made.
        totals: [MAX_METRICS, 2], sums of the metrics and of their numbers.
        last_epoch: scalar, sum of a metric over the last epoch that began.
        written: [K, M, ...] by name, columns to write back; 0 for minibatches that were not made.
    """

    is_finite: tf.Tensor
    num_steps: tf.Tensor
    totals: tf.Tensor
    last_epoch: tf.Tensor
    written: Tensors


Begin = Callable[[Tensors, Tensors], Tensors]
"""(columns of a whole batch, knobs) -> columns from which minibatches are taken."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Step that is made for each minibatch of a call; `epochs` and `drawn` make it.

    Attributes:
        step: step of a minibatch.
        begin: changes the columns of the whole batch, once, before the first minibatch; None =
            unchanged.
        stop_when: (metric, limit): the loop ends after a minibatch whose metric exceeds the limit.
        last_epoch_of: metric whose mean over the last epoch that began is also reported, as
            "METRIC_last_epoch"; "" = none.
        num_epochs: passes over a train batch.
        minibatch_steps: env steps in a minibatch of a train batch.
        shuffles: visit the rows of a train batch in a new random order in each epoch.
        of_rows: minibatches are of rows even if the train batch is of sequences: `begin` makes rows
            of them.
        is_drawn: True if minibatches are drawn from a replay, False if they are parts of a train
            batch.
        write_back: tensors of the step, a row for each row of a minibatch, that go back to where
            the minibatch was drawn.
        seeds: shape of the int32 seeds that each drawn minibatch gets as the column "seeds"; None =
            no seeds.
        table: places of the metrics.
    """

    step: Step
    begin: Begin | None = None
    stop_when: tuple[str, float] | None = None
    last_epoch_of: str = ""
    num_epochs: int = 1
    minibatch_steps: int = 1
    shuffles: bool = True
    of_rows: bool = False
    is_drawn: bool = False
    write_back: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    table: FigureTable = field(default_factory=FigureTable)

    @property
    def optimizer_variables(self) -> list[Any]:
        """Variables of all optimisers of the step, always in the same order."""
        return [item for optimizer in self.step.optimizers for item in optimizer.variables]

    def run(
        self,
        columns: Tensors,
        knobs: Tensors,
        order: tf.Tensor | None,
        limit: tf.Tensor,
    ) -> LoopResult:
        """Make the step for each minibatch until `limit`, `stop_when`, or a number is not finite.

        Args:
            columns: columns of the batch by name, or by policy id and name: [R, ...] of rows from
                which `order` picks; without an order [K, M, ...] of K minibatches.
            knobs: float32 scalars by name.
            order: int32 [K, M], rows of each minibatch; None if the columns are minibatches.
            limit: scalar int32, maximum number of minibatches.

        Raises:
            ConfigError: `stop_when` or `last_epoch_of` names no metric of the step, or `write_back`
                a tensor that it doesn't return.
        """
        if self.begin is not None:
            columns = self.begin(columns, knobs)
        before = tf.cast(knobs.get(STEPS_BEFORE, 0), tf.int32)
        written = {name: tf.zeros(columns[WEIGHTS].shape) for name in self.write_back}

        def body(index: tf.Tensor, *state: Any) -> tuple[Any, ...]:
            _, _, totals, last_epoch, written = state
            # a stack of minibatches is indexed by their numbers
            rows = index if order is None else order[index]
            minibatch = tf.nest.map_structure(lambda column: tf.gather(column, rows), columns)
            metrics, tensors = self.step.run(minibatch, knobs, before + index + 1)
            table = self.table.stacked(metrics)
            check_written(self.write_back, tensors)
            written = {
                name: tf.tensor_scatter_nd_update(column, [[index]], [tensors[name]])
                for name, column in written.items()
            }
            return (
                index + 1,
                tf.reduce_all(tf.math.is_finite(table)),
                self._may_continue(metrics),
                totals + table,
                self._of_last_epoch(last_epoch, metrics, index, limit),
                written,
            )

        def has_next(
            index: tf.Tensor, is_finite: tf.Tensor, may_continue: tf.Tensor, *_: Any
        ) -> Any:
            return (index < limit) & is_finite & may_continue

        start = (tf.constant(0), tf.constant(True), tf.constant(True), self.table.zeros())
        num_steps, is_finite, _, totals, last_epoch, written = tf.while_loop(
            has_next, body, (*start, tf.constant(0.0), written), parallel_iterations=1
        )
        return LoopResult(is_finite, num_steps, totals, last_epoch=last_epoch, written=written)

    def _may_continue(self, metrics: Tensors) -> tf.Tensor:
        """Return whether the minibatch with these metrics may be followed by another."""
        if self.stop_when is None:
            return tf.constant(True)
        metric, limit = self.stop_when
        return ~(found_metric(metrics, metric, "stop_when")[0] > limit)

    def _of_last_epoch(
        self,
        total: tf.Tensor,
        metrics: Tensors,
        index: tf.Tensor,
        limit: tf.Tensor,
    ) -> tf.Tensor:
        """Return the sum of `last_epoch_of` over the current epoch, after the minibatch `index`."""
        if not self.last_epoch_of:
            return total
        is_first = tf.equal(index % tf.maximum(limit // self.num_epochs, 1), 0)
        value = found_metric(metrics, self.last_epoch_of, "last_epoch_of")[0]
        return value + tf.where(is_first, 0.0, total)


class Minibatches(NamedTuple):
    """Step for the minibatches of an epoch; see `minibatches`."""

    env_steps: int
    step: Step
    shuffles: bool
    of_rows: bool


def minibatches(
    env_steps: int,
    step: Step,
    *,
    shuffles: bool = True,
    of_rows: bool = False,
) -> Minibatches:
    """Return the division of a train batch into minibatches, for `epochs`.

    Args:
        env_steps: env steps in a minibatch; if it consists of whole sequences, rounded down to
            them.
        step: step of a minibatch.
        shuffles: True to visit rows or sequences in a new random order in each epoch.
        of_rows: True if minibatches are of rows although the train batch is of sequences: `begin`
            of `epochs` makes rows of them.
    """
    return Minibatches(env_steps, step, shuffles, of_rows)


def epochs(
    number: int,
    parts: Minibatches,
    *,
    begin: Begin | None = None,
    stop_when: tuple[str, float] | None = None,
    last_epoch_of: str = "",
) -> Loop:
    """Return a loop that passes over each train batch several times::

        epochs(config.num_sgd_iter, minibatches(config.minibatch_steps(), step))

    Args:
        number: passes over a train batch.
        parts: division into minibatches, and the step of each.
        begin: changes the columns of the whole batch, [R, ...] of rows or [B, T, ...] of sequences,
            once, before the first minibatch. It also gets the knobs.
        stop_when: (metric, limit): the update ends after a minibatch whose metric exceeds the
            limit.
        last_epoch_of: metric whose mean over the last epoch that began is also reported, as
            "METRIC_last_epoch".

    Raises:
        ConfigError: `number` is not a positive integer, or `parts` no result of `minibatches`.
    """
    check_positive(number, "epochs(number, parts)", "number")
    check_parts(parts, Minibatches)
    return Loop(
        step=parts.step,
        begin=begin,
        stop_when=stop_when,
        last_epoch_of=last_epoch_of,
        num_epochs=number,
        minibatch_steps=parts.env_steps,
        shuffles=parts.shuffles,
        of_rows=parts.of_rows,
    )


def drawn(
    step: Step,
    *,
    write_back: Sequence[str] = (PRIORITIES,),
    seeds: tuple[int, ...] | None = None,
) -> Loop:
    """Return a loop over minibatches that are drawn from a replay; WEIGHTS is among their columns::

        drawn(chain(step, every(100, follow([target]))))

    Args:
        step: step of a minibatch.
        write_back: tensors of the step, one number for each row of the minibatch, that are written
            into the replay. PRIORITIES are what prioritised replay draws by.
        seeds: shape of the int32 seeds that each minibatch gets as the column "seeds", new for each,
            such as (2,) for `tf.random.stateless_normal`; None = no seeds.
    """
    return Loop(step=step, is_drawn=True, write_back=tuple(write_back), seeds=seeds)


def weighted_mean(losses: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Return the mean over the rows of losses times importance weights: small weights make small
    steps.

    Args:
        losses: losses of rows, any shape.
        weights: importance weights, of the same shape; they are constant for gradients.

    Returns:
        float32 scalar.

    Source: Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3.4.
    """
    return tf.reduce_mean(losses * tf.stop_gradient(weights))


def per_row(
    judge: Callable[[Tensors, Tensors], tuple[tf.Tensor, tf.Tensor, Tensors]],
) -> Loss:
    """Return the loss of a drawn minibatch whose rows have importance weights and priorities.

    Args:
        judge: (columns, knobs) -> (losses [B], absolute TD errors [B], further tensors).

    Returns:
        Loss that is the weighted mean of the losses. It gives the metric "mean_td_error", and the
        errors as `aiorl.data.columns.PRIORITIES`, which `drawn` can write back.
    """

    def loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        losses, errors, tensors = judge(columns, knobs)
        errors = tf.stop_gradient(errors)
        metrics = {**tensors, "mean_td_error": tf.reduce_mean(errors)}
        return weighted_mean(losses, columns[WEIGHTS]), {**metrics, PRIORITIES: errors}

    return loss


def guarded(
    loop: Loop,
) -> Callable[[Tensors, Tensors, tf.Tensor | None, tf.Tensor], LoopResult]:
    """Return the run of a loop, of columns of any shape, after which all variables are as before if
    any loss, metric or gradient was not finite.
    """

    def run(
        columns: Tensors,
        knobs: Tensors,
        order: tf.Tensor | None,
        limit: tf.Tensor,
    ) -> LoopResult:
        variables = [*loop.step.variables, *loop.optimizer_variables]
        before = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
        result = loop.run(columns, knobs, order, limit)
        if tf.executing_eagerly() and result.is_finite:
            return result  # assigning all variables takes a tenth of an eager update
        for variable, old in zip(variables, before, strict=True):
            variable.assign(tf.where(result.is_finite, tf.convert_to_tensor(variable), old))
        return result

    return run
