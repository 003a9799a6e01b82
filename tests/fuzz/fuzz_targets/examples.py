"""One valid message of each type, and several Samples: small, with arrays in every kind of
storage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiorl.net.wire import messages as m

_SAMPLES = dict(
    seq=1,
    lease_id=1,
    env_steps=4,
    agent_steps=4,
    first_version=0,
    last_version=0,
    num_envs=1,
    length=4,
    batches={"default_policy": {"obs": np.arange(4, dtype=np.float32)}},
    episodes={"rewards": np.zeros(0)},
    filter_deltas={},
    perf={"env_s": 0.5},
    sampled_total=4,
)
_WEIGHTS = {"default_policy": {"w": np.zeros((2, 3), np.float32)}}
_FILTERS = {"default_policy": {"n": np.zeros(1)}}


def make_samples(**changes) -> m.Samples:
    return m.Samples(**(_SAMPLES | changes))


def make_snapshot(version: int = 0, incarnation: str = "L") -> m.Snapshot:
    return m.Snapshot(version, _WEIGHTS, _FILTERS, {"i1": 3}, {"timestep": 7}, incarnation)


def stacked_frames() -> np.ndarray:
    """Return pictures [T, N, H, W, K] that overlap like stacks of frames."""
    rng = np.random.default_rng(0)
    frames = (rng.random((7, 2, 16, 16)) < 0.1).astype(np.uint8)
    return np.stack([np.moveaxis(frames[step : step + 4], 0, -1) for step in range(4)])


def example_messages() -> list[m.Message]:
    large = np.arange(5000, dtype=np.int64).astype(np.uint8) % 7
    columns = {
        "stacks": stacked_frames(),
        "shrinks": np.zeros((40, 40), np.int32),
        "bools": np.ones((4, 1), np.bool_),
        "halves": np.ones((4, 1, 3), np.float16),
    }
    return [
        m.Hello(m.PROTOCOL_VERSION, "run", "w1", "i1", 1, "host", 7),
        make_samples(),
        make_samples(
            batches={"default_policy": columns, "other": {}},
            episodes={"lengths": np.ones(2, np.int32)},
        ),
        make_samples(batches={"p": {"lz4": large, "raw": np.linspace(0, 1, 600)}}),
        m.Beat(4, "sampling", 0.5, 1),
        m.SnapshotRequest(-1),
        m.Failure("EnvError", "it broke", "Traceback", fatal=True),
        m.Reply(1, True, {"a": [1, np.arange(3)], "b": None}),
        m.Leaving("by user", 4, 0),
        m.StatusRequest(99),
        m.Status({"workers": [{"slot": 1}]}),
        make_snapshot(3)._replace(
            since=2,
            policies={"joins": np.ones(3, np.uint8), "leaves": np.zeros(0)},
        ),
        make_snapshot(),
        m.Welcome(
            1,
            2,
            "run",
            "L",
            {"env": "x"},
            {"default_policy": {"graph": b"\x08\x08", "spec": {"format": 1}}},
            make_snapshot(),
            "i1",
            3,
        ),
        m.Refused("no", True, m.RefusalCode.FULL, "i1"),
        m.Lease(1, 4, 0),
        m.Ack(3, True),
        m.LearnerBeat("L", 3),
        m.Call(1, "stacks", {"depth": 3, "array": np.zeros(2)}, "actor-1", 8),
        m.Item(1, {"a": [1, np.arange(3)], "b": "text"}),
        m.Credit(1, 4),
        m.Cancel(1),
        m.Payload(1, {"args": [np.arange(3)], "kwargs": {}}),
        m.PayloadRequest(1),
        m.Bye("done", True),
    ]


def same(left: Any, right: Any) -> bool:
    """Compare arrays and messages by contents; bool differs from int, and byte orders differ."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.shape, left.dtype.newbyteorder("<"))
            == (right.shape, right.dtype.newbyteorder("<"))
            and left.astype(right.dtype).tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or left != left
