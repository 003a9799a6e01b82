"""Rows of fragments, checked before anything of them is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.n_step import check_n_steps
from aiorl.data import columns as c
from aiorl.data.column_spec import ColumnSpec
from aiorl.data.finite import all_finite
from aiorl.data.fragment import check_new_obs
from aiorl.errors import BatchError

__all__ = ["check_fragment", "check_numbers", "check_priorities", "checked_errors", "newest_steps"]

Array = NDArray[Any]


def check_fragment(columns: tuple[ColumnSpec, ...], arrays: Mapping[str, Array]) -> tuple[int, int]:
    """Refuse a fragment whose rows can't be stored. Safe in any thread.

    Args:
        columns: of a row.
        arrays: of the fragment by name; others than these columns are not looked at.
    Returns: T and N.

    Raises:
        BatchError: a column is missing, of another shape or dtype, or holds numbers that are not finite or too large.
    """
    first = next((arrays[column.name] for column in columns if column.name in arrays), None)
    if first is None or first.ndim < 2:
        raise BatchError(columns[0].name, "a column [T, N, ...]", "none" if first is None else f"shape {first.shape}")
    shape = first.shape[:2]
    if not all(shape):
        raise BatchError(columns[0].name, "at least one row", f"shape {first.shape}")
    for column in columns:
        array = arrays.get(column.name)
        if array is None and column.name == c.NEW_OBS:
            _check_following(ColumnSpec(c.OBS, column.shape, column.dtype), shape, arrays)
        elif array is None:
            raise BatchError(column.name, "in every fragment", f"only {sorted(arrays)!r:.500}")
        else:
            column.check(array, shape)
            check_numbers(column, array)
    valid = arrays.get(c.VALID)
    if valid is not None and (valid.shape != shape or valid.dtype != np.bool_):
        raise BatchError(c.VALID, f"bool {shape}", f"{valid.dtype} {valid.shape}")
    if c.N_STEPS in arrays:
        check_n_steps(arrays[c.N_STEPS], shape)
    return shape[0], shape[1]


def check_priorities(arrays: Mapping[str, Array], shape: tuple[int, ...]) -> None:
    """Refuse first priorities that whoever sampled a fragment can't have found. Safe in any thread.

    Args:
        arrays: of the fragment by name.
        shape: T and N.

    Raises:
        BatchError: they are missing, of another shape or dtype, or one is not finite, too large or below 0.
    """
    column, array = ColumnSpec(c.PRIORITIES), arrays.get(c.PRIORITIES)
    if array is None:
        raise BatchError(c.PRIORITIES, "in every fragment", f"only {sorted(arrays)!r:.500}")
    column.check(array, shape)
    check_numbers(column, array)
    if array.size and array.min() < 0:
        raise BatchError(c.PRIORITIES, "sizes of errors, at least 0", f"{array.min()}")


def checked_errors(name: str, errors: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return absolute values of errors as float64.

    Raises:
        BatchError: another shape, or numbers that are not finite.
    """
    array = np.asarray(errors)
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise BatchError(name, f"numbers {shape}", f"{array.dtype} {array.shape}")
    found: NDArray[np.float64] = np.abs(array.astype(np.float64))
    if not all_finite(found):
        raise BatchError(name, "finite numbers", "a NaN or an infinity")
    return found


def newest_steps(columns: tuple[ColumnSpec, ...], arrays: Mapping[str, Array], cut: int) -> dict[str, Array]:
    """Return what a fragment that is checked has of its rows, without its first steps.

    Args:
        columns: of a row.
        arrays: of the fragment by name.
        cut: steps to leave out.
    """
    of_steps = {column.name for column in columns} | {c.VALID, c.N_STEPS}
    newest = {name: array[cut:] if name in of_steps else array for name, array in arrays.items()}
    if c.FINAL_INDEX in arrays:
        is_left = arrays[c.FINAL_INDEX][:, 0] >= cut
        newest[c.FINAL_INDEX] = arrays[c.FINAL_INDEX][is_left] - np.array([cut, 0], np.int32)
        newest[c.FINAL_OBS] = arrays[c.FINAL_OBS][is_left]
    return newest


def _check_following(obs: ColumnSpec, shape: tuple[int, ...], arrays: Mapping[str, Array]) -> None:
    check_new_obs(arrays)
    obs.check(arrays[c.OBS], shape)
    for name in (c.LAST_OBS, c.FINAL_OBS):
        if name in arrays:
            check_numbers(ColumnSpec(name, obs.shape, obs.dtype), arrays[name])


def check_numbers(column: ColumnSpec, array: Array) -> None:
    """Refuse numbers that are not finite, or too large for a column.

    Raises:
        BatchError: there are such.
    """
    if array.dtype.kind == "f":
        if not all_finite(array):
            raise BatchError(column.name, "finite numbers", "a NaN or an infinity")
        if array.dtype.itemsize > 4 and (np.abs(array) > np.finfo(np.float32).max).any():
            raise BatchError(column.name, "numbers of float32", "larger ones")
    elif column.dtype == "int32" and array.size and array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise BatchError(column.name, "numbers of int32", f"{array.min()} to {array.max()}")
