"""Export of a policy out of a checkpoint, as files that run without aiorl.

paths = aiorl.export_policy("runs/ppo_CartPole-v1_...", "exported", ["onnx", "savedmodel"])
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiorl.acting.saved_run import SavedRun
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, ExportError, nearest
from aiorl.learning.tf_runtime import import_tensorflow
from aiorl.process.extras import want_packages
from aiorl.process.replaced_file import replaced_directory
from aiorl.run.export.check import Runner, check_against_policy
from aiorl.run.export.description import describe
from aiorl.run.export.form import PolicyForm
from aiorl.run.export.onnx_form import open_onnx, to_onnx

__all__ = ["FORMATS", "export_policy"]

_DESCRIPTION = "policy.json"

Writer = Callable[[PolicyForm, Path], Runner]
"""Writes a policy to a path and opens what was written."""


@dataclass(frozen=True, slots=True)
class _Format:
    """A format.

    Attributes:
        file: what one opens, in the format's directory; "" is the directory itself.
        packages: top-level modules that writing it needs.
        writer: gives what writes it; loads these.
    """

    file: str
    packages: tuple[str, ...]
    writer: Callable[[], Writer]


def _onnx() -> Writer:
    def write(form: PolicyForm, path: Path) -> Runner:
        path.write_bytes(to_onnx(form))
        return open_onnx(path)

    return write


def _from_tensorflow(name: str) -> Writer:
    if "tensorflow" not in sys.modules:
        import_tensorflow(CommonConfig(compilation_cache="off"))
    writer: Writer = getattr(importlib.import_module("aiorl.run.export.tensorflow_forms"), name)
    return writer


_TENSORFLOW = ("tensorflow", "keras")
FORMATS = {
    "onnx": _Format("policy.onnx", (), _onnx),
    "savedmodel": _Format("", _TENSORFLOW, partial(_from_tensorflow, "write_savedmodel")),
    "keras": _Format("policy.keras", _TENSORFLOW, partial(_from_tensorflow, "write_keras")),
    "tflite": _Format("policy.tflite", _TENSORFLOW, partial(_from_tensorflow, "write_tflite")),
}
"""Formats by name."""


def export_policy(
    run: str | Path | SavedRun,
    directory: str | Path,
    formats: Iterable[str] = ("onnx",),
    *,
    policy_id: str | None = None,
) -> dict[str, Path]:
    """Write a policy of a checkpoint as files that hold all of it and run without aiorl.

    Each format has a directory of its own below `directory`, with a ``policy.json`` that says what goes in and what
    comes out. Every file is run beside the policy before it is put in its place; if anything fails, nothing is changed.

    Args:
        run: a checkpoint, a run directory or a directory of checkpoints, of several the newest that is whole; or what
            was read of it.
        directory: where to write; made if missing. An earlier export there is replaced.
        formats: "onnx", "savedmodel", "keras", "tflite"; all but the first need TensorFlow.
        policy_id: which of several policies; None is the only one, or ``default_policy``.
    Returns: format -> what one opens: a file, for "savedmodel" a directory.

    Raises:
        CheckpointError: there is no checkpoint, or it can't be used.
        UnknownPolicyError: there is no such policy (also a ValueError).
        PolicyError: it is of a class of the user's own, which a checkpoint doesn't hold (also a ValueError).
        ExportError: it has no form in a format, or what was written is not the policy (a PolicyError).
        ConfigError: a format that is unknown or needs a package that is not installed; a directory that can't be
            written or holds something else (also a ValueError).
        ImportError: its network can only be run in TensorFlow, which is not installed.
    """
    wanted = _checked(formats)
    directory = Path(directory).expanduser().absolute()
    for name in wanted:
        _check_place(directory / name)
    form = PolicyForm.of(run if isinstance(run, SavedRun) else SavedRun.open(run), policy_id)
    try:
        with ExitStack() as stack:
            for name in wanted:
                _write(form, name, stack.enter_context(replaced_directory(directory / name)))
    except OSError as error:
        raise ConfigError(
            f"{directory} can't be written: {error.strerror or error}.", key="directory", value=str(directory)
        ) from error
    return {name: directory / name / FORMATS[name].file for name in wanted}


def _write(form: PolicyForm, name: str, directory: Path) -> None:
    kind = FORMATS[name]
    try:
        compared = check_against_policy(form, kind.writer()(form, directory / kind.file))
    except ExportError as error:
        raise ExportError(f"policy {form.parts.policy_id!r} can't be exported as {name}: {error}") from error
    described = describe(form, name, kind.file or ".", compared)
    (directory / _DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _checked(formats: Iterable[str]) -> list[str]:
    """The formats in order, each once, as far as they can be written here."""
    wanted = list(dict.fromkeys([formats] if isinstance(formats, str) else formats))
    if not wanted:
        raise ConfigError(f"no format is named; there are {', '.join(FORMATS)}.", key="formats")
    for name in wanted:
        if name not in FORMATS:
            raise ConfigError(
                f"there is no format {name!r:.100}; there are {', '.join(FORMATS)}.",
                key="formats",
                value=name,
                hint=nearest(str(name), FORMATS).strip(),
            )
        want_packages(f"the format {name}", FORMATS[name].packages, "learner", key="formats", value=name)
    return wanted


def _check_place(path: Path) -> None:
    """Refuse to replace what is no earlier export."""
    if path.exists() and not (path / _DESCRIPTION).is_file():
        raise ConfigError(
            f"{path} is there already and holds no {_DESCRIPTION}, so it is no earlier export; name another directory.",
            key="directory",
            value=str(path.parent),
        )
