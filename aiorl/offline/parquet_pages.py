"""Pages of a Parquet file: how much memory they take decoded, found out before anything is decoded.

The footer tells the number of values of a column, but a reader decodes all that is in the pages of its rows, whatever
the footer says. So pages are counted by their own headers. Footer and headers are structs in Thrift's compact protocol
(https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift); they are read here, since
pyarrow's own view of a damaged footer can end the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from aiorl.errors import DataError

__all__ = ["RowGroup", "decoded_bytes", "read_row_groups"]

_I32, _I64 = 5, 6
_Kept = Mapping[int, Any]
"""Number of a field -> the type of its number, what to keep of its struct, or [what to keep of a list's structs]."""
_CHUNK: _Kept = {5: _I64, 7: _I64, 9: _I64, 11: _I64}
_FOOTER: _Kept = {4: [{1: [{3: _CHUNK}], 3: _I64}]}
_DICTIONARY = 7
_OF_PAGES = {5: {1: _I32}, _DICTIONARY: {1: _I32}, 8: {1: _I32}}  # with data, and data of version 2
_HEADER: _Kept = {2: _I32, 3: _I32, **_OF_PAGES}
_HEADER_BYTES = (1 << 12, 1 << 20)
_MAX_FOOTER_BYTES = 1 << 24
_MAX_KEPT = 1 << 20
_MAX_NESTED = 8
_MAX_NUMBER = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "INT96": 12}
"""Bytes of a decoded value; of texts, which are read as a dictionary, those of an entry's number."""


class RowGroup(NamedTuple):
    """A row group as the footer describes it.

    Attributes:
        num_rows: its rows.
        chunks: what is known of each column.
    """

    num_rows: int
    chunks: list[Mapping[int, Any]]


def read_row_groups(file: IO[bytes]) -> list[RowGroup]:
    """Return the row groups that a file's footer describes.

    Raises:
        DataError: it has no footer that can be read.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    if length > min(size - 8, _MAX_FOOTER_BYTES):
        raise DataError(f"a footer of {length:,} bytes")
    file.seek(size - 8 - length)
    try:
        groups = _Compact(file.read(length)).struct(_FOOTER).get(4, [])
    except IndexError as error:
        raise DataError("a damaged footer") from error
    return [RowGroup(_number(group, 3), [chunk.get(3, {}) for chunk in group.get(1, [])]) for group in groups]


def decoded_bytes(file: IO[bytes], chunk: Mapping[int, Any], column: Any) -> int:
    """Return an upper bound of the bytes that a column of a row group takes decoded.

    Args:
        file: the whole file.
        chunk: of the row group.
        column: pyarrow's ColumnSchema of it.

    Raises:
        DataError: a page has no header that can be read.
    """
    width = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(column.physical_type, 8)
    width += 4 * max(0, column.max_repetition_level - 1)  # where the lists within a row begin
    at, first = _number(chunk, 9), chunk.get(11, 0)
    if 0 < first < at:
        at = first
    end, total, num_values = at + _number(chunk, 7), 0, 0
    while at < end:
        header, size = _page_header(file, at)
        counts = {kind: _number(header[kind], 1) for kind in _OF_PAGES if kind in header}
        total += max(_number(header, 2), width * sum(counts.values()))
        num_values += sum(counts.values()) - counts.get(_DICTIONARY, 0)
        at += size + _number(header, 3)
    if num_values < _number(chunk, 5):  # a reader would look for the others behind them
        raise DataError("a column without all of its pages")
    return total


def _number(fields: Mapping[int, Any], number: int) -> int:
    found = fields.get(number)
    if type(found) is not int or found < 0:
        raise DataError("a damaged footer or page")
    return found


def _page_header(file: IO[bytes], at: int) -> tuple[Mapping[int, Any], int]:
    """The header of the page that begins at a place, and its length."""
    for most in _HEADER_BYTES:
        file.seek(at)
        reader = _Compact(file.read(most))
        try:
            return reader.struct(_HEADER), reader.at
        except IndexError:
            continue
    raise DataError("a damaged page")


class _Compact:
    """Reads a struct in Thrift's compact protocol, as any reader does that knows no more of it.

    Attributes:
        at: number of the next byte.
    """

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self._data = data
        self.at = 0

    def struct(self, kept: _Kept, depth: int = 0) -> dict[int, Any]:
        """Number of a field -> value, of the fields that are kept.

        Raises:
            IndexError: the bytes end within it.
            DataError: it is no struct that could be meant in one way only.
        """
        fields: dict[int, Any] = {}
        seen: set[int] = set()
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in seen or not 0 < number <= _MAX_NUMBER:  # others read numbers modulo 2^16
                raise DataError("a damaged footer or page")
            seen.add(number)
            wanted = kept.get(number)
            value = self._value(head & 15, wanted, depth)
            if wanted is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, wanted: Any, depth: int) -> Any:
        expected = {int: wanted, list: 9, dict: 12}.get(type(wanted), kind)
        if depth > _MAX_NESTED or kind != expected:
            raise DataError("a damaged footer or page")
        if kind in (1, 2):  # true and false, within the head of a field
            return None
        if kind in (4, _I32, _I64):
            return self._integer()
        if kind == 9:
            return self._list(wanted[0] if wanted else None, depth)
        if kind == 12:
            return self.struct(wanted or {}, depth + 1)
        if kind not in (3, 7, 8):
            raise DataError("a damaged footer or page")
        length = {3: 1, 7: 8}.get(kind) or self._varint()
        self.at += length
        if self.at > len(self._data):
            raise IndexError
        return None

    def _list(self, wanted: Any, depth: int) -> list[Any]:
        head = self._byte()
        kind, size = head & 15, head >> 4
        if size == 15:
            size = self._varint()
        if wanted is not None and (kind != 12 or size > _MAX_KEPT):
            raise DataError("a damaged footer or page")
        kept = []
        for _ in range(size):
            value = self._value(3 if kind in (1, 2) else kind, wanted, depth + 1)
            if wanted is not None:
                kept.append(value)
        return kept

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128 and shift < 63:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
