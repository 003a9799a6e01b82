"""Encoding of messages in frames: arrays are passed on as views, only small ones are copied (see
`format`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import numpy as np

from aiorl.data.columns import Array
from aiorl.errors import LocalProtocolError
from aiorl.net.wire import messages as m
from aiorl.net.wire.compression import MIN_COLUMN_BYTES, compress_array, compress_stacks
from aiorl.net.wire.format import (
    ALIGN,
    ARRAY_REF,
    CONTINUED,
    DEFAULT_LIMITS,
    DTYPES,
    FORMAT_VERSION,
    LZ4,
    PACK_MAX_BYTES,
    PACK_TOTAL_BYTES,
    PACKED,
    RAW,
    SHARE_FROM_BYTES,
    SHARE_MIN_BYTES,
    STACKED,
    Limits,
)
from aiorl.net.wire.schema import (
    ARRAY,
    MESSAGE_TYPES,
    MESSAGE_TYPES_BY_CLASS,
    NESTED_VALUES,
    OPTIONAL_ARRAYS,
    ArrayTree,
)
from aiorl.text import MAX_LABEL, is_label

Frame: TypeAlias = bytes | memoryview
"""Part of an encoded message: the immutable header, or a view of arrays that were passed in."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PADDING = [b"\0" * n for n in range(ALIGN)]
_CACHED_LAYOUTS = 128
_CACHED_NAMES = 512
_CACHED_REFERENCES = 128
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCES = (list, tuple)
_CONTAINERS = (dict, list, tuple, Mapping)
_MAX_PAUSE = 31
_MAX_DENSE = 4096


class _DenseColumns:
    """Memory of float columns that did not shrink, so that they soon cost a probe in one message of
    32 only.

    Most floats are dense, and successive messages are alike. A column that has not shrunk n times
    in a row is left out of the next 2^(n - 1) - 1 messages.
    """

    def __init__(self) -> None:
        # column -> messages left, length of the pause
        self._pauses: dict[tuple[object, ...], tuple[int, int]] = {}

    def is_worth_a_try(self, column: tuple[object, ...]) -> bool:
        """Return False while a column pauses; counts this message."""
        num_left, length = self._pauses.get(column, (0, 0))
        if num_left:
            self._pauses[column] = num_left - 1, length
        return not num_left

    def add(self, column: tuple[object, ...]) -> None:
        """Record that a column did not shrink."""
        if len(self._pauses) >= _MAX_DENSE:
            self._pauses.clear()
        _, length = self._pauses.get(column, (0, 0))
        self._pauses[column] = length, min(2 * length + 1, _MAX_PAUSE)

    def remove(self, column: tuple[object, ...]) -> None:
        """Record that a column has shrunk."""
        self._pauses.pop(column, None)


_dense = _DenseColumns()


class _Shared:
    """Adjacent arrays of one allocation, which are sent as one frame.

    Attributes:
        base: the allocation.
    """

    __slots__ = ("_address", "_end", "_max_bytes", "_start", "base")

    def __init__(self, base: Array, max_bytes: int) -> None:
        self.base = base
        self._address = _address(base)
        self._start = self._end = 0
        self._max_bytes = max_bytes

    def begin(self, array: Array) -> bool:
        """Add the first array; return False if it lies outside of the allocation."""
        self._start = start = _address(array) - self._address
        self._end = end = start + array.nbytes
        return start >= 0 and end <= self.base.nbytes

    def go_on(self, array: Array) -> bool:
        """Add an array and return True if it is the next one."""
        start = self._end + (self._start - self._end) % ALIGN
        end = start + array.nbytes
        if (
            _address(array) - self._address != start
            or end > self.base.nbytes
            or end - self._start > self._max_bytes
        ):
            return False
        self._end = end
        return True

    def frame(self) -> memoryview:
        """Return the bytes of all arrays, with the small gaps between them."""
        return self.base.data.cast("B")[self._start : self._end]


@dataclass(slots=True, eq=False)
class _Writer:
    """Collector of the arrays of one message."""

    compress: bool
    limits: Limits
    nodes: list[tuple[int, str]] = field(default_factory=list)
    columns: list[tuple[int, str, str]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    storage: bytearray = field(default_factory=bytearray)
    packed: list[Any] = field(default_factory=list)  # bytes and contiguous arrays
    packed_bytes: int = 0
    frames: list[Frame | _Shared] = field(default_factory=list)
    shared: _Shared | None = None
    num_bytes: int = 0  # of all arrays

    def add_node(self, parent: int, key: str) -> int:
        self.nodes.append((parent, key))
        return len(self.nodes)

    def add_tree(self, parent: int, key: str, value: Mapping[str, Any], tree: ArrayTree) -> None:
        node = self.add_node(parent, key)
        if tree is ARRAY:
            raise LocalProtocolError(f"{key}: expected an array, got a {type(value).__name__}")
        for name, item in value.items():
            key = name if name in tree else "*"
            below = tree.get(key)
            if below is ARRAY and key in tree:
                self.add_array(node, name, item)
            elif below is ARRAY or not isinstance(item, Mapping):
                raise LocalProtocolError(
                    f"{key}.{name}: expected a map of arrays, got {type(item).__name__}"
                )
            else:
                self.add_tree(node, name, item, below)

    def add_array(self, node: int, name: str, value: object) -> None:
        array = np.asarray(value)
        code = _CODES.get(array.dtype)
        if code is None:
            code = array.dtype.newbyteorder("<").str
            if code not in DTYPES:
                raise LocalProtocolError(
                    f"{name}: arrays of {array.dtype} cannot be sent; use bool, int, uint or float"
                )
            array = array.astype(code)
        size = array.nbytes
        shape = array.shape
        if len(shape) > self.limits.max_ndim or size > self.limits.max_array_bytes:
            raise LocalProtocolError(
                f"{name}: an array of shape {shape} ({size:,} bytes) exceeds the protocol's"
                f" limits ({self.limits.max_ndim} dimensions, {self.limits.max_array_bytes:,} bytes)"
            )
        self.num_bytes += size
        self.columns.append((node, name, code))
        self.shapes.append(shape)
        if size >= MIN_COLUMN_BYTES and self.compress and self.compressed(array, node, name):
            return
        if (self.shared is not None or size >= SHARE_FROM_BYTES) and self.share(array, size):
            return
        if not size or (size <= PACK_MAX_BYTES and self.packed_bytes + size <= PACK_TOTAL_BYTES):
            self.storage.append(PACKED)
            padding = -self.packed_bytes % ALIGN
            if padding:
                self.packed.append(_PADDING[padding])
            if size:
                self.packed.append(_contiguous(array))
            self.packed_bytes += padding + size
        else:
            self.storage.append(RAW)
            self.frames.append(_contiguous(array).data.cast("B"))
            self.shared = None

    def compressed(self, array: Array, node: int, name: str) -> bool:
        """Add an array compressed; return False if that does not pay."""
        if 2 * len(self.frames) >= self.limits.max_frames:
            return False  # half of the frames are left to arrays that cannot share one
        if array.dtype.kind != "f":
            array = _contiguous(array)
            return self.add_compressed(compress_stacks(array), STACKED) or self.add_compressed(
                compress_array(array), LZ4
            )
        column = (node, name, array.dtype, array.shape)
        if not _dense.is_worth_a_try(column):
            return False
        if self.add_compressed(compress_array(_contiguous(array)), LZ4):
            _dense.remove(column)
            return True
        _dense.add(column)
        return False

    def add_compressed(self, compressed: bytes | None, storage: int) -> bool:
        """Add the frame of a compressed array; return False if there is none."""
        if compressed is None:
            return False
        self.storage.append(storage)
        self.frames.append(compressed)
        return True

    def share(self, array: Array, size: int) -> bool:
        """Add an array without a copy, in the frame of the arrays before it if it is adjacent;
        return False if not.
        """
        base = array.base
        if not size or not isinstance(base, np.ndarray) or not array.flags.c_contiguous:
            return False
        shared = self.shared
        if shared is not None and base is shared.base and shared.go_on(array):
            self.storage.append(CONTINUED)
            return True
        if (
            size < SHARE_FROM_BYTES
            or base.nbytes < SHARE_MIN_BYTES
            or not base.flags.c_contiguous
            or base.dtype.str not in DTYPES
        ):
            return False
        shared = _Shared(base, self.limits.max_array_bytes)
        if not shared.begin(array):
            return False
        self.shared = shared
        self.storage.append(RAW)
        self.frames.append(shared)
        return True

    def finish(self, name: str, scalars: Mapping[str, object]) -> list[Frame]:
        pack = (
            _cached_layout if len(self.nodes) + len(self.columns) <= _CACHED_NAMES else _pack_layout
        )
        layout = pack(tuple(self.nodes), tuple(self.columns)) if self.nodes else b""
        header = _header(name, scalars, layout, bytes(self.storage), self.shapes)
        frames: list[Frame] = [header]
        if PACKED in self.storage:
            frames.append(b"".join(self.packed))
        frames += [frame.frame() if isinstance(frame, _Shared) else frame for frame in self.frames]
        limits = self.limits
        if len(self.columns) > limits.max_arrays:
            raise LocalProtocolError(
                f"a {name} message of {len(self.columns)} arrays exceeds the protocol's limits"
                f" ({limits.max_arrays} arrays)"
            )
        _check_size(name, self.num_bytes, limits)
        return _checked(name, frames, limits)


def _header(
    name: str,
    scalars: Mapping[str, object],
    layout: bytes = b"",
    storage: bytes = b"",
    shapes: Sequence[tuple[int, ...]] = (),
) -> bytes:
    """Return the first frame of a message."""
    try:
        header: bytes = msgpack.Packer(default=_to_plain).pack(
            (FORMAT_VERSION, name, scalars, layout, storage, shapes)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"a {name} message cannot be packed: {error}") from error
    return header


def _checked(name: str, frames: list[Frame], limits: Limits) -> list[Frame]:
    """Return the frames of a message that is within the limits."""
    num_bytes = len(frames[0])
    if num_bytes > limits.max_header_bytes or len(frames) > limits.max_frames:
        raise LocalProtocolError(
            f"a {name} message of {len(frames)} frames and a header of {num_bytes} bytes"
            f" exceeds the protocol's limits ({limits.max_frames} frames,"
            f" {limits.max_header_bytes} bytes)"
        )
    _check_size(name, sum(map(len, frames)), limits)
    return frames


def _check_size(name: str, num_bytes: int, limits: Limits) -> None:
    if num_bytes > limits.max_message_bytes:
        raise LocalProtocolError(
            f"a {name} message of {num_bytes:,} bytes exceeds the protocol's limit of"
            f" {limits.max_message_bytes:,} bytes"
        )


def encode(
    message: m.Message, *, compress: bool = True, limits: Limits = DEFAULT_LIMITS
) -> list[Frame]:
    """Encode a message as frames.

    Texts for people are made printable and cut to their length, as the receiver would do.

    Args:
        message: any message of ``messages``. Arrays above 256 KiB, and smaller ones that are
            adjacent in one allocation, are not copied, except compressed, strided or big-endian
            ones. They must not change until the frames are sent.
        compress: try LZ4 on columns, and send repeated frames of stacks once.
        limits: the receiver's limits.

    Raises:
        LocalProtocolError: when the message contains a value that cannot be sent, or exceeds the
            limits.
    """
    kind = MESSAGE_TYPES_BY_CLASS[type(message)]
    if isinstance(message, m.Welcome):
        writer = _Writer(compress, limits)
        return writer.finish(kind.name, _welcome_scalars(message, writer))
    scalars = message._asdict()
    nested = NESTED_VALUES.get(kind.cls)
    if nested is not None:
        kind.leave_out_defaults(scalars)
        return _encode_nested(kind.name, scalars, nested, compress=compress, limits=limits)
    writer = _Writer(compress, limits)
    for name, tree in kind.arrays.items():
        value = scalars.pop(name)
        if value or name not in OPTIONAL_ARRAYS:
            writer.add_tree(0, name, value, tree)
    kind.leave_out_defaults(scalars)
    kind.fit_texts(scalars)
    return writer.finish(kind.name, scalars)


def _encode_nested(
    name: str, scalars: dict[str, Any], field: str, *, compress: bool, limits: Limits
) -> list[Frame]:
    """Encode a message with a field that holds arrays at any depth; without any, it is one
    frame.
    """
    arrays: list[Array] = []
    scalars[field] = _take_arrays(scalars[field], arrays, limits.max_depth)
    if not arrays:
        return _checked(name, [_header(name, scalars)], limits)
    writer = _Writer(compress, limits)
    node = writer.add_node(0, field)
    for number, array in enumerate(arrays):
        writer.add_array(node, str(number), array)
    return writer.finish(name, scalars)


def _welcome_scalars(message: m.Welcome, writer: _Writer) -> dict[str, object]:
    kind = MESSAGE_TYPES["welcome"]
    snapshot_kind = MESSAGE_TYPES["snapshot"]
    snapshot = message.snapshot
    graphs = {
        pid: {"graph": np.frombuffer(graph["graph"], np.uint8)}
        for pid, graph in message.graphs.items()
    }
    writer.add_tree(0, "graphs", graphs, kind.arrays["graphs"])
    arrays = {field: getattr(snapshot, field) for field in snapshot_kind.arrays}
    for name in OPTIONAL_ARRAYS:
        if not arrays[name]:
            del arrays[name]
    writer.add_tree(0, "snapshot", arrays, kind.arrays["snapshot"])
    scalars: dict[str, object] = {field: getattr(message, field) for field in kind.scalars}
    scalars["graphs"] = {pid: graph["spec"] for pid, graph in message.graphs.items()}
    of_snapshot = {field: getattr(snapshot, field) for field in snapshot_kind.scalars}
    snapshot_kind.leave_out_defaults(of_snapshot)
    scalars["snapshot"] = of_snapshot
    return scalars


def _take_arrays(value: Any, arrays: list[Array], depth: int) -> Any:
    """Add the arrays in ``value`` to ``arrays``, and return ``value`` with a reference in the place
    of each; without any, the message has no layout.
    """
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return _reference(len(arrays) - 1)
    if not isinstance(value, _CONTAINERS):
        return value
    if depth <= 0:
        raise LocalProtocolError("the value is nested too deeply to be sent")
    if not value:
        return value
    if isinstance(value, _SEQUENCES):
        if _PLAIN.issuperset(map(type, value)):
            return value
        return [_take_arrays(item, arrays, depth - 1) for item in value]
    if _PLAIN.issuperset(map(type, value.values())):
        return value
    return {key: _take_arrays(item, arrays, depth - 1) for key, item in value.items()}


@functools.lru_cache(maxsize=_CACHED_REFERENCES)
def _reference(number: int) -> msgpack.ExtType:
    """Return the reference to an array, by its number, which is its name in the layout."""
    return msgpack.ExtType(ARRAY_REF, number.to_bytes(4, "little"))


def _pack_layout(
    nodes: tuple[tuple[int, str], ...], columns: tuple[tuple[int, str, str], ...]
) -> bytes:
    """Check the names of a layout, and return its bytes."""
    for name in [*(key for _, key in nodes), *(name for _, name, _ in columns)]:
        if not is_label(name):
            raise LocalProtocolError(
                f"{name[:60]!r} cannot name an array or a group of arrays: use at most {MAX_LABEL}"
                " printable characters"
            )
    layout: bytes = msgpack.packb((nodes, columns))
    return layout


_cached_layout = functools.lru_cache(maxsize=_CACHED_LAYOUTS)(_pack_layout)


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _address(array: Array) -> int:
    """Return the address of an array's first byte; the array must not be empty."""
    if array.flags.writeable:
        # several times faster than the array interface
        return addressof(c_char.from_buffer(array.data))
    address: int = array.__array_interface__["data"][0]
    return address


def _to_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} values cannot be sent")
