"""Observations and actions as clients write them: nested lists, PNG images, packed arrays; and as flat tensors."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence, Set
from reprlib import repr as shown
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.errors import nearest
from aiorl.process.imports import install_command
from aiorl.web.app import Refusal

Array = NDArray[Any]

_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
)
_MAX_DIMENSIONS = 8
_TOO_LARGE = 1e38  # for a float32 that others are added to
_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def part_at(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the part of a nested value at a path."""
    for name in path:
        value = value[name]
    return value


def given_value(space: spaces.Space[Any], value: Any, name: str) -> Any:
    """Return a value of a space with its images and packed arrays as arrays; its numbers are not checked.

    Args:
        space: the space.
        value: numbers, lists and dicts, nested like the space. Any array in it can also be ``{"png": BASE64}``, or a
            list of such images to be joined along the last axis; ``{"data": BASE64, "dtype": ..., "shape": ...}``; or
            bytes in dtype and shape of the space, if the format of the message has bytes.
        name: name of the value, for messages.

    Raises:
        Refusal: a part can't be read.
    """
    if type(value) is list and isinstance(space, _ARRAYS):
        return value
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {
            key: given_value(space.spaces[key], part, f"{name}.{key}") if key in space.spaces else part
            for key, part in value.items()
        }
    if isinstance(space, spaces.Tuple) and isinstance(value, list) and len(value) == len(space.spaces):
        pairs = enumerate(zip(space.spaces, value, strict=True))
        return [given_value(part, one, f"{name}.{index}") for index, (part, one) in pairs]
    if isinstance(value, bytes):
        return unpacked_array(value, np.dtype(space.dtype), tuple(space.shape or ()), name)
    if not isinstance(value, Mapping) or isinstance(space, spaces.Dict):
        return value
    if "png" in value:
        return _image(value["png"], tuple(space.shape or ()), name)
    if "data" in value:
        shape, dtype = value.get("shape"), value.get("dtype")
        if str(dtype) not in _DTYPES or not is_shape(shape):
            raise Refusal(400, f"{name} needs dtype, one of {', '.join(sorted(_DTYPES))}, and shape, a list of sizes.")
        return unpacked_array(_bytes(value["data"], name), np.dtype(str(dtype)), tuple(shape or ()), name)
    raise Refusal(400, f"{name} is an object, expected numbers, {{'png': ...}} or {{'data': ..., 'dtype', 'shape'}}.")


def check_keys(said: Mapping[str, Any], known: Set[str]) -> None:
    """Check the keys of a request.

    Raises:
        Refusal: it has others.
    """
    if not said.keys() <= known:
        name = str(min(said.keys() - known, key=str))
        raise Refusal(400, f"There is no key {name!r:.50}.{nearest(name, known) or f' Keys: {sorted(known)}.'}")


def flag(said: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return true or false from a request.

    Raises:
        Refusal: it is something else.
    """
    found = said.get(name, default)
    if not isinstance(found, bool | np.bool_):
        raise Refusal(400, f"{name!r} must be true or false, not {shown(found)}.")
    return bool(found)


def number(value: Any, name: str) -> float:
    """Return a number of a request that float32 can hold.

    Raises:
        Refusal: it is none.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not abs(value) < _TOO_LARGE:
        raise Refusal(400, f"{name!r} must be a number below 1e38, not {shown(value)}.")
    return float(value)


def held_by(dtype: np.dtype[Any], value: Any) -> Array:
    """Return an array of numbers as one of a dtype; those too large for floats become infinite.

    Raises:
        ValueError: its values are no numbers, or the dtype can't hold them.
    """
    given = np.asarray(value)
    with np.errstate(over="ignore", invalid="ignore"):
        found = given.astype(dtype)
    if given.dtype.kind not in "biuf" or (dtype.kind != "f" and not np.array_equal(found, given)):
        raise ValueError(f"it has values that {dtype} can't hold")
    return found


def is_shape(value: Any) -> bool:
    """Return True for a list of at most eight sizes."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 40 for size in value)
    )


def _bytes(value: Any, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise Refusal(400, f"{name} is not valid base64.") from None


def unpacked_array(data: bytes | memoryview, dtype: np.dtype[Any], shape: Sequence[int], name: str) -> Array:
    """Return the array that bytes hold, row by row and little endian.

    Raises:
        Refusal: they are too many or too few.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise Refusal(400, f"{name} has {len(data)} bytes, but {dtype} of shape {list(shape)} has {expected}.")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def _image(given: Any, shape: tuple[int, ...], name: str) -> Array:
    """Return the array of shape [H, W] or [H, W, C] that one or more PNG images hold."""
    try:
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        said = f"{name} is a PNG image, which needs Pillow here. Install it with: {install_command('serve')}"
        raise Refusal(400, said) from None
    layers: list[Array] = []
    for data in given if isinstance(given, list) else [given]:
        try:
            with PngImageFile(io.BytesIO(_bytes(data, name))) as image:
                # compared before anything is unpacked
                if len(shape) not in (2, 3) or image.size[::-1] != shape[:2] or len(layers) >= max(shape):
                    raise Refusal(400, f"{name} is an image of size {image.size}, expected an array of {shape}.")
                if image.mode not in ("L", "RGB", "RGBA"):
                    raise Refusal(400, f"{name} has PNG's mode {image.mode}, expected grey, RGB or RGBA of 8 bits.")
                layers.append(np.asarray(image).reshape(*shape[:2], -1))
        except Refusal:
            raise
        except Exception as error:  # whatever a damaged file leads to
            raise Refusal(400, f"{name} is not a valid PNG image: {error}.") from None
    found: Array = np.concatenate(layers, axis=-1) if layers else np.zeros(0, np.uint8)
    if found.size != math.prod(shape):
        raise Refusal(400, f"{name} has images of shape {list(found.shape)}, expected {list(shape)}.")
    return found.reshape(shape)
