"""Optimisers of the variables that a step trains: one for all, or one for each part of them.

`aiorl.learning.steps.descend` uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from aiorl.learning.lazy import tf
from aiorl.learning.step_checks import check_part

Reduce = Callable[[list["tf.Tensor"]], list["tf.Tensor"]]
"""Gradients of one minibatch, in the order of the variables -> gradients to clip and apply."""

Clip = float | Reduce | None
"""Largest global norm of the gradients; or a function of them, such as ``lambda gradients:
[tf.clip_by_norm(item, 0.5) for item in gradients]``; None = not clipped."""


@dataclass(frozen=True)
class Part:
    """Variables of a `descend` that have a learning rate, an optimiser or a clipping of their
    own::

        Part(first_layer, rate=0.1)
        Part(heads, optimizer=keras.optimizers.SGD(momentum=0.9), clip=0.1, lr="heads_lr")

    Attributes:
        variables: variables among those of the step, TensorFlow's or Keras's.
        optimizer: optimiser of these variables alone; None = one like that of the step.
        clip: clips the gradients of these variables, after the step has clipped all of them.
        lr: knob with the learning rate; None = that of the step.
        rate: factor of the learning rate.
    """

    variables: Sequence[Any]
    _: KW_ONLY
    optimizer: Any = None  # a Keras optimiser; Keras ships no types
    clip: Clip = None
    lr: str | None = None
    rate: float = 1.0


class Group(NamedTuple):
    """Variables of a `Descent` that one optimiser trains.

    Attributes:
        optimizer: Keras optimiser, built for these variables.
        variables: the variables.
        places: their places among the variables of the descent.
        clip: see `Part`.
        lr: see `Part`.
        rate: see `Part`.
    """

    optimizer: Any
    variables: list[Any]
    places: list[int]
    clip: Clip
    lr: str
    rate: float


def clipped(
    gradients: list[tf.Tensor], clip: Clip, norm: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Return gradients after clipping; `norm` is their global norm, if it is known."""
    if clip is None:
        return gradients
    if callable(clip):
        return clip(gradients)
    return list(tf.clip_by_global_norm(gradients, clip, use_norm=norm)[0])


def of_tensorflow(variables: Sequence[Any]) -> list[Any]:
    """Return TensorFlow's variables; one of Keras holds one of them."""
    return [item if isinstance(item, tf.Variable) else item.value for item in variables]


def groups_of(
    variables: Sequence[Any], optimizer: Any, parts: Sequence[Part], lr: str
) -> Iterator[Group]:
    """Yield the variables of each part, then those that are in none, with built optimisers.

    Raises:
        ConfigError: see `aiorl.learning.steps.descend`.
    """
    rest = {variable.ref(): place for place, variable in enumerate(variables)}
    for part in parts:
        of_part = of_tensorflow(part.variables)
        check_part(of_part, rest)
        places = [rest.pop(variable.ref()) for variable in of_part]
        of_its_own = part.optimizer
        if of_its_own is None:
            of_its_own = like(optimizer)
        of_its_own.build(of_part)
        yield Group(of_its_own, of_part, places, clip=part.clip, lr=part.lr or lr, rate=part.rate)
    if rest:
        others = [variables[place] for place in rest.values()]
        optimizer.build(others)
        yield Group(optimizer, others, list(rest.values()), clip=None, lr=lr, rate=1.0)


def like(optimizer: Any) -> Any:  # Keras optimisers; Keras ships no types
    """Return an optimiser with the settings of `optimizer` that has not been built yet."""
    return type(optimizer).from_config(optimizer.get_config())
