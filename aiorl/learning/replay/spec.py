"""ReplaySpec: what a replay holds, and what that takes before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.column_spec import ColumnSpec
from aiorl.errors import ConfigError
from aiorl.learning.replay.sum_tree import SumTree

__all__ = ["FRAMES_OF", "RECENT_FRAMES", "Prioritised", "ReplaySpec"]

_MAX_STACK = 16
_SPARE_FRAMES = 1024

RECENT_FRAMES = 3072
"""So many frames may lie between two pieces of a trajectory, which are those of other trajectories: 24 fragments of 128
rows, a round of as many workers."""

FRAMES_OF = {c.OBS: "obs_frames", c.NEW_OBS: "new_obs_frames"}
"""Observations -> the field of a stored row that says in which slots their frames lie."""


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Rows are drawn in proportion to (|TD error| + epsilon) to the power of alpha.

    Attributes:
        alpha: 0 draws all alike, 1 in proportion to the errors themselves.
        epsilon: so that rows without an error are drawn too.
    """

    alpha: float = 0.6
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse what gives no priorities.

        Raises:
            ConfigError: a number out of its range.
        """
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha of priorities is {self.alpha}; it is from 0 to 1.", value=self.alpha)
        if not 0 <= self.epsilon < math.inf:
            raise ConfigError(f"epsilon of priorities is {self.epsilon}; it is 0 or more.", value=self.epsilon)


@dataclass(frozen=True, slots=True)
class ReplaySpec:
    """What a replay holds.

    Attributes:
        columns: of a row as it is sampled, `obs` and `new_obs` included where there are such.
        capacity: rows.
        priorities: None = rows are drawn uniformly.
        stack: frames of an observation. 0 = `obs` and `new_obs` are columns like others. From 2 on, observations are
            ``[..., K]``, a stack of K frames along the last axis, oldest first, and each frame is kept once. 1 = an
            observation is one frame, kept once for the row that it follows and the row that follows it.
        spill_dir: directory of memory-mapped files that hold the rows; None = memory does.
        unit: what a row is to people.
        made_with: settings that what is stored was made with, by name, as JSON can hold them.
    """

    columns: tuple[ColumnSpec, ...]
    capacity: int
    priorities: Prioritised | None = None
    stack: int = 0
    spill_dir: str | None = None
    unit: str = "rows"
    made_with: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no replay can hold.

        Raises:
            ConfigError: no rows, or stacks that the columns have not.
        """
        if self.capacity < 1:
            raise ConfigError(f"a replay of {self.capacity} rows holds nothing.", value=self.capacity)
        if not self.stack:
            return
        shapes = {column.shape for column in self.columns if column.name in FRAMES_OF}
        dtypes = {column.dtype for column in self.columns if column.name in FRAMES_OF}
        has_both = {column.name for column in self.columns} >= FRAMES_OF.keys()
        if not has_both or len(shapes) != 1 or len(dtypes) != 1:
            raise ConfigError("frames are kept once where obs and new_obs are columns of one shape and dtype.")
        (shape,) = shapes
        if not 1 <= self.stack <= _MAX_STACK or (self.stack > 1 and shape[-1:] != (self.stack,)):
            raise ConfigError(
                f"observations of shape {shape} are no stacks of {self.stack} frames.",
                value=self.stack,
                hint=f"The last axis has the frames, 2 to {_MAX_STACK}.",
            )

    @property
    def plain_columns(self) -> tuple[ColumnSpec, ...]:
        """Columns that lie in the row itself."""
        return tuple(column for column in self.columns if not (self.stack and column.name in FRAMES_OF))

    @property
    def row(self) -> np.dtype[np.void]:
        """A stored row: its columns side by side, so that fetching it touches one place in memory."""
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            (column.name, np.dtype(column.dtype), column.shape) for column in self.plain_columns
        ]
        if self.stack:
            fields += [(name, np.dtype(np.int32), (self.stack,)) for name in FRAMES_OF.values()]
        fields.sort(key=lambda field: -field[1].itemsize)  # so that nothing has to be padded
        return np.dtype(fields, align=True)

    @property
    def frame(self) -> np.dtype[np.void]:
        """A frame, as the one field of a record."""
        obs = next(column for column in self.columns if column.name == c.OBS)
        shape = obs.shape[:-1] if self.stack > 1 else obs.shape
        return np.dtype([("frame", np.dtype(obs.dtype), shape)])

    @property
    def num_frames(self) -> int:
        """Frames that are kept: one for each row, and spare ones, so that no row has to go before its time.

        One in 25 more is for episodes' ends and beginnings. `RECENT_FRAMES` are for a trajectory's rows that share
        frames with its rows in an older fragment: they go with these, while what came in between stays.
        """
        if not self.stack:
            return 0
        return self.capacity + self.capacity // 25 + min(RECENT_FRAMES, self.capacity) + _SPARE_FRAMES

    @property
    def bytes_of_rows(self) -> int:
        """Bytes of rows and frames."""
        frames = self.num_frames * self.frame.itemsize if self.stack else 0
        return self.capacity * self.row.itemsize + frames

    @property
    def bytes_needed(self) -> int:
        """Bytes of all that is held, in memory or files."""
        tree = 8 * SumTree.num_sums(self.capacity) if self.priorities is not None else 0
        return self.bytes_of_rows + tree

    @property
    def saved_bytes(self) -> int:
        """Bytes of a checkpoint of it, once it is full."""
        return self.bytes_of_rows + (8 * self.capacity if self.priorities is not None else 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory."""
        return self.bytes_needed - self.disk_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of memory-mapped files."""
        return self.bytes_of_rows if self.spill_dir is not None else 0

    def identity(self) -> dict[str, Any]:
        """What a saved state must have been made with to be taken up again, as JSON holds it."""
        return {
            "columns": sorted([column.name, list(column.shape), column.dtype] for column in self.columns),
            "capacity": self.capacity,
            "stack": self.stack,
            "is_prioritised": self.priorities is not None,
            **self.made_with,
        }

    def __str__(self) -> str:
        """Rows and what they take, for people."""
        per_row = math.ceil(self.bytes_of_rows / self.capacity)
        return f"{self.capacity:,} {self.unit} of {per_row:,} bytes"
