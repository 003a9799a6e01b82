"""The JSON beside an exported policy: what goes in, what comes out, what it means, and where it is from."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.acting_graph import (
    DIST_INPUTS_OUTPUT,
    OBS_INPUT,
    PREV_ACTIONS_INPUT,
    PREV_REWARDS_INPUT,
    VF_OUTPUT,
    ArraySpec,
)
from aiorl.acting.distributions import SquashedGaussian
from aiorl.acting.observation.filters import MeanStdFilter
from aiorl.data.spaces import space_to_dict
from aiorl.run.export.check import ROWS, TOLERANCE, Compared
from aiorl.run.export.form import ActionPart, PolicyForm

__all__ = ["describe"]

_FORMAT_VERSION = 1
_GAUSSIAN_INPUTS = "means, then logarithms of standard deviations (held within -20 and 2)"
_INPUTS_OF = {
    "categorical": "a logit for each action",
    "multi_categorical": "logits of each choice, one after the other",
    "bernoulli": "logit of each bit's being 1",
    "greedy": "the value of each action, of which the largest is taken: nothing is to be drawn",
    "squashed_gaussian": f"{_GAUSSIAN_INPUTS}; what is drawn is squashed into the bounds of the space by tanh",
}
_PACKAGES = ("aiorl", "numpy", "gymnasium", "onnxruntime")
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras")


def describe(form: PolicyForm, format_name: str, file_name: str, compared: Compared) -> dict[str, Any]:
    """What the JSON beside a file holds.

    Args:
        form: the policy.
        format_name: such as "onnx".
        file_name: what one opens, relative to the JSON.
        compared: what `check_against_policy` found.
    """
    run, parts = form.run, form.parts
    part, preprocessor = run.acting.part, form.parts.preprocessor
    space = run.acting.spaces[parts.policy_id]
    own = parts.filter
    packages = _PACKAGES if format_name == "onnx" else (*_PACKAGES, *_TENSORFLOW_PACKAGES)
    return {
        "format_version": _FORMAT_VERSION,
        "format": format_name,
        "file": file_name,
        "policy_id": parts.policy_id,
        "algo": part.policies[parts.policy_id].algo or part.algo,
        "env": part.env,
        "env_steps": run.env_steps,
        "checkpoint": run.checkpoint.path.name,
        "run_id": run.checkpoint.meta.get("run_id"),
        "observation_space": dict(space["observation"]),
        "action_space": dict(space["action"]),
        "inputs": [_described(spec, _meaning_of_input(form, spec)) for spec in form.inputs],
        "outputs": [
            *(
                _described(one.output, _meaning_of_action(form, one))
                | {"path": list(one.path), "space": space_to_dict(one.space)}
                for one in form.actions
            ),
            *(_described(spec, _meaning_of_output(form, spec)) for spec in form.outputs[len(form.actions) :]),
        ],
        "preprocessor": {
            "name": type(preprocessor).__name__,
            "action_mask": preprocessor.layout.num_mask,
            "parts": {name: list(shape) for name, shape in preprocessor.layout.parts.items()},
        },
        "observation_filter": {
            "name": part.observation_filter,
            "count": own.count if isinstance(own, MeanStdFilter) else 0,
        },
        "distribution": form.spec.distribution,
        "clip_actions": part.clip_actions,
        "checked": {"rows": list(ROWS), "tolerance": TOLERANCE, **compared._asdict()},
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def _described(spec: ArraySpec, meaning: str) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": [None, *spec.shape], "meaning": meaning}


def _meaning_of_input(form: PolicyForm, spec: ArraySpec) -> str:
    if spec.name == OBS_INPUT:
        return _meaning_of_obs(form)
    if spec.name == PREV_ACTIONS_INPUT:
        many = ", its arrays flattened, one after the other" if form.parts.policy.layout.is_nested else ""
        return f"the action before{many}; zeros at an episode's start"
    if spec.name == PREV_REWARDS_INPUT:
        return "the reward before; zero at an episode's start"
    return f"recurrent state: {spec.name.replace('_in_', '_out_')} of the step before, zeros at an episode's start"


def _meaning_of_obs(form: PolicyForm) -> str:
    preprocessor = form.parts.preprocessor
    layout = preprocessor.layout
    if preprocessor.is_identity:
        return "observations as the environment gives them"
    text = {
        "BoxPreprocessor": f"observations as {preprocessor.dtype}",
        "DiscretePreprocessor": "the observation's number, one-hot",
        "MultiDiscretePreprocessor": "each number of the observation one-hot, one after the other",
        "MultiBinaryPreprocessor": "the observation's bits as float32",
        "NestedPreprocessor": "the parts of the observation, flattened, one after the other in the order of the space, "
        "Discrete ones one-hot",
    }
    kind = type(preprocessor).__name__
    if not layout.num_mask:
        return text.get(kind, f"what {kind} makes of an observation")
    return (
        f"the action mask, {layout.num_mask} numbers (1 = allowed, in the order of the action space), then the "
        "observation, flattened: the only other part, or all of them in the order of the space, Discrete ones one-hot"
    )


def _meaning_of_action(form: PolicyForm, part: ActionPart) -> str:
    space = part.space
    match space:
        case spaces.Discrete():
            return f"number of the most likely action, {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete():
            return "the most likely number of each choice"
        case spaces.MultiBinary():
            return "1 where that is likelier than 0"
    if isinstance(part.distribution, SquashedGaussian):
        return "mean of the distribution, squashed into the bounds of the space"
    return "mean of the distribution" + (", clipped to the bounds of the space" if part.bounds is not None else "")


def _meaning_of_output(form: PolicyForm, spec: ArraySpec) -> str:
    if spec.name == DIST_INPUTS_OUTPUT:
        kinds = " then ".join(_INPUTS_OF.get(part.distribution.name, _GAUSSIAN_INPUTS) for part in form.actions)
        return f"inputs of the action distribution, before anything is chosen: {kinds}"
    if spec.name == VF_OUTPUT:
        return "the value function's estimate; 0, or untrained, where the algorithm learns none beside the policy"
    return f"recurrent state after the step, {np.prod(spec.shape, dtype=int)} numbers"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
