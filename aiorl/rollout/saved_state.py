"""A worker's lasting state as bytes: filters and policies, in msgpack; reading it runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiorl.env.nested_codec import pack, unpack
from aiorl.errors import BadFrame, CheckpointError

__all__ = ["SavedState", "dump_state", "load_state"]

_FORMAT = "aiorl-rollout-worker"
_VERSION = 1
_WHERE = "of a rollout worker"


class SavedState(NamedTuple):
    """What is kept.

    Attributes:
        filters: policy id -> statistics of its observation filter.
        policies: policy id -> what its ``get_state`` gave.
    """

    filters: Mapping[str, Mapping[str, Any]]
    policies: Mapping[str, Mapping[str, Any]]


def dump_state(state: SavedState) -> bytes:
    """The state as bytes.

    Raises:
        CheckpointError: a policy's state holds what is neither number, string, array, nor a list or dict of these.
    """
    try:
        return pack({"format": _FORMAT, "version": _VERSION, **state._asdict()})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(_WHERE, f"a policy's state cannot be saved: {error}") from error


def load_state(data: bytes) -> SavedState:
    """What ``dump_state`` was given.

    Raises:
        CheckpointError: bytes that it did not write, or that are damaged.
    """
    try:
        content = unpack(data)
    except BadFrame as error:
        raise CheckpointError(_WHERE, f"its bytes are damaged: {error}") from error
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise CheckpointError(_WHERE, "these bytes are none that RolloutWorker.save() gave")
    if content.get("version") != _VERSION:
        raise CheckpointError(_WHERE, f"its form is {content.get('version')!r}, and {_VERSION} is known here")
    for name in SavedState._fields:
        entries = content.get(name)
        if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
            raise CheckpointError(_WHERE, f"its {name} are damaged")
    return SavedState(content["filters"], content["policies"])
