"""RLlib's JSON lines: a batch as one JSON object, its columns plain lists or text that holds a compressed array.

    {"type": "SampleBatch", "obs": [[...], ...] or "BCJNGGh...", "actions": [...], ...}
    {"type": "MultiAgentBatch", "count": 4, "policy_batches": {"policy": {"obs": ...}}}

either of them perhaps as the only entry, ``{"value": {...}}``. The text is base64 of an LZ4 frame of a pickled array;
`aiorl.offline.pickled_array` reads it without unpickling.
"""

from __future__ import annotations

import binascii
from collections.abc import Generator, Mapping
from typing import Any

import lz4.frame
import numpy as np
from numpy.typing import NDArray

from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions
from aiorl.offline.json_file import JsonFile, jsonable, read_lines
from aiorl.offline.pickled_array import read_pickled_array
from aiorl.offline.stored_columns import Room, check_policies, plain_column, to_batch

__all__ = ["RllibJson", "is_rllib", "rllib_batch", "unpack_lz4"]

_NO_COLUMNS = frozenset({"type", "count"})
_MAX_EXPANSION = 255  # an LZ4 block cannot hold more than this many bytes per byte


class RllibJson(Format):
    """JSON lines as RLlib writes them; written without compression, since that would take a pickle."""

    name = "rllib"
    suffixes = ()
    about = "JSON lines as RLlib writes and reads them (written with plain columns)"
    can_be_wrapped = True

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See Format."""
        return read_lines(path, share, rllib_batch)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See Format."""
        return JsonFile(path, _to_rllib)


def is_rllib(line: Mapping[str, object]) -> bool:
    """Whether a line is one of RLlib's."""
    return "type" in line or line.keys() == {"value"}


def rllib_batch(line: Mapping[str, Any]) -> Batch:
    """The batch of one line.

    Raises:
        DataError: it holds no batch, or one that cannot be read.
    """
    if line.keys() == {"value"} and isinstance(line["value"], dict):
        line = line["value"]
    kind = line.get("type")
    room = Room()
    if kind == "SampleBatch":
        return _sample_batch(line, room)
    if kind != "MultiAgentBatch":
        raise DataError("its type is neither SampleBatch nor MultiAgentBatch")
    count, policies = line.get("count"), check_policies(line.get("policy_batches"))
    if type(count) is not int or not 0 <= count < 2**53:
        raise DataError("a MultiAgentBatch needs a count of steps")
    if not all(isinstance(rows, dict) for rows in policies.values()):
        raise DataError("policy_batches must be columns by policy id")
    return MultiAgentBatch({policy_id: _sample_batch(rows, room) for policy_id, rows in policies.items()}, count)


def _sample_batch(columns: Mapping[str, Any], room: Room) -> SampleBatch:
    made: dict[str, NDArray[Any]] = {}
    for name, value in columns.items():
        if name in _NO_COLUMNS and not isinstance(value, list):
            continue
        made[name] = _column(name, value, room.left)
        room.take(made[name].nbytes)
    return to_batch(made)


def _column(name: str, value: object, room: int) -> NDArray[Any]:
    if isinstance(value, str):
        return _unpacked(name, value, room)
    if isinstance(value, list) and value and isinstance(value[0], str):  # each row on its own
        rows: list[NDArray[Any]] = []
        for text in value:
            if not isinstance(text, str):
                raise DataError(f"column {name!r} has compressed rows and others")
            rows.append(_unpacked(name, text, room))
            room -= rows[-1].nbytes
        try:
            return np.stack(rows)
        except ValueError as error:
            raise DataError(f"column {name!r} has rows that differ in shape") from error
    return plain_column(name, value)


def _unpacked(name: str, text: str, room: int) -> NDArray[Any]:
    try:
        frame = binascii.a2b_base64(text, strict_mode=True)
        return read_pickled_array(unpack_lz4(frame, room), max_bytes=room)
    except binascii.Error as error:
        raise DataError(f"column {name!r} is text that is no compressed array ({error})") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise DataError(f"column {name!r}: {error.reason}") from error
        raise DataError(f"column {name!r} is text that is no compressed array") from error


def unpack_lz4(frame: bytes, max_bytes: int) -> bytes:
    """What an LZ4 frame holds.

    Raises:
        DataError: it is damaged, or holds more than allowed; found before memory is taken.
    """
    try:
        size = int(lz4.frame.get_frame_info(frame)["content_size"])
        most = size or min(len(frame) * _MAX_EXPANSION, max_bytes)
        if size > max_bytes or size > len(frame) * _MAX_EXPANSION:
            raise DataError(f"compressed data of {size:,} bytes in {len(frame):,}, more than there can or may be")
        unpacker = lz4.frame.LZ4FrameDecompressor()
        raw: bytes = unpacker.decompress(frame, max_length=most + 1)
    except (RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"damaged compressed data ({error})") from error
    if not unpacker.eof or unpacker.unused_data:
        raise DataError("compressed data that are cut short, too large or followed by others")
    return raw


def _to_rllib(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, SampleBatch):
        return {"type": "SampleBatch", **jsonable(batch)}
    policies = {policy_id: jsonable(rows) for policy_id, rows in batch.policy_batches.items() if rows.count}
    return {"type": "MultiAgentBatch", "count": batch.count, "policy_batches": policies}
