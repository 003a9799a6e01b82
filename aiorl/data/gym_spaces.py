"""Spaces of the old ``gym`` package in Gymnasium's form.

Nothing is imported from gym: its spaces are recognised by the module and the name of their classes.
Shimmy has a conversion, too, but it drops the first value of a Discrete and the dtype of a
MultiDiscrete, and needs gym.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

Space = spaces.Space[Any]

_PACKAGE = "gym"
_KIND_OF_FIELDS = {
    ("low", "high", "shape", "dtype"): "Box",
    ("n",): "Discrete",
    ("spaces",): "Dict",
}
"""Fields of named tuples that some environments use in place of gym's spaces if gym is not
installed."""


def gymnasium_space(space: Any) -> Any:
    """Return a space of gym, or each of a mapping by agent, as a space of Gymnasium; other values
    are unchanged.

    A kind that Gymnasium does not have becomes an `OtherSpace`.

    Args:
        space: a space, spaces by agent id, or any other value.
    """
    if space is None or isinstance(space, spaces.Space):
        return space
    kind = _kind_of(space)
    if kind is not None:
        return _CONVERSIONS[kind](space)
    if is_of_gym(space):
        return OtherSpace(space)
    if isinstance(space, Mapping):
        return {agent_id: gymnasium_space(part) for agent_id, part in space.items()}
    return space


def is_of_gym(thing: Any) -> bool:
    """Return True for a class of gym, a subclass of one, or an object of such a class."""
    kind = thing if isinstance(thing, type) else type(thing)
    return any(_is_in_gym(base) for base in kind.__mro__)


class OtherSpace(Space):
    """Space of gym of a kind without a counterpart; it samples and checks as the original.

    Attributes:
        original: the space of gym.
    """

    def __init__(self, original: Any) -> None:
        """Take over a space of gym."""
        super().__init__(
            getattr(original, "shape", None),
            getattr(original, "dtype", None),
        )
        self.original = original

    def sample(
        self,
        mask: Any | None = None,
        probability: Any | None = None,
    ) -> Any:
        """Return a random value of the original."""
        return self.original.sample()

    def contains(self, x: Any) -> bool:
        """Return True if the original contains the value."""
        return bool(self.original.contains(x))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OtherSpace) and bool(self.original == other.original)

    __hash__ = None  # type: ignore[assignment]  # as other spaces

    def __repr__(self) -> str:
        return repr(self.original)


def _is_in_gym(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE


def _kind_of(space: Any) -> str | None:
    """Return the name of a space's kind if it is one of those that are converted."""
    for base in type(space).__mro__:
        if _is_in_gym(base) and base.__name__ in _CONVERSIONS:
            return base.__name__
    return _KIND_OF_FIELDS.get(getattr(space, "_fields", ()))


def _box(space: Any) -> spaces.Box:
    dtype = np.dtype(space.dtype).type
    return spaces.Box(space.low, space.high, space.shape, dtype)


def _discrete(space: Any) -> spaces.Discrete:
    start = int(getattr(space, "start", 0))
    return spaces.Discrete(int(space.n), start=start)


def _multi_binary(space: Any) -> spaces.MultiBinary:
    size = space.n
    if np.ndim(size) == 0:
        return spaces.MultiBinary(int(size))
    return spaces.MultiBinary([int(length) for length in size])


def _multi_discrete(space: Any) -> spaces.MultiDiscrete:
    dtype = np.dtype(space.dtype).type
    return spaces.MultiDiscrete(np.asarray(space.nvec), dtype=dtype)


def _tuple(space: Any) -> spaces.Tuple[Any]:
    return spaces.Tuple([gymnasium_space(part) for part in space.spaces])


def _dict(space: Any) -> spaces.Dict:
    # A plain dict would be sorted by key.
    return spaces.Dict(
        OrderedDict((key, gymnasium_space(part)) for key, part in space.spaces.items())
    )


_CONVERSIONS: Mapping[str, Callable[[Any], Space]] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiBinary": _multi_binary,
    "MultiDiscrete": _multi_discrete,
    "Tuple": _tuple,
    "Dict": _dict,
}
