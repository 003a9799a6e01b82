"""Comparison of a newly exported file with its policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from aiorl.acting.acting_graph import (
    DIST_INPUTS_OUTPUT,
    OBS_INPUT,
    PREV_ACTIONS_INPUT,
    PREV_REWARDS_INPUT,
    Previous,
)
from aiorl.acting.distributions import MASKED_LOGIT, BoxScale
from aiorl.acting.graph_policy import ActResult, GraphPolicy
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.errors import ExportError
from aiorl.run.export.form import PolicyForm

Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Function that runs a file: inputs by name -> outputs by name, [N, ...]."""

TOLERANCE = 1e-5
"""Largest difference allowed, relative to the largest number of an output if that is above 1.
Actions of a Box with a range are compared in units of half the range, from the middle of it."""
ROWS = (1, 3, 16)
"""Numbers of rows of the batches that are compared."""

_STEPS = 2
_SPREAD = 5.0  # standard deviations
_ROUNDING = 10.0
"""Largest difference allowed as a multiple of the rounding, if above TOLERANCE: runtimes sum in
different orders."""


class Compared(NamedTuple):
    """Result of a comparison, relative to the largest number of an output if that is above 1.

    Attributes:
        difference: largest difference between the outputs of file and policy.
        rounding: largest difference that a change of the last digit of each weight makes in the
            policy's outputs. A deep network with large weights has few certain digits.
    """

    difference: float
    rounding: float


def check_against_policy(form: PolicyForm, run: Runner) -> Compared:
    """Run a file and its policy on the same random observations, for several batch sizes and a few
    steps each.

    Args:
        form: the policy.
        run: function that runs the file.

    Returns:
        The largest differences found.

    Raises:
        ExportError: the file fails, or its outputs differ from the policy's.
    """
    rng = np.random.default_rng(0)
    policy = form.parts.policy
    nudged = _nudged(form, rng)
    difference = rounding = 0.0
    for rows in ROWS:
        states = policy.initial_state(rows)
        for _ in range(_STEPS):
            obs = _random_obs(form, rng, rows)
            prev = _random_previous(form, rng, rows)
            inputs = {OBS_INPUT: obs, **dict(zip(form.spec.state_inputs, states, strict=True))}
            if prev is not None:
                inputs |= {PREV_ACTIONS_INPUT: prev[0], PREV_REWARDS_INPUT: prev[1]}
            if prev is not None and form.carried is not None:
                chosen, clipped = _random_carried(form, rng, prev[0])
                inputs |= {form.carried.name: chosen, PREV_ACTIONS_INPUT: clipped}
                prev = np.where(_is_first_half(chosen), chosen, clipped), prev[1]
            try:
                outputs = dict(run(inputs))
            except Exception as error:
                # runtimes raise exceptions of any kind
                raise ExportError(f"the exported file doesn't run: {error!s:.500}") from error
            _check_form(form, outputs, rows)
            filtered = form.parts.filter(obs, update=False)
            expected = _by_name(form, policy.act(filtered, states, prev=prev, explore=False))
            rounded = _by_name(form, nudged.act(filtered, states, prev=prev, explore=False))
            states = [expected[name] for name in form.spec.output_names[2:]]
            for name, array in expected.items():
                output_rounding = _difference(rounded[name], array)
                limit = max(TOLERANCE, _ROUNDING * output_rounding)
                difference = max(difference, _checked_difference(name, outputs[name], array, limit))
                rounding = max(rounding, output_rounding)
            difference = max(difference, *_action_differences(form, outputs))
    return Compared(difference, rounding)


def _nudged(form: PolicyForm, rng: np.random.Generator) -> GraphPolicy:
    """Return the policy with the last digit of each weight changed, randomly up or down."""
    policy = form.run.parts(form.parts.policy_id).policy
    weights = dict(form.parts.policy.get_weights())
    for name, weight in weights.items():
        if weight.dtype.kind == "f":
            directions = rng.choice(np.array([-np.inf, np.inf], weight.dtype), weight.shape)
            weights[name] = np.nextafter(weight, directions)
    policy.set_weights(weights)
    return policy


def _by_name(form: PolicyForm, result: ActResult) -> dict[str, Array]:
    """Return the outputs of a network by name."""
    arrays = (result.columns[c.ACTION_DIST_INPUTS], result.columns[c.VF_PREDS], *result.state_out)
    return dict(zip(form.spec.output_names, arrays, strict=True))


def _random_obs(form: PolicyForm, rng: np.random.Generator, rows: int) -> Array:
    """Return random preprocessed observations [N, ...], of a size that the network has seen."""
    preprocessor = form.parts.preprocessor
    normalisation = form.normalisation
    space = preprocessor.observation_space
    assert isinstance(space, spaces.Box), "preprocessors return arrays"
    is_whole = preprocessor.dtype.kind != "f"
    centre: Array = np.zeros(space.shape)
    spread: Array = np.full(space.shape, 256.0 if is_whole else 1.0)
    if normalisation is not None:
        centre = normalisation.centre.astype(np.float64)
        spread = 1.0 / normalisation.scale.astype(np.float64)
    low = np.clip(centre - _SPREAD * spread, space.low, space.high)
    high = np.clip(centre + _SPREAD * spread, space.low, space.high)
    obs = rng.uniform(low, high, (rows, *space.shape))
    num_mask = preprocessor.layout.num_mask
    if num_mask:
        obs[:, :num_mask] = rng.integers(0, 2, (rows, num_mask))
        obs[form.parts.policy.rows_without_action(obs), :num_mask] = 1.0
    if is_whole:
        obs = np.rint(obs)
    return obs.astype(preprocessor.dtype)


def _random_previous(form: PolicyForm, rng: np.random.Generator, rows: int) -> Previous | None:
    """Return random previous actions and rewards; the first row has a zero action, as at an
    episode's start.
    """
    spec = form.spec.prev_action
    if spec is None:
        return None
    policy = form.parts.policy
    policy.action_space.seed(int(rng.integers(1 << 31)))
    actions = np.stack([policy.layout.to_row(policy.action_space.sample()) for _ in range(rows)])
    actions[0] = 0
    return actions.astype(spec.dtype), rng.standard_normal(rows).astype(np.float32)


def _random_carried(
    form: PolicyForm, rng: np.random.Generator, previous: Array
) -> tuple[Array, Array]:
    """Return random actions before clipping, and previous actions: the clipped ones, or others in
    the second half.
    """
    low, high = form.previous_bounds
    chosen = (rng.standard_normal(previous.shape) * _SPREAD).astype(np.float32)
    return chosen, np.where(_is_first_half(chosen), np.clip(chosen, low, high), previous)


def _is_first_half(rows: Array) -> Array:
    """Return for rows [N, ...] whether they are in the first half, [N, 1...]."""
    return (np.arange(len(rows)) <= len(rows) // 2).reshape(-1, *[1] * (rows.ndim - 1))


def _check_form(form: PolicyForm, outputs: Mapping[str, Array], rows: int) -> None:
    actual = {name: (value.shape, value.dtype.name) for name, value in outputs.items()}
    expected = {spec.name: ((rows, *spec.shape), spec.dtype) for spec in form.outputs}
    if actual != expected:
        raise ExportError(f"the exported file returns {actual}, expected {expected}")


def _action_differences(form: PolicyForm, outputs: Mapping[str, Array]) -> Iterator[float]:
    """Yield the differences of actions from those that aiorl would choose for the distribution
    inputs from the file.

    So two almost equally likely actions do not count as a difference.
    """
    policy = form.parts.policy
    actions = policy.distribution.deterministic(outputs[DIST_INPUTS_OUTPUT])
    if form.carried_output is not None:
        name = form.carried_output.name
        yield _checked_difference(name, outputs[name], actions.astype(np.float32), TOLERANCE)
    if form.run.acting.part.clip_actions:
        actions = policy.layout.clip(actions)
    for part, expected in zip(form.actions, policy.layout.split(actions), strict=True):
        got = outputs[part.output.name]
        limit = 0.0
        if isinstance(part.space, spaces.Box):
            scale = BoxScale(part.space)
            steps = np.abs(scale.centre / scale.half_range) * np.finfo(expected.dtype).eps
            limit = max(TOLERANCE, 2 * float(steps.max(initial=0.0)))
            got = scale.to_units(got)
            expected = scale.to_units(expected)
        yield _checked_difference(part.output.name, got, expected, limit)


def _difference(got: Array, want: Array) -> float:
    """Return the largest difference in an output; floats are relative to the largest number if that
    is above 1.
    """
    sizes = np.abs(want[np.abs(want) < -MASKED_LOGIT].astype(np.float64))
    scale = max(1.0, sizes.max(initial=0.0)) if want.dtype.kind == "f" else 1.0
    differences = np.abs(got.astype(np.float64) - want.astype(np.float64)) / scale
    return float(differences.max(initial=0.0))


def _checked_difference(
    name: str,
    got: Array,
    expected: Array,
    limit: float,
) -> float:
    """Return the difference of a file's output from the expected one, which must be within a limit.

    Raises:
        ExportError: it is larger, or NaN.
    """
    difference = _difference(got, expected)
    if not difference <= limit:
        raise ExportError(
            f"the exported file is not the policy: {name} differs by {difference:.3g}, more than"
            f" the limit of {limit:.3g}"
        )
    return difference
