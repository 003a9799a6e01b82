"""Export of a policy from a checkpoint to files that run without aiorl.

paths = aiorl.export_policy("runs/ppo_CartPole-v1_...", "exported", ["onnx", "savedmodel"])
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiorl.acting.acting_graph import ArraySpec
from aiorl.acting.acting_state import SavedRun
from aiorl.acting.actor import CARRIES_ACTION
from aiorl.acting.filters import MeanStdFilter
from aiorl.acting.older_order import KEEPS_ORDER
from aiorl.config.code import import_object
from aiorl.config.parts import RuntimePart
from aiorl.data.spaces import space_to_dict
from aiorl.errors import ConfigError, ExportError, nearest
from aiorl.learning.tf_runtime import import_tensorflow
from aiorl.process.imports import require_packages
from aiorl.process.replaced_file import replaced_directory
from aiorl.process.versions import installed_version
from aiorl.run.export.check import ROWS, TOLERANCE, Compared, Runner, check_against_policy
from aiorl.run.export.form import PolicyForm

_DESCRIPTION = "policy.json"
_FORMAT_VERSION = 1
_MEANINGS = {
    "obs": (
        "preprocessed observations: unchanged, or flattened in the order of the space with Discrete"
        " parts one-hot; an action mask (1 = allowed) comes first"
    ),
    "prev_actions": (
        "the previous action, its arrays flattened one after another; zeros at an episode's start."
        " Numbers that the state says were clipped are replaced by those that the policy chose"
    ),
    "prev_rewards": "the previous reward; zero at an episode's start",
    "state_in": (
        "state: state_out of the previous step; zeros at an episode's start. If carries_action is"
        " true, the last component is the previous action before it was clipped"
    ),
    "action": "the most likely action, for a Box the mean, in the environment's form",
    "dist_inputs": (
        "inputs of the action distribution. Categorical and Bernoulli: logits. Gaussian: means,"
        " then logarithms of standard deviations (clipped to -20 to 2); squashed_gaussian maps"
        " draws into the bounds of the space by tanh; scaled_gaussian multiplies draws by half the"
        " range of the space and adds the middle of the range, where both bounds are finite."
        " Greedy: values of the actions"
    ),
    "vf": (
        "the value function's estimate; 0 or untrained if the algorithm learns none in addition to"
        " the policy"
    ),
    "state_out": "state after the step: the next state_in",
}
"""Meanings of inputs and outputs, by name without the number."""
_PACKAGES = ("aiorl", "numpy", "gymnasium", "onnxruntime", "tensorflow", "tensorflow-cpu", "keras")


@dataclass(frozen=True, slots=True)
class _Format:
    """Export format.

    Attributes:
        file: the file to open in the format's directory; "" is the directory itself.
        packages: top-level modules that the writer needs.
        writer: import path of the function that writes a policy to a path and opens the file; its
            module loads them.
    """

    file: str
    packages: tuple[str, ...]
    writer: str

    def write(self, form: PolicyForm, directory: Path) -> Runner:
        """Write a policy, and return a function that runs the file."""
        if "tensorflow" in self.packages and "tensorflow" not in sys.modules:
            import_tensorflow(RuntimePart())
        writer = import_object(f"aiorl.run.export.{self.writer}", key="formats")
        runner: Runner = writer(form, directory / self.file)
        return runner


_TENSORFLOW = ("tensorflow", "keras")
FORMATS = {
    "onnx": _Format("policy.onnx", ("onnx",), "onnx_form:write_onnx"),
    "savedmodel": _Format("", _TENSORFLOW, "tensorflow_forms:write_savedmodel"),
    "keras": _Format("policy.keras", _TENSORFLOW, "tensorflow_forms:write_keras"),
    "tflite": _Format("policy.tflite", _TENSORFLOW, "tensorflow_forms:write_tflite"),
}
"""Formats by name."""


def export_policy(
    run: str | Path | SavedRun,
    directory: str | Path,
    formats: Iterable[str] = ("onnx",),
    *,
    policy_id: str | None = None,
) -> dict[str, Path]:
    """Export a checkpoint's policy to files that are complete and run without aiorl.

    Each format gets its own directory in `directory`, with a ``policy.json`` that describes inputs
    and outputs. Every file is compared with the policy before it is put in place. If anything
    fails, existing files stay unchanged.

    Args:
        run: path of a checkpoint, of a run directory or of a directory of checkpoints (the newest
            intact one is used), or an opened run.
        directory: directory to write to, made if missing. An earlier export there is replaced.
        formats: any of "onnx", "savedmodel", "keras", "tflite"; all but the first need TensorFlow.
        policy_id: id of the policy; None is the only one, or ``default_policy``.

    Returns:
        Path to open, by format: a file, or for "savedmodel" a directory.

    Raises:
        CheckpointError: there is no checkpoint, or it can't be used.
        UnknownPolicyError: no policy has that id (also a ValueError).
        PolicyError: the policy has a class of the user's own, which is not in the checkpoint (also
            a ValueError).
        ExportError: the policy can't be written in a format, or the file differs from the policy (a
            PolicyError).
        ConfigError: a format is unknown or needs a package that is not installed, or the directory
            can't be written or has other content (also a ValueError).
        ImportError: the network runs only in TensorFlow, which is not installed.
    """
    names = _checked(formats)
    directory = Path(directory).expanduser().absolute()
    for name in names:
        _check_place(directory / name)
    form = PolicyForm.of(run if isinstance(run, SavedRun) else SavedRun.open(run), policy_id)
    try:
        with ExitStack() as stack:
            for name in names:
                _write(form, name, stack.enter_context(replaced_directory(directory / name)))
    except OSError as error:
        raise ConfigError(
            f"{directory} can't be written: {error.strerror or error}.",
            key="directory",
            value=str(directory),
        ) from error
    return {name: directory / name / FORMATS[name].file for name in names}


def _write(form: PolicyForm, name: str, directory: Path) -> None:
    kind = FORMATS[name]
    try:
        compared = check_against_policy(form, kind.write(form, directory))
    except ExportError as error:
        raise ExportError(
            f"policy {form.parts.policy_id!r} can't be exported as {name}: {error}"
        ) from error
    description = json.dumps(_describe(form, name, kind.file or ".", compared), indent=1)
    (directory / _DESCRIPTION).write_text(f"{description}\n", encoding="utf-8")


def _checked(formats: Iterable[str]) -> list[str]:
    """Return the formats in order, without duplicates, after a check that they can be written
    here.
    """
    names = [formats] if isinstance(formats, str) else list(dict.fromkeys(formats))
    if not names:
        raise ConfigError(f"formats is empty; there are {', '.join(FORMATS)}.", key="formats")
    for name in names:
        if name not in FORMATS:
            raise ConfigError(
                f"there is no format {name!r:.100}; there are {', '.join(FORMATS)}.",
                key="formats",
                value=name,
                hint=nearest(str(name), FORMATS).strip(),
            )
        require_packages(
            f"the format {name}",
            FORMATS[name].packages,
            "learner",
            key="formats",
            value=name,
        )
    return names


def _check_place(path: Path) -> None:
    """Refuse to replace a directory that is not an earlier export."""
    if path.exists() and not (path / _DESCRIPTION).is_file():
        raise ConfigError(
            f"{path} exists and has no {_DESCRIPTION}, so it is not an earlier export; choose"
            " another directory.",
            key="directory",
            value=str(path.parent),
        )


def _describe(
    form: PolicyForm, format_name: str, file_name: str, compared: Compared
) -> dict[str, Any]:
    """Return the content of the JSON file next to an exported file.

    Args:
        form: the policy.
        format_name: name of the format, such as "onnx".
        file_name: path of the file, relative to the JSON file.
        compared: result of `check_against_policy`.
    """
    run = form.run
    parts = form.parts
    part = run.acting.part
    preprocessor = form.parts.preprocessor
    space = run.acting.spaces[parts.policy_id]
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
        KEEPS_ORDER: True,
        CARRIES_ACTION: form.carried is not None,
        "observation_space": dict(space["observation"]),
        "action_space": dict(space["action"]),
        "inputs": [_described(spec) for spec in form.inputs],
        "outputs": [
            *(
                {
                    **_described(action.output),
                    "path": action.path,
                    "space": space_to_dict(action.space),
                }
                for action in form.actions
            ),
            *map(_described, form.outputs[len(form.actions) :]),
        ],
        "preprocessor": {
            "name": type(preprocessor).__name__,
            "action_mask": preprocessor.layout.num_mask,
            "parts": {name: list(shape) for name, shape in preprocessor.layout.parts.items()},
        },
        "observation_filter": {
            "name": part.observation_filter,
            "count": parts.filter.count if isinstance(parts.filter, MeanStdFilter) else 0,
        },
        "distribution": form.spec.distribution,
        "clip_actions": part.clip_actions,
        "checked": {"rows": list(ROWS), "tolerance": TOLERANCE, **compared._asdict()},
        "versions": _versions(),
    }


def _described(spec: ArraySpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": [None, *spec.shape],
        "meaning": _MEANINGS[spec.name.rstrip("_0123456789")],
    }


def _versions() -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {package: installed_version(package) for package in _PACKAGES}
    return {package: version for package, version in versions.items() if version}
