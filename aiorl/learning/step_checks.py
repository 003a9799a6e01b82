"""Checks of the steps and loops of a user's own algorithm.

`aiorl.learning.steps` makes them, most of them while it is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiorl.errors import ConfigError


def check_positive(number: object, call: str, what: str) -> None:
    """Raise ConfigError unless a `number`, which is `what` of a `call`, is a positive integer."""
    if not isinstance(number, int) or number < 1:
        raise ConfigError(
            f"{what} of {call} is {number!r:.200}, expected a positive integer.", key="algo"
        )


def check_parts(parts: object, kind: type) -> None:
    """Raise ConfigError unless the `parts` of `epochs` are of this `kind`, that of
    `minibatches`.
    """
    if not isinstance(parts, kind):
        raise ConfigError(
            f"parts of epochs(number, parts) is a {type(parts).__name__}, expected the division of"
            " a train batch into minibatches.",
            key="algo",
            hint="Pass minibatches(config.minibatch_steps(), step).",
        )


def check_rate(lr: str, knobs: Iterable[str]) -> None:
    """Raise ConfigError unless `lr` is one of the `knobs`."""
    if lr not in knobs:
        raise ConfigError(
            f"the learning rate of a step is the knob {lr!r}, but the knobs are {_listed(knobs)}.",
            key="algo",
            hint="Add it to knobs of the Update, or set lr= of descend to one of them.",
        )


def check_part(variables: Sequence[Any], places: Mapping[Any, int]) -> None:
    """Raise ConfigError unless each of the `variables` of a part of `descend` is among those that
    are in no part yet, whose references have `places`.
    """
    if not variables:
        raise ConfigError("a part of descend(parts=) has no variables.", key="algo")
    for variable in variables:
        if variable.ref() not in places:
            raise ConfigError(
                f"a part of descend(parts=) has the variable {variable.name!r}, which is not among"
                " the variables of the step, or is in another part.",
                key="algo",
                hint="Take the variables of a part from those of the network that is trained.",
            )


def check_only_one(name: str, names: Sequence[str]) -> None:
    """Raise ConfigError unless a `name` of a step against a gradient is once among the `names` of
    all of them.
    """
    if names.count(name) != 1:
        raise ConfigError(
            f"{names.count(name)} steps of the update have the name {name!r}; the names are"
            f" {_listed(names)}.",
            key="algo",
            hint="Give with_descent or with_loss the name of one: NAME of the metric NAME_loss, '' of"
            " loss.",
        )


def check_distinct(what: str, earlier: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """Raise ConfigError if `later`, which `with_loss` adds, has a name of an `earlier` one."""
    repeated = earlier.keys() & later.keys()
    if repeated:
        raise ConfigError(
            f"with_loss adds {what} with names that are taken: {_listed(repeated)}.",
            key="algo",
            hint="Give them other names.",
        )


def check_not_repeated(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """Raise ConfigError if a metric of a `later` step of a chain has the name of an `earlier`
    one.
    """
    repeated = earlier.keys() & later.keys()
    if repeated:
        raise ConfigError(
            f"two steps of a chain give the metrics {_listed(repeated)}.",
            key="algo",
            hint=(
                "Give one of them a name, descend(..., name=), which begins the names of its loss"
                " and gradient; rename other metrics in the loss."
            ),
        )


def check_written(write_back: Sequence[str], tensors: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all names of `write_back` are among the `tensors` of a step."""
    for name in write_back:
        if name not in tensors:
            raise ConfigError(
                f"the loop writes {name!r} back into the replay, but the tensors of its step"
                f" are {_listed(tensors)}.",
                key="algo",
                hint=(
                    "Let a loss return it, as one of per_row returns priorities, or set"
                    " drawn(step, write_back=())."
                ),
            )


def found_metric(metrics: Mapping[str, Any], name: str, argument: str) -> Any:
    """Return the metric of this name, which an `argument` of `epochs` names.

    Raises:
        ConfigError: there is none.
    """
    if name not in metrics:
        raise ConfigError(
            f"{argument} names the metric {name!r}, but the metrics are {_listed(metrics)}.",
            key="algo",
            hint="Name one of them, or let the loss return it.",
        )
    return metrics[name]


def checked_pair(returned: Any, loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return what a loss returned.

    Raises:
        ConfigError: it is not a scalar tensor and further tensors by name.
    """
    name = getattr(loss, "__qualname__", "loss")
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not (is_pair and hasattr(returned[0], "get_shape") and isinstance(returned[1], Mapping)):
        raise ConfigError(
            f"{name} returned {returned!r:.200}, expected a pair: the loss, a scalar tensor, and"
            " further tensors by name.",
            key="algo",
            hint="Return (loss, {}) if there are none.",
        )
    value, tensors = returned
    if len(value.shape):
        raise ConfigError(
            f"{name} returned a loss of shape {list(value.shape)}, expected a scalar.",
            key="algo",
            hint="Take its mean: tf.reduce_mean, masked_mean, or per_row for a replay.",
        )
    return value, tensors


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
