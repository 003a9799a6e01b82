"""Layout of actions in a column, and conversion to the form of environments.

An action of a simple space is an array, and the column is ``[B, *space.shape]`` in the space's
dtype. An action of a Tuple or Dict space, however nested, is a flat row: its components one after
the other, depth first, those of a Dict in the order of the space. Such a column is int64 if all
components are whole numbers; otherwise float32, or float64 if a component has this dtype or float32
can't hold a whole number exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.data.columns import Array, Bools
from aiorl.data.spaces import KINDS
from aiorl.errors import BatchError, UnsupportedSpaceError

Space = spaces.Space[Any]
Dtype = np.dtype[Any]
Path = tuple[str | int, ...]

_EXACT_IN_FLOAT32 = 1 << 24
_FLOAT32_STEPS = 4 * np.finfo(np.float32).eps
_WHOLE_KINDS = "iub"
"""Kinds of NumPy's dtypes that are whole numbers."""


@dataclass(frozen=True, slots=True)
class _Component:
    """Place of a component in a row of the column.

    Attributes:
        space: space of the component.
        shape: shape of one of its actions.
        size: numbers of one of its actions.
        place: its numbers in a flat row.
        is_whole: True if its actions are whole numbers.
    """

    space: Space
    shape: tuple[int, ...]
    size: int
    place: slice
    is_whole: bool


class ActionLayout:
    """Column form and environment form of the actions of a space.

    Attributes:
        space: the action space.
        is_nested: True for a Tuple or Dict.
        leaves: components that are arrays, depth first; the space itself if it is not nested.
        shape: shape of one action in its column.
        dtype: dtype of the column.
    """

    def __init__(self, space: Space) -> None:
        """Lay out a space.

        Raises:
            UnsupportedSpaceError: a component is not a Box, Discrete, MultiBinary or MultiDiscrete,
                or a Tuple or Dict has no components.
        """
        self.space = space
        self.is_nested = _is_nested(space)
        self.leaves = tuple(leaf_spaces(space))
        self._components = _components(self.leaves)
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        self.dtype = _common_dtype(self.leaves) if self.is_nested else np.dtype(space.dtype)
        # A column of floats could hold fractions for these components.
        self._checked: list[_Component] = []
        if self.is_nested:
            self.shape = (sum(part.size for part in self._components),)
            if self.dtype.kind == "f":
                self._checked = [part for part in self._components if part.is_whole]
        self._bounds = self._column_bounds()
        self._num_bounded = sum(map(_count_bounded, self.leaves))

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
            return self._joined(actions)
        column = np.asarray(actions)
        if column.ndim == 0 or column.shape[1:] != self.shape:
            raise BatchError(
                "actions",
                f"shape (N, {', '.join(map(str, self.shape))})",
                column.shape,
            )
        if column.dtype != self.dtype:
            column = _cast(column, self.space, self.dtype)
        for part in self._checked:
            _cast(column[:, part.place], part.space)
        return column

    def _joined(self, actions: Any) -> Array:
        """Return the column of one batch for each component, nested like the space."""
        if _is_row_wise(self.space, actions):
            raise BatchError(
                "actions",
                "one array per component, of all rows",
                f"rows: {_described(actions)}",
            )
        batches = list(_leaf_values(self.space, actions))
        rows = len(batches[0])
        column = self.zeros(rows)
        for batch, part in zip(batches, self._components, strict=True):
            if np.shape(batch) != (rows, *part.shape):
                raise BatchError(
                    "actions",
                    f"{rows} rows of {part.space}",
                    f"shape {np.shape(batch)}",
                )
            column[:, part.place] = _cast(batch, part.space).reshape(rows, part.size)
        return column

    def to_row(self, action: Any) -> Array:
        """Convert one action from the form of an environment to column form: ``[*shape]``.

        Raises:
            BatchError: it doesn't fit the space.
        """
        if not self.is_nested:
            return _cast_action(action, self.space, self.shape)
        row = self.zeros()
        values = _leaf_values(self.space, action)
        for value, part in zip(values, self._components, strict=True):
            row[part.place] = _cast_action(value, part.space, part.shape).ravel()
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
        low, high = self._bounds
        clipped: Array = np.clip(column, low, high)
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
        difference = np.abs(actions - self.clip(chosen))
        before: Array = np.where(difference <= self.rounding, chosen, actions)
        return before

    @functools.cached_property
    def rounding(self) -> Array:
        """Largest difference between a number at a bound and the same rounded to float32,
        ``[*shape]``.
        """
        if self._bounds is None:
            return np.zeros(self.shape, np.float32)
        bounds = np.abs(np.asarray(self._bounds, np.float64))
        bounds[np.isinf(bounds)] = 0.0
        largest: Array = bounds.max(axis=0)
        return (_FLOAT32_STEPS * largest).astype(np.float32)

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
        rows = column.size // max(math.prod(self.shape), 1)
        return int(np.count_nonzero(is_outside)), rows * self._num_bounded

    def to_env(self, column: Array) -> list[Any]:
        """Convert the N actions of ``[N, *shape]`` to the form of environments.

        Returns:
            N actions of the kind that ``space.sample()`` has: NumPy integers for Discrete, separate
            arrays for other simple spaces, tuples for Tuple, and dicts in the order of the space
            for Dict.
        """
        if not self.is_nested:
            return rows_of(column.astype(self.dtype))
        leaf_rows = map(rows_of, self.split(column))
        return _regrouped(self.space, leaf_rows)

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
        return [_component_batch(part, column[:, part.place]) for part in self._components]

    def misfits(self, column: Array) -> Iterator[tuple[Space, Bools]]:
        """Yield each of `leaves` with flags [N] of the actions that it doesn't have.

        A Box has all finite numbers, or whole ones, because actions are clipped later.

        Args:
            column: N actions ``[N, *shape]``, of any dtype of numbers.
        """
        flat = column.reshape(len(column), math.prod(self.shape))
        for part in self._components:
            numbers = flat[:, part.place]
            low, high = _range_of(part.space)
            fits = (numbers >= low) & (numbers <= high)
            if part.is_whole:
                fits &= numbers == np.rint(numbers)
            yield part.space, ~fits.all(axis=1)

    def _column_bounds(self) -> tuple[Array, Array] | None:
        """Return the lowest and the highest action in column form; None without bounds."""
        if isinstance(self.space, spaces.Box):
            if not _count_bounded(self.space):
                return None
            return self.space.low, self.space.high
        if not any(isinstance(leaf, spaces.Box) for leaf in self.leaves):
            return None
        lowest: float = -np.inf
        highest: float = np.inf
        if self.dtype.kind == "i":
            limits: Any = np.iinfo(self.dtype)
            lowest = limits.min
            highest = limits.max
        low = np.full(self.shape, lowest, self.dtype)
        high = np.full(self.shape, highest, self.dtype)
        for part in self._components:
            if isinstance(part.space, spaces.Box):
                low[part.place] = part.space.low.ravel()
                high[part.place] = part.space.high.ravel()
        return low, high


def leaves_of(
    space: Space,
    path: Path = (),
) -> Iterator[tuple[Path, Space]]:
    """Yield the components of a space that are arrays, depth first, each as its path and its space.

    Raises:
        UnsupportedSpaceError: the space is of another kind, or a Tuple or Dict without components.
    """
    match space:
        case spaces.Box() | spaces.Discrete() | spaces.MultiBinary() | spaces.MultiDiscrete():
            yield path, space
        case spaces.Tuple() if space.spaces:
            for index, part in enumerate(space.spaces):
                yield from leaves_of(part, (*path, index))
        case spaces.Dict() if space.spaces:
            for name, part in space.spaces.items():
                yield from leaves_of(part, (*path, name))
        case _:
            raise UnsupportedSpaceError("action space", space, KINDS)


def leaf_spaces(space: Space) -> Iterator[Space]:
    """Yield the spaces of `leaves_of`."""
    return (leaf for _, leaf in leaves_of(space))


def _components(leaves: Sequence[Space]) -> list[_Component]:
    """Return the components with these spaces, one after the other in a row."""
    components = []
    start = 0
    for leaf in leaves:
        shape = leaf.shape or ()
        size = math.prod(shape)
        component = _Component(
            space=leaf,
            shape=shape,
            size=size,
            place=slice(start, start + size),
            is_whole=_is_whole(leaf),
        )
        components.append(component)
        start += size
    return components


def _is_nested(space: Space) -> bool:
    return isinstance(space, spaces.Tuple | spaces.Dict)


def _is_whole(leaf: Space) -> bool:
    """Return whether a component's actions are whole numbers."""
    return np.dtype(leaf.dtype).kind in _WHOLE_KINDS


def _count_bounded(leaf: Space) -> int:
    """Return how many numbers of a component's actions have a bound."""
    if not isinstance(leaf, spaces.Box):
        return 0
    return int(np.count_nonzero(leaf.bounded_below | leaf.bounded_above))


def _cast_action(
    action: Any,
    space: Space,
    shape: tuple[int, ...],
) -> Array:
    """Return an action of a simple space in its dtype, after checking the shape."""
    array = np.asarray(action)
    if array.shape != shape:
        raise BatchError(
            "actions",
            f"an action of {space}",
            f"shape {array.shape}",
        )
    return _cast(array, space)


def _cast(
    values: Any,
    space: Space,
    dtype: Dtype | None = None,
) -> Array:
    """Convert numbers to a space's dtype, or to the one given, without changing whole numbers.

    Raises:
        BatchError: the dtype cannot represent them, such as 0.7 or NaN in a space of whole numbers.
    """
    numbers = np.asarray(values)
    if dtype is None:
        dtype = np.dtype(space.dtype)
    if numbers.dtype == dtype:
        return numbers
    if numbers.dtype.kind not in "biufO":
        raise _misfit(
            space,
            dtype,
            f"{numbers.dtype}: {numbers.ravel()[:3]}",
        )
    try:
        # A NaN as a whole number would be a warning; the comparison below refuses it.
        with np.errstate(invalid="ignore"):
            cast = numbers.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _misfit(space, dtype, f"{numbers.ravel()[:3]}") from error
    if dtype.kind in _WHOLE_KINDS:
        is_lost = cast != numbers
        if is_lost.any():
            raise _misfit(space, dtype, numbers[is_lost].ravel()[0])
    return cast


def _misfit(
    space: Space,
    dtype: Dtype,
    numbers: object,
) -> BatchError:
    """Return the error for numbers that a dtype cannot represent."""
    kind = "whole numbers" if dtype.kind in _WHOLE_KINDS else "numbers"
    return BatchError(
        "actions",
        f"{kind} that {dtype} can hold, for {space}",
        numbers,
    )


def _common_dtype(leaves: Sequence[Space]) -> Dtype:
    """Return the dtype of a column that holds these components."""
    whole = [leaf for leaf in leaves if _is_whole(leaf)]
    if len(whole) == len(leaves):
        return np.dtype(np.int64)
    if any(leaf.dtype == np.float64 for leaf in leaves):
        return np.dtype(np.float64)
    if any(_largest(leaf) > _EXACT_IN_FLOAT32 for leaf in whole):
        return np.dtype(np.float64)
    return np.dtype(np.float32)


def _largest(leaf: Space) -> int:
    """Return the largest absolute value of a component's whole numbers."""
    match leaf:
        case spaces.Discrete():
            first = int(leaf.start)
            last = first + int(leaf.n) - 1
            return max(abs(first), abs(last))
        case spaces.MultiDiscrete():
            first = np.abs(leaf.start).max()
            last = np.abs(leaf.start + leaf.nvec - 1).max()
            return int(max(first, last))
        case spaces.Box():
            return max(abs(int(leaf.low.min())), abs(int(leaf.high.max())))
    return 1


def _range_of(leaf: Space) -> tuple[Any, Any]:
    """Return the range of each number of a component's actions; a Box allows all finite ones."""
    match leaf:
        case spaces.Discrete():
            return leaf.start, leaf.start + (leaf.n - 1)
        case spaces.MultiDiscrete():
            return leaf.start.ravel(), (leaf.start + (leaf.nvec - 1)).ravel()
        case spaces.MultiBinary():
            return 0, 1
    return -np.finfo(np.float64).max, np.finfo(np.float64).max


def _leaf_values(space: Space, value: Any) -> Iterator[Any]:
    """Yield the parts of a nested value, depth first in the order of the space."""
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, Sequence) or len(value) != len(space.spaces):
            raise BatchError(
                "actions",
                f"{len(space.spaces)} components",
                _described(value),
            )
        for part, component in zip(space.spaces, value, strict=True):
            yield from _leaf_values(part, component)
    elif isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise BatchError(
                "actions",
                f"the components {list(space.spaces)}",
                _described(value),
            )
        for name, part in space.spaces.items():
            yield from _leaf_values(part, value[name])
    else:
        yield value


def _is_row_wise(space: Space, actions: Any) -> bool:
    """Return whether a sequence for a Tuple has the components of each row, not the rows of each
    component.
    """
    if isinstance(space, spaces.Dict) and isinstance(actions, Mapping):
        return any(_is_row_wise(part, actions.get(name)) for name, part in space.spaces.items())
    if not isinstance(space, spaces.Tuple) or not isinstance(actions, Sequence):
        return False
    # In a tuple of batches a list is the batch of a component; in a list it is a row.
    row_types = (tuple, list) if isinstance(actions, list) else (tuple,)
    for part, batch in zip(space.spaces, actions, strict=False):
        if _is_row_wise(part, batch):
            return True
        if not _is_nested(part) and isinstance(batch, row_types):
            return True
    return False


def _described(value: Any) -> str:
    text = repr(sorted(value) if isinstance(value, Mapping) else value)
    return text[:200]


def _component_batch(part: _Component, numbers: Array) -> Array:
    """Return a component's numbers [N, size] as a batch of its own shape and dtype."""
    if part.is_whole and numbers.dtype.kind == "f":
        numbers = np.rint(numbers)
    batch = numbers.astype(part.space.dtype)
    return batch.reshape(len(batch), *part.shape)


def nested(space: Space, parts: Iterator[Any]) -> Any:
    """Return a value that is nested like a space, made of its parts, depth first."""
    if isinstance(space, spaces.Tuple):
        return tuple(nested(part, parts) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: nested(part, parts) for name, part in space.spaces.items()}
    return next(parts)


def rows_of(batch: Array) -> list[Any]:
    """Return the actions of a batch ``[N, *shape]`` of a simple space as its ``sample()`` has them.

    They share the memory of the batch, whose dtype must be that of the space.
    """
    if batch.ndim == 1 and batch.dtype.kind == "f":
        return [batch[row, ...] for row in range(len(batch))]  # arrays without dimensions
    return list(batch)


def _regrouped(space: Space, leaf_rows: Iterator[list[Any]]) -> list[Any]:
    """Return N actions that are nested like a space, made of the N rows of each leaf."""
    if isinstance(space, spaces.Tuple):
        components = [_regrouped(part, leaf_rows) for part in space.spaces]
        return list(zip(*components, strict=True))
    if isinstance(space, spaces.Dict):
        by_name = {name: _regrouped(part, leaf_rows) for name, part in space.spaces.items()}
        rows = zip(*by_name.values(), strict=True)
        return [dict(zip(by_name, row, strict=True)) for row in rows]
    return next(leaf_rows)
