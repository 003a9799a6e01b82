"""Reading of the only kind of pickle in RLlib's files: an array of numbers.

A pickle is a program: it names functions, and unpickling calls them. Here each of NumPy's names
that build arrays stands for a function of ours that only records its arguments, and any other name
is refused. So is each opcode that no array needs, before anything is unpickled. In the end NumPy
makes the array, if the records are the shape, dtype and bytes of one.

NumPy 1 and 2 write these forms at protocols 2 to 5, C-ordered and Fortran-ordered:

    numpy.core.numeric._frombuffer(bytes, dtype, shape, order)    protocol 5, contiguous
    numpy.core.multiarray._reconstruct(ndarray, (0,), b"b") <- (1, shape, dtype, is_fortran, bytes)
    numpy.core.multiarray.scalar(dtype, bytes)

with ``numpy._core`` for ``numpy.core`` since NumPy 2, and bytes as ``_codecs.encode(text,
"latin1")`` at protocol 2 (``bytes()`` if they are empty).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable

import numpy as np

from aiorl.data.columns import Array
from aiorl.errors import DataError
from aiorl.offline.stored_columns import from_bytes
from aiorl.text import one_line

_MAX_OPCODES = 400
_MAX_TEXT = 200
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")
_ARRAYS = """
PROTO FRAME MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 SHORT_BINUNICODE BINUNICODE BINUNICODE8
SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE GLOBAL STACK_GLOBAL
BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE REDUCE BUILD STOP
"""
_OPCODES = frozenset(_ARRAYS.split())


def read_pickled_array(data: bytes) -> Array:
    """Return the array in a pickle; it is read-only if it shares the memory of the pickle.

    Raises:
        DataError: the pickle has other contents than an array of numbers; the message names them.
    """
    if data[:1] != b"\x80":
        raise DataError(
            "a compressed column is not a pickle of protocol 2 to 5. RLlib before 0.8.5 wrote"
            " another form: read the file with that version and write it again without compression"
            " (output_compress_columns: [])"
        )
    try:
        _check_opcodes(data)
        return _array(_Unpickler(io.BytesIO(data)).load())
    except DataError:
        raise
    except Exception as error:  # the opcodes can make the unpickler raise anything
        raise DataError("a pickled array is cut short or damaged") from error


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that no array needs, and those that take more memory than the pickle has
    bytes.
    """
    import pickletools  # only needed to read pickles

    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise _refused(f"the opcode {opcode.name}")
        if number >= _MAX_OPCODES or (
            opcode.name.endswith("PUT") and int(argument or 0) > _MAX_OPCODES
        ):
            raise _refused(f"more than {_MAX_OPCODES} opcodes")


class _Dtype:
    """Record of a dtype."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "="

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), "<" | ">" | "|" | "=" as order, None, None, None, int(), int(), int()):
                self.order = order
            case _:
                raise _refused("a state that is not of a dtype of numbers")


class _Array:
    """Record of an array's bytes, dtype, shape and order."""

    __slots__ = ("parts",)

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        match state:
            case (
                int(),
                tuple() as shape,
                _Dtype() as dtype,
                bool() | int() as is_fortran,
                data,
            ) if not self.parts:
                self.parts = (data, dtype, shape, "F" if is_fortran else "C")
            case _:
                raise _refused("a state that is not of an array of numbers")


def _built(name: str, arguments: tuple[object, ...]) -> object:
    """Return the record for a constructor of NumPy, or for bytes, with its arguments."""
    match name, arguments:
        case "dtype", (str() as code, int(), int()):
            if not _NUMBERS.fullmatch(code):
                raise _refused(f"an array of dtype {code!r}")
            return _Dtype(code)
        case "encode", (str() as text, "latin1" | "latin-1"):
            return text  # encoded at the end, because a pickle can repeat it many times
        case "bytearray" | "bytes", (bytes() | str() as data,):
            return data
        case "bytes", ():
            return b""
        case "_frombuffer", (data, _Dtype() as dtype, tuple() as shape, "C" | "F" as order):
            return _Array(data, dtype, shape, order)
        case "_reconstruct", (_, (0,), bytes() | str()):
            return _Array()
        case "scalar", (_Dtype() as dtype, data):
            return _Array(data, dtype, (), "C")
    raise _refused(f"{name} with other arguments than those of an array")


_NAMES = {
    "numpy.core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "builtins.bytearray",
    "__builtin__.bytearray",
    "__builtin__.bytes",
    "_codecs.encode",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Return a new function that records its arguments, so that a pickle can't change our
        objects.

        Raises:
            DataError: no array needs the name.
        """
        if f"{module.replace('numpy._core', 'numpy.core')}.{name}" not in _NAMES:
            raise _refused(f"{module}.{name}")
        return lambda *arguments: _built(name, arguments)


def _array(built: object) -> Array:
    match built:
        case _Array(parts=(data, _Dtype() as dtype, tuple() as shape, "C" | "F" as order)):
            code = dtype.code
            if dtype.order not in "=|":
                code = dtype.order + dtype.code
            raw = data.encode("latin1") if isinstance(data, str) else data
            return from_bytes(raw, np.dtype(code), shape, "F" if order == "F" else "C")
    raise _refused("something that is not an array")


def _refused(what: str) -> DataError:
    return DataError(
        f"a compressed column is a pickle that asks for {one_line(what, _MAX_TEXT)}; only arrays of"
        " numbers are allowed"
    )
