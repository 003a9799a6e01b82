"""Pages of a Parquet file: how much memory they take decoded, told before anything is decoded.

The footer of a file says it too, and may say anything: a reader of 50 rows decodes every value of the pages that they
are in. Each page has a header of its own, a struct in Thrift's compact protocol, and is decoded by what that says:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from typing import IO, Any

from aiorl.errors import DataError

__all__ = ["decoded_bytes"]

_HEADER_BYTES = (1 << 12, 1 << 20)
_NUM_BYTES, _COMPRESSED_BYTES = 2, 3
_DICTIONARY = 7
_KINDS = (5, _DICTIONARY, 8)  # with data, and data of version 2
_NUM_VALUES = 1
_MAX_NESTED = 4
_MAX_NUMBER = 100
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "INT96": 12}
"""Bytes of a decoded value; of text that is read as numbers of a dictionary's entries, of the number."""


def decoded_bytes(file: IO[bytes], chunk: Any, column: Any) -> int:
    """Return an upper bound of the bytes that a column of a row group takes decoded.

    Args:
        file: the whole file.
        chunk: pyarrow's ColumnChunkMetaData.
        column: pyarrow's ColumnSchema of it.

    Raises:
        DataError: a page has no header that can be read.
    """
    width = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(column.physical_type, 8)
    width += 4 * max(0, column.max_repetition_level - 1)  # where the lists within a row begin
    at, first = chunk.data_page_offset, chunk.dictionary_page_offset
    if first and first < at:
        at = first
    end, total, num_values = at + chunk.total_compressed_size, 0, 0
    while at < end:
        header, size = _header(file, at)
        counts = {kind: _number(header[kind], _NUM_VALUES) for kind in _KINDS if kind in header}
        total += max(_number(header, _NUM_BYTES), width * sum(counts.values()))
        num_values += sum(counts.values()) - counts.get(_DICTIONARY, 0)
        at += size + _number(header, _COMPRESSED_BYTES)
    if num_values < chunk.num_values:  # a reader would look for the others behind them
        raise DataError("a column without all of its pages")
    return total


def _number(fields: object, number: int) -> int:
    found = fields.get(number) if isinstance(fields, dict) else None
    if type(found) is not int or found < 0:
        raise DataError("a damaged page")
    return found


def _header(file: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """The header of the page that begins at a place, and its length."""
    for most in _HEADER_BYTES:
        file.seek(at)
        reader = _Compact(file.read(most))
        try:
            return reader.struct(), reader.at
        except IndexError:
            continue
    raise DataError("a damaged page")


class _Compact:
    """Reads a struct in Thrift's compact protocol, as far as headers of pages have its types.

    Attributes:
        at: number of the next byte.
    """

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Field's number -> value; True where it is of no use here.

        Raises:
            IndexError: the bytes end within it.
            DataError: it is no header of a page.
        """
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in fields or not 0 < number <= _MAX_NUMBER:  # others read them modulo 2^16
                raise DataError("a damaged page")
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true and false
            return True
        if kind in (4, 5, 6):
            found = self._integer()
            return found if kind == 5 else True
        if kind == 12 and depth < _MAX_NESTED:
            return self.struct(depth + 1)
        if kind not in (3, 7, 8):
            raise DataError("a damaged page")
        length = {3: 1, 7: 8}.get(kind) or self._varint()
        self.at += length
        if self.at > len(self._data):
            raise IndexError
        return True

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
