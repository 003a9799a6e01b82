"""Layout of an observation in the array that a policy takes.

Nested observations are flattened, their parts one after the other. An action mask precedes the
observation's own numbers in the same row, so it stays with the observation and is available
wherever it is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import leaf_spaces
from aiorl.errors import BatchError, UnsupportedSpaceError

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
        return (self.size + self.num_mask,) if self.num_mask else self.shape

    def split(self, obs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Split arrays [..., *array_shape] into observations [..., *shape] and masks [..., M], None
        without masks.
        """
        if not self.num_mask:
            return obs, None
        return (
            obs[..., self.num_mask :].reshape(*obs.shape[:-1], *self.shape),
            obs[..., : self.num_mask],
        )

    def slices(self) -> dict[str, slice]:
        """Return the place of each part in a flattened observation."""
        edges = itertools.accumulate((math.prod(shape) for shape in self.parts.values()), initial=0)
        return {
            name: slice(start, end)
            for name, (start, end) in zip(self.parts, itertools.pairwise(edges), strict=True)
        }


class LaidOutBox(spaces.Box):
    """Space of observations in the form of policies, with their layout.

    Attributes:
        layout: layout of an observation in the array.
    """

    def __init__(
        self, low: Any, high: Any, layout: ObsLayout, dtype: np.dtype[Any] | type[Any]
    ) -> None:
        """Set the bounds of the array, numbers or arrays."""
        super().__init__(low, high, layout.array_shape, dtype)
        self.layout = layout


def layout_of(space: spaces.Space[Any]) -> ObsLayout:
    """Return the layout of a policy's observation space."""
    return space.layout if isinstance(space, LaidOutBox) else ObsLayout(tuple(space.shape or ()))


ACTION_MASK = "action_mask"
"""Key of the mask in an observation's dict, or in an info."""

Array = NDArray[Any]


def is_masked(observation_space: spaces.Space[Any]) -> bool:
    """Return whether observations of a space contain an action mask."""
    return isinstance(observation_space, spaces.Dict) and ACTION_MASK in observation_space.spaces


class MaskLayout:
    """Layout of the mask of an action space in one row: an entry for each choice, in the order of
    the space.

    Attributes:
        action_space: the action space.
        size: M, entries of a row.
    """

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        """Lay out the mask of an action space.

        Raises:
            UnsupportedSpaceError: it is not an action space.
        """
        self.action_space = action_space
        sizes: list[int] = []
        needs_one: list[bool] = []
        for leaf in leaf_spaces(action_space):
            own = _choices(leaf)
            sizes += own
            needs_one += [not isinstance(leaf, spaces.MultiBinary)] * len(own)
        self.size = sum(sizes)
        self._starts = np.cumsum([0, *sizes])[:-1]
        self._needs_one = np.array(needs_one, np.bool_)

    def check_space(self, mask_space: spaces.Space[Any]) -> None:
        """Check that masks of a space fit this action space.

        Raises:
            UnsupportedSpaceError: the number of entries differs, or the action space has no
                choices.
        """
        try:
            if not self.size:
                raise BatchError(ACTION_MASK, "an action space with choices", self.action_space)
            self.from_rows([_nothing(mask_space)])
        except BatchError as error:
            raise UnsupportedSpaceError(
                "the action mask's space",
                mask_space,
                [f"one of {self.size} entries for the action space {self.action_space}"],
                f"An observation's part named {ACTION_MASK!r} must say which actions are legal;"
                " give it another name if it is something else.",
            ) from error

    def from_rows(self, masks: Sequence[Any]) -> NDArray[np.uint8]:
        """Return the masks [N, M] of N observations, given one by one.

        Raises:
            BatchError: a mask has another shape, or entries other than 0 and 1.
        """
        if masks and all(
            isinstance(mask, np.ndarray) and mask.shape == masks[0].shape for mask in masks
        ):
            return self.from_batch(np.array(masks))
        rows = [np.concatenate([np.ravel(part) for part in self._parts(mask)]) for mask in masks]
        return self._checked(np.array(rows).reshape(len(masks), self.size))

    def from_batch(self, masks: Any) -> NDArray[np.uint8]:
        """Return the masks [N, M] of N observations, given as arrays [N, ...].

        Raises:
            BatchError: masks have another shape, or entries other than 0 and 1.
        """
        parts = [np.asarray(part) for part in self._parts(masks, leading=1)]
        return self._checked(
            np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        )

    def rows_without_action(self, masks: Array) -> NDArray[np.int64]:
        """Return the indices of the masks [N, M] that leave no legal action.

        In these masks a choice has no legal alternative; the entry of a bit can always be 0.
        """
        has_one = np.maximum.reduceat(masks, self._starts, axis=1)[:, self._needs_one] > 0
        return np.flatnonzero(~has_one.all(axis=1))

    def _parts(self, mask: Any, leading: int = 0) -> Iterator[Any]:
        """Yield the arrays of a mask, or of a batch of masks, after checking their sizes."""
        for part, size in _parts(self.action_space, mask):
            shape = np.shape(part)[leading:]
            if math.prod(shape) != size:
                raise BatchError(
                    ACTION_MASK,
                    f"{size} entries for the action space {self.action_space}",
                    f"shape {shape}",
                )
            yield part

    def _checked(self, masks: Array) -> NDArray[np.uint8]:
        if masks.dtype.kind not in "biuf" or not ((masks == 0) | (masks == 1)).all():
            raise BatchError(
                ACTION_MASK, "zeros and ones", f"{masks.dtype}: {np.unique(masks)[:5]}"
            )
        return masks.astype(np.uint8)


def _choices(leaf: spaces.Space[Any]) -> list[int]:
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


def _parts(space: spaces.Space[Any], mask: Any) -> Iterator[tuple[Any, int]]:
    """Yield the arrays of a mask in the order of the action space, each with its expected number of
    entries.
    """
    size = sum(sum(_choices(leaf)) for leaf in leaf_spaces(space))
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        for name, part in space.spaces.items():
            if name in mask:
                yield from _parts(part, mask[name])
            elif _has_choices(part):
                raise BatchError(
                    ACTION_MASK, f"a mask for {name!r}, which is {part}", sorted(map(str, mask))
                )
    elif isinstance(space, spaces.Tuple | spaces.MultiDiscrete) and _is_nested(mask):
        if isinstance(space, spaces.Tuple):
            inner = list(space.spaces)
            if len(mask) != len(inner):
                inner = [part for part in inner if _has_choices(part)]
        else:
            inner = [spaces.Discrete(int(number)) for number in space.nvec.ravel()]
        if len(mask) != len(inner):
            raise BatchError(ACTION_MASK, f"{len(inner)} masks for {space}", f"{len(mask)}")
        for part, own in zip(inner, mask, strict=True):
            yield from _parts(part, own)
    elif size:
        yield mask, size


def _is_nested(mask: Any) -> bool:
    return isinstance(mask, tuple) or (
        isinstance(mask, list) and any(np.ndim(part) for part in mask)
    )


def _has_choices(space: spaces.Space[Any]) -> bool:
    return any(_choices(leaf) for leaf in leaf_spaces(space))


def _nothing(mask_space: spaces.Space[Any]) -> Any:
    """Return a mask of a space with zeros only."""
    if isinstance(mask_space, spaces.Dict):
        return {name: _nothing(part) for name, part in mask_space.spaces.items()}
    if isinstance(mask_space, spaces.Tuple):
        return tuple(_nothing(part) for part in mask_space.spaces)
    return np.zeros(mask_space.shape or ())
