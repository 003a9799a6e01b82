"""From an observation space to the plain array a model takes.

A preprocessor works on a batch at a time, in the form Gymnasium's vector environments batch a space: arrays
``[N, ...]`` for the simple spaces, a tuple or dict of batches for Tuple and Dict. Observations that come one by one
go through `transform_rows`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from aiorl.config.import_path import import_object
from aiorl.errors import BatchError, ConfigError, UnsupportedSpaceError

__all__ = [
    "BoxPreprocessor",
    "DiscretePreprocessor",
    "IdentityPreprocessor",
    "MultiBinaryPreprocessor",
    "MultiDiscretePreprocessor",
    "NestedPreprocessor",
    "Preprocessor",
    "make_preprocessor",
    "preprocessor_for",
]

_KINDS = ("Box", "Discrete", "MultiBinary", "MultiDiscrete", "Tuple", "Dict")


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
        self._is_whole = space.dtype is not None and np.dtype(space.dtype).kind != "f"

    @abstractmethod
    def transform(self, obs: Any) -> NDArray[Any]:
        """Model inputs ``[N, *shape]`` for a batch of N observations.

        Args:
            obs: batched observations, ``[N, ...]``; for Tuple and Dict a tuple or dict of such batches.
        """

    def transform_rows(self, observations: Sequence[Any]) -> NDArray[Any]:
        """Model inputs ``[N, *shape]`` for N observations as environments give them, one by one.

        Raises: BatchError (a ValueError) if one doesn't fit the space.
        """
        obs = _stacked(observations, self.space)
        if obs.dtype.kind == "f" and self._is_whole and not np.array_equal(obs, np.rint(obs)):
            raise BatchError("obs", f"observations of {self.space}", "fractions")
        self._check_range(obs)
        return self.transform(obs)

    def _check_range(self, obs: NDArray[Any]) -> None:
        """Raise BatchError if ``[N, *space.shape]`` holds what `transform` can't represent; by default nothing is."""
        return

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Space of the model inputs: what a policy is told."""
        if self.is_identity:
            return self.space
        flat = spaces.flatten_space(self.space)
        assert isinstance(flat, spaces.Box), "a space of simple components flattens to a Box"
        low, high = flat.low.astype(self.dtype), flat.high.astype(self.dtype)
        return spaces.Box(low.reshape(self.shape), high.reshape(self.shape), dtype=self.dtype.type)


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

    def _check_range(self, obs: NDArray[Any]) -> None:
        _check_range(obs, self._start, self._start + self.shape[0], self.space)


class MultiDiscretePreprocessor(Preprocessor):
    """Several discrete numbers as their one-hot vectors, one after the other, float32."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        """One entry per value of each number."""
        sizes = np.asarray(space.nvec, np.int64).reshape(-1)
        super().__init__(space, (int(sizes.sum()),), np.float32)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._low = np.asarray(space.start, np.int64)
        self._end = self._low + space.nvec
        self._shift = offsets - self._low.reshape(-1)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        out = np.zeros((len(obs), *self.shape), np.float32)
        np.put_along_axis(out, obs.reshape(len(obs), -1).astype(np.int64) + self._shift, 1.0, axis=1)
        return out

    def _check_range(self, obs: NDArray[Any]) -> None:
        _check_range(obs, self._low, self._end, self.space)


class MultiBinaryPreprocessor(Preprocessor):
    """Bits as float32 zeros and ones."""

    def __init__(self, space: spaces.MultiBinary) -> None:
        """Keep the shape."""
        super().__init__(space, tuple(space.shape), np.float32)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        return obs.astype(np.float32)


class NestedPreprocessor(Preprocessor):
    """Tuples and Dicts, however nested, as one float32 vector: their components' model inputs, flattened.

    Components follow each other in the order of the space, those within a component in C order, as in
    ``gymnasium.spaces.flatten``. Byte images keep their values of 0 to 255 as floats.
    """

    def __init__(self, space: spaces.Tuple[Any] | spaces.Dict) -> None:
        """Make a preprocessor for each component."""
        named = list(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
        if not named:
            raise UnsupportedSpaceError("the observation space", space, _KINDS, "It has no components.")
        self._parts: list[tuple[Any, Preprocessor, slice]] = []
        end = 0
        for name, part in named:
            preprocessor = preprocessor_for(part)
            start, end = end, end + math.prod(preprocessor.shape)
            self._parts.append((name, preprocessor, slice(start, end)))
        super().__init__(space, (end,), np.float32)
        self._type = Mapping if isinstance(space, spaces.Dict) else Sequence

    def transform(self, obs: Any) -> NDArray[Any]:
        """See Preprocessor."""
        self._check_form(obs)
        batches = [preprocessor.transform(obs[name]) for name, preprocessor, _ in self._parts]
        return self._joined(batches)

    def transform_rows(self, observations: Sequence[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        for obs in observations:
            self._check_form(obs)
        return self._joined(
            [preprocessor.transform_rows([obs[name] for obs in observations]) for name, preprocessor, _ in self._parts]
        )

    def _joined(self, batches: Sequence[NDArray[Any]]) -> NDArray[Any]:
        out = np.empty((len(batches[0]), *self.shape), np.float32)
        for batch, (_, _, part) in zip(batches, self._parts, strict=True):
            out[:, part] = batch.reshape(len(batch), part.stop - part.start)
        return out

    def _check_form(self, obs: Any) -> None:
        is_whole = isinstance(obs, self._type) and len(obs) == len(self._parts)
        if is_whole and (self._type is Sequence or all(name in obs for name, _, _ in self._parts)):
            return
        given = sorted(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
        raise BatchError("obs", f"observations of {self.space}", given)


class IdentityPreprocessor(Preprocessor):
    """Arrays exactly as the environment gives them: for observations its wrappers prepared already."""

    is_identity = True

    def __init__(self, space: spaces.Space[Any]) -> None:
        """Keep shape and dtype.

        Raises: UnsupportedSpaceError if an observation is not one array, as in a Tuple or Dict.
        """
        if space.shape is None or space.dtype is None:
            raise UnsupportedSpaceError("without a preprocessor, the observation space", space, _KINDS[:4])
        super().__init__(space, tuple(space.shape), space.dtype)

    def transform(self, obs: NDArray[Any]) -> NDArray[Any]:
        """See Preprocessor."""
        return obs


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
    if isinstance(space, spaces.Tuple | spaces.Dict):
        return NestedPreprocessor(space)
    hint = "model.custom_preprocessor names a preprocessor of your own."
    raise UnsupportedSpaceError("the observation space", space, _KINDS, hint)


def make_preprocessor(
    space: spaces.Space[Any], *, custom_preprocessor: str | type[Preprocessor] | None = None, is_enabled: bool = True
) -> Preprocessor:
    """The preprocessor a worker uses: a user's own, none at all, or the one for the space.

    Args:
        space: the environment's observation space.
        custom_preprocessor: subclass of Preprocessor, or its import path; it is called with the space.
        is_enabled: False takes observations as they are, unless there is a custom preprocessor.

    Raises:
        ConfigError: a custom preprocessor that can't be imported or is none.
        UnsupportedSpaceError: no preprocessor exists for that kind of space.
    """
    if custom_preprocessor:
        key = "model.custom_preprocessor"
        kind: Any = custom_preprocessor
        if isinstance(custom_preprocessor, str):
            kind = import_object(custom_preprocessor, key=key)
        if not (isinstance(kind, type) and issubclass(kind, Preprocessor)):
            raise ConfigError(
                f"{key} is {custom_preprocessor!r}, which is no subclass of aiorl's Preprocessor.",
                key=key,
                value=custom_preprocessor,
            )
        return kind(space)  # type: ignore[call-arg]  # a concrete kind takes the space alone
    return preprocessor_for(space) if is_enabled else IdentityPreprocessor(space)


def _stacked(observations: Sequence[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    """Observations of a simple space as one batch ``[N, *space.shape]``."""
    try:
        batch = np.array(observations)
    except ValueError as error:
        raise BatchError("obs", f"observations of {space}", "arrays of different shapes") from error
    shape = (len(observations), *(space.shape or ()))
    if batch.shape != shape and len(observations):
        raise BatchError("obs", f"observations of shape {shape[1:]}", f"{len(observations)} of shape {batch.shape[1:]}")
    if batch.dtype.kind not in "biuf":
        raise BatchError("obs", f"observations of {space}", f"dtype {batch.dtype}")
    return batch.reshape(shape)


def _check_range(obs: NDArray[Any], low: Any, end: Any, space: spaces.Space[Any]) -> None:
    if ((obs < low) | (obs >= end)).any():
        raise BatchError("obs", f"observations of {space}", f"values from {obs.min()} to {obs.max()}")
