"""An exported policy, whatever the format: its inputs and outputs, and the steps before and after the network.

The file holds everything between an observation as the preprocessor gives it and an action as the environment takes it:
observation filter, network, the most likely action, clipping to the bounds of the action space, dtype and shape.
Bounds and statistics are float32, which every runtime has, also in browsers and on accelerators. A format has its own
way to write an operation (`_Nodes` of `onnx_form`, `_KerasOperations` of `tensorflow_forms`); a tensor is whatever the
format calls it by, and its first axis is the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
    Categorical,
    Composite,
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.errors import ExportError

Array = NDArray[Any]
F32 = NDArray[np.float32]

_ACTION = "action"
_ONE = np.ones(1, np.float32)


@dataclass(frozen=True, slots=True)
class ActionPart:
    """One array of an action.

    Attributes:
        output: its name, shape and dtype among the outputs.
        path: keys and positions in the action space that lead to it; empty where the action is one array.
        space: its space.
        distribution: over it.
        inputs: its columns among the inputs of the whole distribution.
        bounds: least and greatest numbers of a Box that actions are clipped to, flat; None = they are not.
    """

    output: ArraySpec
    path: tuple[str | int, ...]
    space: spaces.Space[Any]
    distribution: ActionDistribution
    inputs: slice
    bounds: tuple[F32, F32] | None


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """A policy of a checkpoint, ready to be written.

    Attributes:
        run: where it is from.
        parts: what it acts with.
        normalisation: its observation filter; None without.
        actions: the arrays of its actions.
    """

    run: SavedRun
    parts: PolicyParts
    normalisation: Normalisation | None
    actions: tuple[ActionPart, ...]

    @classmethod
    def of(cls, run: SavedRun, policy_id: str | None) -> Self:
        """A policy of a run.

        Raises: as `SavedRun.parts`.
        """
        parts = run.parts(policy_id)
        own = parts.filter
        normalisation = Normalisation.of(own) if isinstance(own, MeanStdFilter) else None
        return cls(run, parts, normalisation, tuple(_action_parts(parts, run.acting.part.clip_actions)))

    @property
    def spec(self) -> ActingSpec:
        """Description of the network."""
        return self.parts.policy.spec

    @property
    def inputs(self) -> tuple[ArraySpec, ...]:
        """Inputs, without the axis of rows: observations, the step before for a network that looks back, states."""
        spec, preprocessor = self.spec, self.parts.preprocessor
        previous = () if spec.prev_action is None else (spec.prev_action, ArraySpec(PREV_REWARDS_INPUT, (), "float32"))
        return (
            ArraySpec(OBS_INPUT, tuple(preprocessor.shape), np.dtype(preprocessor.dtype).name),
            *previous,
            *_states(spec.state_inputs, spec),
        )

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """Outputs, without the axis of rows: actions, then what the network gives."""
        spec = self.spec
        return (
            *(part.output for part in self.actions),
            ArraySpec(DIST_INPUTS_OUTPUT, (spec.num_dist_inputs,), "float32"),
            ArraySpec(VF_OUTPUT, (), "float32"),
            *_states(spec.output_names[2:], spec),
        )


def _states(names: tuple[str, ...], spec: ActingSpec) -> Iterator[ArraySpec]:
    return (ArraySpec(name, shape, "float32") for name, shape in zip(names, spec.state_shapes, strict=True))


def _action_parts(parts: PolicyParts, clip_actions: bool) -> Iterator[ActionPart]:
    distribution = parts.policy.distribution
    if isinstance(distribution, Composite):
        found = [(part.distribution, part.inputs) for part in distribution.parts]
    else:
        found = [(distribution, slice(0, distribution.num_inputs))]
    for index, ((kind, inputs), (path, space)) in enumerate(
        zip(found, _leaves(parts.policy.action_space, ()), strict=True)
    ):
        name = f"{_ACTION}_{index}" if isinstance(distribution, Composite) else _ACTION
        output = ArraySpec(name, tuple(space.shape or ()), np.dtype(space.dtype).name)
        yield ActionPart(output, path, space, kind, inputs, _bounds(space) if clip_actions else None)


def _leaves(
    space: spaces.Space[Any], path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space[Any]]]:
    """The parts of a space that are arrays, depth first, each behind the path to it."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for name, part in named:
            yield from _leaves(part, (*path, name))
    else:
        yield path, space


def _bounds(space: spaces.Space[Any]) -> tuple[F32, F32] | None:
    if not isinstance(space, spaces.Box) or not (space.bounded_below.any() or space.bounded_above.any()):
        return None
    return _rounded(space.low, math.inf), _rounded(space.high, -math.inf)


def _rounded(bound: NDArray[Any], toward: float) -> F32:
    """Bounds in float32, flat; those that it can't hold moved inwards, so that no action is beyond them."""
    flat = bound.ravel().astype(np.float64)
    with np.errstate(over="ignore"):
        near = flat.astype(np.float32)
    is_beyond = near < flat if toward > 0 else near > flat
    moved: F32 = np.where(is_beyond, np.nextafter(near, np.float32(toward)), near)
    return moved


def normalise(ops: Any, obs: Any, own: Normalisation) -> Any:
    """Filtered observations, float32."""
    centred = ops.subtract(ops.cast(obs, "float32"), own.centre)
    return ops.subtract(ops.multiply(centred, own.scale), own.shift)


def choose_action(ops: Any, dist_inputs: Any, part: ActionPart) -> Any:
    """The most likely action [N, ...] as the environment takes it, for the inputs of the whole distribution [N, P].

    Raises: ExportError for a distribution of another kind.
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
            return _shifted(ops, ops.argmax(ops.reshape(padded, [len(kind.sizes), widest])), kind.start)
        case Bernoulli():
            return ops.is_positive(inputs)
        case DiagGaussian():
            values = ops.columns(inputs, 0, kind.size)
            if isinstance(kind, SquashedGaussian):
                share = ops.multiply(ops.add(ops.tanh(values), _ONE), _ONE / 2)
                values = ops.minimum(ops.add(ops.multiply(share, kind.span), kind.low), kind.high)
            if part.bounds is not None:
                low, high = part.bounds
                values = ops.minimum(ops.maximum(values, low), high)
            return values
    raise ExportError(f"actions of a {kind.name} distribution can't be exported")


def _shifted(ops: Any, index: Any, start: NDArray[np.int64]) -> Any:
    return ops.add(index, start.astype(np.int64)) if start.any() else index
