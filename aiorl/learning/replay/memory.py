"""Room for replays: checked before the run, taken from memory or from files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from aiorl.errors import ConfigError
from aiorl.learning.replay.spec import ReplaySpec
from aiorl.process.available_memory import available_bytes

__all__ = ["allocate", "check_fits"]

_SPILL_KEY = "replay_spill_dir"
_ELSEWHERE = f"or {_SPILL_KEY} to a directory on a disk that has room for it."


def check_fits(specs: Iterable[ReplaySpec]) -> None:
    """Refuse replays, all of a run, that this machine has no room for, before anything is allocated.

    Raises:
        ConfigError: memory or a disk is too small; names the figures and the settings.
    """
    specs = list(specs)
    what = ", ".join(map(str, specs))
    needed, free = sum(map(_bytes_in_memory, specs)), available_bytes()
    if needed > free:
        raise ConfigError(
            f"the replay ({what}) needs {_readable(needed)} of memory, and {_readable(free)} are free.",
            key="replay_capacity",
            value=needed,
            hint="Set a smaller replay_capacity" + (f", {_ELSEWHERE}" if any(not s.disk_bytes for s in specs) else "."),
        )
    on_disk: defaultdict[str, int] = defaultdict(int)
    for spec in specs:
        if spec.spill_dir is not None:
            on_disk[spec.spill_dir] += spec.disk_bytes
    for directory, needed in on_disk.items():
        try:
            free = shutil.disk_usage(directory).free
        except OSError as error:
            raise _unusable(directory, error) from error
        if needed > free:
            raise ConfigError(
                f"the replay ({what}) needs {_readable(needed)} in {directory}, and {_readable(free)} are free there.",
                key=_SPILL_KEY,
                value=directory,
                hint=f"Set a smaller replay_capacity, {_ELSEWHERE}",
            )


def allocate(count: int, record: np.dtype[np.void], spill_dir: str | None) -> NDArray[Any]:
    """Return [count] records of zeros, in memory or in a file that goes when the process ends.

    Raises:
        ConfigError: there is not so much memory, or the file can't be made that large.
    """
    size = max(1, count * record.itemsize)
    try:
        if spill_dir is None:
            return np.zeros(count, record)
        with tempfile.TemporaryFile(
            prefix="aiorl-replay-", dir=spill_dir
        ) as file:  # has no name: it can't be left over
            if hasattr(os, "posix_fallocate"):  # a disk that fills up later would end the process with a signal
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.memmap(file, record, "r+", shape=(count,)).view(np.ndarray)
    except OSError as error:
        raise _unusable(str(spill_dir), error) from error
    except MemoryError as error:
        raise ConfigError(
            f"the replay needs {_readable(size)}, and the system does not give that.",
            key="replay_capacity",
            value=count,
            hint="Set a smaller replay_capacity, or replay_spill_dir.",
        ) from error


def _bytes_in_memory(spec: ReplaySpec) -> int:
    """What a replay takes of memory, in files of a file system that lies there, too."""
    is_all = spec.spill_dir is not None and _lies_in_memory(spec.spill_dir)
    return spec.memory_bytes + (spec.disk_bytes if is_all else 0)


def _lies_in_memory(directory: str) -> bool:
    path = Path(directory).resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in (path, *path.parents) if place in mounts), "") in ("tmpfs", "ramfs")


def _unusable(directory: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory} can't hold the replay: {error.strerror or error}.",
        key=_SPILL_KEY,
        value=directory,
        hint=f"Set {_SPILL_KEY} to a directory that exists, can be written to and has room.",
    )


def _readable(size: int) -> str:
    """A size in gigabytes of 10^9 bytes, or in bytes where it is small."""
    return f"{size / 1e9:,.2f} GB" if size >= 10**7 else f"{size:,} bytes"
