"""Read the one thing that RLlib pickles into its files, an array of numbers, without ever unpickling.

A pickle is a program: it names functions, and unpickling calls them. Here its opcodes are walked with an own stack on
which lie numbers, text, bytes, tuples and the names of a few constructors of NumPy. Nothing is imported, looked up or
called; "calling" a constructor notes its arguments, and an array is made of them at the end, if they are the shape,
dtype and bytes of one. Every other name or opcode is refused with its name.

These are the spellings that NumPy 1 and 2 write at protocols 2 to 5, C-ordered and Fortran-ordered:

    numpy.core.numeric._frombuffer(bytes, dtype, shape, order)                        protocol 5, contiguous
    numpy.core.multiarray._reconstruct(ndarray, (0,), b"b") <- (1, shape, dtype, is_fortran, bytes)
    numpy.core.multiarray.scalar(dtype, bytes)

with ``numpy._core`` for ``numpy.core`` since NumPy 2, and bytes as ``_codecs.encode(text, "latin1")`` at protocol 2
(``bytes()`` if there are none).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import DataError
from aiorl.text import one_line

__all__ = ["MAX_DIMS", "read_pickled_array"]

MAX_DIMS = 8
_MAX_OPCODES = 400
_MAX_ROWS = 1 << 28
_MAX_TEXT = 200
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")


class _Constructor(Enum):
    """What a pickled array may name."""

    FROM_BUFFER = "_frombuffer"
    RECONSTRUCT = "_reconstruct"
    SCALAR = "scalar"
    ARRAY_TYPE = "ndarray"
    DTYPE = "dtype"
    BYTES = "bytearray"
    ENCODE = "encode"


_NAMES: Final = {
    **{
        (f"numpy.{core}.{module}", name.value): name
        for core in ("core", "_core")
        for module, name in (
            ("numeric", _Constructor.FROM_BUFFER),
            ("multiarray", _Constructor.RECONSTRUCT),
            ("multiarray", _Constructor.SCALAR),
        )
    },
    ("numpy", "ndarray"): _Constructor.ARRAY_TYPE,
    ("numpy", "dtype"): _Constructor.DTYPE,
    ("builtins", "bytearray"): _Constructor.BYTES,
    ("__builtin__", "bytearray"): _Constructor.BYTES,
    ("__builtin__", "bytes"): _Constructor.BYTES,  # of no bytes, at protocol 2
    ("_codecs", "encode"): _Constructor.ENCODE,
}


@dataclass(slots=True, eq=False)
class _Dtype:
    code: str
    order: str = "="


@dataclass(slots=True, eq=False)
class _Latin1:
    """Bytes that are written as text; they are made when all else is known to be right."""

    text: str


@dataclass(slots=True, eq=False)
class _Pending:
    """An array that is not made yet: bytes, dtype, shape and order, once they were given."""

    parts: tuple[object, ...] | None = None


class _Mark:
    """Where on the stack a tuple begins."""


_MARK = _Mark()


def read_pickled_array(data: bytes, *, max_bytes: int) -> NDArray[Any]:
    """The array in a pickle of one.

    Args:
        data: the pickle.
        max_bytes: the size that the array may have.
    Returns: the array, read-only where its bytes are those of the pickle.

    Raises:
        DataError: it holds anything but an array of numbers; the message names what it asked for.
    """
    if data[:1] != _PROTO:
        raise DataError(
            "a compressed column is no pickle of protocol 2 to 5; RLlib before 0.8.5 wrote another form: read the file "
            "with an RLlib of that age and write it again without compression (output_compress_columns: [])"
        )
    try:
        made = _Walk(data).run()
        return _array(made, max_bytes)
    except (IndexError, struct.error, UnicodeError) as error:
        raise DataError("a pickled array is cut short or damaged") from error


class _Walk:
    """One walk over the opcodes of a pickle."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> object:
        """What the pickle's last opcode finds on the stack."""
        for _ in range(_MAX_OPCODES):
            code = self._take(1)[0]
            if code == _STOP:
                return self._pop()
            step = _OPCODES.get(code)
            if step is None:
                raise _refused(f"the opcode {bytes([code])!r}")
            step(self)
        raise _refused(f"more than {_MAX_OPCODES} opcodes")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise IndexError(size)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _MAX_TEXT)
        if end < 0:
            raise IndexError(end)
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def _skip(self, size: int) -> None:
        self._take(size)

    def _push_number(self, form: str) -> None:
        self._push(self._number(form))

    def _push_long(self) -> None:
        size = self._number("B")
        if size > 8:
            raise _refused(f"a number of {size} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _push_text(self, form: str) -> None:
        self._push(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def _push_bytes(self, form: str) -> None:
        self._push(self._take(self._number(form)))

    def _push_tuple(self, size: int) -> None:
        items = tuple(reversed([self._pop() for _ in range(size)]))
        self._push(items)

    def _push_marked(self) -> None:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        self._push(tuple(reversed(items)))

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _refused("a name that is no text")
        found = _NAMES.get((module, name))
        if found is None:
            raise _refused(f"{module}.{name}")
        self._push(found)

    def _name_in_lines(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def _name_on_stack(self) -> None:
        name = self._pop()
        self._name(self._pop(), name)

    def _get(self, form: str) -> None:
        number = self._number(form)
        if number not in self._memo:
            raise IndexError(number)
        self._push(self._memo[number])

    def _put(self, form: str) -> None:
        self._memo[self._number(form)] = self._top()

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def _top(self) -> Any:
        value = self._pop()
        self._push(value)
        return value

    def _reduce(self) -> None:
        arguments = self._pop()
        self._push(_called(self._pop(), arguments))

    def _build(self) -> None:
        state = self._pop()
        match self._top(), state:
            case _Dtype() as dtype, (int(), "<" | ">" | "|" | "=" as order, None, None, None, int(), int(), int()):
                dtype.order = order
            case _Pending(parts=None) as pending, (
                int(),
                tuple() as shape,
                _Dtype() as dtype,
                bool() | int() as f,
                data,
            ):
                pending.parts = (data, dtype, shape, "F" if f else "C")
            case _:
                raise _refused("a state that is none of an array of numbers")


def _called(constructor: object, arguments: object) -> object:
    """What a constructor makes of its arguments; nothing is called."""
    match constructor, arguments:
        case _Constructor.DTYPE, (str() as code, int(), int()):
            if not _NUMBERS.fullmatch(code):
                raise _refused(f"an array of dtype {code!r}")
            return _Dtype(code)
        case _Constructor.ENCODE, (str() as text, "latin1" | "latin-1"):
            return _Latin1(text)
        case _Constructor.BYTES, (bytes() | _Latin1() as data,):
            return data
        case _Constructor.BYTES, ():
            return b""
        case _Constructor.FROM_BUFFER, (data, _Dtype() as dtype, tuple() as shape, "C" | "F" as order):
            return _Pending((data, dtype, shape, order))
        case _Constructor.RECONSTRUCT, (_Constructor.ARRAY_TYPE, (0,), bytes() | _Latin1()):
            return _Pending()
        case _Constructor.SCALAR, (_Dtype() as dtype, data):
            return _Pending((data, dtype, (), "C"))
        case _Constructor(), _:
            raise _refused(f"{constructor.value} with other arguments than an array's")
        case _:
            raise _refused("a call of what is no constructor of arrays")


def _array(made: object, max_bytes: int) -> NDArray[Any]:
    if not isinstance(made, _Pending) or made.parts is None:
        raise _refused("something that is no array")
    data, dtype, shape, order = made.parts
    assert isinstance(dtype, _Dtype)
    assert isinstance(shape, tuple)
    if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size <= _MAX_ROWS for size in shape):
        raise DataError("a pickled array has an impossible shape")
    code = np.dtype(dtype.code) if dtype.order in "=|" else np.dtype(dtype.order + dtype.code)
    size = math.prod(shape) * code.itemsize
    if size > max_bytes:
        raise DataError(f"a pickled array of {size:,} bytes, more than the {max_bytes:,} that are allowed")
    if isinstance(data, _Latin1):
        data = data.text.encode("latin1")
    if not isinstance(data, bytes) or len(data) != size:
        raise DataError(f"a pickled array of {size:,} bytes brings another number of them")
    array: NDArray[Any] = np.frombuffer(data, code) if size else np.empty(0, code)
    if code.kind == "b" and size and array.view(np.uint8).max() > 1:
        raise DataError("a pickled array of booleans holds other numbers than 0 and 1")
    native: NDArray[Any] = array.astype(code.newbyteorder("="), copy=False)
    return native.reshape(shape, order="F" if order == "F" else "C")


def _refused(what: str) -> DataError:
    return DataError(
        f"a compressed column is a pickle that asks for {one_line(what, _MAX_TEXT)}; only arrays of numbers are read"
    )


def _opcode(name: str, *arguments: Any) -> Callable[[_Walk], None]:
    return lambda walk: getattr(walk, name)(*arguments)


_PROTO, _STOP = b"\x80", ord(".")
_OPCODES: Final[dict[int, Callable[[_Walk], None]]] = {
    0x80: _opcode("_skip", 1),  # PROTO
    0x95: _opcode("_skip", 8),  # FRAME
    ord("("): _opcode("_push", _MARK),
    ord("N"): _opcode("_push", None),
    0x88: _opcode("_push", True),
    0x89: _opcode("_push", False),
    ord("K"): _opcode("_push_number", "<B"),
    ord("M"): _opcode("_push_number", "<H"),
    ord("J"): _opcode("_push_number", "<i"),
    0x8A: _opcode("_push_long"),  # LONG1
    0x8C: _opcode("_push_text", "<B"),  # SHORT_BINUNICODE
    ord("X"): _opcode("_push_text", "<I"),
    0x8D: _opcode("_push_text", "<Q"),  # BINUNICODE8
    ord("C"): _opcode("_push_bytes", "<B"),
    ord("B"): _opcode("_push_bytes", "<I"),
    0x8E: _opcode("_push_bytes", "<Q"),  # BINBYTES8
    0x96: _opcode("_push_bytes", "<Q"),  # BYTEARRAY8
    ord(")"): _opcode("_push_tuple", 0),
    0x85: _opcode("_push_tuple", 1),
    0x86: _opcode("_push_tuple", 2),
    0x87: _opcode("_push_tuple", 3),
    ord("t"): _opcode("_push_marked"),
    ord("c"): _opcode("_name_in_lines"),
    0x93: _opcode("_name_on_stack"),  # STACK_GLOBAL
    ord("h"): _opcode("_get", "<B"),
    ord("j"): _opcode("_get", "<I"),
    ord("q"): _opcode("_put", "<B"),
    ord("r"): _opcode("_put", "<I"),
    0x94: _opcode("_memoize"),
    ord("R"): _opcode("_reduce"),
    ord("b"): _opcode("_build"),
}
