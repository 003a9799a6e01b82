"""Values as clients write them: keys and numbers; observations and actions with PNG images and
packed arrays.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import struct
from collections.abc import Mapping, Sequence, Set
from reprlib import repr as short_repr
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces

from aiorl.data.columns import Array
from aiorl.data.spaces import DTYPES
from aiorl.errors import nearest
from aiorl.process.imports import install_command
from aiorl.web.app import Refusal

_PNG_SIGNATURE_BYTES = 8
_CHUNK_HEAD = struct.Struct(">I4s")
_CHECKSUM_BYTES = 4
_MAX_SMALL_CHUNKS = 100
_LEAST_CHUNK_BYTES = 1024
"""Chunks of a PNG image below this size, and least mean size of others: programs write 8 KiB."""
_BOOLS = (bool, np.bool_)
_TOO_LARGE = 1e38  # for a float32 that others are added to
_EXACT = 1 << 53
"""Up to this, all whole numbers are exact as float64."""
_FEW = 64
_MAX_NAME = 100
_FLOATS = {float}
_PLAIN = {float, int}
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_LISTS = {list, tuple}
_CONTAINERS = {list, tuple, np.ndarray}
_NAMES: dict[type[Any], str] = {
    str: "a text",
    bytes: "bytes",
    type(None): "null",
    dict: "an object",
}


def parse_value(space: spaces.Space[Any], value: Any, name: str) -> Any:
    """Return a value as a client writes it, with arrays in place of lists; their shapes and bounds
    are not checked.

    Args:
        space: the space.
        value: numbers, lists and dicts, nested like the space. Any array in it can also be
            ``{"png": BASE64}``, or a list of such images to be joined along the last axis;
            ``{"data": BASE64, "dtype": ..., "shape": ...}``; or bytes in dtype and shape of the
            space, if the format of the message has bytes.
        name: name of the value, for messages.

    Raises:
        Refusal: a part can't be read.
    """
    # first, because isinstance is slow for other spaces
    if type(value) is list and isinstance(space, spaces.Box):
        return parse_array(value, space.dtype, name)
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        check_keys(value, space.spaces.keys())
        return {
            key: parse_value(space.spaces[key], part, f"{name}.{key}")
            for key, part in value.items()
        }
    if (
        isinstance(space, spaces.Tuple)
        and isinstance(value, list | tuple)
        and len(value) == len(space.spaces)
    ):
        return tuple(
            parse_value(space.spaces[index], part, f"{name}.{index}")
            for index, part in enumerate(value)
        )
    if isinstance(value, bytes):
        return unpack_array(value, np.dtype(space.dtype), tuple(space.shape or ()), name)
    if not isinstance(value, Mapping):
        return parse_array(value, np.dtype(space.dtype), name)[()]
    if "png" in value:
        return _image(value["png"], tuple(space.shape or ()), name)
    if "data" in value:
        shape = value.get("shape")
        dtype = str(value.get("dtype"))
        if dtype not in DTYPES or not is_shape(shape):
            raise Refusal(
                400,
                f"{name} needs dtype, one of {', '.join(sorted(DTYPES))}, and shape, a list of"
                " sizes.",
            )
        array = unpack_array(_bytes(value["data"], name), np.dtype(dtype), shape, name)
        if array.dtype == space.dtype:
            return array
        return parse_array(array, np.dtype(space.dtype), name)
    raise Refusal(
        400,
        f"{name} is an object, expected numbers, {{'png': ...}} or {{'data': ..., 'dtype',"
        " 'shape'}.",
    )


def parse_array(value: Any, dtype: np.dtype[Any], name: str) -> Array:
    """Return an array of numbers that a client writes as lists: float64 for all floats, otherwise
    of a dtype.

    Raises:
        Refusal: it has other values, such as texts or null, or some that the dtype can't hold.
            Whole numbers keep all their digits.
    """
    if type(value) is list and dtype.kind == "f" and len(value) < _FEW:  # most observations
        types = set(map(type, value))
        if types == _FLOATS or (
            types <= _PLAIN and all([-_EXACT < item < _EXACT for item in value])
        ):
            return np.asarray(value, np.float64)
    kinds = _kinds_of(value)
    for kind in kinds:
        if not issubclass(kind, _NUMBERS):
            verb = "is" if kind is type(value) else "has"
            raise Refusal(
                400,
                f"{name} must have numbers, in lists of one length: it {verb}"
                f" {_NAMES.get(kind, kind.__name__)}.",
            )
    if dtype.kind in "iu" and not any(issubclass(kind, float | np.floating) for kind in kinds):
        whole = _in_array(value, np.uint64 if dtype == np.uint64 else np.int64, name)
        if dtype != np.uint64 and not np.array_equal(whole.astype(dtype), whole):
            raise _does_not_fit(name, dtype)
        return whole.astype(dtype, copy=False)
    floats = _in_array(value, np.float64, name)
    may_lose_digits = dtype.kind != "f" or not kinds <= _FLOATS
    if may_lose_digits and floats.size and np.abs(floats).max() >= _EXACT:
        _check_digits(value, dtype, name)
    if dtype.kind == "f":
        return floats
    with np.errstate(invalid="ignore"):
        array = floats.astype(dtype)
    if not np.array_equal(array, floats):
        raise _does_not_fit(name, dtype)
    return array


def _kinds_of(value: Any) -> set[type[Any]]:
    """Return the types of the numbers in lists; those of an array are of one type."""
    kinds = {type(value)}
    level = [value]
    inner = kinds
    while not inner.isdisjoint(_LISTS):
        level = [item for item in level if type(item) in _LISTS]
        inner = set(map(type, itertools.chain.from_iterable(level)))
        kinds |= inner
        if not inner.isdisjoint(_CONTAINERS):
            level = [*itertools.chain.from_iterable(level)]
    if np.ndarray in inner:
        kinds |= {item.dtype.type for item in level if isinstance(item, np.ndarray)}
    return kinds - _CONTAINERS


def _in_array(value: Any, dtype: Any, name: str) -> Array:
    try:
        if isinstance(value, np.ndarray):  # which NumPy would convert without an error
            if dtype is np.int64 and value.dtype.kind == "u" and (value >> 63).any():
                raise OverflowError("a number is too large")
            if dtype is np.uint64 and (value < 0).any():
                raise OverflowError("a number is below 0")
        return np.asarray(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refusal(
            400, f"{name} must have numbers that fit, in lists of one length: {error!s:.200}."
        ) from None


def _check_digits(value: Any, dtype: np.dtype[Any], name: str) -> None:
    """Refuse whole numbers that lose digits as floats, and floats so large that whole numbers have
    lost theirs.

    Raises:
        Refusal: there are any.
    """
    for item in np.asarray(value, object).ravel().tolist():
        if isinstance(item, int | np.integer):
            loses_digits = int(float(item)) != int(item)
        else:
            loses_digits = dtype.kind != "f" and abs(item) >= _EXACT
        if loses_digits:
            raise Refusal(
                400,
                f"{name} has a whole number above 2^53, {item}, which would lose digits. Send it"
                " without a fraction to a space of whole numbers.",
            )


def _does_not_fit(name: str, dtype: np.dtype[Any]) -> Refusal:
    return Refusal(400, f"{name} has values that {dtype} can't hold.")


def check_keys(body: Mapping[str, Any], keys: Set[str]) -> None:
    """Check the keys of a request.

    Raises:
        Refusal: it has others.
    """
    if not body.keys() <= keys:
        name = str(min(body.keys() - keys, key=str))[:_MAX_NAME]
        hint = nearest(name, keys) or f" Keys: {sorted(keys)}."
        raise Refusal(400, f"There is no key {name!r:.50}.{hint}")


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return true or false from a request.

    Raises:
        Refusal: it is something else.
    """
    value = body.get(name, default)
    if not isinstance(value, _BOOLS):
        raise Refusal(400, f"{name!r} must be true or false, not {short_repr(value)}.")
    return bool(value)


def number(value: Any, name: str) -> float:
    """Return a number of a request that float32 can hold.

    Raises:
        Refusal: it is none.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(
        value, bool
    )
    if not is_number or not abs(value) < _TOO_LARGE:  # so written, because NaN is not below it
        raise Refusal(400, f"{name!r} must be a number below 1e38, not {short_repr(value)}.")
    if isinstance(value, int) and int(float(value)) != value:
        raise Refusal(
            400, f"{name!r} is a whole number above 2^53, {value}, which would lose digits."
        )
    return float(value)


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """Return True for a list of at most eight sizes, none of them 0."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(size) is int and size > 0 for size in value)
    )


def _bytes(value: Any, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise Refusal(400, f"{name} is not valid base64.") from None


def unpack_array(
    data: bytes | memoryview, dtype: np.dtype[Any], shape: Sequence[int], name: str
) -> Array:
    """Return the array that bytes hold, row by row and little endian.

    Raises:
        Refusal: they are too many or too few.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise Refusal(
            400, f"{name} has {len(data)} bytes, but {dtype} of shape {list(shape)} has {expected}."
        )
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def _with_critical_chunks(png: bytes) -> bytes:
    """Return a PNG image without the chunks that its pixels don't need: Pillow would unpack a
    profile of any size.

    Raises:
        ValueError: it has more chunks than programs write.
    """
    at = _PNG_SIGNATURE_BYTES
    parts = [png[:at]]
    for _ in range(_MAX_SMALL_CHUNKS + len(png) // _LEAST_CHUNK_BYTES):
        if at + _CHUNK_HEAD.size > len(png):
            return b"".join(parts)
        num_bytes, kind = _CHUNK_HEAD.unpack_from(png, at)
        end = at + _CHUNK_HEAD.size + num_bytes + _CHECKSUM_BYTES
        if kind[:1].isupper():  # so it says that it is critical
            parts.append(png[at:end])
        at = end
    raise ValueError("it has too many chunks")


def _image(images: Any, shape: tuple[int, ...], name: str) -> Array:
    """Return the array of shape [H, W] or [H, W, C] that one or more PNG images hold."""
    try:
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        raise Refusal(
            400,
            f"{name} is a PNG image, which needs Pillow here. Install it with:"
            f" {install_command('serve')}",
        ) from None
    layers: list[Array] = []
    for part in images if isinstance(images, list) else [images]:
        data = _bytes(part, name)
        is_fitting = False
        try:
            with PngImageFile(io.BytesIO(_with_critical_chunks(data))) as image:
                if (  # its pixels are unpacked only if they fit
                    image.mode in ("L", "RGB", "RGBA")
                    and image.size[::-1] == shape[:2]
                    and len(layers) < max(shape)
                ):
                    layers.append(np.asarray(image).reshape(*shape[:2], -1))
                    is_fitting = True
        except Exception as error:  # whatever a damaged file leads to
            raise Refusal(400, f"{name} is not a valid PNG image: {error}.") from None
        if not is_fitting:
            raise Refusal(
                400,
                f"{name} has size {image.size} and mode {image.mode}, not {shape} in L, RGB or"
                " RGBA.",
            )
    if not layers or sum(layer.size for layer in layers) != math.prod(shape):
        raise Refusal(
            400,
            f"{name} has {len(layers)} images, which don't make up an array of shape"
            f" {list(shape)}.",
        )
    return np.concatenate(layers, axis=-1).reshape(shape)
