"""Layout of an observation in the array that a policy takes.

Nested observations are flattened, their parts one after the other. An action mask precedes the
observation's own numbers in the same row, so it stays with the observation and is available
wherever it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import Space, leaf_spaces
from aiorl.data.columns import I64, Array
from aiorl.errors import BatchError, UnsupportedSpaceError

Masks = NDArray[np.uint8]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObsLayout:
    """Layout of an observation in its array.

    Attributes:
        shape: shape of the observation, without the mask.
        parts: shape of each part of a nested observation by its name, in order: the keys and
            positions that lead to it, joined by dots. Empty for an observation that is not nested.
        num_mask: M, entries of the action mask before the observation; 0 = there is no mask, and
            the array has the shape of the observation. With a mask it is flat.
        num_frames: frames along the last axis, oldest first, if each observation of an episode adds
            one to the newest frames of the previous one; 1 = it is not known to be a stack of
            frames.
        byte_parts: names of the parts whose numbers are bytes, as in images.
        is_filtered: True if a filter has normalised the numbers.
    """

    shape: Shape
    parts: Mapping[str, Shape] = field(default_factory=dict)
    num_mask: int = 0
    num_frames: int = 1
    byte_parts: tuple[str, ...] = ()
    is_filtered: bool = False

    @property
    def size(self) -> int:
        """D, numbers in the observation without the mask."""
        return math.prod(self.shape)

    @property
    def array_shape(self) -> Shape:
        """Shape of the array."""
        if not self.num_mask:
            return self.shape
        return (self.num_mask + self.size,)

    def split(self, obs: Array) -> tuple[Array, Array | None]:
        """Split arrays [..., *array_shape] into observations [..., *shape] and masks [..., M], None
        without masks.
        """
        if not self.num_mask:
            return obs, None
        masks = obs[..., : self.num_mask]
        numbers = obs[..., self.num_mask :]
        return numbers.reshape(*obs.shape[:-1], *self.shape), masks

    def slices(self) -> dict[str, slice]:
        """Return the place of each part in a flattened observation."""
        places = {}
        start = 0
        for name, shape in self.parts.items():
            end = start + math.prod(shape)
            places[name] = slice(start, end)
            start = end
        return places


class LaidOutBox(spaces.Box):
    """Space of observations in the form of policies, with their layout.

    Attributes:
        layout: layout of an observation in the array.
    """

    def __init__(
        self,
        low: Any,
        high: Any,
        layout: ObsLayout,
        dtype: np.dtype[Any] | type[Any],
    ) -> None:
        """Set the bounds of the array, numbers or arrays."""
        super().__init__(low, high, layout.array_shape, dtype)
        self.layout = layout


def layout_of(space: Space) -> ObsLayout:
    """Return the layout of a policy's observation space."""
    if isinstance(space, LaidOutBox):
        return space.layout
    return ObsLayout(tuple(space.shape or ()))


ACTION_MASK = "action_mask"
"""Key of the mask in an observation's dict, or in an info."""


def is_masked(observation_space: Space) -> bool:
    """Return whether observations of a space contain an action mask."""
    return isinstance(observation_space, spaces.Dict) and ACTION_MASK in observation_space.spaces


class MaskLayout:
    """Layout of the mask of an action space in one row: an entry for each choice, in the order of
    the space.

    Attributes:
        action_space: the action space.
        size: M, entries of a row.
    """

    def __init__(self, action_space: Space) -> None:
        """Lay out the mask of an action space.

        Raises:
            UnsupportedSpaceError: it is not an action space.
        """
        self.action_space = action_space
        sizes: list[int] = []
        needs_one: list[bool] = []
        for leaf in leaf_spaces(action_space):
            for size in _choices(leaf):
                sizes.append(size)
                needs_one.append(not isinstance(leaf, spaces.MultiBinary))
        self.size = sum(sizes)
        self._starts = np.cumsum([0, *sizes])[:-1]
        self._needs_one = np.array(needs_one, np.bool_)

    def check_space(self, mask_space: Space) -> None:
        """Check that masks of a space fit this action space.

        Raises:
            UnsupportedSpaceError: the number of entries differs, or the action space has no
                choices.
        """
        try:
            if not self.size:
                raise BatchError(
                    ACTION_MASK,
                    "an action space with choices",
                    self.action_space,
                )
            self.from_rows([_zeros(mask_space)])
        except BatchError as error:
            raise UnsupportedSpaceError(
                what="the action mask's space",
                space=mask_space,
                supported=[f"one of {self.size} entries for the action space {self.action_space}"],
                hint=f"An observation's part named {ACTION_MASK!r} must say which actions are"
                " legal; give it another name if it is something else.",
            ) from error

    def from_rows(self, masks: Sequence[Any]) -> Masks:
        """Return the masks [N, M] of N observations, given one by one.

        Raises:
            BatchError: a mask has another shape, or entries other than 0 and 1.
        """
        are_arrays = bool(masks) and all(isinstance(mask, np.ndarray) for mask in masks)
        if are_arrays and len({mask.shape for mask in masks}) == 1:
            return self.from_batch(np.array(masks))
        rows = []
        for mask in masks:
            parts = [np.ravel(part) for part in self._parts(mask)]
            rows.append(np.concatenate(parts))
        return self._checked(np.array(rows).reshape(len(masks), self.size))

    def from_batch(self, masks: Any) -> Masks:
        """Return the masks [N, M] of N observations, given as arrays [N, ...].

        Raises:
            BatchError: masks have another shape, or entries other than 0 and 1.
        """
        parts = []
        for part in map(np.asarray, self._parts(masks, leading=1)):
            parts.append(part.reshape(len(part), -1))
        return self._checked(np.concatenate(parts, axis=1))

    def rows_without_action(self, masks: Array) -> I64:
        """Return the indices of the masks [N, M] that leave no legal action.

        In these masks a choice has no legal alternative; the entry of a bit can always be 0.
        """
        has_legal = np.maximum.reduceat(masks, self._starts, axis=1) > 0
        is_complete = has_legal[:, self._needs_one].all(axis=1)
        return np.flatnonzero(~is_complete)

    def _parts(self, mask: Any, leading: int = 0) -> Iterator[Any]:
        """Yield the arrays of a mask, or of a batch of masks, after checking their sizes."""
        for part, size in _parts(self.action_space, mask):
            shape = np.shape(part)[leading:]
            if math.prod(shape) != size:
                expected = f"{size} entries for the action space {self.action_space}"
                raise BatchError(ACTION_MASK, expected, f"shape {shape}")
            yield part

    def _checked(self, masks: Array) -> Masks:
        is_number = masks.dtype.kind in "biuf"
        if not is_number or not ((masks == 0) | (masks == 1)).all():
            description = f"{masks.dtype}: {np.unique(masks)[:5]}"
            raise BatchError(ACTION_MASK, "zeros and ones", description)
        return masks.astype(np.uint8)


def _choices(leaf: Space) -> list[int]:
    """Return the number of mask entries for each choice of a simple action space; empty without
    choices.
    """
    match leaf:
        case spaces.Discrete():
            return [int(leaf.n)]
        case spaces.MultiDiscrete():
            return [int(size) for size in leaf.nvec.ravel()]
        case spaces.MultiBinary():
            return [math.prod(leaf.shape)]
    return []


def _parts(space: Space, mask: Any) -> Iterator[tuple[Any, int]]:
    """Yield the arrays of a mask in the order of the action space, each with its expected number of
    entries.
    """
    size = sum(sum(_choices(leaf)) for leaf in leaf_spaces(space))
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        for name, part in space.spaces.items():
            if name in mask:
                yield from _parts(part, mask[name])
            elif _has_choices(part):
                names = sorted(map(str, mask))
                raise BatchError(
                    ACTION_MASK,
                    f"a mask for {name!r}, which is {part}",
                    names,
                )
    elif isinstance(space, spaces.Tuple | spaces.MultiDiscrete) and _is_nested(mask):
        components = _masked_components(space, len(mask))
        if len(mask) != len(components):
            raise BatchError(
                ACTION_MASK,
                f"{len(components)} masks for {space}",
                f"{len(mask)}",
            )
        for component, part in zip(components, mask, strict=True):
            yield from _parts(component, part)
    elif size:
        yield mask, size


def _masked_components(
    space: spaces.Tuple[Any] | spaces.MultiDiscrete,
    count: int,
) -> list[Space]:
    """Return the components that have masks in a sequence: of a Tuple all of them if the number
    fits, or those with choices.
    """
    if isinstance(space, spaces.MultiDiscrete):
        return [spaces.Discrete(int(size)) for size in space.nvec.ravel()]
    if len(space.spaces) == count:
        return list(space.spaces)
    return [part for part in space.spaces if _has_choices(part)]


def _is_nested(mask: Any) -> bool:
    if isinstance(mask, list):
        return any(np.ndim(part) for part in mask)
    return isinstance(mask, tuple)


def _has_choices(space: Space) -> bool:
    return any(_choices(leaf) for leaf in leaf_spaces(space))


def _zeros(mask_space: Space) -> Any:
    """Return a mask of a space with zeros only."""
    if isinstance(mask_space, spaces.Dict):
        return {name: _zeros(part) for name, part in mask_space.spaces.items()}
    if isinstance(mask_space, spaces.Tuple):
        return tuple(_zeros(part) for part in mask_space.spaces)
    return np.zeros(mask_space.shape or ())
