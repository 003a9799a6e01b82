"""From an observation space to the plain array a model takes.

A preprocessor works on a batch at a time, in the form Gymnasium's vector environments batch a space: arrays
``[N, ...]`` for the simple spaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from aiorl.errors import UnsupportedSpaceError

__all__ = [
    "BoxPreprocessor",
    "DiscretePreprocessor",
    "MultiBinaryPreprocessor",
    "MultiDiscretePreprocessor",
    "Preprocessor",
    "preprocessor_for",
]


class Preprocessor(ABC):
    """Turns observations of one space into model inputs.

    Attributes:
        space: the environment's space of one observation.
        shape: shape of one model input.
        dtype: float32, or uint8 for byte images.
        is_identity: ``transform`` returns its argument's values unchanged.
    """

    is_identity = False

    def __init__(self, space: spaces.Space[Any], shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Note the spaces on both sides."""
        self.space = space
        self.shape = shape
        self.dtype = np.dtype(dtype)

    @abstractmethod
    def transform(self, obs: Any) -> NDArray[Any]:
        """Model inputs ``[N, *shape]`` for a batch of N observations.

        Args:
            obs: batched observations, ``[N, ...]``.
        """


class BoxPreprocessor(Preprocessor):
    """Boxes of any shape as they are: bytes stay bytes, every other number becomes float32."""

    def __init__(self, space: spaces.Box) -> None:
        """Keep the shape; a box without dimensions becomes a vector of one."""
        dtype = np.uint8 if space.dtype == np.uint8 else np.float32
        super().__init__(space, tuple(space.shape) or (1,), dtype)
        self.is_identity = space.dtype == self.dtype and bool(space.shape)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        return obs.astype(self.dtype, copy=False).reshape(len(obs), *self.shape)


class DiscretePreprocessor(Preprocessor):
    """Discrete numbers as one-hot vectors of float32."""

    def __init__(self, space: spaces.Discrete) -> None:
        """One entry per value."""
        super().__init__(space, (int(space.n),), np.float32)
        self._start = int(space.start)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        out = np.zeros((len(obs), *self.shape), np.float32)
        out[np.arange(len(obs)), obs.astype(np.int64, copy=False) - self._start] = 1.0
        return out


class MultiDiscretePreprocessor(Preprocessor):
    """Several discrete numbers as their one-hot vectors, one after the other, float32."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        """One entry per value of each number."""
        sizes = np.asarray(space.nvec, np.int64).reshape(-1)
        super().__init__(space, (int(sizes.sum()),), np.float32)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._shift = offsets - np.asarray(space.start, np.int64).reshape(-1)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        out = np.zeros((len(obs), *self.shape), np.float32)
        np.put_along_axis(out, obs.reshape(len(obs), -1).astype(np.int64) + self._shift, 1.0, axis=1)
        return out


class MultiBinaryPreprocessor(Preprocessor):
    """Bits as float32 zeros and ones."""

    def __init__(self, space: spaces.MultiBinary) -> None:
        """Keep the shape."""
        super().__init__(space, tuple(space.shape), np.float32)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        return obs.astype(np.float32)


def preprocessor_for(space: spaces.Space[Any]) -> Preprocessor:
    """The preprocessor of an observation space.

    Raises:
        UnsupportedSpaceError: no preprocessor exists for that kind of space.
    """
    if isinstance(space, spaces.Box):
        return BoxPreprocessor(space)
    if isinstance(space, spaces.Discrete):
        return DiscretePreprocessor(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscretePreprocessor(space)
    if isinstance(space, spaces.MultiBinary):
        return MultiBinaryPreprocessor(space)
    raise UnsupportedSpaceError("the observation space", space, ("Box", "Discrete", "MultiBinary", "MultiDiscrete"))
