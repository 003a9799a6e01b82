"""Which fields each message has on the wire, and what may stand in them.

A message is split in two: *scalars* go into the header and are checked here one by one; *arrays* go into
frames, and a *tree* says at which paths they may hang. ``{"*": ARRAY}`` is a map of arrays by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np

from aiorl.errors import BadFrame
from aiorl.protocol import messages as m
from aiorl.protocol.limits import Limits

__all__ = ["ARRAY", "MESSAGE_TYPES", "MESSAGE_TYPES_BY_CLASS", "ArrayTree", "MessageType"]

ArrayTree: TypeAlias = "Mapping[str, ArrayTree] | None"
ARRAY: Final = None
"""The leaf of an array tree."""

# Decoded values are checked before they are typed; until then they are Any, as msgpack hands them over.
Check: TypeAlias = Callable[[str, Any, Limits], None]

_MAX_INT = 1 << 53


def _check_int(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not int or not -1 <= value <= _MAX_INT:
        raise BadFrame(f"expected a whole number from -1 to 2**53, got {_show(value)}", field=field)


def _check_count(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise BadFrame(f"expected a whole number from 0 to 2**53, got {_show(value)}", field=field)


def _check_str(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not str:
        raise BadFrame(f"expected a string, got {_show(value)}", field=field)


def _check_bool(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not bool:
        raise BadFrame(f"expected true or false, got {_show(value)}", field=field)


def _check_float(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not float and type(value) is not int:
        raise BadFrame(f"expected a number, got {_show(value)}", field=field)


def _check_floats(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not dict:
        raise BadFrame(f"expected a map of numbers, got {_show(value)}", field=field)
    for key, number in value.items():
        if type(key) is not str or (type(number) is not float and type(number) is not int):
            raise BadFrame(f"expected a map of numbers by name, got {_show({key: number})}", field=field)


def _check_ints(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not dict:
        raise BadFrame(f"expected a map of whole numbers, got {_show(value)}", field=field)
    for key, number in value.items():
        if type(key) is not str:
            raise BadFrame(f"expected names as keys, got {_show(key)}", field=field)
        _check_int(field, number, limits)


def _check_plain(field: str, value: Any, limits: Limits) -> None:
    """Plain data of any shape; array references are resolved (and so gone or known) before."""
    _check_nested(field, value, limits.max_depth)


def _check_plain_map(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not dict:
        raise BadFrame(f"expected a map, got {_show(value)}", field=field)
    _check_nested(field, value, limits.max_depth)


_LEAVES = (type(None), bool, int, float, str, bytes, np.ndarray)


def _check_nested(field: str, value: Any, depth: int) -> None:
    kind = type(value)
    if kind in _LEAVES:
        return
    if depth <= 0:
        raise BadFrame("nested too deeply", field=field)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise BadFrame(f"expected names as keys, got {_show(key)}", field=field)
            _check_nested(field, item, depth - 1)
    elif kind is list:
        for item in value:
            _check_nested(field, item, depth - 1)
    else:
        raise BadFrame(f"{kind.__name__} values do not travel", field=field)


def _check_specs(field: str, value: Any, limits: Limits) -> None:
    _check_plain_map(field, value, limits)
    for spec in value.values():
        if type(spec) is not dict:
            raise BadFrame(f"expected a map, got {_show(spec)}", field=field)


def _check_snapshot(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not dict:
        raise BadFrame(f"expected a map, got {_show(value)}", field=field)
    MESSAGE_TYPES["snapshot"].check_scalars(value, limits, prefix=f"{field}.")


def _show(value: object) -> str:
    text = reprlib.repr(value)  # which goes a few levels deep: a peer's lists may be nested deeper than Python recurses
    if isinstance(value, (dict, list, str, bytes)):
        text = f"{type(value).__name__} {text}"
    return text if len(text) <= 60 else text[:57] + "..."


_ARRAYS: ArrayTree = {"*": ARRAY}
_POLICY_ARRAYS: ArrayTree = {"*": _ARRAYS}
_SNAPSHOT_ARRAYS: dict[str, ArrayTree] = {"weights": _POLICY_ARRAYS, "filters": _POLICY_ARRAYS}


@dataclass(frozen=True, slots=True)
class MessageType:
    """One kind of message as it goes over the wire.

    Attributes:
        name: its name in the header.
        cls: the dataclass of ``messages``.
        scalars: header field -> the check that decides whether a decoded value may stand there.
        arrays: tree of the paths at which arrays may hang; its top level are fields.
    """

    name: str
    cls: type[m.Message]
    scalars: Mapping[str, Check]
    arrays: Mapping[str, ArrayTree]

    def check_scalars(self, values: dict[str, Any], limits: Limits, prefix: str = "") -> None:
        """Raise BadFrame, naming the field, unless exactly the right fields are there and well typed."""
        checks = self.scalars
        try:
            for field, check in checks.items():
                check(field, values[field], limits)
        except KeyError:
            raise BadFrame(f"missing in {self.name}", field=prefix + field) from None
        except BadFrame as error:
            if prefix and not error.field.startswith(prefix):
                raise BadFrame(error.message, field=prefix + error.field) from error
            raise
        if len(values) != len(checks):
            extra = next(key for key in values if key not in checks)
            raise BadFrame(f"no such field in {self.name}", field=prefix + str(extra)[:60])


def _types() -> dict[str, MessageType]:
    integer, count, string, boolean, number = _check_int, _check_count, _check_str, _check_bool, _check_float
    table: list[tuple[str, type[m.Message], dict[str, Check], dict[str, ArrayTree]]] = [
        (
            "hello",
            m.Hello,
            {
                "protocol": count, "run_id": string, "worker_id": string, "incarnation": string,
                "slot_hint": count, "host": string, "pid": count, "learner_incarnation": string,
            },
            {},
        ),
        (
            "samples",
            m.Samples,
            {
                "seq": count, "lease_id": count, "env_steps": count, "agent_steps": count,
                "first_version": integer, "last_version": integer, "num_envs": count, "length": count,
                "perf": _check_floats, "sampled_total": count, "abandoned_total": count,
            },
            {"batches": _POLICY_ARRAYS, "episodes": _ARRAYS, "filter_deltas": _POLICY_ARRAYS},
        ),
        (
            "beat",
            m.Beat,
            {"sampled_total": count, "state": string, "in_env_s": number, "abandoned_total": count},
            {},
        ),
        ("snapshot_request", m.SnapshotRequest, {"have_version": integer}, {}),
        (
            "failure",
            m.Failure,
            {"kind": string, "message": string, "traceback": string, "fatal": boolean},
            {},
        ),
        ("reply", m.Reply, {"call_id": count, "ok": boolean, "result": _check_plain}, {"result": _ARRAYS}),
        ("leaving", m.Leaving, {"reason": string, "sampled_total": count, "abandoned_total": count}, {}),
        (
            "snapshot",
            m.Snapshot,
            {
                "version": integer, "filter_acks": _check_ints, "global_vars": _check_plain_map,
                "learner_incarnation": string,
            },
            dict(_SNAPSHOT_ARRAYS),
        ),
        (
            "welcome",
            m.Welcome,
            {
                "slot": count, "num_workers": count, "run_id": string, "learner_incarnation": string,
                "config": _check_plain_map, "graphs": _check_specs, "snapshot": _check_snapshot,
                "incarnation": string, "acked_seq": count,
            },
            {"graphs": {"*": {"graph": ARRAY}}, "snapshot": _SNAPSHOT_ARRAYS},
        ),
        ("refused", m.Refused, {"reason": string, "retry": boolean, "code": string, "incarnation": string}, {}),
        ("lease", m.Lease, {"lease_id": count, "fragments": count, "min_version": integer}, {}),
        ("ack", m.Ack, {"seq": count, "resend": boolean}, {}),
        ("learner_beat", m.LearnerBeat, {"learner_incarnation": string, "version": integer}, {}),
        ("call", m.Call, {"call_id": count, "method": string, "args": _check_plain_map}, {"args": _ARRAYS}),
        ("bye", m.Bye, {"reason": string, "final": boolean}, {}),
    ]  # fmt: skip
    for name, cls, scalars, arrays in table:
        if {field.name for field in fields(cls)} != scalars.keys() | arrays.keys():
            raise TypeError(f"the wire schema of {name} does not have the fields of {cls.__name__}")
    return {name: MessageType(name, cls, scalars, arrays) for name, cls, scalars, arrays in table}


MESSAGE_TYPES: Final = _types()
MESSAGE_TYPES_BY_CLASS: Final = {kind.cls: kind for kind in MESSAGE_TYPES.values()}
