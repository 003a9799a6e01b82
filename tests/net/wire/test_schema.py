from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from aiorl.errors import BadFrame
from aiorl.net.wire import messages as m
from aiorl.net.wire.format import DEFAULT_LIMITS
from aiorl.net.wire.schema import MESSAGE_TYPES, MESSAGE_TYPES_BY_CLASS

GOOD: dict[str, dict[str, Any]] = {
    "hello": {
        "protocol": 1, "run_id": "", "worker_id": "w", "incarnation": "i", "slot_hint": 0, "host": "h", "pid": 1,
        "learner_incarnation": "",
    },
    "samples": {
        "seq": 1, "lease_id": 1, "env_steps": 1, "agent_steps": 1, "first_version": -1, "last_version": 1,
        "num_envs": 1, "length": 1, "perf": {"x": 1.5, "y": 2}, "sampled_total": 1, "abandoned_total": 0,
    },
    "beat": {"sampled_total": 1, "state": "", "in_env_s": 1, "abandoned_total": 0},
    "reply": {"call_id": 1, "ok": True, "result": [None, {"x": [1.5, b"y"]}]},
    "snapshot": {"version": 1, "filter_acks": {"i": 3}, "global_vars": {"timestep": 1}, "learner_incarnation": ""},
    "welcome": {
        "slot": 1, "num_workers": 1, "run_id": "", "learner_incarnation": "", "config": {}, "graphs": {"p": {}},
        "snapshot": {"version": 1, "filter_acks": {}, "global_vars": {}, "learner_incarnation": ""},
        "incarnation": "i", "acked_seq": 0,
    },
    "failure": {"kind": "", "message": "", "traceback": "", "fatal": False},
}  # fmt: skip


def test_every_message_has_a_schema_and_its_fields() -> None:
    assert set(get_args(m.Message)) == set(MESSAGE_TYPES_BY_CLASS) == {kind.cls for kind in MESSAGE_TYPES.values()}
    for kind in MESSAGE_TYPES.values():
        assert {field.name for field in dataclasses.fields(kind.cls)} == kind.scalars.keys() | kind.arrays.keys()


@pytest.mark.parametrize("kind", MESSAGE_TYPES_BY_CLASS)
def test_messages_are_frozen_and_slotted(kind: type) -> None:
    assert kind.__dataclass_params__.frozen
    assert not hasattr(object.__new__(kind), "__dict__")


@pytest.mark.parametrize("name", GOOD)
def test_good_values_pass_and_each_field_is_needed(name: str) -> None:
    kind = MESSAGE_TYPES[name]
    kind.check_scalars(GOOD[name], DEFAULT_LIMITS)
    for field in GOOD[name]:
        with pytest.raises(BadFrame) as caught:
            kind.check_scalars({key: GOOD[name][key] for key in GOOD[name] if key != field}, DEFAULT_LIMITS)
        assert caught.value.field == field
    with pytest.raises(BadFrame) as caught:
        kind.check_scalars(GOOD[name] | {"more": 1}, DEFAULT_LIMITS)
    assert caught.value.field == "more"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("samples", "first_version", -2),
        ("samples", "first_version", True),
        ("samples", "seq", -1),
        ("samples", "seq", "1"),
        ("samples", "perf", []),
        ("samples", "perf", {"x": "1"}),
        ("samples", "perf", {b"x": 1.0}),
        ("beat", "in_env_s", "1"),
        ("beat", "in_env_s", False),
        ("beat", "state", 1),
        ("failure", "fatal", 1),
        ("snapshot", "filter_acks", [1]),
        ("snapshot", "filter_acks", {b"i": 1}),
        ("snapshot", "filter_acks", {"i": 1.0}),
        ("snapshot", "global_vars", None),
        ("snapshot", "global_vars", {b"x": 1}),
        ("snapshot", "global_vars", {"x": object()}),
        ("reply", "result", {1: 2}),
        ("reply", "result", (1, 2)),
        ("welcome", "graphs", {"p": 1}),
        ("welcome", "graphs", []),
        ("welcome", "config", 1),
        ("welcome", "snapshot", 1),
    ],
)
def test_wrong_values_are_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(BadFrame) as caught:
        MESSAGE_TYPES[name].check_scalars(GOOD[name] | {field: value}, DEFAULT_LIMITS)
    assert caught.value.field == field


def test_fields_of_the_snapshot_in_a_welcome_are_named_with_their_path() -> None:
    snapshot = GOOD["welcome"]["snapshot"]
    for broken in ({**snapshot, "version": "1"}, {key: snapshot[key] for key in snapshot if key != "version"}):
        with pytest.raises(BadFrame) as caught:
            MESSAGE_TYPES["welcome"].check_scalars(GOOD["welcome"] | {"snapshot": broken}, DEFAULT_LIMITS)
        assert caught.value.field == "snapshot.version"
