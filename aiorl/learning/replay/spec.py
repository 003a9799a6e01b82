"""Contents of a replay and the room for it, which is checked before the run and taken from memory
or files.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import Columns, ColumnSpec
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.replay.priorities import Prioritised, SumTree
from aiorl.process.machine import available_bytes

_SPARE_FRAMES = 1024

RECENT_FRAMES = 3072
"""Maximum number of frames between two pieces of a trajectory: 24 fragments of 128 rows, a round of
24 workers."""

FRAMES_OF = {c.OBS: "obs_frames", c.NEW_OBS: "new_obs_frames"}
"""Field of a stored row with the slots of its frames, for both observations."""

EPISODE_COLUMNS = (c.EPS_ID, c.AGENT_INDEX, c.T)
"""Columns of a fragment by which a replay knows the rows of one agent in one episode."""


@dataclass(frozen=True, slots=True)
class ReplaySpec:
    """Contents of a replay.

    Attributes:
        columns: columns of a sampled row, including `obs` and `new_obs` if there are any.
        capacity: maximum number of rows.
        priorities: settings of priorities; None = rows are drawn uniformly.
        stack: frames of an observation. 0 = `obs` and `new_obs` are ordinary columns. From 2 on,
            observations are ``[..., K]``, a stack of K frames along the last axis, oldest first,
            and each frame is stored once. 1 = an observation is one frame, stored once for the rows
            before and after it.
        spill_dir: directory for memory-mapped files with the rows; None = rows are in memory.
        unit: name of a row in messages.
        made_with: settings that affect the stored data, by name, JSON-serialisable.
    """

    columns: tuple[ColumnSpec, ...]
    capacity: int
    priorities: Prioritised | None = None
    stack: int = 0
    spill_dir: str | None = None
    unit: str = "rows"
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain_columns(self) -> tuple[ColumnSpec, ...]:
        """Columns that are part of the row itself."""
        return tuple(
            column for column in self.columns if not (self.stack and column.name in FRAMES_OF)
        )

    @property
    def row(self) -> np.dtype[np.void]:
        """Dtype of a stored row: its columns lie side by side, so that reading it touches one place
        in memory.
        """
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            (column.name, np.dtype(column.dtype), column.shape) for column in self.plain_columns
        ]
        if self.stack:
            fields += [(name, np.dtype(np.int32), (self.stack,)) for name in FRAMES_OF.values()]
        fields.sort(key=lambda field: -field[1].itemsize)  # avoids padding
        return np.dtype(fields, align=True)

    @property
    def frame(self) -> np.dtype[np.void]:
        """Dtype of a frame, which is the only field of a record."""
        obs = next(column for column in self.columns if column.name == c.OBS)
        shape = obs.shape
        if self.stack > 1:
            shape = shape[:-1]
        return np.dtype([("frame", np.dtype(obs.dtype), shape)])

    @property
    def num_frames(self) -> int:
        """Number of frames to keep: one for each row, and spare ones so that no row is dropped
        early.

        4 % more are for starts and ends of episodes. `RECENT_FRAMES` are for rows that share frames
        with rows of the same trajectory in an older fragment: they are dropped with these, while
        the rows in between stay.
        """
        if not self.stack:
            return 0
        return (
            self.capacity + self.capacity // 25 + min(RECENT_FRAMES, self.capacity) + _SPARE_FRAMES
        )

    @property
    def bytes_of_rows(self) -> int:
        """Bytes of rows and frames."""
        num_bytes = self.capacity * self.row.itemsize
        if self.stack:
            num_bytes += self.num_frames * self.frame.itemsize
        return num_bytes

    @property
    def bytes_needed(self) -> int:
        """Bytes of the whole replay; anything but rows and frames is in memory."""
        num_bytes = self.bytes_of_rows
        if self.priorities is not None:
            num_bytes += 8 * SumTree.num_sums(self.capacity)
        return num_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that a full replay takes in a checkpoint."""
        num_bytes = self.bytes_of_rows
        if self.priorities is not None:
            num_bytes += 8 * self.capacity
        return num_bytes

    def identity(self) -> dict[str, Any]:
        """Return the settings that must match those of a saved state to restore it,
        JSON-serialisable.
        """
        return {
            "columns": sorted(
                [column.name, list(column.shape), column.dtype] for column in self.columns
            ),
            "capacity": self.capacity,
            "stack": self.stack,
            "is_prioritised": self.priorities is not None,
            **self.made_with,
        }

    def __str__(self) -> str:
        """Return the number and size of rows, for messages."""
        per_row = math.ceil(self.bytes_of_rows / self.capacity)
        return f"{self.capacity:,} {self.unit} of {per_row:,} bytes"


def check_episode_columns(arrays: Columns, leading: tuple[int, ...]) -> None:
    """Check that EPISODE_COLUMNS are in a fragment. Safe in any thread.

    Args:
        arrays: arrays of the fragment by name.
        leading: T and N.

    Raises:
        BatchError: one is missing, or is no integer for each row.
    """
    for name in EPISODE_COLUMNS:
        if name not in arrays:
            raise BatchError(
                name,
                "in every fragment; name EpisodeReplay.fragment_columns in the columns of replayed",
                f"only {sorted(arrays)!r:.500}",
            )
        column = arrays[name]
        if column.shape != leading or column.dtype.kind not in "iu":
            raise BatchError(name, f"integers {leading}", f"{column.dtype} {column.shape}")


_SPILL_KEY = "replay_spill_dir"


def check_fits(specs: Iterable[ReplaySpec]) -> None:
    """Check that this machine has room for all replays of a run, before anything is allocated.

    Raises:
        ConfigError: memory or a disk is too small; the message has the figures and the settings.
    """
    specs = list(specs)
    needed: Counter[str | None] = Counter()  # by directory; None is memory
    for spec in specs:
        needed[None] += spec.bytes_needed - spec.bytes_of_rows
        needed[spec.spill_dir] += spec.bytes_of_rows
    for directory, size in needed.items():
        try:
            free = available_bytes() if directory is None else shutil.disk_usage(directory).free
        except OSError as error:
            raise _unusable(str(directory), error) from error
        if size > free:
            raise ConfigError(
                f"the replay ({', '.join(map(str, specs))}) needs {_readable(size)} in"
                f" {directory or 'memory'}, and {_readable(free)} are free there.",
                key="replay_capacity" if directory is None else _SPILL_KEY,
                value=directory or size,
                hint=(
                    f"Set a smaller replay_capacity, or {_SPILL_KEY} to a directory on a disk with"
                    " enough room."
                ),
            )


def allocate(count: int, record: np.dtype[np.void], spill_dir: str | None) -> NDArray[Any]:
    """Return [count] records of zeros, in memory or in a file that is deleted when the process
    ends.

    Raises:
        ConfigError: there is not enough memory, or the file can't be made that large.
    """
    size = max(1, count * record.itemsize)
    try:
        if spill_dir is None:
            return np.zeros(count, record)
        with tempfile.TemporaryFile(
            prefix="aiorl-replay-", dir=spill_dir
        ) as file:  # unnamed, so it can't be left behind
            if hasattr(os, "posix_fallocate"):  # otherwise a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.memmap(file, record, "r+", shape=(count,)).view(np.ndarray)
    except OSError as error:
        raise _unusable(str(spill_dir), error) from error
    except MemoryError as error:
        raise ConfigError(
            f"the replay needs {_readable(size)}, but the system refuses to allocate it.",
            key="replay_capacity",
            value=count,
            hint="Set a smaller replay_capacity, or replay_spill_dir.",
        ) from error


def _unusable(directory: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory} can't hold the replay: {error.strerror or error}.",
        key=_SPILL_KEY,
        value=directory,
        hint=f"Set {_SPILL_KEY} to an existing, writable directory with enough room.",
    )


def _readable(size: int) -> str:
    """Format a size in gigabytes of 10^9 bytes, or in bytes if it is small."""
    if size < 10**7:
        return f"{size:,} bytes"
    return f"{size / 1e9:,.2f} GB"
