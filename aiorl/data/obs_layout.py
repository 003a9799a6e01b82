"""Layout of an observation in the one array that a policy takes.

Nested observations are flattened, their parts one after the other. An action mask lies before the observation's own
numbers, in the same row: so it goes wherever the observation goes, and reaches whoever needs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = ["LaidOutBox", "ObsLayout", "layout_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObsLayout:
    """Layout of an observation in its array.

    Attributes:
        shape: shape of the observation, without the mask.
        parts: shape of each part of a nested observation by its name, in order: the keys and positions that lead to
            it, joined by dots. Empty for an observation that has none.
        num_mask: M, entries of the action mask before the observation; 0 = there is no mask, and the array has the
            shape of the observation. With a mask it is flat.
        num_frames: frames along the last axis, oldest first, where each observation of an episode adds one to the
            newest ones of the observation before; 1 = it is no stack of frames, as far as is known.
    """

    shape: Shape
    parts: Mapping[str, Shape] = field(default_factory=dict)
    num_mask: int = 0
    num_frames: int = 1

    @property
    def size(self) -> int:
        """D, numbers of the observation without the mask."""
        return math.prod(self.shape)

    @property
    def array_shape(self) -> Shape:
        """Shape of the array."""
        return (self.size + self.num_mask,) if self.num_mask else self.shape

    def split(self, obs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Split arrays [..., *array_shape] into observations [..., *shape] and masks [..., M], None without masks."""
        if not self.num_mask:
            return obs, None
        return obs[..., self.num_mask :].reshape(*obs.shape[:-1], *self.shape), obs[..., : self.num_mask]

    def slices(self) -> dict[str, slice]:
        """Return the place of each part in a flattened observation."""
        edges = itertools.accumulate((math.prod(shape) for shape in self.parts.values()), initial=0)
        return {
            name: slice(start, end) for name, (start, end) in zip(self.parts, itertools.pairwise(edges), strict=True)
        }


class LaidOutBox(spaces.Box):
    """The space of observations as policies take them, with their layout.

    Attributes:
        layout: how an observation lies in the array.
    """

    def __init__(self, low: Any, high: Any, layout: ObsLayout, dtype: np.dtype[Any] | type[Any]) -> None:
        """Take the bounds of the array, numbers or arrays."""
        super().__init__(low, high, layout.array_shape, dtype)
        self.layout = layout


def layout_of(space: spaces.Space[Any]) -> ObsLayout:
    """Return the layout of a policy's observation space."""
    return space.layout if isinstance(space, LaidOutBox) else ObsLayout(tuple(space.shape or ()))
