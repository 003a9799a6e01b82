"""Checkpoints: a directory of safetensors and JSON, written completely or not at all.

    checkpoints/checkpoint-000123/
        tensors.safetensors        weights, optimiser, filters: every array
        pieces/000000.safetensors  stored experience, if any: rows of one array in each file
        meta.json                  description of the arrays, counters, random states, and digests
                                   of everything

A checkpoint is written under a temporary name, flushed to disk and renamed. A directory with the
final name is therefore complete unless the disk damaged it later, which the digests reveal. Loading
a checkpoint runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors, save as save_tensors

from aiorl.config.code import is_local
from aiorl.config.files import parse_json, read_with_owners
from aiorl.config.layers import CONFIG_FILE
from aiorl.data.columns import Array, Piece
from aiorl.data.spaces import with_sorted_keys
from aiorl.errors import CheckpointError
from aiorl.text import shortened

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
_TENSORS = "tensors.safetensors"
_META = "meta.json"
_PIECES = "pieces"
_NAME = re.compile(r"checkpoint-([0-9]{6,})")
_TEMPORARY = ".partial-"
_ASIDE = f"{_TEMPORARY}old-"
_GONE = f"{_TEMPORARY}gone-"
_SUPERSEDED = "superseded"
_MAX_META_BYTES = 64 << 20
_LARGE_BYTES = 4 << 30
"""Size of stored experience above which checking takes several seconds."""
_MAX_SHOWN = 120
"""Characters of a value in an error."""


class _PieceFile(NamedTuple):
    """Location, size and digest of the file of a piece."""

    owner: StrictStr
    name: StrictStr
    first: StrictInt
    file: Annotated[StrictStr, Field(pattern=r"^[0-9]{6,}\.safetensors$")]
    num_bytes: StrictInt
    sha256: StrictStr

    @classmethod
    def write(cls, directory: Path, number: int, owner: str, piece: Piece) -> _PieceFile:
        name, first, rows = piece
        payload = save_tensors({name: np.asarray(rows, order="C")})
        file = f"{number:06d}.safetensors"
        _write(directory / file, payload)
        return cls(
            owner=owner,
            name=name,
            first=first,
            file=file,
            num_bytes=len(payload),
            sha256=_sha256(payload),
        )

    def read(self, checkpoint: Path) -> Array:
        payload = _read(checkpoint, f"{_PIECES}/{self.file}", self.num_bytes)
        if _sha256(payload) != self.sha256:
            raise CheckpointError(
                checkpoint, f"{self.file} is damaged: it does not match its digest in {_META}"
            )
        try:
            rows: Array = load_tensors(payload)[self.name]
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(checkpoint, f"{self.file} is damaged: {error}") from error
        return rows


class _Header(BaseModel):
    """Contents of meta.json."""

    format_version: StrictInt
    number: StrictInt
    tensors_bytes: StrictInt = 4 << 30  # older checkpoints don't contain the size of their tensors
    tensors_sha256: StrictStr
    meta: dict[str, Any]
    meta_sha256: StrictStr
    pieces: list[_PieceFile] = []
    pieces_sha256: StrictStr | None = None  # missing in older checkpoints


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of a checkpoint.

    Attributes:
        path: its directory.
        number: its number; numbers increase.
        tensors: name -> array, as given to `save_checkpoint`.
        meta: as given to `save_checkpoint`.
        pieces: description of each piece of the larger arrays, in order.
        owners: users to whom its directory and the files that were read belong, as id -> path.
    """

    path: Path
    number: int
    tensors: dict[str, Array]
    meta: dict[str, Any]
    pieces: tuple[_PieceFile, ...] = ()
    owners: Mapping[int, Path] = field(default_factory=dict)

    def check_pieces(self) -> None:
        """Read all pieces, one at a time, and compare their digests; this takes as long as the disk
        does.

        Raises:
            CheckpointError: when one is missing or damaged.
        """
        size = sum(piece.num_bytes for piece in self.pieces)
        if size > _LARGE_BYTES:
            _log.info("checking %s: %.1f GB of stored experience", self.path, size / 1e9)
        for piece in self.pieces:
            piece.read(self.path)

    def pieces_of(self, owner: str) -> Iterator[Piece]:
        """Yield the pieces of one owner in order, reading each one just before.

        Raises:
            CheckpointError: when one is missing or damaged.
        """
        for piece in self.pieces:
            if piece.owner == owner:
                yield piece.name, piece.first, piece.read(self.path)

    def under(self, prefix: str) -> dict[str, Array]:
        """Return the tensors with names that begin with ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): array
            for name, array in self.tensors.items()
            if name.startswith(prefix)
        }

    def filter_state(self, name: str) -> dict[str, Array]:
        """Return the state of a filter, named by policy id or by `returns_of`; empty if there is
        none.
        """
        entries = self.under(f"filter/{name}/")
        # those with a slash belong to the policy's return statistic
        return {entry: array for entry, array in entries.items() if "/" not in entry}


def save_checkpoint(
    directory: Path,
    number: int,
    tensors: Mapping[str, Array],
    meta: Mapping[str, Any],
    *,
    keep: int | None = 3,
    pieces: Mapping[str, Iterable[Piece]] | None = None,
) -> Path:
    """Write a checkpoint, which becomes the newest one, and remove all but the newest `keep`.

    The call blocks for as long as the disk takes. On failure, older checkpoints stay unchanged.

    Args:
        directory: directory of checkpoints; created if missing.
        number: number of the new one. One with the same number is replaced; those with higher ones
            move to ``superseded/``.
        tensors: arrays of bool, int, uint or float, any shape.
        meta: JSON values: run_id, env, algo, spaces, counters, random states.
        keep: number of checkpoints to keep, including the new one; None keeps all.
        pieces: owner -> larger arrays piece by piece, of which one is in memory at a time.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: when the disk is full, the directory can't be written, or a value can't be
            stored in a checkpoint; the message is one plain sentence.
    """
    path = directory / _name(number)
    temporary = directory / f"{_TEMPORARY}{path.name}"
    try:
        payload = save_tensors(
            {name: np.asarray(array, order="C") for name, array in tensors.items()}
        )
        header = {
            "format_version": FORMAT_VERSION,
            "number": number,
            "tensors_bytes": len(payload),
            "tensors_sha256": _sha256(payload),
            "meta": dict(meta),
            "meta_sha256": _digest_of(meta),
        }
    except (TypeError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise CheckpointError(path, f"one of its values can't be stored: {error}") from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write(temporary / _TENSORS, payload)
        piece_files = _write_pieces(temporary / _PIECES, pieces or {})
        if piece_files:
            header |= {"pieces": piece_files, "pieces_sha256": _digest_of(piece_files)}
        text = json.dumps(header, indent=1, allow_nan=False).encode()
        if len(text) > _MAX_META_BYTES:
            raise CheckpointError(
                path, f"{_META} would have {len(text):,} bytes, more than would be read back"
            )
        _write(temporary / _META, text)
        _sync_directory(temporary)
        _move_into_place(temporary, path)
        _set_aside_newer(directory, number)
        _sync_directory(directory)
    except OSError as error:
        raise CheckpointError(
            path, f"can't be written: {error.strerror or error}. Older ones are intact."
        ) from error
    finally:
        _remove(temporary)
    if keep is not None:
        _remove_old(directory, keep)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, and compare it with its digest.

    Raises:
        CheckpointError: when a file is missing, unreadable, damaged or of another format version,
            or when a weight of a policy or critic is not finite.
    """
    owners: dict[int, Path] = {}
    try:
        header = _Header.model_validate(parse_json(_read(path, _META, _MAX_META_BYTES, owners)))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(
            path, f"{_META} is damaged: {place} is missing, or has the wrong type"
        ) from error
    except ValueError as error:
        raise CheckpointError(path, f"{_META} is damaged: {error!s:.200}") from error
    if header.format_version != FORMAT_VERSION:
        raise CheckpointError(
            path,
            f"format version {header.format_version!r}, but this aiorl reads {FORMAT_VERSION}; "
            "load it with the version that wrote it",
        )
    name = _name(header.number)
    if name not in (path.name, path.resolve().name):
        raise CheckpointError(
            path,
            f"{_META} has the number {header.number}, so it is damaged unless the directory was"
            f" called {name}. If it was, give it this name again; a link can have any name",
        )
    if _digest_of(header.meta) != header.meta_sha256:
        raise CheckpointError(path, f"{_META} is damaged: its contents do not match its digest")
    payload = _read(path, _TENSORS, header.tensors_bytes, owners)
    if _sha256(payload) != header.tensors_sha256:
        raise CheckpointError(
            path, f"{_TENSORS} is damaged: it does not match its digest in {_META}"
        )
    try:
        tensors = load_tensors(payload)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        # KeyError: a dtype unknown to NumPy
        raise CheckpointError(path, f"{_TENSORS} is damaged: {error}") from error
    for name, array in tensors.items():
        if ("/weights/" in name or "/critics/" in name) and not np.isfinite(array).all():
            raise CheckpointError(path, f"{name!r:.200} contains numbers that are not finite")
    _check_sizes(path, header)
    return Checkpoint(
        path=path,
        number=header.number,
        tensors=tensors,
        meta=header.meta,
        pieces=tuple(header.pieces),
        owners=owners,
    )


def _check_sizes(path: Path, header: _Header) -> None:
    """Check the presence and size of each piece; `Checkpoint.check_pieces` checks contents."""
    if header.pieces_sha256 is not None and _digest_of(header.pieces) != header.pieces_sha256:
        raise CheckpointError(
            path, f"{_META} is damaged: its list of pieces does not match its digest"
        )
    if len({piece.file for piece in header.pieces}) != len(header.pieces):
        raise CheckpointError(path, f"{_META} is damaged: it names a piece twice")
    for piece in header.pieces:
        try:
            num_bytes = (path / _PIECES / piece.file).stat().st_size
        except OSError as error:
            raise CheckpointError(
                path, f"{piece.file} can't be read: {error.strerror or error}"
            ) from error
        if num_bytes != piece.num_bytes:
            raise CheckpointError(
                path,
                f"{piece.file} is damaged: it has {num_bytes:,} bytes, not {piece.num_bytes:,}",
            )


def load_newest_valid(
    directory: Path, check: Callable[[Checkpoint], object] = lambda checkpoint: None
) -> Checkpoint:
    """Read the newest undamaged checkpoint, and name the damaged ones in the log.

    Args:
        directory: directory of checkpoints.
        check: raises CheckpointError if the contents are invalid; the previous checkpoint is then
            used.

    Raises:
        CheckpointError: when there is none, or none that is undamaged.
    """
    faults: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            checkpoint = load_checkpoint(path)
            check(checkpoint)
        except CheckpointError as error:
            _log.warning("%s; using the previous one", error)
            faults.append(f"{path.name}: {error.reason}")
        else:
            return checkpoint
    if faults:
        raise CheckpointError(directory, f"none can be used; {'; '.join(faults)}")
    raise CheckpointError(directory, "there is none in this directory")


def find_checkpoint(
    path: str | Path, check: Callable[[Checkpoint], object] = lambda checkpoint: None
) -> Checkpoint:
    """Read a checkpoint, or the newest undamaged one of a run directory or of a directory of
    checkpoints.

    Args:
        path: any of these, or a link to it; a checkpoint's directory must have the name under which
            it was written.
        check: raises CheckpointError if the contents are invalid; the previous checkpoint is then
            used.

    Raises:
        CheckpointError: when there is none, or none that can be used.
    """
    path = Path(path).expanduser().absolute()
    try:
        return _found(path, check)
    except PermissionError as error:
        raise CheckpointError(path, f"{error.strerror}: check its owner and mode") from error


def _found(path: Path, check: Callable[[Checkpoint], object]) -> Checkpoint:
    aside = path.parent / _SUPERSEDED / path.name
    if aside.exists() and not path.exists():
        path = aside
    if (path / _META).exists():
        checkpoint = load_checkpoint(path)
        check(checkpoint)
        return checkpoint
    for directory in (path / "checkpoints", path):
        if path.is_dir() and list_checkpoints(directory):
            return load_newest_valid(directory, check)
    if (path / CONFIG_FILE).exists():
        raise CheckpointError(
            path, "the run has none yet; it writes one every checkpoint_interval_s, and at its end"
        )
    if path.is_dir():
        reason = "there is none in it"
    else:
        reason = "it is not a directory" if path.exists() else "there is no such directory"
    raise CheckpointError(
        path, f"{reason}; give a run directory, or one of the checkpoint-* directories of a run"
    )


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the directories of finished checkpoints, oldest first; empty if `directory` doesn't
    exist.

    Raises:
        CheckpointError: when it can't be read.
    """
    try:
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(directory, f"can't be read: {error.strerror or error}") from error
    return sorted(paths, key=lambda path: (_number_of(path), path))


def clear_partial(directory: Path) -> None:
    """Remove the remains of a killed writer; the caller must be the only writer.

    A checkpoint that was being replaced by one of the same number is restored.

    Raises:
        OSError: when the directory can't be read.
    """
    remains = [path for path in directory.iterdir() if path.name.startswith(_TEMPORARY)]
    for path in remains:
        final = path.with_name(path.name.removeprefix(_ASIDE))
        if path.name.startswith(_ASIDE) and not os.path.lexists(final):
            with contextlib.suppress(OSError):
                path.rename(final)
        else:
            _remove(path)


def check_compatible(checkpoint: Checkpoint, expected: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to the current run.

    Args:
        checkpoint: the checkpoint.
        expected: required entries of its `meta`, for example {"algo": "ppo", "env": "CartPole-v1",
            "spaces": {...}}.

    Raises:
        CheckpointError: when entries differ; it names all of them, with the beginnings of both
                values.
    """
    stored = checkpoint.meta
    current = json.loads(json.dumps(dict(expected)))  # as read from a file: tuples become lists
    differing = [
        f"{name} is {_shown(stored.get(name))} there and {_shown(value)} here"
        for name, value in current.items()
        if not _is_same(name, stored.get(name), value)
    ]
    if differing:
        raise CheckpointError(
            checkpoint.path,
            f"belongs to another run: {'; '.join(differing)}. A new run can begin with its weights:"
            " set init_from to its path",
        )


def _shown(value: object) -> str:
    return shortened(repr(value), _MAX_SHOWN)


def _is_same(name: str, stored: Any, current: Any) -> bool:
    """Return whether two values agree; an environment may be redefined, or named without its module
    in the file.

    Spaces whose Dicts list the same parts in different orders agree: a run takes over the order
    that is stored.
    """
    if name == "spaces" and isinstance(stored, dict) and isinstance(current, dict):
        return bool(_in_one_order(stored) == _in_one_order(current))
    if name == "env" and isinstance(stored, str) and isinstance(current, str):
        stored_env = _without_number(stored)
        env = _without_number(current)
        return env == stored_env or env.endswith(f":{stored_env}")
    return bool(stored == current)


def _without_number(env: str) -> str:
    """Return the name of an environment without the number of its redefinition in a program."""
    if is_local(env):
        return env.partition("#")[0]
    return env


def _in_one_order(spaces: dict[str, Any]) -> Any:
    """Return the spaces of policies with the parts of Dicts sorted; unchanged if they are
    damaged.
    """
    try:
        return {
            policy_id: {name: with_sorted_keys(space) for name, space in of_policy.items()}
            for policy_id, of_policy in spaces.items()
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return spaces


def _digest_of(plain: Any) -> str:
    return _sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode())


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def _read(path: Path, name: str, max_bytes: int, owners: dict[int, Path] | None = None) -> bytes:
    """Return the content of a file of a checkpoint, and add its owner and the directory's to
    ``owners``.
    """
    try:
        content, file_owners = read_with_owners(path / name, max_bytes=max_bytes)
    except OSError as error:
        raise CheckpointError(path, f"{name} can't be read: {error.strerror or error}") from error
    if owners is not None:
        owners.update(file_owners)
    return content


def _write_pieces(directory: Path, pieces: Mapping[str, Iterable[Piece]]) -> list[_PieceFile]:
    files: list[_PieceFile] = []
    for owner, pieces_of_owner in pieces.items():
        for piece in pieces_of_owner:
            directory.mkdir(exist_ok=True)
            files.append(_PieceFile.write(directory, len(files), owner, piece))
    if files:
        _sync_directory(directory)
    return files


def _write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename a new checkpoint to its final name.

    A directory can't be renamed onto one with contents, so an old one with that name stays until
    the new is in place.
    """
    aside = path.with_name(f"{_ASIDE}{path.name}")
    _remove(aside)
    is_replaced = os.path.lexists(path)
    if is_replaced:
        path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        if is_replaced:
            aside.rename(path)
        raise
    _remove(aside)


def _set_aside_newer(directory: Path, number: int) -> None:
    """Move checkpoints with higher numbers away, so that the newest is always the one written last.

    They exist if a trainer went back to an earlier checkpoint, if another run wrote them, or if
    they are damaged.
    """
    for path in list_checkpoints(directory):
        if _number_of(path) > number:
            aside = directory / _SUPERSEDED / path.name
            aside.parent.mkdir(exist_ok=True)
            _remove_at_once(aside, directory)
            path.rename(aside)


def _remove(path: Path) -> None:
    """Remove a file or directory; a failure is no reason to end a training run."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove_at_once(path: Path, directory: Path) -> None:
    """Remove a checkpoint so that a process that is killed meanwhile leaves none without some of
    its files.

    Args:
        path: the checkpoint.
        directory: directory of checkpoints, where remains are removed later.
    """
    for remains in directory.glob(f"{_GONE}*"):
        _remove(remains)
    gone = directory / f"{_GONE}{path.name}"
    with contextlib.suppress(OSError):
        path.rename(gone)
    _remove(gone)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest."""
    with contextlib.suppress(CheckpointError):
        for path in list_checkpoints(directory)[: -max(keep, 1)]:
            _remove_at_once(path, directory)


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def _number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
