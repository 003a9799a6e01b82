"""Checkpoints: a directory of safetensors and JSON, written at once or not at all.

    checkpoints/checkpoint-000123/
        tensors.safetensors    weights, optimiser, filters: every array
        meta.json              what the arrays belong to, counters, random states, and digests of both

A checkpoint is written under a temporary name, flushed to disk and renamed, so a directory of the final name is
whole unless the disk damaged it later; the digest tells. Loading one runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from aiorl.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "check_compatible",
    "list_checkpoints",
    "load_checkpoint",
    "load_newest_valid",
    "save_checkpoint",
]

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
_TENSORS = "tensors.safetensors"
_META = "meta.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")
_TEMPORARY = ".partial-"
_KEYS = {"format_version", "number", "tensors_sha256", "meta", "meta_sha256"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read back.

    Attributes:
        path: its directory.
        number: its number; they rise.
        tensors: name -> array, as given to `save_checkpoint`.
        meta: as given to `save_checkpoint`.
        damaged: paths of newer checkpoints that could not be used.
    """

    path: Path
    number: int
    tensors: dict[str, NDArray[Any]]
    meta: dict[str, Any]
    damaged: tuple[Path, ...] = field(default=())


def save_checkpoint(
    directory: Path, number: int, tensors: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], *, keep: int = 3
) -> Path:
    """Write one checkpoint and remove all but the newest `keep`.

    Blocks for as long as the disk takes. On failure the older checkpoints are as they were.

    Args:
        directory: where checkpoints are; made if missing.
        number: number of the new one; one of the same number is replaced.
        tensors: arrays of bool, int, uint or float, any shape.
        meta: what JSON can hold: run_id, env, algo, spaces, counters, random states.
        keep: checkpoints to keep, the new one included.
    Returns: the new checkpoint's directory.
    Raises: CheckpointError in one plain sentence if the disk is full, the directory can't be written, or something
        in it has no place in a checkpoint.
    """
    path = directory / f"checkpoint-{number:06d}"
    temporary = directory / f"{_TEMPORARY}{path.name}"
    try:
        payload = save_tensors({name: np.asarray(array, order="C") for name, array in tensors.items()})
        digest = hashlib.sha256(payload).hexdigest()
        header = {
            "format_version": FORMAT_VERSION, "number": number, "tensors_sha256": digest, "meta": dict(meta),
            "meta_sha256": _digest_of(meta),
        }  # fmt: skip
        text = json.dumps(header, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(path, f"something in it can't be stored: {error}") from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary / _TENSORS, payload)
        _write(temporary / _META, text)
        _sync_directory(temporary)
        _move_into_place(temporary, path)
        _sync_directory(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(path, f"can't be written: {error.strerror or error}. Older ones are intact.") from error
    _remove_old(directory, keep)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint and check it against its digest.

    Raises: CheckpointError if a file is missing, unreadable or damaged, or of another format version.
    """
    try:
        header = json.loads((path / _META).read_bytes())
        payload = (path / _TENSORS).read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(path, f"{_META} is damaged: {error}") from error
    if not isinstance(header, dict) or not header.keys() >= _KEYS:
        raise CheckpointError(path, f"{_META} is damaged: it lacks what every checkpoint has")
    if header["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            path,
            f"format version {header['format_version']!r}, but this aiorl reads {FORMAT_VERSION}; "
            "load it with the aiorl that wrote it",
        )
    if not isinstance(header["meta"], dict) or _digest_of(header["meta"]) != header["meta_sha256"]:
        raise CheckpointError(path, f"{_META} is damaged: its digest is not the one it says")
    if hashlib.sha256(payload).hexdigest() != header["tensors_sha256"]:
        raise CheckpointError(path, f"{_TENSORS} is damaged: its digest is not the one in {_META}")
    try:
        tensors = load_tensors(payload)
    except SafetensorError as error:
        raise CheckpointError(path, f"{_TENSORS} is damaged: {error}") from error
    return Checkpoint(path, int(header["number"]), tensors, header["meta"])


def load_newest_valid(directory: Path) -> Checkpoint:
    """Read the newest checkpoint that is whole, naming in the log those that are not.

    Raises: CheckpointError if there is none, or none that is whole.
    """
    damaged: list[Path] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            _log.warning("%s; taking the one before it", error)
            damaged.append(path)
        else:
            return Checkpoint(found.path, found.number, found.tensors, found.meta, tuple(damaged))
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(directory, f"none can be used; damaged: {names}")
    raise CheckpointError(directory, "there is none in this directory")


def list_checkpoints(directory: Path) -> list[Path]:
    """Directories of finished checkpoints, oldest first; empty if `directory` doesn't exist."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def check_compatible(checkpoint: Checkpoint, expected: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that belongs to something else.

    Args:
        checkpoint: what was loaded.
        expected: what its `meta` must say, such as {"algo": "ppo", "env": "CartPole-v1", "spaces": {...}}.
    Raises: CheckpointError naming all that differs, both values of each.
    """
    differing = [
        f"{name} is {checkpoint.meta.get(name)!r} there and {_as_json(value)!r} here"
        for name, value in expected.items()
        if checkpoint.meta.get(name) != _as_json(value)
    ]
    if differing:
        raise CheckpointError(checkpoint.path, f"belongs to another run: {'; '.join(differing)}")


def _as_json(value: Any) -> Any:  # Any: whatever JSON holds
    """The value as it would come back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))


def _digest_of(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(temporary: Path, path: Path) -> None:
    if path.exists():  # a directory can't be renamed onto a full one; the old stays until the new is in place
        aside = path.with_name(f"{_TEMPORARY}old-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        temporary.rename(path)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest; failing to is no reason to end a training run."""
    for path in list_checkpoints(directory)[: -max(keep, 1)]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
