"""Compiled updates kept on disk: a later run of the same networks starts without XLA's compilation, seconds sooner.

TensorFlow writes and reads the files, where ``TF_XLA_FLAGS`` tells it to. It takes what it finds at its word, and an
error in reading or writing one is an error of the update; so all else is seen to here::

    ~/.cache/aiorl/xla/                              only this user's: what is in it is executed
        tf2.21.0-x86_64-1f0c9a7b2d3e4f50/            one for each TensorFlow, processor and number of threads
            xla_compile_cache__*.pb                  TensorFlow's, written under another name and renamed
            xla_compile_cache__*.pb.sha256           ours, once the update is compiled: without it a file is removed
            loading-4711                             locked by a process that has not compiled or loaded its update yet
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from aiorl.config.files import read_regular, whose_else
from aiorl.process.machine import usable_cores

logger = logging.getLogger(__name__)

_MAX_FILES, _MAX_BYTES = 200, 128 << 20
_ROOM_BYTES = 8 << 20
"""Must be free for the cache to be used; more than what one update takes."""
_FILES, _DIGEST, _LOADING = "xla_compile_cache__*", ".sha256", "loading-"
_LEFT_S = 600.0
"""After so long nobody writes a temporary file any more."""


class CompilationCache:
    """The directory of one kind of machine code, checked and tidied up.

    Attributes:
        folder: where TensorFlow is to keep its files.
    """

    def __init__(self, folder: Path) -> None:
        """Take over a directory; `open` checks one."""
        self.folder = folder
        self._loading: int | None = None

    @classmethod
    def open(cls, root: Path, threads: int) -> Self:
        """Make or take the directory for what is compiled here, rid of what can't be relied on.

        Args:
            root: where those of each kind of machine code are.
            threads: threads that TensorFlow will compute with.

        Raises:
            OSError: it can't be used: others may write there, nobody can, or there is no room. Says why.
        """
        root.parent.mkdir(parents=True, exist_ok=True)
        root = root.parent.resolve() / root.name
        folder = root / _kind_of_code(threads)
        for place in (root, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
        _check_private(folder)
        _check_room(folder)
        _remove_what_crashed(folder)
        _remove_unverified(folder)
        _remove_beyond_bounds(root)
        return cls(folder)

    def begin(self) -> None:
        """Note that an update is compiled or loaded from now on: if this process ends by that, the next one knows."""
        with contextlib.suppress(OSError):
            self._loading = os.open(self._mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._loading, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def seal(self) -> None:
        """Let later runs use what has been compiled by now: it compiled or loaded, and did not crash."""
        with contextlib.suppress(OSError):
            for path in _compiled(self.folder):
                digest = path.with_name(path.name + _DIGEST)
                if not digest.exists():
                    partial = self.folder / f"{path.name}{_DIGEST}.{secrets.token_hex(4)}.tmp"
                    partial.write_text(_digest_of(path), encoding="ascii")
                    partial.replace(digest)
        if self._loading is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink()
            os.close(self._loading)
            self._loading = None

    @property
    def _mark(self) -> Path:
        return self.folder / f"{_LOADING}{os.getpid()}"


def _kind_of_code(threads: int) -> str:
    """Name for all that makes machine code another, or unfit to run, and is not in TensorFlow's own names.

    Raises:
        OSError: TensorFlow's version is not known.
    """
    for name in ("tensorflow-cpu", "tensorflow", "tf-nightly-cpu", "tf-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            break
    else:
        raise OSError("the version of TensorFlow is not known")
    processor = platform.processor()
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")
        wanted = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
        processor = "\n".join(line for line in first.splitlines() if line.startswith(wanted))
    cores = usable_cores()
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "TF_XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS")]
    facts = "\n".join([version, platform.platform(), processor, str(cores), str(threads), *flags])
    return f"tf{version}-{platform.machine()}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _check_private(folder: Path) -> None:
    """Raise OSError unless only this user can write a directory and the one it is in, or put others in their place."""
    me = os.geteuid()
    for place in (folder, folder.parent):
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{place} is no directory")
        if fault := whose_else(found):
            raise OSError(f"{place} {fault}: make it yours with mode 0700")
    for place in folder.parent.parents:
        found = place.lstat()
        if found.st_uid not in (0, me):
            raise OSError(f"{place}, in which it is, belongs to user {found.st_uid}")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise OSError(f"{place}, in which it is, can be written by everybody")


def _check_room(folder: Path) -> None:
    """Raise OSError unless an update can be written: where TensorFlow can't keep what it compiled, the update fails."""
    probe = folder / f".room-{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            for _ in range(_ROOM_BYTES >> 20):
                file.write(bytes(1 << 20))
    finally:
        probe.unlink(missing_ok=True)


def _compiled(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob(_FILES) if path.suffix == ".pb")


def _digest_of(path: Path) -> str:
    return hashlib.sha256(read_regular(path, max_bytes=_MAX_BYTES)).hexdigest()


def _remove_what_crashed(folder: Path) -> None:
    """Remove everything if a process ended while it loaded its update, or compiled it: perhaps by what is in here."""
    crashed = False
    for path in folder.glob(f"{_LOADING}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                crashed = True
            finally:
                os.close(descriptor)
    if crashed:
        logger.info("a process ended while it compiled or loaded its update: what %s held is removed", folder)
        for path in folder.glob(_FILES):
            path.unlink(missing_ok=True)


def _remove_unverified(folder: Path) -> None:
    """Remove what is not as it was when it was sealed, and what was left behind half done."""
    for path in folder.glob(_FILES):
        if path.suffix == ".pb":
            digest = path.with_name(path.name + _DIGEST)
            with contextlib.suppress(OSError):
                if read_regular(digest, max_bytes=64).decode("ascii", "replace") == _digest_of(path):
                    continue
            path.unlink(missing_ok=True)
            digest.unlink(missing_ok=True)
        elif path.suffix == _DIGEST:
            if not path.with_suffix("").exists():
                path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _LEFT_S:
                    path.unlink()


def _remove_beyond_bounds(root: Path) -> None:
    """Remove the oldest files of all kinds of machine code, so that few and not too large ones stay."""
    found = []
    for path in root.glob(f"*/{_FILES}.pb"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            found.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if number >= _MAX_FILES or total > _MAX_BYTES:
            path.unlink(missing_ok=True)
            path.with_name(path.name + _DIGEST).unlink(missing_ok=True)
