"""Values of calls: what messages can carry, and the marks by which other kinds of data travel.

Numbers, texts, bytes, arrays of numbers, lists and dicts with texts as keys are sent as they are.
Anything else is a dict with one key that begins with ``$``: its kind. Classes and functions are
named, never shipped. Nothing here runs code of the sender.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

import numpy as np

from aiorl.config.code import import_object, import_path_of, importable_place
from aiorl.data.columns import Array
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import RemoteProtocolError, UnsendableError
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes
from aiorl.net.wire.format import DTYPES, Limits
from aiorl.net.wire.messages import Value

LIMITS: Final = Limits(max_map=1 << 16, max_depth=64)
"""Limits of the messages between actors and their hub."""
ENDPOINT_LIMITS: Final = EndpointLimits(times=EndpointTimes(dead_after_s=120.0))
"""Limits of the endpoints: the event loop of a user's program may stand still for minutes."""

UNKNOWN_ACTOR: Final = "it has ended, or another actor has started it, which alone can call it"

MakeHandle: TypeAlias = Callable[[str, str], Any]
"""(name of an actor, import path of its class) -> its handle."""

_ARRAY_BYTES = 256
"""Memory of an array and its view of a frame, without the numbers in it."""
_MAX_ROWS = 1 << 20
"""Rows of all arrays of objects in one value: an empty dict is one byte of a message."""
_ROW_BYTES = 72
"""Memory of a row with an empty dict."""
_BULK_BYTES = 1 << 12
"""Longer texts and bytes are sent as arrays, outside of the header."""
_NATIVE = frozenset(DTYPES.values())
"""Types of arrays that are sent as they are."""
_CONTAINERS = frozenset({dict, list})
_MIN_INT = -(1 << 63)
_MAX_INT = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class ActorName:
    """An actor in a value.

    Attributes:
        name: its name.
        path: import path of its class.
    """

    name: str
    path: str

    def __getattr__(self, name: str) -> Any:
        """Refuse calls: it stands for an actor that the process does not know."""
        raise AttributeError(f"{self.name} can't be called from here: {UNKNOWN_ACTOR}")


def pack(value: Any) -> Value:
    """Return a value as data that a message can carry, with copies of its arrays: they may change
    before it is sent. The copies can't be written to, since several calls may share them.

    Tuples, sets, dicts with any keys, NumPy numbers, batches, fragments, spaces, observation
    filters, metrics of episodes, handles of actors, classes and functions at the top level of a
    module, and `functools.partial` of these arrive as what they are.

    Raises:
        UnsendableError: it contains something else.
    """
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return cast(Value, value)
    if kind is int:
        if not _MIN_INT <= value <= _MAX_INT:
            raise UnsendableError(f"{value} does not fit into 64 bits")
        return cast(Value, value)
    if kind is str:
        return _packed_text(value)
    if kind is np.ndarray:
        return _packed_array(value)
    if kind is dict:
        return _packed_dict(value)
    if kind is list:
        return _packed_items(value)
    if kind is tuple:
        return {"$tuple": _packed_items(value)}
    return _packed_other(value)


def _packed_other(value: Any) -> Value:
    # These modules take long to load; a process that has such a value has loaded its module.
    if _is_a(value, "gymnasium", "Space"):  # before mappings, as a Dict space is one
        from aiorl.data.spaces import space_to_dict

        return {"$space": pack(space_to_dict(value))}
    if _is_a(value, "aiorl.acting.filters", "ObservationFilter"):
        from aiorl.acting.filters import filter_to_dict

        return {"$filter": pack(filter_to_dict(value))}
    if _is_a(value, "aiorl.offline.estimators", "OffPolicyEstimate"):
        return {"$estimate": _packed_items(value)}
    match value:
        case RolloutMetrics():
            return {"$metrics": _packed_items(value)}
        case np.generic():
            return {"$number": _checked_array(np.asarray(value))}
        case bytes() | bytearray() | memoryview():
            return _packed_bytes(bytes(value))
        case SampleBatch():
            columns = {name: _packed_array(column) for name, column in value.items()}
            return {"$batch": {"columns": columns, "env_steps": value.env_steps}}
        case MultiAgentBatch():
            batches = {policy_id: pack(batch) for policy_id, batch in value.policy_batches.items()}
            return {"$batches": {"policies": batches, "env_steps": value.env_steps}}
        case Fragment():
            return {"$fragment": {"columns": pack(value.columns), "extras": pack(value.extras)}}
        case ActorName():
            return {"$actor": [value.name, value.path]}
        case functools.partial():
            return {"$partial": [pack(value.func), pack(list(value.args)), pack(value.keywords)]}
        case set() | frozenset():
            return {"$set": _packed_items(list(value))}
        case bool() | int() | float() | str():  # members of enumerations, and similar kinds
            raise UnsendableError(
                f"{value!r:.100} is a {type(value).__qualname__}, which would arrive as plain data:"
                " send its value"
            )
        case tuple():
            return {"$tuple": _packed_items(value)}
        case list():
            return _packed_items(value)
        case Mapping():
            return _packed_dict(value)
    actor = getattr(value, "__actor__", None)
    if isinstance(actor, ActorName):
        return pack(actor)
    path = import_path_of(value)
    if path is not None:
        return {"$code": path}
    if callable(value) and hasattr(value, "__qualname__"):
        raise UnsendableError(
            f"{value.__qualname__} can't be imported by other processes: define it by def or class"
            f" at the top level {importable_place()}; functools.partial gives a function its"
            " arguments"
        )
    raise UnsendableError(
        f"a {type(value).__qualname__} can't be sent to or from an actor: send its data as numbers,"
        " texts, arrays, lists and dicts"
    )


def _is_a(value: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)  # it lacks the name while it is being loaded
    return kind is not None and isinstance(value, kind)


def _packed_text(text: str) -> Value:
    if len(text) <= _BULK_BYTES // 4:
        return text
    return {"$text": np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)}


def _packed_bytes(data: bytes) -> Value:
    return data if len(data) <= _BULK_BYTES else {"$bytes": np.frombuffer(data, np.uint8)}


def _packed_array(array: Array) -> Value:
    """Return an array of numbers as it is; one of objects, such as infos, without its empty dicts."""
    if array.dtype.kind != "O" or array.ndim != 1:
        return _checked_array(array)
    if len(array) > _MAX_ROWS:
        raise UnsendableError(
            f"an array of {len(array):,} objects is too long for a message, at most {_MAX_ROWS:,}"
        )
    is_filled = np.array([type(item) is not dict or bool(item) for item in array], np.bool_)
    return {"$objects": {"is_filled": is_filled, "items": _packed_items(list(array[is_filled]))}}


def _checked_array(array: Array) -> Array:
    dtype = array.dtype
    if dtype not in _NATIVE and dtype.newbyteorder("<").str not in DTYPES:
        raise UnsendableError(
            f"an array of dtype {array.dtype} can't be sent to or from an actor: only arrays of"
            " numbers of at most 64 bits, and of booleans"
        )
    copied = array.copy()
    copied.setflags(write=False)
    return copied


def _packed_items(items: list[Any] | tuple[Any, ...]) -> list[Value]:
    if len(items) > LIMITS.max_map:
        raise UnsendableError(
            f"a sequence of {len(items):,} values is too long for a message, at most"
            f" {LIMITS.max_map:,}: put numbers into an array"
        )
    return [pack(item) for item in items]


def _packed_dict(items: Mapping[Any, Any]) -> Value:
    if len(items) > LIMITS.max_map:
        raise UnsendableError(
            f"a dict of {len(items):,} values is too long for a message, at most {LIMITS.max_map:,}"
        )
    for key in items:
        if type(key) is not str or key[:1] == "$" or len(key) >= _BULK_BYTES:
            return {"$dict": [[pack(key), pack(value)] for key, value in items.items()]}
    return {key: pack(value) for key, value in items.items()}


def num_bytes(value: Any) -> int:
    """Return the memory that a packed value takes in a process.

    An empty dict is one byte of a message, and 64 here.
    """
    kind = type(value)
    if kind is np.ndarray:
        return _ARRAY_BYTES + int(value.nbytes)
    size = sys.getsizeof(value)
    if not value:
        return size
    if kind is dict:
        rows = value.get("is_filled")  # of an array of objects
        if isinstance(rows, np.ndarray):
            size += _ROW_BYTES * rows.size
        return size + sum(map(sys.getsizeof, value)) + sum(map(num_bytes, value.values()))
    if kind is list:
        return size + sum(map(num_bytes, value))
    return size


def unpack(value: Value, make_handle: MakeHandle, *, imports_code: bool) -> Any:
    """Return what `pack` was given.

    Args:
        value: data of a message, from a peer.
        make_handle: makes handles of actors.
        imports_code: True if the peer may name classes and functions to import: the hub may, when
            it calls an actor.

    Raises:
        RemoteProtocolError: it is not a result of `pack`, or names code that can't be imported.
    """
    return _Reader(make_handle, imports_code).read(value)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedValue:
    """A value that is unpacked each time it is read, so that no reader sees what another changes.

    Only its arrays are the same each time; they can't be written to.

    Attributes:
        packed: result of `pack`, from a peer.
        make_handle: makes handles of actors.
        imports_code: True if the peer may name classes and functions to import.
    """

    packed: Value
    make_handle: MakeHandle
    imports_code: bool = False

    def unpack(self) -> Any:
        """Return the value.

        Raises:
            RemoteProtocolError: it is not a result of `pack`, or names code that can't be imported.
        """
        return unpack(self.packed, self.make_handle, imports_code=self.imports_code)

    def checked(self) -> Value:
        """Return the packed value, for a peer that may import all code that is named in it.

        Raises:
            RemoteProtocolError: see `unpack`; then the sender may not name this code.
        """
        self.unpack()
        return self.packed

    def parts(self) -> list[PackedValue]:
        """Return the items of a tuple or a list; none of another value."""
        items = self.packed
        if isinstance(items, dict) and list(items) == ["$tuple"]:
            items = items["$tuple"]
        if not isinstance(items, list):
            return []
        return [dataclasses.replace(self, packed=item) for item in items]


def refuse_handle(name: str, path: str) -> Any:
    """Refuse handles of actors, as the ``make_handle`` of `unpack` where there are no actors.

    Raises:
        RemoteProtocolError: always.
    """
    raise RemoteProtocolError(f"the actor {name:.64} of {path:.200} can't be called from here")


@dataclasses.dataclass(slots=True)
class _Reader:
    """Reader of packed values.

    Attributes:
        make_handle: makes handles of actors.
        imports_code: True if code may be imported.
        rows_left: rows of arrays of objects that may still come.
    """

    make_handle: MakeHandle
    imports_code: bool
    rows_left: int = _MAX_ROWS

    def read(self, value: Value) -> Any:
        """Return what `pack` was given.

        Raises:
            RemoteProtocolError: it is not a result of `pack`.
        """
        if type(value) is dict:
            if len(value) == 1:
                mark, content = next(iter(value.items()))
                if mark[:1] == "$":
                    return self._marked(mark, content)
            if _CONTAINERS.isdisjoint(map(type, value.values())):
                return value.copy()
            return {key: self.read(item) for key, item in value.items()}
        if type(value) is list:
            if _CONTAINERS.isdisjoint(map(type, value)):
                return value.copy()
            return [self.read(item) for item in value]
        return value

    def _marked(self, mark: str, content: Any) -> Any:
        """Return the value of a mark.

        Raises:
            RemoteProtocolError: there is no such mark, or its content does not fit.
        """
        read = _READERS.get(mark)
        if read is None:
            raise RemoteProtocolError(f"there is no kind of value called {mark[:40]!r}")
        try:
            return read(self, content)
        except RemoteProtocolError:
            raise
        except Exception as error:  # whatever a peer's content makes a reader raise
            raise RemoteProtocolError(f"a value marked {mark} can't be read: {error}") from error

    def _items(self, content: Any) -> list[Any]:
        if type(content) is not list:
            raise TypeError(f"expected a list, got a {type(content).__name__}")
        return [self.read(item) for item in content]

    def _tuple(self, content: Any) -> Any:
        return tuple(self._items(content))

    def _set(self, content: Any) -> Any:
        return set(self._items(content))

    def _dict(self, content: Any) -> Any:
        return {self.read(key): self.read(value) for key, value in content}

    def _number(self, content: Any) -> Any:
        return _array(content)[()]

    def _bytes(self, content: Any) -> Any:
        return _array(content).tobytes()

    def _text(self, content: Any) -> Any:
        return _array(content).tobytes().decode("utf-8", "surrogatepass")

    def _batch(self, content: Any) -> Any:
        columns = {name: _array(self.read(column)) for name, column in content["columns"].items()}
        batch = SampleBatch(columns)
        batch.env_steps = _count(content["env_steps"])
        return batch

    def _batches(self, content: Any) -> Any:
        batches = self.read(content["policies"])
        if not all(isinstance(batch, SampleBatch) for batch in batches.values()):
            raise TypeError("expected a sample batch for each policy")
        return MultiAgentBatch(batches, _count(content["env_steps"]))

    def _fragment(self, content: Any) -> Any:
        return Fragment(self.read(content["columns"]), self.read(content["extras"]))

    def _space(self, content: Any) -> Any:
        from aiorl.data.spaces import space_from_dict  # loads Gymnasium

        return space_from_dict(self.read(content))

    def _objects(self, content: Any) -> Any:
        is_filled = _array(content["is_filled"])
        if is_filled.dtype != np.bool_ or is_filled.ndim != 1:
            raise TypeError("expected a mask of the rows")
        self.rows_left -= len(is_filled)
        if self.rows_left < 0:
            raise TypeError(f"expected at most {_MAX_ROWS:,} rows of objects")
        items = self._items(content["items"])
        if len(items) != np.count_nonzero(is_filled):
            raise TypeError(f"expected as many items as the mask has, got {len(items)}")
        remaining = iter(items)
        array = np.empty(len(is_filled), object)
        for row, has_item in enumerate(is_filled.tolist()):
            array[row] = next(remaining) if has_item else {}
        return array

    def _filter(self, content: Any) -> Any:
        from aiorl.acting.filters import filter_from_dict  # loads Gymnasium

        return filter_from_dict(self.read(content))

    def _metrics(self, content: Any) -> Any:
        length, reward, *by_name = self._items(content)
        if not isinstance(length, int | np.integer) or not isinstance(reward, float | np.floating):
            raise TypeError("expected the length and the reward of an episode")
        if len(by_name) != 4 or not all(type(values) is dict for values in by_name):
            raise TypeError("expected four dicts of an episode's metrics")
        return RolloutMetrics(cast(int, length), cast(float, reward), *by_name)

    def _estimate(self, content: Any) -> Any:
        from aiorl.offline.estimators import OffPolicyEstimate  # loads readers of files

        name, metrics = self._items(content)
        if type(name) is not str or type(metrics) is not dict:
            raise TypeError("expected the name of an estimator and its metrics")
        return OffPolicyEstimate(name, metrics)

    def _actor(self, content: Any) -> Any:
        name, path = content
        if type(name) is not str or type(path) is not str:
            raise TypeError("expected a name and an import path")
        return self.make_handle(name, path)

    def _partial(self, content: Any) -> Any:
        function, args, kwargs = self._items(content)
        return functools.partial(function, *args, **kwargs)

    def _code(self, content: Any) -> Any:
        if not self.imports_code:
            raise RemoteProtocolError(
                f"an actor can't send the class or function {content!r:.200}: send data, such as"
                " its name"
            )
        return import_object(content, key="a value")


_READERS: Final[dict[str, Callable[[_Reader, Any], Any]]] = {
    "$tuple": _Reader._tuple,
    "$set": _Reader._set,
    "$dict": _Reader._dict,
    "$number": _Reader._number,
    "$bytes": _Reader._bytes,
    "$text": _Reader._text,
    "$batch": _Reader._batch,
    "$batches": _Reader._batches,
    "$fragment": _Reader._fragment,
    "$space": _Reader._space,
    "$objects": _Reader._objects,
    "$filter": _Reader._filter,
    "$metrics": _Reader._metrics,
    "$estimate": _Reader._estimate,
    "$actor": _Reader._actor,
    "$partial": _Reader._partial,
    "$code": _Reader._code,
}
"""Mark -> the method that reads its content."""


def _array(content: Any) -> Any:
    if type(content) is not np.ndarray:
        raise TypeError(f"expected an array, got a {type(content).__name__}")
    return content


def _count(content: Any) -> int:
    if type(content) is not int:
        raise TypeError(f"expected a number of env steps, got {content!r:.40}")
    return content
