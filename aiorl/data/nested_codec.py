"""Observations, actions and infos of any structure as bytes, for child processes.

The format is msgpack, with arrays and NumPy numbers as dtype, shape and raw bytes, and with tuples
distinct from lists (agent ids can be tuples). Reading it runs no code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from aiorl.errors import BadFrame

_ARRAY = 1
_NUMBER = 2
_TUPLE = 3
_KINDS = frozenset("biuf")
_DTYPE = re.compile(r"[<>|][biuf][0-9]{1,2}")
_MAX_TUPLES = 32
"""Limit of tuples within tuples: reading each takes tens of kilobytes of the C stack."""
_PLAIN: tuple[type[Any], ...] = (int, float, str, bytes, list, dict)
_UNSENDABLE = (TypeError, ValueError, OverflowError)

Data = bytes | bytearray | memoryview


def pack(value: Any) -> bytes:
    """Encode None, booleans, numbers, strings, bytes, arrays of numbers, and lists, tuples and
    dicts of these.

    Raises:
        TypeError: the value contains something else.
        ValueError: it is nested too deeply.
    """
    return _packed(value, 0)


def pack_infos(infos: Mapping[Any, Mapping[str, Any]]) -> tuple[bytes, int]:
    """Encode info dicts by agent, and return the bytes and the number of entries left out because
    they can't be.
    """
    try:
        return pack(infos), 0
    except _UNSENDABLE:
        pass
    sendable: dict[Any, dict[str, Any]] = {}
    num_dropped = 0
    for agent_id, info in infos.items():
        sendable[agent_id] = {}
        for key, value in info.items():
            try:
                pack({key: value})
            except _UNSENDABLE:
                num_dropped += 1
            else:
                sendable[agent_id][key] = value
    return pack(sendable), num_dropped


def unpack(data: Data) -> Any:
    """Decode the bytes of ``pack``; arrays do not share the memory of ``data``.

    Raises:
        BadFrame: the bytes are damaged, or tuples are nested too deeply.
    """
    try:
        return _unpacked(data, 0)
    except BadFrame:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadFrame(f"bytes of an environment cannot be read: {error}") from error


def _packed(value: Any, tuples: int) -> bytes:
    if tuples > _MAX_TUPLES:
        raise ValueError(f"more than {_MAX_TUPLES} tuples within each other")
    packed: bytes = msgpack.packb(
        value,
        default=functools.partial(_to_extension, tuples=tuples),
        strict_types=True,
    )
    return packed


def _unpacked(data: Data, tuples: int) -> Any:
    if tuples > _MAX_TUPLES:
        raise BadFrame(f"more than {_MAX_TUPLES} tuples within each other")
    return msgpack.unpackb(
        data,
        ext_hook=functools.partial(_from_extension, tuples=tuples),
        strict_map_key=False,
    )


def _to_extension(value: Any, tuples: int) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {value.dtype} cannot be sent")
        array = np.asarray(value, value.dtype.newbyteorder("<"))
        head: bytes = msgpack.packb([array.dtype.str, list(array.shape)])
        code = _ARRAY if isinstance(value, np.ndarray) else _NUMBER
        return msgpack.ExtType(code, head + array.tobytes())
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _packed(list(value), tuples + 1))
    # strict_types passes subclasses of the plain types, such as IntEnum or EnvContext, to this
    # function.
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _from_extension(
    code: int,
    data: bytes,
    tuples: int,
) -> Any:
    if code == _TUPLE:
        items = _unpacked(data, tuples + 1)
        if type(items) is not list:
            raise BadFrame("a tuple that is not a list of values")
        return tuple(items)
    if code not in (_ARRAY, _NUMBER):
        raise BadFrame(f"unknown kind {code} of value")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    name, shape = unpacker.unpack()
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise BadFrame(f"arrays of {name!r:.50} are not accepted")
    dtype = np.dtype(name)
    numbers = np.frombuffer(data, dtype, offset=unpacker.tell())
    array = numbers.reshape(shape).copy()
    return array if code == _ARRAY else array[()]
