"""Checkpoints: a directory of safetensors and JSON, written at once or not at all.

    checkpoints/checkpoint-000123/
        tensors.safetensors    weights, optimiser, filters: every array
        pieces/000000.safetensors    stored experience, where there is any: rows of one array each
        meta.json              what the arrays belong to, counters, random states, and digests of all

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from aiorl.config.code import is_local
from aiorl.config.files import parse_json, read_regular
from aiorl.data.columns import Piece
from aiorl.errors import CheckpointError

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
_TENSORS = "tensors.safetensors"
_META = "meta.json"
_PIECES = "pieces"
_NAME = re.compile(r"checkpoint-([0-9]{6,})")
_TEMPORARY = ".partial-"
_ASIDE = f"{_TEMPORARY}old-"
_SUPERSEDED = "superseded"
_MAX_META_BYTES = 64 << 20
_LARGE_BYTES = 4 << 30
"""Of stored experience that takes some seconds to check."""


class _PieceFile(NamedTuple):
    """Where a piece is, and how large; the digest is that of the file."""

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
        return cls(owner, name, first, file, len(payload), hashlib.sha256(payload).hexdigest())

    def read(self, checkpoint: Path) -> NDArray[Any]:
        payload = _read(checkpoint, f"{_PIECES}/{self.file}", self.num_bytes)
        if hashlib.sha256(payload).hexdigest() != self.sha256:
            raise CheckpointError(checkpoint, f"{self.file} is damaged: its digest is not the one in {_META}")
        try:
            rows: NDArray[Any] = load_tensors(payload)[self.name]
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(checkpoint, f"{self.file} is damaged: {error}") from error
        return rows


class _Header(BaseModel):
    """Contents of meta.json."""

    format_version: StrictInt
    number: StrictInt
    tensors_bytes: StrictInt = 4 << 30  # older checkpoints don't say how large their tensors are
    tensors_sha256: StrictStr
    meta: dict[str, Any]
    meta_sha256: StrictStr
    pieces: list[_PieceFile] = []
    pieces_sha256: StrictStr | None = None  # older ones lack it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read back.

    Attributes:
        path: its directory.
        number: its number; they rise.
        tensors: name -> array, as given to `save_checkpoint`.
        meta: as given to `save_checkpoint`.
        pieces: what is known of each piece of the larger arrays, in order.
    """

    path: Path
    number: int
    tensors: dict[str, NDArray[Any]]
    meta: dict[str, Any]
    pieces: tuple[_PieceFile, ...] = ()

    @property
    def files(self) -> list[Path]:
        """Its directory and what is in it."""
        return [self.path, self.path / _META, self.path / _TENSORS]

    def check_pieces(self) -> None:
        """Read all pieces, one at a time, and compare their digests; takes as long as the disk does.

        Raises: CheckpointError if one is missing or damaged.
        """
        size = sum(piece.num_bytes for piece in self.pieces)
        if size > _LARGE_BYTES:
            _log.info("checking %s: %.1f GB of stored experience", self.path, size / 1e9)
        for piece in self.pieces:
            piece.read(self.path)

    def pieces_of(self, owner: str) -> Iterator[Piece]:
        """The pieces of one owner, in order; each is read when its turn comes.

        Raises: CheckpointError if one is missing or damaged.
        """
        for piece in self.pieces:
            if piece.owner == owner:
                yield piece.name, piece.first, piece.read(self.path)

    def under(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The tensors whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): array for name, array in self.tensors.items() if name.startswith(prefix)}

    def filter_state(self, name: str) -> dict[str, NDArray[Any]]:
        """State of a filter by its name, a policy's id or what `returns_of` makes of it; empty where it has none."""
        found = self.under(f"filter/{name}/")
        return {entry: array for entry, array in found.items() if "/" not in entry}


def save_checkpoint(
    directory: Path,
    number: int,
    tensors: Mapping[str, NDArray[Any]],
    meta: Mapping[str, Any],
    *,
    keep: int | None = 3,
    pieces: Mapping[str, Iterable[Piece]] | None = None,
) -> Path:
    """Write one checkpoint, which is the newest then, and remove all but the newest `keep`.

    Blocks for as long as the disk takes. On failure the older checkpoints are as they were.

    Args:
        directory: where checkpoints are; made if missing.
        number: number of the new one; one of the same number is replaced, those of higher ones go to ``superseded/``.
        tensors: arrays of bool, int, uint or float, any shape.
        meta: what JSON can hold: run_id, env, algo, spaces, counters, random states.
        keep: checkpoints to keep, the new one included; None keeps all.
        pieces: owner -> larger arrays piece by piece, one of which is in memory at a time.
    Returns: the new checkpoint's directory.
    Raises: CheckpointError in one plain sentence if the disk is full, the directory can't be written, or something
        in it has no place in a checkpoint.
    """
    path = directory / _name(number)
    temporary = directory / f"{_TEMPORARY}{path.name}"
    try:
        payload = save_tensors({name: np.asarray(array, order="C") for name, array in tensors.items()})
        digest = hashlib.sha256(payload).hexdigest()
        header = {
            "format_version": FORMAT_VERSION, "number": number, "tensors_bytes": len(payload),
            "tensors_sha256": digest, "meta": dict(meta), "meta_sha256": _digest_of(meta),
        }  # fmt: skip
    except (TypeError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise CheckpointError(path, f"something in it can't be stored: {error}") from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write(temporary / _TENSORS, payload)
        if written := _write_pieces(temporary / _PIECES, pieces or {}):
            header |= {"pieces": written, "pieces_sha256": _digest_of(written)}
        text = json.dumps(header, indent=1, allow_nan=False).encode()
        if len(text) > _MAX_META_BYTES:
            raise CheckpointError(path, f"{_META} would have {len(text):,} bytes, more than would be read back")
        _write(temporary / _META, text)
        _sync_directory(temporary)
        _move_into_place(temporary, path)
        _set_aside_newer(directory, number)
        _sync_directory(directory)
    except OSError as error:
        raise CheckpointError(path, f"can't be written: {error.strerror or error}. Older ones are intact.") from error
    finally:
        _remove(temporary)
    if keep is not None:
        _remove_old(directory, keep)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint and check it against its digest.

    Raises: CheckpointError if a file is missing, unreadable or damaged, or of another format version, or if a weight of
        a policy or critic is not finite.
    """
    try:
        header = _Header.model_validate(parse_json(_read(path, _META, _MAX_META_BYTES)))
    except ValueError as error:
        said: object = error
        if isinstance(error, ValidationError):
            place = ".".join(map(str, error.errors()[0]["loc"]))
            said = f"{place} is missing, or of a wrong kind"
        raise CheckpointError(path, f"{_META} is damaged: {said!s:.200}") from error
    if header.format_version != FORMAT_VERSION:
        raise CheckpointError(
            path,
            f"format version {header.format_version!r}, but this aiorl reads {FORMAT_VERSION}; "
            "load it with the aiorl that wrote it",
        )
    if path.name != _name(header.number):
        raise CheckpointError(path, f"{_META} is damaged: it says that it is number {header.number}")
    if _digest_of(header.meta) != header.meta_sha256:
        raise CheckpointError(path, f"{_META} is damaged: its digest is not the one it says")
    payload = _read(path, _TENSORS, header.tensors_bytes)
    if hashlib.sha256(payload).hexdigest() != header.tensors_sha256:
        raise CheckpointError(path, f"{_TENSORS} is damaged: its digest is not the one in {_META}")
    try:
        tensors = load_tensors(payload)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:  # the latter of dtypes that NumPy has not
        raise CheckpointError(path, f"{_TENSORS} is damaged: {error}") from error
    for name, array in tensors.items():
        if ("/weights/" in name or "/critics/" in name) and not np.isfinite(array).all():
            raise CheckpointError(path, f"{name!r:.200} holds numbers that are not finite")
    _check_sizes(path, header)
    return Checkpoint(path, header.number, tensors, header.meta, tuple(header.pieces))


def _check_sizes(path: Path, header: _Header) -> None:
    """Check that each piece is there and of its size; of their contents, see `Checkpoint.check_pieces`."""
    if header.pieces_sha256 is not None and _digest_of(header.pieces) != header.pieces_sha256:
        raise CheckpointError(path, f"{_META} is damaged: its pieces are not those of their digest")
    if len({piece.file for piece in header.pieces}) != len(header.pieces):
        raise CheckpointError(path, f"{_META} is damaged: it names a piece twice")
    for piece in header.pieces:
        try:
            found = (path / _PIECES / piece.file).stat().st_size
        except OSError as error:
            raise CheckpointError(path, f"{piece.file} can't be read: {error.strerror or error}") from error
        if found != piece.num_bytes:
            raise CheckpointError(path, f"{piece.file} is damaged: it has {found:,} bytes, not {piece.num_bytes:,}")


def load_newest_valid(directory: Path, check: Callable[[Checkpoint], object] = lambda found: None) -> Checkpoint:
    """Read the newest checkpoint that is whole, naming in the log those that are not.

    Args:
        directory: where checkpoints are.
        check: raises CheckpointError where what was read makes no sense; the one before is taken then, too.
    Raises: CheckpointError if there is none, or none that is whole.
    """
    damaged: list[Path] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            found = load_checkpoint(path)
            check(found)
        except CheckpointError as error:
            _log.warning("%s; taking the one before it", error)
            damaged.append(path)
        else:
            return found
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(directory, f"none can be used; damaged: {names}")
    raise CheckpointError(directory, "there is none in this directory")


def find_checkpoint(path: str | Path, check: Callable[[Checkpoint], object] = lambda found: None) -> Checkpoint:
    """Read a checkpoint, or the newest that is whole of a run directory or a directory of checkpoints.

    Args:
        path: any of these; of a checkpoint, where it was written.
        check: raises CheckpointError where what was read makes no sense; the one before is taken then, too.
    Raises: CheckpointError if there is none, or none that can be used.
    """
    path = Path(path).expanduser().absolute()
    aside = path.parent / _SUPERSEDED / path.name
    if aside.exists() and not path.exists():
        path = aside
    if (path / _META).exists():
        found = load_checkpoint(path)
        check(found)
        return found
    for directory in (path / "checkpoints", path):
        if list_checkpoints(directory):
            return load_newest_valid(directory, check)
    what = "there is none in it" if path.is_dir() else "there is no such directory"
    raise CheckpointError(path, f"{what}; give a run directory, or one of the checkpoint-* directories of a run")


def list_checkpoints(directory: Path) -> list[Path]:
    """Directories of finished checkpoints, oldest first; empty if `directory` doesn't exist.

    Raises: CheckpointError if it can't be read.
    """
    try:
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(directory, f"can't be read: {error.strerror or error}") from error
    return [path for _, path in sorted(found)]


def clear_partial(directory: Path) -> None:
    """Remove what a writer that was killed left behind; only for who may write there alone.

    A checkpoint that was being replaced by another of its number is put back.

    Raises: OSError if the directory can't be read.
    """
    left = [path for path in directory.iterdir() if path.name.startswith(_TEMPORARY)]
    for path in left:
        whole = path.with_name(path.name.removeprefix(_ASIDE))
        if path.name.startswith(_ASIDE) and not os.path.lexists(whole):
            with contextlib.suppress(OSError):
                path.rename(whole)
        else:
            _remove(path)


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
        if not _is_same(name, checkpoint.meta.get(name), _as_json(value))
    ]
    if differing:
        raise CheckpointError(
            checkpoint.path,
            f"belongs to another run: {'; '.join(differing)}. A new run can begin with its weights: give its path as "
            "init_from",
        )


def _is_same(name: str, there: Any, here: Any) -> bool:
    """Return whether two values are alike; an environment may be defined again, or named without its module there."""
    if name == "env" and isinstance(there, str) and isinstance(here, str):
        there, here = (env.partition("#")[0] if is_local(env) else env for env in (there, here))
        return bool(here == there or here.endswith(f":{there}"))
    return bool(there == here)


def _as_json(value: Any) -> Any:  # Any: whatever JSON holds
    """The value as it would come back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))


def _digest_of(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _read(path: Path, name: str, max_bytes: int) -> bytes:
    try:
        return read_regular(path / name, max_bytes=max_bytes)
    except OSError as error:
        raise CheckpointError(path, f"{name} can't be read: {error.strerror or error}") from error


def _write_pieces(directory: Path, pieces: Mapping[str, Iterable[Piece]]) -> list[_PieceFile]:
    written: list[_PieceFile] = []
    for owner, own in pieces.items():
        for piece in own:
            directory.mkdir(exist_ok=True)
            written.append(_PieceFile.write(directory, len(written), owner, piece))
    if written:
        _sync_directory(directory)
    return written


def _write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(temporary: Path, path: Path) -> None:
    """Give a new checkpoint its name.

    A directory can't be renamed onto a full one: an old one of that name stays until the new is in place.
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
    """Move those of higher numbers out of the way, so that the newest is always the one that was written last.

    A trainer went back to the one before them, another run wrote them, or they are damaged.
    """
    for path in list_checkpoints(directory):
        if int(path.name.rpartition("-")[2]) > number:
            aside = directory / _SUPERSEDED / path.name
            aside.parent.mkdir(exist_ok=True)
            _remove(aside)
            path.rename(aside)


def _remove(path: Path) -> None:
    """Remove whatever is there; failing to is no reason to end a training run."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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
            _remove(path)


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"
