"""Action masks: which actions are legal, in the forms that environments use and as flat rows.

Environments give a mask as ``obs["action_mask"]``, with 1 (or True) for what is legal:

- Discrete(n): n entries.
- MultiDiscrete(nvec): the entries of each number, one after the other in one array, or an array each in a tuple.
- MultiBinary(n): n entries, whether the bit may be 1; every bit may be 0.
- Tuple and Dict: a tuple or dict of the masks of their parts. Parts without choices, such as a Box, have none.

Wherever there are several, one array of them all, one after the other, will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import leaf_spaces
from aiorl.errors import BatchError, UnsupportedSpaceError

__all__ = ["ACTION_MASK", "MaskLayout", "is_masked"]

ACTION_MASK = "action_mask"
"""Key of the mask in an observation's dict, or in an info."""

Array = NDArray[Any]


def is_masked(observation_space: spaces.Space[Any]) -> bool:
    """Whether observations of a space bring an action mask."""
    return isinstance(observation_space, spaces.Dict) and ACTION_MASK in observation_space.spaces


class MaskLayout:
    """Layout of the mask of an action space in one row: an entry for each choice, in the order of the space.

    Attributes:
        action_space: the action space.
        size: M, entries of a row.
    """

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        """Lay out the mask of an action space.

        Raises:
            UnsupportedSpaceError: a space that is no action space.
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
            UnsupportedSpaceError: it has another number of entries, or actions have no choices at all.
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
                f"An observation's part named {ACTION_MASK!r} says which actions are legal; give it another name "
                "if it is something else.",
            ) from error

    def from_rows(self, masks: Sequence[Any]) -> NDArray[np.uint8]:
        """Return the masks [N, M] of N observations, given one by one.

        Raises:
            BatchError: a mask of another shape, or with other entries than 0 and 1.
        """
        if masks and all(isinstance(mask, np.ndarray) and mask.shape == masks[0].shape for mask in masks):
            return self.from_batch(np.array(masks))
        rows = [np.concatenate([np.ravel(part) for part in self._parts(mask)]) for mask in masks]
        return self._checked(np.array(rows).reshape(len(masks), self.size))

    def from_batch(self, masks: Any) -> NDArray[np.uint8]:
        """Return the masks [N, M] of N observations, given as arrays [N, ...].

        Raises:
            BatchError: masks of another shape, or with other entries than 0 and 1.
        """
        parts = [np.asarray(part) for part in self._parts(masks, leading=1)]
        return self._checked(np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1))

    def rows_without_action(self, masks: Array) -> NDArray[np.int64]:
        """Return the indices of the masks [N, M] that leave no legal action.

        Those are masks in which some choice has no legal alternative; a bit may always be 0.
        """
        has_one = np.maximum.reduceat(masks, self._starts, axis=1)[:, self._needs_one] > 0
        return np.flatnonzero(~has_one.all(axis=1))

    def _parts(self, mask: Any, leading: int = 0) -> Iterator[Any]:
        """Yield the arrays of a mask, or of a batch of masks, checked for their sizes."""
        for part, size in _parts(self.action_space, mask):
            shape = np.shape(part)[leading:]
            if math.prod(shape) != size:
                raise BatchError(
                    ACTION_MASK, f"{size} entries for the action space {self.action_space}", f"shape {shape}"
                )
            yield part

    def _checked(self, masks: Array) -> NDArray[np.uint8]:
        if masks.dtype.kind not in "biuf" or not ((masks == 0) | (masks == 1)).all():
            raise BatchError(ACTION_MASK, "zeros and ones", f"{masks.dtype}: {np.unique(masks)[:5]}")
        return masks.astype(np.uint8)


def _choices(leaf: spaces.Space[Any]) -> list[int]:
    """Return the number of mask entries of each choice of a simple action space; empty without choices."""
    match leaf:
        case spaces.Discrete():
            return [int(leaf.n)]
        case spaces.MultiDiscrete():
            return [int(size) for size in leaf.nvec.ravel()]
        case spaces.MultiBinary():
            return [math.prod(leaf.shape)]
    return []


def _parts(space: spaces.Space[Any], mask: Any) -> Iterator[tuple[Any, int]]:
    """Yield the arrays of a mask in the order of the action space, each with the number of entries it must have."""
    size = sum(sum(_choices(leaf)) for leaf in leaf_spaces(space))
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        for name, part in space.spaces.items():
            if name in mask:
                yield from _parts(part, mask[name])
            elif _has_choices(part):
                raise BatchError(ACTION_MASK, f"a mask for {name!r}, which is {part}", sorted(map(str, mask)))
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
    return isinstance(mask, tuple) or (isinstance(mask, list) and any(np.ndim(part) for part in mask))


def _has_choices(space: spaces.Space[Any]) -> bool:
    return any(_choices(leaf) for leaf in leaf_spaces(space))


def _nothing(mask_space: spaces.Space[Any]) -> Any:
    """Return a mask of that space, all zeros."""
    if isinstance(mask_space, spaces.Dict):
        return {name: _nothing(part) for name, part in mask_space.spaces.items()}
    if isinstance(mask_space, spaces.Tuple):
        return tuple(_nothing(part) for part in mask_space.spaces)
    return np.zeros(mask_space.shape or ())
