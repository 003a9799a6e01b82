"""Spaces as plain data.

In the handshake and in checkpoints, spaces are dicts of strings, numbers and lists, which both
msgpack and JSON support, so a policy can be restored or served without its environment. Infinite
bounds are the strings ``"inf"`` and ``"-inf"``; bounds that are equal everywhere are one number.
The parts of a Dict keep the order of the space: flattened observations and actions follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from reprlib import repr as show
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.data.columns import Array
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.errors import ConfigError, UnsupportedSpaceError

Space = spaces.Space[Any]

# A space from a socket or a file can claim any size, and its bounds are arrays of that size.
MAX_SPACE_ELEMENTS = 1 << 24
"""Limit of the numbers in a value of a space, over all its parts."""
_MAX_DEPTH = 8
DTYPES = frozenset(
    [
        "bool",
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
    ]
)
SIMPLE_KINDS = ("Box", "Discrete", "MultiBinary", "MultiDiscrete")
"""Kinds of spaces whose values are single arrays."""
KINDS = (*SIMPLE_KINDS, "Tuple", "Dict")
"""All kinds of spaces that aiorl supports."""


def space_to_dict(space: Space) -> dict[str, Any]:
    """Return a space, of Gymnasium or of the old gym package, as strings, numbers and lists.

    Raises:
        UnsupportedSpaceError: the space is not a Box, Discrete, MultiBinary, MultiDiscrete, Tuple
            or Dict.
    """
    space = gymnasium_space(space)
    match space:
        case spaces.Box():
            return {
                "kind": "Box",
                "shape": list(space.shape),
                "dtype": str(space.dtype),
                "low": _bound_to_data(space.low),
                "high": _bound_to_data(space.high),
            }
        case spaces.Discrete():
            return {
                "kind": "Discrete",
                "n": int(space.n),
                "start": int(space.start),
                "dtype": str(np.dtype(space.dtype)),
            }
        case spaces.MultiBinary():
            # its n is a number or a shape, and (5,) is not equal to 5
            return {
                "kind": "MultiBinary",
                "n": space.n if isinstance(space.n, int) else list(space.shape),
            }
        case spaces.MultiDiscrete():
            return {
                "kind": "MultiDiscrete",
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": str(space.dtype),
            }
        case spaces.Tuple():
            return {"kind": "Tuple", "spaces": [space_to_dict(part) for part in space.spaces]}
        case spaces.Dict():
            return {
                "kind": "Dict",
                "spaces": [[str(key), space_to_dict(part)] for key, part in space.spaces.items()],
            }
        case _:
            raise UnsupportedSpaceError("space", space, KINDS)


def space_from_dict(data: Mapping[str, Any]) -> Space:
    """Return the space of a description by `space_to_dict`.

    Raises:
        ConfigError: the description is damaged, or larger than MAX_SPACE_ELEMENTS.
    """
    return _space_from_dict(data, 0, _Room())


def with_sorted_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a space with the parts of every Dict in alphabetical order."""
    if data.get("kind") == "Dict":
        parts = [[str(key), with_sorted_keys(part)] for key, part in data["spaces"]]
        return {**data, "spaces": sorted(parts, key=lambda pair: str(pair[0]))}
    if data.get("kind") == "Tuple":
        return {**data, "spaces": [with_sorted_keys(part) for part in data["spaces"]]}
    return dict(data)


def differ_in_order_only(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
) -> bool:
    """Return True if two descriptions list the same parts of Dicts in different orders."""
    return first != second and with_sorted_keys(first) == with_sorted_keys(second)


def _bound_to_data(bound: Array) -> Any:
    first = bound.flat[0] if bound.size else 0
    if (bound == first).all():
        return _number_to_data(first)
    return [_number_to_data(value) for value in bound.ravel()]


def _number_to_data(value: Any) -> int | float | str:
    number: int | float = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return number


class _Room:
    """Elements left for the parts of a space."""

    def __init__(self) -> None:
        self._elements = MAX_SPACE_ELEMENTS

    def shape(self, data: object) -> tuple[int, ...]:
        """Return the shape of a part, and count its elements."""
        if not isinstance(data, Sequence) or isinstance(data, str | bytes):
            raise _damaged("shape", data)
        shape = tuple(_integer(size) for size in data)
        # With a side of 0, the other sides still count.
        self._elements -= math.prod(max(size, 1) for size in shape)
        if len(shape) > _MAX_DEPTH or any(size < 0 for size in shape) or self._elements < 0:
            raise _damaged("shape", shape)
        return shape


def _space_from_dict(
    data: object,
    depth: int,
    room: _Room,
) -> Space:
    if depth > _MAX_DEPTH:
        raise _damaged("nested deeper than", _MAX_DEPTH)
    if not isinstance(data, Mapping):
        raise _damaged("not a mapping:", type(data).__name__)
    kind = data.get("kind")
    try:
        match kind:
            case "Box":
                shape = room.shape(data["shape"])
                dtype = _dtype(data.get("dtype", "float32"))
                low = _bound_from_data(data["low"], shape, dtype)
                high = _bound_from_data(data["high"], shape, dtype)
                return spaces.Box(low, high, shape, dtype.type)
            case "Discrete":
                dtype = _dtype(data.get("dtype", "int64"))
                size = _integer(data["n"])
                first = _integer(data.get("start", 0))
                return spaces.Discrete(size, start=first, dtype=dtype.type)
            case "MultiBinary":
                if isinstance(data["n"], int):
                    return spaces.MultiBinary(room.shape([data["n"]])[0])
                return spaces.MultiBinary(room.shape(data["n"]))
            case "MultiDiscrete":
                dtype = _dtype(data.get("dtype", "int64"))
                nvec = np.asarray(data["nvec"], dtype=dtype)
                start = np.asarray(data.get("start", np.zeros_like(nvec)), dtype=dtype)
                return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
            case "Tuple":
                parts = [_space_from_dict(part, depth + 1, room) for part in data["spaces"]]
                return spaces.Tuple(parts)
            case "Dict":
                # Gymnasium would sort a mapping.
                pairs = [
                    (str(key), _space_from_dict(part, depth + 1, room))
                    for key, part in data["spaces"]
                ]
                return spaces.Dict(pairs)
    except ConfigError:
        raise
    except KeyError as error:
        raise _damaged(f"{kind}:", f"the key {error} is missing") from error
    except (AssertionError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(f"{kind}:", f"{error!r:.200}") from error
    raise _damaged("unknown kind", kind)


def _damaged(what: str, value: object) -> ConfigError:
    # str(value) could be nested too deeply or too long
    text = value if isinstance(value, str) else show(value)
    return ConfigError(
        f"the description of a space cannot be read: {what} {text:.200}.",
        value=value,
    )


def _integer(data: object) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise _damaged("not an integer:", data)
    return data


def _dtype(data: object) -> np.dtype[Any]:
    if data not in DTYPES:
        raise _damaged("dtype", data)
    return np.dtype(str(data))


def _bound_from_data(
    data: object,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Array:
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite
        numbers = np.asarray(_numbers_from_data(data), dtype)
    if numbers.ndim == 0:
        return np.full(shape, numbers)
    return numbers.reshape(shape)


def _numbers_from_data(data: object) -> Any:
    if isinstance(data, str):
        return float(data)
    if isinstance(data, list | tuple):
        return [float(value) if isinstance(value, str) else value for value in data]
    return data
