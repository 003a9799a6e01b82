"""Exported policies independent of the format: inputs and outputs, and the steps before and after
the network.

A file contains everything between a preprocessed observation and an action in the environment's
form: the observation filter, the network, the choice of the most likely action, clipping to the
bounds of the action space, dtype and shape. A network that looks back was trained on its previous
actions as it chose them, before they were clipped, so a last component of the state carries them
from step to step. Bounds and statistics are float32, which every runtime supports, even in browsers
and on accelerators; only actions of a float64 Box that is narrow and far from 0 are computed in
float64. Each format has its own class that writes operations (`_Nodes` of `onnx_form`,
`_KerasOperations` of `tensorflow_forms`) and its own type of tensors, with rows on the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.acting_graph import (
    DIST_INPUTS_OUTPUT,
    OBS_INPUT,
    PREV_REWARDS_INPUT,
    VF_OUTPUT,
    ActingSpec,
    ArraySpec,
)
from aiorl.acting.acting_state import PolicyParts, SavedRun
from aiorl.acting.distributions import (
    MASKED_LOGIT,
    ActionDistribution,
    Bernoulli,
    BoxScale,
    Categorical,
    Composite,
    DiagGaussian,
    MultiCategorical,
    ScaledGaussian,
    SquashedGaussian,
)
from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.data.actions import leaves_of
from aiorl.data.columns import F32, Array
from aiorl.errors import ExportError

_ACTION = "action"
_ONE = np.ones(1, np.float32)
_FARTHEST = 32.0
"""Distance of the middle of a range from 0, in halves of the range, up to which float32 is precise
enough."""


@dataclass(frozen=True, slots=True)
class ActionPart:
    """One array of an action.

    Attributes:
        output: name, shape and dtype of the output.
        path: keys and indices that lead to it in the action space; empty if the action is one
            array.
        space: space of the array.
        distribution: distribution of the array.
        inputs: its columns among the inputs of the whole distribution.
        dtype: dtype in which the actions of a Box are computed, "float32" or "float64".
        bounds: lower and upper bounds of a Box that actions are clipped to, flat; None if they are
            not clipped.
    """

    output: ArraySpec
    path: tuple[str | int, ...]
    space: spaces.Space[Any]
    distribution: ActionDistribution
    inputs: slice
    dtype: str
    bounds: tuple[Array, Array] | None


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """A checkpoint's policy, ready for export.

    Attributes:
        run: the run that it belongs to.
        parts: preprocessor, filter and network of the policy.
        normalisation: the observation filter; None if there is none.
        actions: the arrays of its actions.
    """

    run: SavedRun
    parts: PolicyParts
    normalisation: Normalisation | None
    actions: tuple[ActionPart, ...]

    @classmethod
    def of(cls, run: SavedRun, policy_id: str | None) -> Self:
        """Return the form of a run's policy.

        Raises:
            AiorlError: the policy cannot be loaded; see `SavedRun.parts`.
        """
        parts = run.parts(policy_id)
        normalisation = None
        if isinstance(parts.filter, MeanStdFilter):
            normalisation = Normalisation.of(parts.filter)
        return cls(
            run=run,
            parts=parts,
            normalisation=normalisation,
            actions=tuple(_action_parts(parts, run.acting.part.clip_actions)),
        )

    @property
    def spec(self) -> ActingSpec:
        """Inputs and outputs of the network."""
        return self.parts.policy.spec

    @property
    def carried(self) -> ArraySpec | None:
        """Last component of the state, with the previous actions before they were clipped; None if
        there is none.
        """
        return self._carried_as("state_in_")

    @property
    def carried_output(self) -> ArraySpec | None:
        """The same for the next step."""
        return self._carried_as("state_out_")

    def _carried_as(self, prefix: str) -> ArraySpec | None:
        previous = self.spec.prev_action
        if previous is None or all(part.bounds is None for part in self.actions):
            return None
        return ArraySpec(f"{prefix}{len(self.spec.state_shapes)}", previous.shape, "float32")

    @property
    def previous_bounds(self) -> tuple[F32, F32]:
        """Lower and upper bounds that previous actions [*shape] were clipped to; infinite where
        they were not.
        """
        low: list[F32] = []
        high: list[F32] = []
        for part in self.actions:
            infinite = np.full(math.prod(part.output.shape), np.inf, np.float32)
            bounds = part.bounds or (-infinite, infinite)
            low.append(_rounded(bounds[0], math.inf))
            high.append(_rounded(bounds[1], -math.inf))
        shape = () if self.spec.prev_action is None else self.spec.prev_action.shape
        return np.concatenate(low).reshape(shape), np.concatenate(high).reshape(shape)

    @property
    def inputs(self) -> tuple[ArraySpec, ...]:
        """Inputs without the row axis: observations, previous actions and rewards if the network
        uses them, states.
        """
        spec = self.spec
        preprocessor = self.parts.preprocessor
        specs = [ArraySpec(OBS_INPUT, tuple(preprocessor.shape), np.dtype(preprocessor.dtype).name)]
        if spec.prev_action is not None:
            specs += [spec.prev_action, ArraySpec(PREV_REWARDS_INPUT, (), "float32")]
        specs += _states(spec.state_inputs, spec)
        if self.carried is not None:
            specs.append(self.carried)
        return tuple(specs)

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """Outputs without the row axis: actions, then the network's outputs."""
        spec = self.spec
        carried = self.carried_output
        return (
            *(part.output for part in self.actions),
            ArraySpec(DIST_INPUTS_OUTPUT, (spec.num_dist_inputs,), "float32"),
            ArraySpec(VF_OUTPUT, (), "float32"),
            *_states(spec.output_names[2:], spec),
            *(() if carried is None else (carried,)),
        )


def _states(names: tuple[str, ...], spec: ActingSpec) -> Iterator[ArraySpec]:
    return (
        ArraySpec(name, shape, "float32")
        for name, shape in zip(names, spec.state_shapes, strict=True)
    )


def _action_parts(parts: PolicyParts, clip_actions: bool) -> Iterator[ActionPart]:
    whole = parts.policy.distribution
    pieces = [(_ACTION, whole, slice(0, whole.num_inputs))]
    if isinstance(whole, Composite):
        pieces = [
            (f"{_ACTION}_{index}", part.distribution, part.inputs)
            for index, part in enumerate(whole.parts)
        ]
    leaves = leaves_of(parts.policy.action_space)
    for (name, distribution, inputs), (path, space) in zip(pieces, leaves, strict=True):
        dtype = "float64" if _needs_float64(space) else "float32"
        yield ActionPart(
            output=ArraySpec(name, tuple(space.shape or ()), np.dtype(space.dtype).name),
            path=path,
            space=space,
            distribution=distribution,
            inputs=inputs,
            dtype=dtype,
            bounds=_bounds(space, dtype) if clip_actions else None,
        )


def _needs_float64(space: spaces.Space[Any]) -> bool:
    """Return whether float32 is too coarse for the range of a space."""
    if not isinstance(space, spaces.Box) or space.dtype != np.float64:
        return False
    scale = BoxScale(space)
    return bool((np.abs(scale.centre) > _FARTHEST * scale.half_range).any())


def _bounds(space: spaces.Space[Any], dtype: str) -> tuple[Array, Array] | None:
    if not isinstance(space, spaces.Box) or not (
        space.bounded_below.any() or space.bounded_above.any()
    ):
        return None
    return _rounded(space.low, math.inf, dtype), _rounded(space.high, -math.inf, dtype)


def _rounded(bound: NDArray[Any], toward: float, dtype: str = "float32") -> Array:
    """Return bounds as flat floats; bounds that the dtype can't represent move inwards, so that
    none is exceeded.
    """
    flat = bound.ravel().astype(np.float64)
    with np.errstate(over="ignore"):
        near = flat.astype(dtype)
    is_beyond = near < flat if toward > 0 else near > flat
    moved: Array = np.where(is_beyond, np.nextafter(near, toward, dtype=dtype), near)
    return moved


def normalise(ops: Any, obs: Any, normalisation: Normalisation) -> Any:
    """Return filtered observations, float32."""
    centred = ops.subtract(ops.cast(obs, "float32"), normalisation.centre)
    return ops.subtract(ops.multiply(centred, normalisation.scale), normalisation.shift)


def actions_before_clipping(ops: Any, previous: Any, carried: Any, form: PolicyForm) -> Any:
    """Return previous actions as the policy chose them.

    Args:
        ops: the format's operations.
        previous: actions [N, *shape] as environments got them.
        carried: actions [N, *shape] as the policy chose them.
        form: the policy.

    Returns:
        The carried numbers where the others are what clipping makes of them; elsewhere another
        action was taken.
    """
    low, high = form.previous_bounds
    clipped = ops.minimum(ops.maximum(carried, low), high)
    return ops.where_close(previous, clipped, form.parts.policy.layout.rounding, carried)


def carry_actions(ops: Any, dist_inputs: Any, form: PolicyForm) -> Any:
    """Return the most likely actions [N, *shape] before they are clipped, float32.

    Raises:
        ExportError: a part has a kind of distribution that can't be exported.
    """
    flat = []
    for part in form.actions:
        chosen = choose_action(ops, dist_inputs, replace(part, bounds=None))
        flat.append(ops.cast(ops.reshape(chosen, (math.prod(part.output.shape),)), "float32"))
    assert form.carried is not None, "only such policies carry actions"
    return ops.reshape(ops.joined(flat), form.carried.shape)


def choose_action(ops: Any, dist_inputs: Any, part: ActionPart) -> Any:
    """Return the most likely actions [N, ...] in the environment's form.

    Args:
        ops: the format's operations.
        dist_inputs: inputs of the whole distribution, [N, P].
        part: the array of the action.

    Returns:
        The actions.

    Raises:
        ExportError: this kind of distribution can't be exported.
    """
    inputs = ops.columns(dist_inputs, part.inputs.start, part.inputs.stop)
    return ops.cast(ops.reshape(_mode(ops, inputs, part), part.output.shape), part.output.dtype)


def _mode(ops: Any, inputs: Any, part: ActionPart) -> Any:
    kind = part.distribution
    match kind:
        case Categorical():
            return _shifted(ops, ops.argmax(inputs), np.array(kind.start))
        case MultiCategorical():
            widest = int(kind.sizes.max())
            columns = np.full(len(kind.sizes) * widest, kind.num_inputs)
            columns[kind.positions] = np.arange(kind.num_inputs)
            padded = ops.take(inputs, columns, MASKED_LOGIT)
            table = ops.reshape(padded, [len(kind.sizes), widest])
            # ONNX Runtime's ArgMax leaves a table without rows as it is
            index = ops.reshape(ops.argmax(table), [len(kind.sizes)])
            return _shifted(ops, index, kind.start)
        case Bernoulli():
            return ops.is_positive(inputs)
        case DiagGaussian():
            values = ops.columns(inputs, 0, kind.size)
            if isinstance(kind, SquashedGaussian):
                share = ops.multiply(ops.add(ops.tanh(values), _ONE), _ONE / 2)
                values = ops.minimum(ops.add(ops.multiply(share, kind.span), kind.low), kind.high)
            if part.dtype != "float32":
                values = ops.cast(values, part.dtype)
            if isinstance(kind, ScaledGaussian):
                half_range = kind.scale.half_range.astype(part.dtype)
                centre = kind.scale.centre.astype(part.dtype)
                values = ops.add(ops.multiply(values, half_range), centre)
            if part.bounds is not None:
                low, high = part.bounds
                values = ops.minimum(ops.maximum(values, low), high)
            return values
    raise ExportError(f"actions of a {kind.name} distribution can't be exported")


def _shifted(ops: Any, index: Any, start: NDArray[np.int64]) -> Any:
    if not start.any():
        return index
    return ops.add(index, start.astype(np.int64))
