"""Observations, actions and infos of any shape as bytes, for the way to a child process and back.

msgpack, with arrays and NumPy numbers as dtype, shape and raw bytes, and with tuples kept apart from lists (agent
ids may be tuples). Nothing that is read runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from aiorl.errors import BadFrame

__all__ = ["pack", "pack_infos", "unpack"]

_ARRAY, _NUMBER, _TUPLE = 1, 2, 3
_KINDS = frozenset("biuf")
_PLAIN: tuple[type[Any], ...] = (int, float, str, bytes, list, dict)


def pack(value: Any) -> bytes:
    """Bytes for None, booleans, numbers, strings, bytes, arrays of numbers, and lists, tuples and dicts of these.

    Raises:
        TypeError: something else is in it.
    """
    packed: bytes = msgpack.packb(value, default=_to_extension, strict_types=True)
    return packed


def pack_infos(infos: Mapping[Any, Mapping[str, Any]]) -> tuple[bytes, int]:
    """Bytes for info dicts by agent, without the entries that have no such form; and how many those were."""
    try:
        return pack(infos), 0
    except (TypeError, ValueError, OverflowError):
        kept: dict[Any, dict[str, Any]] = {}
        dropped = 0
        for agent_id, info in infos.items():
            kept[agent_id] = {}
            for key, value in info.items():
                try:
                    pack({key: value})
                except (TypeError, ValueError, OverflowError):
                    dropped += 1
                else:
                    kept[agent_id][key] = value
        return pack(kept), dropped


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """What ``pack`` was given; arrays share the memory of ``data`` no more.

    Raises:
        BadFrame: damaged bytes.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False)
    except BadFrame:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadFrame(f"bytes of an environment cannot be read: {error}") from error


def _to_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {value.dtype} cannot be sent")
        little = np.asarray(value, value.dtype.newbyteorder("<"))
        head: bytes = msgpack.packb([little.dtype.str, list(little.shape)])
        code = _ARRAY if isinstance(value, np.ndarray) else _NUMBER
        return msgpack.ExtType(code, head + little.tobytes())
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    # Subclasses of the plain types (strict_types hands them over), such as IntEnum or EnvContext.
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _from_extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code not in (_ARRAY, _NUMBER):
        raise BadFrame(f"unknown kind {code} of value")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    name, shape = unpacker.unpack()
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise BadFrame(f"arrays of {dtype} are not accepted")
    array = np.frombuffer(data, dtype, offset=unpacker.tell()).reshape(shape).copy()
    return array if code == _ARRAY else array[()]
