"""Persistent state of a worker as bytes: filters and policies, in msgpack; reading it runs no
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiorl.config.files import check_depth
from aiorl.data.nested_codec import pack, unpack
from aiorl.errors import BadFrame, CheckpointError

_FORMAT = "aiorl-rollout-worker"
_VERSION = 1
_MAX_DEPTH = 64
_WHERE = "of a rollout worker"


class SavedState(NamedTuple):
    """State of a worker's filters and policies.

    Attributes:
        filters: statistics of the observation filters by policy id.
        policies: results of ``get_state`` by policy id.
    """

    filters: Mapping[str, Mapping[str, Any]]
    policies: Mapping[str, Mapping[str, Any]]


def dump_state(state: SavedState) -> bytes:
    """Return the state as bytes.

    Raises:
        CheckpointError: a policy's state contains a value other than numbers, strings, arrays, and
            lists and dicts of these.
    """
    try:
        return pack({"format": _FORMAT, "version": _VERSION, **state._asdict()})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(_WHERE, f"a policy's state cannot be saved: {error}") from error


def load_state(data: bytes) -> SavedState:
    """Return the state from the bytes of `dump_state`.

    Raises:
        CheckpointError: the bytes are damaged, or not from `dump_state`.
    """
    try:
        content = unpack(data)
        check_depth(content, _MAX_DEPTH)
    except (BadFrame, ValueError) as error:
        raise CheckpointError(_WHERE, f"its bytes are damaged: {error}") from error
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise CheckpointError(_WHERE, "its bytes are not from RolloutWorker.save()")
    if content.get("version") != _VERSION:
        raise CheckpointError(
            _WHERE, f"its version is {content.get('version')!r}, but this aiorl reads {_VERSION}"
        )
    fields: list[Any] = [content.get(name) for name in SavedState._fields]
    saved = SavedState(*fields)
    for name, entries in saved._asdict().items():
        if not isinstance(entries, Mapping) or not all(
            isinstance(entry, Mapping) for entry in entries.values()
        ):
            raise CheckpointError(_WHERE, f"its {name} are damaged")
    return saved
