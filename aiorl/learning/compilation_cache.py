"""Compiled updates kept on disk: a later run with the same networks starts seconds sooner, without
compiling.

TensorFlow writes and reads the files, in the folder that ``TF_XLA_FLAGS`` names, and executes their
code. So only files stay that are unchanged since a run compiled and used them::

    ~/.cache/aiorl/xla/                              only this user's
        tf2.21.0-x86_64-1f0c9a7b2d3e4f50/            one for each TensorFlow, processor, threads
            xla_compile_cache__*.pb                  TensorFlow's, written elsewhere and renamed
            sums.json                                name -> SHA-256 of files that a run has used

An update that can't be written or read there is compiled as a plain graph (`CompiledFunction`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import time
from pathlib import Path
from typing import Self

from aiorl.config.files import read_regular, whose_else
from aiorl.process.machine import usable_cores
from aiorl.process.replaced_file import write_json
from aiorl.process.versions import installed_version

_MAX_FILES = 200
_MAX_BYTES = 128 << 20
_FILES = "xla_compile_cache__*"
_SUMS = "sums.json"
_LEFT_S = 600.0
"""Age in seconds at which a temporary file is certainly abandoned."""


class CompilationCache:
    """Directory for one kind of machine code, checked and cleaned.

    Attributes:
        folder: directory in which TensorFlow keeps its files.
    """

    def __init__(self, folder: Path, sums: dict[str, str]) -> None:
        """Take over a directory whose files have these checksums; `open` checks one first."""
        self.folder = folder
        self._sums = sums

    @classmethod
    def open(cls, root: Path, threads: int) -> Self:
        """Open or create the directory for this kind of machine code, and remove files that can't
        be trusted.

        Args:
            root: directory with a subdirectory for each kind of machine code.
            threads: number of threads that TensorFlow computes with.

        Raises:
            OSError: it can't be used, because others can write there or it can't be written at all.
                The message says why.
        """
        root.parent.mkdir(parents=True, exist_ok=True)
        root = root.parent.resolve() / root.name
        folder = root / _kind_of_code(threads)
        for place in (root, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
        _check_private(folder)
        sums = _verified(folder)
        _remove_beyond_bounds(root)
        return cls(folder, sums)

    def seal(self) -> None:
        """Let later runs use the code compiled so far."""
        with contextlib.suppress(OSError):
            sums = {
                path.name: self._sums.get(path.name) or _sum_of(path)
                for path in self.folder.glob(f"{_FILES}.pb")
            }
            if sums != self._sums:
                write_json(self.folder / _SUMS, sums)
                self._sums = sums


def _kind_of_code(threads: int) -> str:
    """Return a name for everything that changes machine code and isn't in the names of TensorFlow's
    files.

    Raises:
        OSError: TensorFlow's version is unknown.
    """
    packages = ("tensorflow-cpu", "tensorflow", "tf-nightly-cpu", "tf-nightly")
    version = next(filter(None, map(installed_version, packages)), "")
    if not version:
        raise OSError("TensorFlow's version is unknown")
    facts = [
        version,
        platform.platform(),
        _processor(),
        str(usable_cores()),
        str(threads),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("TF_XLA_FLAGS", ""),
        os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),
    ]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"tf{version}-{platform.machine()}-{digest[:16]}"


def _processor() -> str:
    """Return the model and the features of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    fields = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    first, _, _ = text.partition("\n\n")
    return "\n".join(line for line in first.splitlines() if line.startswith(fields))


def _check_private(folder: Path) -> None:
    """Raise OSError unless only this user can write or replace a directory and its parent."""
    for place in (folder, folder.parent):
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise OSError(f"{place} is not a directory")
        fault = whose_else(status)
        if fault:
            raise OSError(f"{place} {fault}: make it yours with mode 0700")
    for place in folder.parent.parents:
        status = place.lstat()
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(f"its enclosing directory {place} belongs to user {status.st_uid}")
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise OSError(f"its enclosing directory {place} is writable by everyone")


def _sum_of(path: Path) -> str:
    return hashlib.sha256(read_regular(path, max_bytes=_MAX_BYTES)).hexdigest()


def _verified(folder: Path) -> dict[str, str]:
    """Return the checksums of files that are unchanged since a run used them; remove other and
    temporary files.
    """
    recorded = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        recorded = dict(json.loads(read_regular(folder / _SUMS, max_bytes=1 << 20)))
    sums = {}
    for path in folder.glob(_FILES):
        with contextlib.suppress(OSError):
            if path.suffix != ".pb" and time.time() - path.lstat().st_mtime < _LEFT_S:
                continue
            # only recorded files are worth reading
            is_recorded = path.suffix == ".pb" and path.name in recorded
            if is_recorded and recorded[path.name] == _sum_of(path):
                sums[path.name] = recorded[path.name]
                continue
        path.unlink(missing_ok=True)
    return sums


def _remove_beyond_bounds(root: Path) -> None:
    """Remove the oldest files of all kinds of machine code until their number and size are within
    bounds.
    """
    files = []
    for path in root.glob(f"*/{_FILES}.pb"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            files.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(files, reverse=True)):
        total += size
        if number >= _MAX_FILES or total > _MAX_BYTES:
            path.unlink(missing_ok=True)
