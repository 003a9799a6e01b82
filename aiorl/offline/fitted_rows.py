"""Stored rows in the form that a policy takes: dtypes and shapes of its observations and
actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.columns import Array
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError, UnsupportedSpaceError

_NUMBERS = (c.REWARDS, c.PREV_REWARDS, c.ACTION_LOGP, c.ACTION_DIST_INPUTS, c.VF_PREDS)
"""Columns that are float32 in every batch."""


class RowFitter:
    """Conversion of stored rows to the dtypes and shapes of a policy's spaces.

    Files of other programs have float64 where batches have float32, floats for whole numbers, and
    numbers for rows with one number, or the other way round. Rows of other shapes are refused.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None,
        action_space: spaces.Space[Any] | None,
    ) -> None:
        """Set the spaces.

        Args:
            observation_space: the policy's observation space; None, or a space other than a Box, to
                leave observations as they are.
            action_space: the policy's action space; None to leave actions as they are.
        """
        is_box = isinstance(observation_space, spaces.Box)
        self._observation_space = observation_space if is_box else None
        self._actions: ActionLayout | None = None
        if action_space is not None:
            try:
                self._actions = ActionLayout(action_space)
            except UnsupportedSpaceError:  # such a policy takes actions in a form of its own
                self._actions = None

    def fit(self, rows: SampleBatch) -> None:
        """Convert the columns of `rows` in place.

        Raises:
            DataError: rows have another shape than the policy's; numbers are fractions, or too
                large, for a policy that takes whole ones; or an action is none of the space.
        """
        space = self._observation_space
        for name in (c.OBS, c.NEW_OBS):
            if space is not None and name in rows:
                rows[name] = _converted(
                    name,
                    rows[name],
                    tuple(space.shape or ()),
                    np.dtype(space.dtype),
                )
        layout = self._actions
        for name in (c.ACTIONS, c.PREV_ACTIONS):
            if layout is not None and name in rows:
                rows[name] = _converted(name, rows[name], layout.shape, layout.dtype)
        if layout is not None and c.ACTIONS in rows:
            _check_actions(layout, rows[c.ACTIONS])
        for name in _NUMBERS:
            if name in rows and rows[name].dtype.kind in "biuf" and rows[name].dtype != np.float32:
                rows[name] = rows[name].astype(np.float32)


def _converted(
    name: str,
    column: Array,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Array:
    """Return a column [B, ...] in the dtype of a space, and in its shape if only axes of length 1
    differ.

    Raises:
        DataError: other axes differ, or whole numbers are wanted, and there are others.
    """
    row_shape = column.shape[1:]
    if row_shape != shape:
        if _without_ones(row_shape) != _without_ones(shape):
            form = "actions of a Tuple or Dict must be one row of numbers each"
            if name in (c.OBS, c.NEW_OBS):
                form = "observations in the form of the environment must be preprocessed first"
            raise DataError(
                f"{name} has rows of shape {row_shape}, but the policy takes {shape}; {form}"
            )
        column = column.reshape(len(column), *shape)
    if column.dtype == dtype or column.dtype.kind not in "biuf":
        return column
    with np.errstate(all="ignore"):  # what doesn't fit is found below
        converted = column.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(converted, column):
        row = int(_rows_with_any(converted != column)[0])
        raise DataError(
            f"{name} of row {row + 1} has {column[row].reshape(-1)[:4].tolist()}, but the policy"
            f" takes whole numbers ({dtype})"
        )
    return converted


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _rows_with_any(flags: Array) -> Array:
    """Return the rows of [B, ...] with a flag that is set."""
    return np.flatnonzero(flags.reshape(len(flags), -1).any(axis=1))


def _check_actions(layout: ActionLayout, actions: Array) -> None:
    """Refuse actions [B, ...] that a space does not have.

    Raises:
        DataError: there is one.
    """
    for _, is_wrong in layout.misfits(actions):
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            action = actions[row].tolist()
            raise DataError(f"the action {action} of row {row + 1} is none of {layout.space}")
