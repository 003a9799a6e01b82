"""Messages to frames: arrays are handed on as views, only small ones are copied (see ``wire_format``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgpack
import numpy as np

from aiorl.errors import LocalProtocolError
from aiorl.protocol import messages as m
from aiorl.protocol.compression import MIN_COLUMN_BYTES, compress_array
from aiorl.protocol.limits import DEFAULT_LIMITS, Limits
from aiorl.protocol.schema import ARRAY, MESSAGE_TYPES, MESSAGE_TYPES_BY_CLASS, ArrayTree
from aiorl.protocol.wire_format import (
    ALIGN,
    ARRAY_REF,
    DTYPES,
    LZ4,
    PACK_MAX_BYTES,
    PACK_TOTAL_BYTES,
    PACKED,
    RAW,
)

__all__ = ["Frame", "encode"]

Frame: TypeAlias = bytes | memoryview
"""What ``encode`` gives: an immutable header, and views of the arrays it was given."""

_PADDING = [b"\0" * n for n in range(ALIGN)]


class _Writer:
    """Collects the arrays of one message."""

    __slots__ = (
        "columns",
        "compress",
        "frames",
        "limits",
        "nodes",
        "packed",
        "packed_bytes",
        "shapes",
        "storage",
    )

    def __init__(self, compress: bool, limits: Limits) -> None:
        self.compress = compress
        self.limits = limits
        self.nodes: list[tuple[int, str]] = []
        self.columns: list[tuple[int, str, str]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.storage = bytearray()
        self.packed: list[bytes | memoryview] = []
        self.packed_bytes = 0
        self.frames: list[Frame] = []

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
                raise LocalProtocolError(f"{key}.{name}: expected a map of arrays, got {type(item).__name__}")
            else:
                self.add_tree(node, name, item, below)

    def add_array(self, node: int, name: str, value: object) -> None:
        array = np.asarray(value)
        dtype = array.dtype
        code = dtype.str
        if code not in DTYPES:
            code = dtype.newbyteorder("<").str
            if code not in DTYPES:
                raise LocalProtocolError(f"{name}: arrays of {dtype} do not travel; use bool, int, uint or float")
            array = array.astype(code)
        size = array.nbytes
        if array.ndim > self.limits.max_ndim or size > self.limits.max_array_bytes:
            raise LocalProtocolError(f"{name}: shape {array.shape} ({size} bytes) is beyond the protocol's limits")
        self.columns.append((node, name, code))
        self.shapes.append(array.shape)
        if self.compress and size >= MIN_COLUMN_BYTES and dtype.kind != "f":
            array = _contiguous(array)
            compressed = compress_array(array)
            if compressed is not None:
                self.storage.append(LZ4)
                self.frames.append(compressed)
                return
        if size <= PACK_MAX_BYTES and self.packed_bytes + size <= PACK_TOTAL_BYTES:
            self.storage.append(PACKED)
            padding = -self.packed_bytes % ALIGN
            if padding:
                self.packed.append(_PADDING[padding])
            self.packed.append(_contiguous(array).data.cast("B") if size else b"")
            self.packed_bytes += padding + size
        else:
            self.storage.append(RAW)
            self.frames.append(_contiguous(array).data.cast("B"))

    def finish(self, name: str, scalars: Mapping[str, object]) -> list[Frame]:
        layout = msgpack.packb((self.nodes, self.columns)) if self.nodes else b""
        try:
            header: bytes = msgpack.packb(
                (m.PROTOCOL_VERSION, name, scalars, layout, bytes(self.storage), self.shapes),
                default=_to_plain,
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise LocalProtocolError(f"a {name} message cannot be packed: {error}") from error
        frames: list[Frame] = [header]
        if PACKED in self.storage:
            frames.append(b"".join(self.packed))
        frames += self.frames
        limits = self.limits
        if len(header) > limits.max_header_bytes or len(frames) > limits.max_frames:
            raise LocalProtocolError(
                f"a {name} message of {len(frames)} frames and a header of {len(header)} bytes is beyond the "
                f"protocol's limits ({limits.max_frames} frames, {limits.max_header_bytes} bytes)"
            )
        return frames


def encode(message: m.Message, *, compress: bool = True, limits: Limits = DEFAULT_LIMITS) -> list[Frame]:
    """The frames of a message.

    Args:
        message: any message of ``messages``. Arrays above 256 KiB are not copied (unless they are
            compressed, strided or big-endian): they must not change until the frames are sent.
        compress: try LZ4 on integer and bool columns.
        limits: what the receiver will accept.

    Raises: LocalProtocolError if the message holds what does not travel or is beyond the limits.
    """
    kind = MESSAGE_TYPES_BY_CLASS[type(message)]
    writer = _Writer(compress, limits)
    if isinstance(message, m.Samples):
        for field, tree in kind.arrays.items():
            writer.add_tree(0, field, getattr(message, field), tree)
        scalars = {field: getattr(message, field) for field in kind.scalars}
    elif isinstance(message, m.Welcome):
        scalars = _welcome_scalars(message, writer)
    elif isinstance(message, (m.Call, m.Reply)):
        field = "args" if isinstance(message, m.Call) else "result"
        scalars = {name: getattr(message, name) for name in kind.scalars}
        node = writer.add_node(0, field)
        scalars[field] = _take_arrays(scalars[field], node, writer, limits.max_depth)
    else:
        for field, tree in kind.arrays.items():
            writer.add_tree(0, field, getattr(message, field), tree)
        scalars = {field: getattr(message, field) for field in kind.scalars}
    return writer.finish(kind.name, scalars)


def _welcome_scalars(message: m.Welcome, writer: _Writer) -> dict[str, object]:
    kind = MESSAGE_TYPES["welcome"]
    snapshot_kind = MESSAGE_TYPES["snapshot"]
    snapshot = message.snapshot
    graphs = {pid: {"graph": np.frombuffer(graph["graph"], np.uint8)} for pid, graph in message.graphs.items()}
    writer.add_tree(0, "graphs", graphs, kind.arrays["graphs"])
    arrays = {field: getattr(snapshot, field) for field in snapshot_kind.arrays}
    writer.add_tree(0, "snapshot", arrays, kind.arrays["snapshot"])
    scalars: dict[str, object] = {field: getattr(message, field) for field in kind.scalars}
    scalars["graphs"] = {pid: graph["spec"] for pid, graph in message.graphs.items()}
    scalars["snapshot"] = {field: getattr(snapshot, field) for field in snapshot_kind.scalars}
    return scalars


def _take_arrays(value: Any, node: int, writer: _Writer, depth: int) -> Any:
    """``value`` with a reference in the place of each array, the arrays being added to ``writer``."""
    if isinstance(value, np.ndarray):
        number = len(writer.columns)
        writer.add_array(node, str(number), value)
        return msgpack.ExtType(ARRAY_REF, number.to_bytes(4, "little"))
    if depth < 0:
        raise LocalProtocolError("the value is nested too deeply to travel")
    if isinstance(value, Mapping):
        return {key: _take_arrays(item, node, writer, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take_arrays(item, node, writer, depth - 1) for item in value]
    return value


def _contiguous(array: m.AnyArray) -> m.AnyArray:
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _to_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} values do not travel")
