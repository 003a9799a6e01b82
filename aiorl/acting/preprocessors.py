"""Preprocessors: conversion of observations of any space to plain arrays for models.

A preprocessor converts a batch at a time, in the form that Gymnasium's vector environments use:
arrays ``[N, ...]`` for simple spaces, a tuple or dict of batches for Tuple and Dict. Single
observations go through `transform_rows`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from aiorl.config.code import import_object, named_failures
from aiorl.data.columns import NUMBER_KINDS, Array, described_value
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.data.obs_layout import (
    ACTION_MASK,
    LaidOutBox,
    MaskLayout,
    ObsLayout,
    is_masked,
    layout_of,
)
from aiorl.data.spaces import KINDS, MAX_SPACE_ELEMENTS, SIMPLE_KINDS
from aiorl.errors import BatchError, ConfigError, UnsupportedSpaceError

Space = spaces.Space[Any]

MAX_ONE_HOT = 1 << 14
"""Largest size of a one-hot observation, because each row contains all of its numbers."""


_FORM = (
    "Its constructor takes only the space and calls super().__init__(space, shape, dtype). Its"
    " transform(obs) returns [N, *shape] for a batch of N observations."
)


class Preprocessor(ABC):
    """Converts observations of one space to model inputs.

    A preprocessor of your own passes the space, and the shape and dtype of its output, to
    ``super().__init__``, and defines ``transform``. The policy's observation space follows from
    these.

    Attributes:
        space: the environment's space of one observation.
        shape: shape of one model input.
        dtype: float32, or uint8 for byte images.
        is_identity: True if ``transform`` returns the values of its argument unchanged.
    """

    is_identity = False

    def __init__(self, space: Space, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Set the space, and shape and dtype of one model input.

        Args:
            space: the environment's space of one observation.
            shape: shape of one model input.
            dtype: float32 or uint8.
        """
        self.space = space
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._is_whole = space.dtype is not None and np.dtype(space.dtype).kind != "f"

    @abstractmethod
    def transform(self, obs: Any) -> Array:
        """Return model inputs ``[N, *shape]`` for a batch of N observations.

        Args:
            obs: batched observations, ``[N, ...]``; for Tuple and Dict a tuple or dict of such
                batches.
        """

    def transform_rows(self, observations: Sequence[Any]) -> Array:
        """Return model inputs ``[N, *shape]`` for N single ``observations`` of environments.

        Raises:
            BatchError: when one doesn't fit the space (also a ValueError).
        """
        obs = _batched(observations, self.space)
        if isinstance(obs, np.ndarray):
            is_converted = self._is_whole and obs.dtype.kind == "f"
            if is_converted and not np.array_equal(obs, np.rint(obs)):
                raise BatchError("obs", f"observations of {self.space}", "fractions")
            self._check_range(obs)
        inputs = self.transform(obs)
        # a user's own may return anything
        shape = getattr(inputs, "shape", type(inputs).__name__)
        expected = (len(observations), *self.shape)
        if shape != expected:
            raise BatchError(
                "obs",
                f"{type(self).__name__}.transform to return {[*expected]}",
                list(shape) if isinstance(shape, tuple) else shape,
            )
        return inputs

    def _check_range(self, obs: Array) -> None:
        """Check that `transform` can represent all values in ``[N, *space.shape]``; by default it
        can.

        Raises:
            BatchError: when it cannot.
        """
        return

    @property
    def layout(self) -> ObsLayout:
        """Layout of the environment's observation in a model input."""
        if self.is_identity:
            return layout_of(self.space)
        return ObsLayout(self.shape)

    @property
    def observation_space(self) -> Space:
        """Space of the model inputs, which a policy gets as its observation space."""
        if self.is_identity:
            return self.space
        if not self._is_built_in:
            return _unbounded(self.layout, self.dtype)
        flat = spaces.flatten_space(self.space)
        assert isinstance(flat, spaces.Box), "a space of simple components flattens to a Box"
        low = flat.low.astype(self.dtype)
        high = flat.high.astype(self.dtype)
        return LaidOutBox(
            low.reshape(self.shape), high.reshape(self.shape), self.layout, self.dtype
        )

    @property
    def _is_built_in(self) -> bool:
        """True if ``transform`` is one of this module's, so that order and bounds of its output are
        known.
        """
        return type(self).transform.__module__ == __name__


class BoxPreprocessor(Preprocessor):
    """Boxes of any shape, and bits, unchanged: bytes stay bytes, all other numbers become
    float32.
    """

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        """Keep the shape; a box without dimensions becomes a vector of one."""
        dtype = np.uint8 if space.dtype == np.uint8 else np.float32
        super().__init__(space, tuple(space.shape) or (1,), dtype)
        self.is_identity = self._is_built_in and space.dtype == self.dtype and bool(space.shape)

    def transform(self, obs: Array) -> Array:
        """See `Preprocessor.transform`."""
        return obs.astype(self.dtype, copy=False).reshape(len(obs), *self.shape)


class OneHotPreprocessor(Preprocessor):
    """Discrete numbers as their one-hot vectors, one after the other, float32."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        """Reserve one entry per value of each number.

        Raises:
            UnsupportedSpaceError: when there are more values than the largest one-hot size.
        """
        num_values = space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n
        sizes = np.asarray(num_values, np.int64)
        size = sum(map(int, sizes.flat))  # in Python's numbers, which don't overflow
        if size > MAX_ONE_HOT:
            raise UnsupportedSpaceError(
                "the observation space",
                space,
                [f"up to {MAX_ONE_HOT} values one-hot"],
                f"Each row would hold {size} numbers. Let the environment return the parts of this"
                " number, for example coordinates (a Box, or MultiDiscrete of few values each), or"
                " set model.custom_preprocessor.",
            )
        super().__init__(space, (size,), np.float32)
        self._low = space.start
        self._end = space.start + sizes
        self._offsets = np.cumsum(sizes.ravel()) - sizes.ravel()

    def transform(self, obs: Array) -> Array:
        """See `Preprocessor.transform`."""
        out = np.zeros((len(obs), *self.shape), np.float32)
        rows = np.arange(len(obs))
        index = obs.astype(np.int64, copy=False) - self._low
        if index.ndim > 1:
            rows = rows[:, None]
            index = index.reshape(len(obs), -1) + self._offsets
        out[rows, index] = 1.0
        return out

    def _check_range(self, obs: Array) -> None:
        if ((obs < self._low) | (obs >= self._end)).any():
            raise BatchError(
                "obs", f"observations of {self.space}", f"values from {obs.min()} to {obs.max()}"
            )


class NestedPreprocessor(Preprocessor):
    """Tuples and Dicts, at any depth, as one float32 vector: their components' model inputs,
    flattened.

    Components follow each other in the order of the space; numbers within a component are in C
    order, as in ``gymnasium.spaces.flatten``. Byte images keep their values of 0 to 255 as floats.
    """

    def __init__(self, space: spaces.Tuple[Any] | spaces.Dict) -> None:
        """Make a preprocessor for each component."""
        components = list(
            space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        )
        if not components:
            raise UnsupportedSpaceError(
                "the observation space", space, KINDS, "It has no components."
            )
        self._parts: list[tuple[Any, Preprocessor, slice]] = []
        end = 0
        for name, component in components:
            preprocessor = preprocessor_for(component)
            start = end
            end += math.prod(preprocessor.shape)
            self._parts.append((name, preprocessor, slice(start, end)))
        if end > MAX_SPACE_ELEMENTS:
            raise UnsupportedSpaceError(
                "the observation space",
                space,
                [f"up to {MAX_SPACE_ELEMENTS} numbers in all"],
                f"Each row would hold {end} numbers.",
            )
        super().__init__(space, (end,), np.float32)
        self._type = Mapping if isinstance(space, spaces.Dict) else Sequence

    @property
    def layout(self) -> ObsLayout:
        """See `Preprocessor.layout`."""
        if not self._is_built_in:
            return ObsLayout(self.shape)
        leaves = list(self._leaves())
        shapes = {name: leaf.shape for name, leaf in leaves}
        byte_parts = tuple(name for name, leaf in leaves if leaf.dtype == np.uint8)
        return ObsLayout(self.shape, shapes, byte_parts=byte_parts)

    def _leaves(self) -> Iterator[tuple[str, Preprocessor]]:
        for name, preprocessor, _ in self._parts:
            if isinstance(preprocessor, NestedPreprocessor):
                for inner_name, leaf in preprocessor._leaves():
                    yield f"{name}.{inner_name}", leaf
            else:
                yield str(name), preprocessor

    def transform(self, obs: Any) -> Array:
        """See `Preprocessor.transform`."""
        self._check_form(obs)
        batches = [preprocessor.transform(obs[name]) for name, preprocessor, _ in self._parts]
        return self._joined(batches)

    def transform_rows(self, observations: Sequence[Any]) -> Array:
        """See `Preprocessor.transform_rows`."""
        for obs in observations:
            self._check_form(obs)
        return self._joined(
            [
                preprocessor.transform_rows([obs[name] for obs in observations])
                for name, preprocessor, _ in self._parts
            ]
        )

    def _joined(self, batches: Sequence[Array]) -> Array:
        out = np.empty((len(batches[0]), *self.shape), np.float32)
        for batch, (_, _, part) in zip(batches, self._parts, strict=True):
            out[:, part] = batch.reshape(len(batch), part.stop - part.start)
        return out

    def _check_form(self, obs: Any) -> None:
        is_complete = isinstance(obs, self._type) and len(obs) == len(self._parts)
        if is_complete and self._type is Mapping:
            is_complete = all(name in obs for name, _, _ in self._parts)
        if not is_complete:
            raise BatchError("obs", f"observations of {self.space}", _form(obs))


class MaskedPreprocessor(Preprocessor):
    """Observations with an action mask: the mask, followed by the model input of the rest of the
    observation.

    Models and observation filters don't get the mask; see `aiorl.data.obs_layout`.
    """

    def __init__(self, space: spaces.Dict, action_space: Space, inner: Preprocessor) -> None:
        """Prepend a mask to another preprocessor's output.

        Args:
            space: the environment's space, with the part "action_mask".
            action_space: space of the actions that the mask allows or forbids.
            inner: preprocessor of `without_mask(space)`.

        Raises:
            UnsupportedSpaceError: when the mask's space does not fit the action space.
        """
        self._masks = MaskLayout(action_space)
        self._masks.check_space(space.spaces[ACTION_MASK])
        self._inner = inner
        self._names = space.spaces.keys()
        self._only = _only_part(space)
        self._layout = dataclasses.replace(inner.layout, num_mask=self._masks.size)
        super().__init__(space, self._layout.array_shape, inner.dtype)

    @property
    def layout(self) -> ObsLayout:
        """See `Preprocessor.layout`."""
        return self._layout

    @property
    def observation_space(self) -> Space:
        """See `Preprocessor.observation_space`."""
        inner = self._inner.observation_space
        if not isinstance(inner, spaces.Box):
            return _unbounded(self._layout, self.dtype)
        low = np.concatenate([np.zeros(self._masks.size, self.dtype), inner.low.ravel()])
        high = np.concatenate([np.ones(self._masks.size, self.dtype), inner.high.ravel()])
        return LaidOutBox(low, high, self._layout, self.dtype)

    def transform(self, obs: Any) -> Array:
        """See `Preprocessor.transform`."""
        inputs = self._inner.transform(self._rest(obs))
        return self._joined(inputs, self._masks.from_batch(obs[ACTION_MASK]))

    def transform_rows(self, observations: Sequence[Any]) -> Array:
        """See `Preprocessor.transform_rows`."""
        for obs in observations:
            if not isinstance(obs, Mapping) or obs.keys() != self._names:
                raise BatchError("obs", f"observations of {self.space}", _form(obs))
        masks = self._masks.from_rows([obs[ACTION_MASK] for obs in observations])
        inputs = self._inner.transform_rows([self._rest(obs) for obs in observations])
        return self._joined(inputs, masks)

    def _rest(self, obs: Mapping[str, Any]) -> Any:
        if self._only is not None:
            return obs[self._only]
        return {name: part for name, part in obs.items() if name != ACTION_MASK}

    def _joined(self, inputs: Array, masks: NDArray[np.uint8]) -> Array:
        out = np.empty((len(inputs), *self.shape), self.dtype)
        out[:, : self._masks.size] = masks
        out[:, self._masks.size :] = inputs.reshape(len(inputs), self._layout.size)
        return out


def without_mask(space: spaces.Dict) -> Space:
    """Return an observation space without its action mask: the only other part itself, or a Dict of
    several parts.

    Raises:
        UnsupportedSpaceError: when there is no other part.
    """
    only = _only_part(space)
    if only is not None:
        return space.spaces[only]
    rest = [(name, part) for name, part in space.spaces.items() if name != ACTION_MASK]
    if not rest:
        raise UnsupportedSpaceError(
            "the observation space", space, KINDS, "It has nothing but an action mask."
        )
    return spaces.Dict(rest)  # a list keeps its order; a mapping would be sorted


def _only_part(space: spaces.Dict) -> str | None:
    """Return the name of the one part besides the mask; None if there are several."""
    names = [name for name in space.spaces if name != ACTION_MASK]
    return names[0] if len(names) == 1 else None


class IdentityPreprocessor(Preprocessor):
    """Arrays exactly as the environment returns them, for observations that its wrappers have
    already prepared.
    """

    is_identity = True

    def __init__(self, space: Space) -> None:
        """Keep shape and dtype.

        Raises:
            UnsupportedSpaceError: when an observation is not one array, as in a Tuple or Dict.
        """
        if space.shape is None or space.dtype is None:
            raise UnsupportedSpaceError(
                "without a preprocessor, the observation space", space, SIMPLE_KINDS
            )
        super().__init__(space, tuple(space.shape), space.dtype)
        self.is_identity = self._is_built_in

    def transform(self, obs: Array) -> Array:
        """See `Preprocessor.transform`."""
        return obs


def preprocessor_for(space: Space) -> Preprocessor:
    """Make the default preprocessor of an observation space.

    Raises:
        UnsupportedSpaceError: when no preprocessor exists for that kind of space.
    """
    space = gymnasium_space(space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return BoxPreprocessor(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotPreprocessor(space)
    if isinstance(space, spaces.Tuple | spaces.Dict):
        return NestedPreprocessor(space)
    hint = "model.custom_preprocessor names a preprocessor of your own."
    if space.dtype is not None and np.dtype(space.dtype).kind == "U":
        hint = (
            "Remove the text with a wrapper, such as wrappers: ['minigrid.wrappers:ImgObsWrapper']"
            " for MiniGrid, or convert it to numbers with model.custom_preprocessor."
        )
    raise UnsupportedSpaceError("the observation space", space, KINDS, hint)


def make_preprocessor(
    space: Space,
    *,
    action_space: Space | None = None,
    custom_preprocessor: str | type[Preprocessor] | None = None,
    is_enabled: bool = True,
) -> Preprocessor:
    """Make the preprocessor of a worker: a user's own, none at all, or the default one for the
    space.

    An action mask in the observations bypasses any of these, and is prepended to the output.

    Args:
        space: the environment's observation space.
        action_space: the environment's action space; None treats an action mask like any other
            part.
        custom_preprocessor: subclass of Preprocessor, or its import path; it is called with the
            space.
        is_enabled: False leaves observations unchanged, unless there is a custom preprocessor.

    Raises:
        ConfigError: when a custom preprocessor can't be imported or is no Preprocessor.
        UnsupportedSpaceError: when no preprocessor exists for that kind of space.
    """
    space = gymnasium_space(space)
    if action_space is not None and isinstance(space, spaces.Dict) and is_masked(space):
        inner = make_preprocessor(
            without_mask(space), custom_preprocessor=custom_preprocessor, is_enabled=is_enabled
        )
        return MaskedPreprocessor(space, gymnasium_space(action_space), inner)
    if custom_preprocessor:
        return _make_custom(custom_preprocessor, space)
    if is_enabled:
        return preprocessor_for(space)
    return IdentityPreprocessor(space)


def _make_custom(custom_preprocessor: str | type[Preprocessor], space: Space) -> Preprocessor:
    """Make a user's own preprocessor; its failures name the setting.

    Raises:
        ConfigError: when it can't be imported or made, or is no Preprocessor.
    """
    key = "model.custom_preprocessor"
    kind: Any = custom_preprocessor
    if isinstance(custom_preprocessor, str):
        kind = import_object(custom_preprocessor, key=key)
    if not (isinstance(kind, type) and issubclass(kind, Preprocessor)):
        raise ConfigError(
            f"{key} is {custom_preprocessor!r}, expected a subclass of aiorl.Preprocessor.",
            key=key,
            value=custom_preprocessor,
            hint=_FORM,
        )
    what = f"{key} {custom_preprocessor!r}"

    def make() -> Any:
        preprocessor = kind(space)  # type: ignore[call-arg]  # a concrete kind takes only the space
        # AttributeError if super().__init__ was not called
        if preprocessor.dtype not in (np.float32, np.uint8):
            raise TypeError(f"its dtype is {preprocessor.dtype}, expected float32 or uint8")
        return preprocessor

    result: Preprocessor = named_failures(make, f"{what} for {space}", key, hint=_FORM)()
    result.transform = named_failures(result.transform, f"{what}: transform", key)  # type: ignore[method-assign]
    return result


def _unbounded(layout: ObsLayout, dtype: np.dtype[Any]) -> LaidOutBox:
    """Return the space of model inputs of which only layout and dtype are known."""
    if dtype.kind == "f":
        return LaidOutBox(-np.inf, np.inf, layout, dtype)
    limits = np.iinfo(dtype)
    return LaidOutBox(limits.min, limits.max, layout, dtype)


def _form(obs: Any) -> Any:
    if isinstance(obs, Mapping):
        return sorted(map(str, obs))
    return type(obs).__name__


def _batched(observations: Sequence[Any], space: Space) -> Any:
    """Return observations of any space as one batch, in the form for ``transform``."""
    # checked first, because isinstance is slow for the other classes
    if isinstance(space, spaces.Box):
        return _stacked(observations, space)
    try:
        if isinstance(space, spaces.Dict):
            return {
                name: _batched([obs[name] for obs in observations], part)
                for name, part in space.spaces.items()
            }
        if isinstance(space, spaces.Tuple):
            return tuple(
                _batched([obs[position] for obs in observations], part)
                for position, part in enumerate(space.spaces)
            )
    except (KeyError, IndexError, TypeError) as error:
        raise BatchError("obs", f"observations of {space}", f"one without {error}") from error
    return _stacked(observations, space)


def _stacked(observations: Sequence[Any], space: Space) -> Array:
    """Return observations of a simple space as one batch ``[N, *space.shape]``."""
    try:
        batch = np.array(observations)
    except ValueError as error:
        raise BatchError("obs", f"observations of {space}", "arrays of different shapes") from error
    if batch.dtype.kind not in NUMBER_KINDS:
        odd = (obs for obs in observations if np.asarray(obs).dtype.kind not in NUMBER_KINDS)
        raise BatchError("obs", f"observations of {space}", described_value(next(odd, batch)))
    shape = (len(observations), *(space.shape or ()))
    if batch.shape != shape and len(observations):
        raise BatchError(
            "obs",
            f"observations of shape {shape[1:]}",
            f"{len(observations)} of shape {batch.shape[1:]}",
        )
    return batch.reshape(shape)
