"""Layout of actions in a column, and conversion to the form of environments.

An action of a simple space is an array, and the column is ``[B, *space.shape]`` in the space's
dtype. An action of a Tuple or Dict space, however nested, is a flat row: its components one after
the other, depth first, those of a Dict in the order of the space. Such a column is int64 if all
components are whole numbers; otherwise float32, or float64 if a component has this dtype or float32
can't hold a whole number exactly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.spaces import KINDS
from aiorl.errors import BatchError, UnsupportedSpaceError

Array = NDArray[Any]

_EXACT_IN_FLOAT32 = 1 << 24
_FLOAT32_STEPS = 4 * np.finfo(np.float32).eps


class ActionLayout:
    """Column form and environment form of the actions of a space.

    Attributes:
        space: the action space.
        is_nested: True for a Tuple or Dict.
        leaves: components that are arrays, depth first; the space itself if it is not nested.
        shape: shape of one action in its column.
        dtype: dtype of the column.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        """Lay out a space.

        Raises:
            UnsupportedSpaceError: a component is not a Box, Discrete, MultiBinary or MultiDiscrete,
                or a Tuple or Dict has no components.
        """
        self.space = space
        self.is_nested = isinstance(space, spaces.Tuple | spaces.Dict)
        self.leaves = tuple(leaf_spaces(space))
        self._sizes = [math.prod(leaf.shape or ()) for leaf in self.leaves]
        self.shape: tuple[int, ...] = (
            (sum(self._sizes),) if self.is_nested else tuple(space.shape or ())
        )
        self.dtype: np.dtype[Any] = (
            _common_dtype(self.leaves) if self.is_nested else np.dtype(space.dtype)
        )
        edges = np.cumsum([0, *self._sizes]).tolist()
        self._slices = [slice(start, end) for start, end in itertools.pairwise(edges)]
        self._bounds = self._column_bounds()
        boxes = [leaf for leaf in self.leaves if isinstance(leaf, spaces.Box)]
        self._num_bounded = sum(int((box.bounded_below | box.bounded_above).sum()) for box in boxes)
        self._rounded = (
            self.is_nested and self.dtype.kind == "f" and any(map(_is_whole, self.leaves))
        )

    @property
    def is_bounded(self) -> bool:
        """True if `clip` can change actions."""
        return self._bounds is not None

    def zeros(self, *leading: int) -> Array:
        """Return the zero action, or ``[*leading, ...]`` of them, in column form."""
        return np.zeros((*leading, *self.shape), self.dtype)

    def to_column(self, actions: Any) -> Array:
        """Convert a policy's actions of N rows to column form.

        Args:
            actions: array ``[N, ...]``; for a nested space either ``[N, A]``, already in column
                form, or one batch for each component, nested like the space. The batches in a list
                must be arrays, because lists or tuples could also be rows.

        Returns:
            ``[N, *shape]`` in `dtype`; the same array if it has this form already.

        Raises:
            BatchError: the batches don't fit the space, or fractions are given for whole numbers.
        """
        if self.is_nested and not isinstance(actions, np.ndarray):
            if _is_row_wise(self.space, actions):
                raise BatchError(
                    "actions",
                    "one array per component, of all rows",
                    f"rows: {_described(actions)}",
                )
            batches = list(_leaf_values(self.space, actions))
            rows = len(batches[0])
            for batch, leaf in zip(batches, self.leaves, strict=True):
                if np.shape(batch) != (rows, *(leaf.shape or ())):
                    raise BatchError(
                        "actions", f"{rows} rows of {leaf}", f"shape {np.shape(batch)}"
                    )
            column = self.zeros(rows)
            for batch, leaf, part in zip(batches, self.leaves, self._slices, strict=True):
                column[:, part] = _cast(batch, leaf).reshape(rows, part.stop - part.start)
            return column
        column = np.asarray(actions)
        if column.shape[1:] != self.shape or not column.ndim:
            raise BatchError(
                "actions", f"shape (N, {', '.join(map(str, self.shape))})", column.shape
            )
        if column.dtype != self.dtype:
            column = _cast(column, self.space, self.dtype)
        if self._rounded:
            for leaf, part in zip(self.leaves, self._slices, strict=True):
                if _is_whole(leaf):
                    _cast(column[:, part], leaf)
        return column

    def to_row(self, action: Any) -> Array:
        """Convert one action from the form of an environment to column form: ``[*shape]``.

        Raises:
            BatchError: it doesn't fit the space.
        """
        if not self.is_nested:
            row = np.asarray(action)
            if row.shape != self.shape:
                raise BatchError("actions", f"an action of {self.space}", f"shape {row.shape}")
            return _cast(row, self.space)
        row = self.zeros()
        for value, leaf, part in zip(
            _leaf_values(self.space, action), self.leaves, self._slices, strict=True
        ):
            if np.shape(value) != (leaf.shape or ()):
                raise BatchError("actions", f"an action of {leaf}", f"shape {np.shape(value)}")
            row[part] = _cast(value, leaf).ravel()
        return row

    def clip(self, column: Array) -> Array:
        """Clip actions to the bounds of every Box; other components are not changed.

        Args:
            column: ``[..., *shape]``.

        Returns:
            A new array, or the same one if there are no bounds.
        """
        if self._bounds is None:
            return column
        clipped: Array = np.clip(column, *self._bounds)
        return clipped

    def before_clipping(self, actions: Array, chosen: Array) -> Array:
        """Return actions as a policy chose them, given as environments got them.

        Args:
            actions: ``[..., *shape]`` as environments got them.
            chosen: ``[..., *shape]`` as the policy chose them, in case that these are its actions.

        Returns:
            The chosen numbers where the others are what `clip` makes of them, but for rounding to
            float32; elsewhere another action was taken.
        """
        is_clipped = np.abs(actions - self.clip(chosen)) <= self.rounding
        before: Array = np.where(is_clipped, chosen, actions)
        return before

    @functools.cached_property
    def rounding(self) -> Array:
        """Largest difference between a number at a bound and the same rounded to float32,
        ``[*shape]``.
        """
        if self._bounds is None:
            return np.zeros(self.shape, np.float32)
        bounds = [np.asarray(bound, np.float64) for bound in self._bounds]
        sizes = [np.where(np.isfinite(bound), np.abs(bound), 0.0) for bound in bounds]
        rounding: Array = (_FLOAT32_STEPS * np.maximum(*sizes)).astype(np.float32)
        return rounding

    def count_clipped(self, column: Array) -> tuple[int, int]:
        """Count the numbers that `clip` changes.

        Args:
            column: ``[..., *shape]``.

        Returns:
            The numbers outside of their bounds, and the numbers that have bounds.
        """
        if self._bounds is None:
            return 0, 0
        low, high = self._bounds
        is_outside = (column < low) | (column > high)
        rows = column.size // math.prod(self.shape) if column.size else 0
        return int(np.count_nonzero(is_outside)), rows * self._num_bounded

    def to_env(self, column: Array) -> list[Any]:
        """Convert the N actions of ``[N, *shape]`` to the form of environments.

        Returns:
            N actions of the kind that ``space.sample()`` has: NumPy integers for Discrete, separate
                arrays for other
            simple spaces, tuples for Tuple, and dicts in the order of the space for Dict.
        """
        if not self.is_nested:
            return rows_of(self.space, column.astype(self.dtype))
        parts = iter(self._slices)
        return _regrouped(self.space, column, parts)

    def to_components(self, column: Array) -> Any:
        """Return one batch ``[N, ...]`` for each component, nested like the space; `to_column` is
        the inverse.

        Returns:
            A tuple for a Tuple, a dict for a Dict, the column itself for a simple space.
        """
        return nested(self.space, iter(self.split(column)))

    def split(self, column: Array) -> list[Array]:
        """Return for each of `leaves` a batch ``[N, *leaf.shape]`` in the leaf's own dtype."""
        if not self.is_nested:
            return [column]
        return [
            _leaf_batch(leaf, column[:, part])
            for leaf, part in zip(self.leaves, self._slices, strict=True)
        ]

    def _column_bounds(self) -> tuple[Array, Array] | None:
        if isinstance(self.space, spaces.Box):
            is_bounded = (self.space.bounded_below | self.space.bounded_above).any()
            return (self.space.low, self.space.high) if is_bounded else None
        if not self.is_nested or not any(isinstance(leaf, spaces.Box) for leaf in self.leaves):
            return None
        info: Any = np.iinfo(self.dtype) if self.dtype.kind == "i" else None
        low = np.full(self.shape, -np.inf if info is None else info.min, self.dtype)
        high = np.full(self.shape, np.inf if info is None else info.max, self.dtype)
        for leaf, part in zip(self.leaves, self._slices, strict=True):
            if isinstance(leaf, spaces.Box):
                low[part], high[part] = leaf.low.ravel(), leaf.high.ravel()
        return low, high


def leaves_of(
    space: spaces.Space[Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space[Any]]]:
    """Yield the components of a space that are arrays, depth first, each as its path and its space.

    Raises:
        UnsupportedSpaceError: the space is of another kind, or a Tuple or Dict without components.
    """
    match space:
        case spaces.Box() | spaces.Discrete() | spaces.MultiBinary() | spaces.MultiDiscrete():
            yield path, space
        case spaces.Tuple() | spaces.Dict() if len(space.spaces):
            named = (
                space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            )
            for name, part in named:
                yield from leaves_of(part, (*path, name))
        case _:
            raise UnsupportedSpaceError("action space", space, KINDS)


def leaf_spaces(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """Yield the spaces of `leaves_of`."""
    return (leaf for _, leaf in leaves_of(space))


def _is_whole(leaf: spaces.Space[Any]) -> bool:
    """Return whether a component's actions are whole numbers."""
    return np.dtype(leaf.dtype).kind in "iub"


def _cast(values: Any, space: spaces.Space[Any], dtype: np.dtype[Any] | None = None) -> Array:
    """Convert numbers to a space's dtype, or to the one given, without changing whole numbers.

    Raises:
        BatchError: the dtype cannot represent them, such as 0.7 or NaN in a space of whole numbers.
    """
    given = np.asarray(values)
    dtype = np.dtype(space.dtype) if dtype is None else dtype
    if given.dtype == dtype:
        return given
    expected = (
        f"{'whole numbers' if dtype.kind in 'iub' else 'numbers'} that {dtype} can hold, for"
        f" {space}"
    )
    if given.dtype.kind not in "biufO":
        raise BatchError("actions", expected, f"{given.dtype}: {given.ravel()[:3]}")
    try:
        with np.errstate(invalid="ignore"):
            cast = given.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise BatchError("actions", expected, f"{given.ravel()[:3]}") from error
    if dtype.kind in "iub" and (is_lost := cast != given).any():
        raise BatchError("actions", expected, given[is_lost].ravel()[0])
    return cast


def _common_dtype(leaves: Sequence[spaces.Space[Any]]) -> np.dtype[Any]:
    if all(map(_is_whole, leaves)):
        return np.dtype(np.int64)
    is_exact = all(_largest(leaf) <= _EXACT_IN_FLOAT32 for leaf in leaves if _is_whole(leaf))
    is_double = any(np.dtype(leaf.dtype) == np.float64 for leaf in leaves)
    return np.dtype(np.float32 if is_exact and not is_double else np.float64)


def _largest(leaf: spaces.Space[Any]) -> int:
    """Return the largest absolute value of a component's actions."""
    match leaf:
        case spaces.Discrete():
            return max(abs(int(leaf.start)), abs(int(leaf.start) + int(leaf.n) - 1))
        case spaces.MultiDiscrete():
            return int(max(np.abs(leaf.start).max(), np.abs(leaf.start + leaf.nvec - 1).max()))
        case spaces.Box():
            return max(abs(int(leaf.low.min())), abs(int(leaf.high.max())))
    return 1


def _leaf_values(space: spaces.Space[Any], value: Any) -> Iterator[Any]:
    """Yield the parts of a nested value, depth first in the order of the space."""
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, Sequence) or len(value) != len(space.spaces):
            raise BatchError("actions", f"{len(space.spaces)} components", _described(value))
        for part, inner in zip(space.spaces, value, strict=True):
            yield from _leaf_values(part, inner)
    elif isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise BatchError("actions", f"the components {list(space.spaces)}", _described(value))
        for name, part in space.spaces.items():
            yield from _leaf_values(part, value[name])
    else:
        yield value


def _is_row_wise(space: spaces.Space[Any], actions: Any) -> bool:
    """Return whether a sequence for a Tuple has the components of each row, not the rows of each
    component.
    """
    if isinstance(space, spaces.Tuple) and isinstance(actions, Sequence):
        rows = tuple | list if isinstance(actions, list) else tuple
        return any(
            (
                _is_row_wise(part, batch)
                if isinstance(part, spaces.Tuple | spaces.Dict)
                else isinstance(batch, rows)
            )
            for part, batch in zip(space.spaces, actions, strict=False)
        )
    if isinstance(space, spaces.Dict) and isinstance(actions, Mapping):
        return any(_is_row_wise(part, actions.get(name)) for name, part in space.spaces.items())
    return False


def _described(value: Any) -> str:
    return f"{sorted(value)!r:.200}" if isinstance(value, Mapping) else f"{value!r:.200}"


def _leaf_batch(leaf: spaces.Space[Any], columns: Array) -> Array:
    dtype = np.dtype(leaf.dtype)
    if dtype.kind in "iub" and columns.dtype.kind == "f":
        columns = np.rint(columns)
    return columns.astype(dtype).reshape(len(columns), *(leaf.shape or ()))


def nested(space: spaces.Space[Any], parts: Iterator[Any]) -> Any:
    """Return a value that is nested like a space, made of its parts, depth first."""
    if isinstance(space, spaces.Tuple):
        return tuple(nested(part, parts) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: nested(part, parts) for name, part in space.spaces.items()}
    return next(parts)


def rows_of(leaf: spaces.Space[Any], batch: Array) -> list[Any]:
    """Return the actions of a batch ``[N, *leaf.shape]`` of a simple space as its ``sample()`` has
    them.

    They share the memory of the batch, whose dtype must be that of the space.
    """
    if batch.ndim == 1 and batch.dtype.kind == "f":
        return [batch[row, ...] for row in range(len(batch))]  # arrays without dimensions
    return list(batch)


def _regrouped(space: spaces.Space[Any], column: Array, parts: Iterator[slice]) -> list[Any]:
    if isinstance(space, spaces.Tuple):
        components = [_regrouped(part, column, parts) for part in space.spaces]
        return list(zip(*components, strict=True))
    if isinstance(space, spaces.Dict):
        named = {name: _regrouped(part, column, parts) for name, part in space.spaces.items()}
        return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    return rows_of(space, _leaf_batch(space, column[:, next(parts)]))
