"""Decoding of frames from untrusted peers: each size is checked before memory is allocated (see
`format`).
"""

from __future__ import annotations

import contextlib
import functools
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np

from aiorl.errors import BadFrame, MessageTooBig, RemoteProtocolError, VersionMismatch
from aiorl.net.wire import messages as m
from aiorl.net.wire.compression import decompress, decompress_stacks
from aiorl.net.wire.format import (
    ALIGN,
    ARRAY_REF,
    CONTINUED,
    DEFAULT_LIMITS,
    DTYPES,
    FORMAT_VERSION,
    LZ4,
    MAX_HELLO_BYTES,
    PACKED,
    RAW,
    STACKED,
    Limits,
)
from aiorl.net.wire.schema import (
    ARRAY,
    MESSAGE_TYPES,
    NESTED_VALUES,
    OPTIONAL_ARRAYS,
    ArrayTree,
)
from aiorl.text import MAX_LABEL, is_label, one_line

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Frame to decode: any object with the buffer protocol; decoded arrays keep it alive."""

_CACHED_LAYOUT_BYTES = 1 << 12
_CACHED_LAYOUTS = 128
_CACHED_COLUMNS = 64
_CACHED_SHAPE_BYTES = 1 << 10
_CACHED_PLACES = 256
_CACHED_REFERENCES = 128
_HELLO_LIMITS = Limits(
    max_frames=1,
    max_header_bytes=MAX_HELLO_BYTES,
    max_arrays=0,
    max_string=MAX_HELLO_BYTES,
    max_map=16,
    max_depth=1,
)


def decode(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> m.Message:
    """Decode the message in frames.

    Args:
        frames: one multipart message. Decoded arrays that were not compressed are read-only views
            of these frames, and keep them alive.
        limits: our limits.

    Raises:
        MessageTooBig: when a size exceeds the limits.
        VersionMismatch: when the peer speaks another protocol version.
        BadFrame: for all other faults. No other error is raised, whatever the bytes.
    """
    if not frames:
        raise BadFrame("an empty message", field="frames")
    if len(frames) > limits.max_frames:
        raise MessageTooBig(
            f"{len(frames)} frames, at most {limits.max_frames} are accepted", field="frames"
        )
    name, values, layout_bytes, storage, shapes = _read_header(frames[0], limits)
    kind = MESSAGE_TYPES.get(name)
    if kind is None:
        raise BadFrame(f"unknown message type {name[:40]!r}", field="type")
    if not kind.arrays or (not layout_bytes and kind.cls in NESTED_VALUES):
        if layout_bytes or storage or shapes or len(frames) > 1:
            raise BadFrame(f"this {name} message carries no arrays", field="layout")
        kind.check_scalars(values, limits)
        return kind.cls(**values)
    is_plain = kind.cls is m.Samples or kind.cls is m.Snapshot
    if is_plain:
        kind.check_scalars(values, limits)
    if len(layout_bytes) <= _CACHED_LAYOUT_BYTES:
        layout = _cached_layout(name, layout_bytes, limits)
        places = _places_of(layout, storage, shapes, limits)
    else:  # too large for a cache
        layout = _parse_layout(name, layout_bytes, limits)
        places = _find_places(layout, storage, shapes, limits)
    arrays = _read_arrays(frames, layout, places)
    if is_plain:
        values.update(arrays)
    elif kind.cls is m.Welcome:
        kind.check_scalars(values, limits)
        _fill_welcome(values, arrays)
    else:
        field = next(iter(kind.arrays))
        _put_arrays(values, arrays[field], field, limits.max_depth + 1)
        if arrays[field]:  # they would keep frames alive that no one counts
            raise BadFrame("an array has no place in the value", field=field)
        kind.check_scalars(values, limits)
    return kind.cls(**values)


def decode_hello(frames: Sequence[Buffer]) -> m.Hello | m.StatusRequest | None:
    """Decode the Hello or the StatusRequest in frames; return None, after no more than the header,
    if there is neither.

    A message of an unregistered peer costs no more than unpacking 4 KiB without arrays.

    Raises:
        VersionMismatch: when the peer speaks another protocol version.
        BadFrame: for all other faults. No other error is raised, whatever the bytes.
    """
    if len(frames) != 1 or memoryview(frames[0]).nbytes > MAX_HELLO_BYTES:
        return None
    if _read_header(frames[0], _HELLO_LIMITS)[0] not in ("hello", "status_request"):
        return None
    message = decode(frames, _HELLO_LIMITS)
    assert isinstance(message, m.Hello | m.StatusRequest)
    return message


_Header: TypeAlias = tuple[str, dict[str, Any], bytes, bytes, list[Any]]
_HEADER_FIELDS = {
    "version": int,
    "type": str,
    "scalars": dict,
    "layout": bytes,
    "storage": bytes,
    "shapes": list,
}
_HEADER_TYPES = [*_HEADER_FIELDS.values()]


def _read_header(frame: Buffer, limits: Limits) -> _Header:
    size = memoryview(frame).nbytes
    if size > limits.max_header_bytes:
        raise MessageTooBig(
            f"{size} bytes, at most {limits.max_header_bytes} are accepted", field="header"
        )
    most = min(limits.max_map, size)
    try:
        header = msgpack.unpackb(
            frame,
            ext_hook=_array_ref,
            max_str_len=limits.max_string,
            max_bin_len=size,
            max_array_len=most,
            max_map_len=most,
            max_ext_len=4,
        )
    except RemoteProtocolError:
        raise
    # msgpack raises its own errors, ValueError and TypeError: all mean "not our message"
    except Exception as error:
        what = one_line(f"{type(error).__name__}: {error}", 120)
        raise BadFrame(f"not a message header: {what}", field="header") from error
    if type(header) is not list or not header or type(header[0]) is not int:
        raise BadFrame("not a message header", field="header")
    if header[0] != FORMAT_VERSION:
        raise VersionMismatch(
            f"the peer sends messages of format {header[0]}, we read format {FORMAT_VERSION}; "
            "install the same aiorl version on both sides",
            field="version",
        )
    if len(header) != 6:
        raise BadFrame(f"{len(header)} entries instead of 6", field="header")
    if [*map(type, header)] != _HEADER_TYPES:
        for value, (field, expected) in zip(header, _HEADER_FIELDS.items(), strict=True):
            if type(value) is not expected:
                raise BadFrame(
                    f"expected {expected.__name__}, got {type(value).__name__}", field=field
                )
    _, name, scalars, layout, storage, shapes = header
    return name, scalars, layout, storage, shapes


class _ArrayRef:
    """Placeholder for an array of a Call or Reply between unpacking and resolving."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@functools.lru_cache(maxsize=_CACHED_REFERENCES)
def _array_ref(code: int, data: bytes) -> _ArrayRef:
    if code != ARRAY_REF or len(data) != 4:
        raise BadFrame(f"extension type {code} is not used here", field="header")
    return _ArrayRef(str(int.from_bytes(data, "little")))


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Names of a message's arrays; while cached, one object serves all messages with the same
    layout.
    """

    nodes: tuple[tuple[int, str], ...]
    columns: tuple[tuple[int, str, np.dtype[Any], int], ...]  # node, name, dtype, item bytes


_Place: TypeAlias = tuple[int, str, tuple[int, ...], np.dtype[Any], int, int, int, int]
"""Place of an array: node, name, shape, dtype, storage, frame, offset in the frame, bytes."""


class _Places(NamedTuple):
    """Places of the arrays of a message, computed and bounded before any of its frames is read.

    Attributes:
        num_frames: frames of the message.
        sizes: (frame, required bytes) of each uncompressed frame.
        arrays: place of each array.
    """

    num_frames: int
    sizes: Sequence[tuple[int, int]]
    arrays: Sequence[_Place]


def _parse_layout(kind_name: str, layout_bytes: bytes, limits: Limits) -> _Layout:
    """Check a layout against the message type's array tree, once for each distinct layout."""
    try:
        layout = msgpack.unpackb(
            layout_bytes,
            max_str_len=limits.max_string,
            max_array_len=min(limits.max_arrays, len(layout_bytes)),
            max_bin_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        nodes, columns = layout
        nodes = tuple((parent, key) for parent, key in nodes)
        columns = tuple((node, name, code) for node, name, code in columns)
    except Exception as error:  # as in _read_header
        what = one_line(f"{type(error).__name__}: {error}", 120)
        raise BadFrame(f"not a layout: {what}", field="layout") from error
    trees: list[ArrayTree] = [MESSAGE_TYPES[kind_name].arrays]
    names_at: list[set[str]] = [set()]
    for parent, key in nodes:
        below = _below(trees, names_at, parent, key)
        if below is ARRAY:
            raise BadFrame("a map stands where an array belongs", field=key)
        trees.append(below)
        names_at.append(set())
    checked = []
    for node, name, code in columns:
        if _below(trees, names_at, node, name) is not ARRAY:
            raise BadFrame("an array stands where a map of arrays belongs", field=name)
        dtype = DTYPES.get(code) if type(code) is str else None
        if dtype is None:
            raise BadFrame(f"dtype {reprlib.repr(code)} is not allowed", field=name)
        checked.append((node, name, dtype, dtype.itemsize))
    for tree, names in zip(trees, names_at, strict=True):
        for key in tree or ():
            if key != "*" and key not in names and key not in OPTIONAL_ARRAYS:
                raise BadFrame(f"missing in {kind_name}", field=key)
    return _Layout(nodes, tuple(checked))


_cached_layout = functools.lru_cache(maxsize=_CACHED_LAYOUTS)(_parse_layout)


def _below(
    trees: list[ArrayTree], names_at: list[set[str]], node: object, key: object
) -> ArrayTree:
    if type(node) is not int or not 0 <= node < len(trees) or type(key) is not str:
        raise BadFrame(f"no such place: {reprlib.repr(node)}, {reprlib.repr(key)}", field="layout")
    if not is_label(key):
        raise BadFrame(
            f"a name of more than {MAX_LABEL} characters, or not printable: {key[:60]!r}",
            field="layout",
        )
    tree = trees[node]
    if tree is ARRAY or (key not in tree and "*" not in tree):
        raise BadFrame("no such field", field=key[:60])
    if key in names_at[node]:
        raise BadFrame("stands there twice", field=key[:60])
    names_at[node].add(key)
    return tree[key] if key in tree else tree["*"]


def _places_of(layout: _Layout, storage: bytes, shapes: list[Any], limits: Limits) -> _Places:
    """Return the places of the arrays of a message, cached for messages with equal layout, storage
    and shapes.
    """
    packed = b""
    if len(shapes) <= _CACHED_COLUMNS:
        # with such an error they are no shapes, which `_find_places` reports
        with contextlib.suppress(TypeError, ValueError):
            # unlike a comparison, it distinguishes 2 from 2.0 and 1 from True
            packed = msgpack.packb(shapes)
    if 0 < len(packed) <= _CACHED_SHAPE_BYTES:
        return _cached_places(layout, storage, packed, limits)
    return _find_places(layout, storage, shapes, limits)


@functools.lru_cache(maxsize=_CACHED_PLACES)
def _cached_places(
    layout: _Layout, storage: bytes, packed_shapes: bytes, limits: Limits
) -> _Places:
    return _find_places(layout, storage, msgpack.unpackb(packed_shapes), limits)


def _find_places(layout: _Layout, storage: bytes, shapes: list[Any], limits: Limits) -> _Places:
    """Compute the places from a header, with sizes within the limits; the frames' own sizes are
    checked later.
    """
    columns = layout.columns
    if not len(columns) == len(storage) == len(shapes):
        raise BadFrame(
            f"{len(columns)} columns, {len(storage)} storages, {len(shapes)} shapes", field="shapes"
        )
    next_frame = 2 if PACKED in storage else 1
    sizes: list[tuple[int, int]] = []
    places: list[_Place] = []
    raw_frame = raw_end = packed_end = total = 0
    max_ndim = limits.max_ndim
    max_bytes = limits.max_array_bytes
    max_total = limits.max_message_bytes
    for (node, name, dtype, size), how, shape in zip(columns, storage, shapes, strict=True):
        if type(shape) is not list or len(shape) > max_ndim:
            raise BadFrame(f"not a shape of at most {max_ndim} dimensions", field=name)
        empty = False
        for extent in shape:
            if type(extent) is not int or extent < 0:
                raise BadFrame(f"not a shape: {reprlib.repr(shape)}", field=name)
            if extent:
                size *= extent
            else:
                empty = True
        total += size
        if size > max_bytes or total > max_total:
            raise MessageTooBig(
                f"array of {size} bytes ({total} with earlier ones), at most {max_bytes}"
                f" ({max_total}) are accepted",
                field=name,
            )
        if empty:
            size = 0
        if how == PACKED:
            frame = 1
            offset = packed_end + -packed_end % ALIGN
            packed_end = offset + size
        elif how == CONTINUED:
            if not raw_frame:
                raise BadFrame("its bytes are missing", field=name)
            frame = raw_frame
            offset = raw_end + -raw_end % ALIGN
            raw_end = offset + size
        elif how in (RAW, LZ4, STACKED):
            frame = next_frame
            offset = 0
            next_frame += 1
            if how == RAW:
                if raw_frame:
                    sizes.append((raw_frame, raw_end))
                raw_frame = frame
                raw_end = size
        else:
            raise BadFrame(f"unknown storage {how}", field=name)
        places.append((node, name, tuple(shape), dtype, how, frame, offset, size))
    if raw_frame:
        sizes.append((raw_frame, raw_end))
    if PACKED in storage:
        sizes.append((1, packed_end))
    return _Places(next_frame, sizes, places)


def _read_arrays(frames: Sequence[Buffer], layout: _Layout, places: _Places) -> dict[str, Any]:
    """Return the arrays of a message, placed in its fields by the layout."""
    if len(frames) != places.num_frames:
        raise BadFrame(f"{len(frames)} frames instead of {places.num_frames}", field="frames")
    views = [*map(_view, frames)]
    for number, due in places.sizes:
        num_bytes = views[number].nbytes
        if num_bytes != due:
            raise BadFrame(
                f"a frame of {num_bytes} bytes instead of {due}", field=f"frame {number}"
            )
    root: dict[str, Any] = {}
    nodes = [root]
    for parent, key in layout.nodes:
        below: dict[str, Any] = {}
        nodes[parent][key] = below
        nodes.append(below)
    for node, name, shape, dtype, how, number, offset, size in places.arrays:
        data = views[number]
        try:
            if how == LZ4:
                data = decompress(data, size)
            elif how == STACKED:
                data = decompress_stacks(data, dtype, shape)
        except BadFrame as error:
            raise BadFrame(error.message, field=name) from error
        nodes[node][name] = np.ndarray(shape, dtype, data, offset)
    return root


def _view(frame: Buffer) -> memoryview:
    view = memoryview(frame)
    if view.ndim != 1 or view.itemsize != 1:
        view = view.cast("B")
    return view if view.readonly else view.toreadonly()


def _fill_welcome(values: dict[str, Any], arrays: dict[str, Any]) -> None:
    specs = values["graphs"]
    graphs = arrays["graphs"]
    if specs.keys() != graphs.keys():
        raise BadFrame(
            "a graph without its description, or a description without its graph", field="graphs"
        )
    values["graphs"] = {
        pid: {"graph": graphs[pid]["graph"].tobytes(), "spec": specs[pid]} for pid in specs
    }
    values["snapshot"] = m.Snapshot(**values["snapshot"], **arrays["snapshot"])


def _put_arrays(container: Any, arrays: dict[str, Any], field: str, depth: int) -> None:
    """Put arrays in the places of their references in a dict or a list; they are removed from
    ``arrays``, as each of them stands in one place.
    """
    if depth < 0:
        raise BadFrame("nested too deeply", field=field)
    items = container.items() if type(container) is dict else enumerate(container)
    for key, item in items:
        kind = type(item)
        if kind is _ArrayRef:
            if item.name not in arrays:
                raise BadFrame(f"array {item.name} is missing", field=field)
            container[key] = arrays.pop(item.name)
        elif kind is dict or kind is list:
            _put_arrays(item, arrays, field, depth - 1)
