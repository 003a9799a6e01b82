"""Values of calls arrive as they were, and nothing else is let through."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import aiorl
from aiorl.acting.filters import (
    FILTER_NAMES,
    MeanStdFilter,
    ReturnFilter,
    filter_to_dict,
    make_filter,
)
from aiorl.actors.values import LIMITS, ActorName, pack, unpack
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import RolloutMetrics
from aiorl.errors import RemoteProtocolError, UnsendableError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Reply
from aiorl.offline.estimators import OffPolicyEstimate

NUMBERS = st.sampled_from(
    ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
).map(np.dtype)
ARRAYS = NUMBERS.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=5)))
KEYS = st.text(max_size=9) | st.integers(-9, 9) | st.tuples(st.integers(0, 3), st.text(max_size=2))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=2000)
    | st.binary(max_size=6000)
    | ARRAYS
    | NUMBERS.flatmap(lambda dtype: hnp.from_dtype(dtype, allow_nan=False))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers(-9, 9), max_size=3)
    ),
    max_leaves=12,
)


def travelled(value: Any, *, imports_code: bool = False) -> Any:
    """Return a value after its way through a message."""
    message = decode(encode(Reply(1, True, pack(value)), limits=LIMITS), LIMITS)
    assert isinstance(message, Reply)
    return unpack(message.result, ActorName, imports_code=imports_code)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


@given(VALUES)
def test_values_of_any_structure_arrive_as_they_were(value: Any) -> None:
    assert_same(travelled(value), value)


def test_batches_fragments_and_spaces_arrive_as_they_were() -> None:
    batch = aiorl.SampleBatch(obs=np.arange(6.0).reshape(3, 2), actions=np.arange(3))
    batch.env_steps = 2
    several = aiorl.MultiAgentBatch({"a": batch, "b": batch}, 5)
    fragment = Fragment({"obs": np.zeros((2, 3, 4), np.float32)}, {"last_obs": np.ones((3, 4))})
    space = gymnasium.spaces.Dict(
        {"b": gymnasium.spaces.Discrete(3, start=2), "a": gymnasium.spaces.Box(-1, 1, (2,))}
    )
    arrived = travelled({"batch": batch, "several": several, "fragment": fragment, "space": space})
    assert arrived["batch"].env_steps == 2
    np.testing.assert_array_equal(arrived["batch"]["obs"], batch["obs"])
    assert list(arrived["several"].policy_batches) == ["a", "b"]
    assert arrived["several"].count == 5
    np.testing.assert_array_equal(arrived["fragment"].extras["last_obs"], np.ones((3, 4)))
    assert arrived["space"] == space
    assert travelled(ActorName("c-1", "m:C")) == ActorName("c-1", "m:C")


def test_columns_of_objects_arrive_with_their_rows() -> None:
    infos = np.array([{}, {"lives": 2}, {}], object)
    infos[2]["obs"] = np.arange(3)
    packed = np.array([b"a", b"b", None], object)
    batch = aiorl.SampleBatch(actions=np.arange(3), infos=infos, packed=packed)
    arrived = travelled(batch)
    assert list(arrived) == list(batch)
    assert list(arrived["infos"][:2]) == [{}, {"lives": 2}]
    np.testing.assert_array_equal(arrived["infos"][2]["obs"], [0, 1, 2])
    assert list(arrived["packed"]) == [b"a", b"b", None]
    assert arrived["infos"].dtype == object


def test_metrics_and_estimates_arrive_as_what_they_are() -> None:
    metrics = RolloutMetrics(3, 1.5, {("agent", "policy"): 1.5}, {"x": 1.0}, {}, {"h": [1, 2]})
    estimate = OffPolicyEstimate("is", {"V_prev": 1.0})
    arrived = travelled([metrics, estimate])
    assert arrived == [metrics, estimate]
    assert list(map(type, arrived)) == [RolloutMetrics, OffPolicyEstimate]


@pytest.mark.parametrize("name", FILTER_NAMES)
@pytest.mark.parametrize("num_kept", [0, 1])
def test_filters_arrive_with_their_statistics_and_pending_deltas(name: str, num_kept: int) -> None:
    original = make_filter(name, (3,), num_kept)
    original(np.arange(12.0).reshape(4, 3))
    original.clear_buffer()
    original(np.ones((2, 3)))
    arrived = travelled(original)
    assert type(arrived) is type(original)
    obs = np.arange(3.0)
    np.testing.assert_array_equal(arrived(obs, update=False), original(obs, update=False))
    if isinstance(original, MeanStdFilter):
        assert repr(arrived) == repr(original)
        assert original.buffer_count == 2
        assert_same(arrived.delta(), original.delta())


def test_a_filter_that_has_no_name_is_refused_before_it_leaves() -> None:
    with pytest.raises(UnsendableError, match="ReturnFilter"):
        pack(ReturnFilter())


def test_a_partial_function_arrives_with_its_arguments_where_code_is_allowed() -> None:
    arrived = travelled(functools.partial(divmod, 17), imports_code=True)
    assert arrived(5) == (3, 2)
    arrived = travelled(functools.partial(make_filter, shape=(2,)), imports_code=True)
    assert arrived("MeanStdFilter").shape == (2,)
    with pytest.raises(RemoteProtocolError):
        travelled(functools.partial(divmod, 17))
    with pytest.raises(UnsendableError, match=r"functools\.partial"):
        pack(functools.partial(lambda number: number, 1))


def test_code_is_named_and_imported_only_where_that_is_allowed() -> None:
    assert travelled(gymnasium.make, imports_code=True) is gymnasium.make
    with pytest.raises(RemoteProtocolError, match="an actor can't send"):
        travelled(gymnasium.make)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (lambda: 1, "lambda"),
        (object(), "object"),
        (np.array(["a"]), "dtype"),
        (np.zeros(2, "M8[s]"), "dtype"),
        (1 << 64, "64 bits"),
        ([0] * 100_000, "array"),
        (complex(1, 2), "complex"),
    ],
)
def test_what_is_no_data_is_refused_before_it_leaves(value: Any, part: str) -> None:
    with pytest.raises(UnsendableError, match=part):
        pack({"deep": [value]})


def forged_filter(**changes: Any) -> dict[str, Any]:
    return {**pack(filter_to_dict(MeanStdFilter((3,)))), **changes}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "value",
    [
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$nothing": []},
        {"$batch": {"columns": {"a": 1}}},
        {"$batches": []},
        {"$batches": {"policies": {"p": 1}, "env_steps": 1}},
        {"$fragment": {}},
        {"$space": {"kind": "Box"}},
        {"$actor": [1, 2]},
        {"$set": [[1]]},
        {"$number": None},
        {"$text": np.array([255, 254], np.uint8)},
        {"$objects": {"is_filled": np.ones(2, np.bool_), "items": [1]}},
        {"$objects": {"is_filled": np.ones(2, np.uint8), "items": [1, 2]}},
        {"$objects": {"is_filled": np.ones((2, 2), np.bool_), "items": [1, 2]}},
        {"$objects": {"is_filled": np.zeros(1, np.bool_), "items": 5}},
        {"$partial": 5},
        {"$partial": [1, [], {}]},
        {"$partial": [{"$actor": ["a", "b"]}, 1, {}]},
        {"$metrics": [1, "a", {}, {}, {}, {}]},
        {"$metrics": [1, 1.0, {}]},
        {"$metrics": [1, 1.0, {}, {}, {}, []]},
        {"$estimate": ["is", []]},
        {"$estimate": [1, {}]},
        {"$filter": {"kind": "Filter"}},
        {"$filter": forged_filter(shape=[1 << 40])},
        {"$filter": forged_filter(shape=[(1 << 40) + 3], num_kept=1 << 40)},
        {"$filter": forged_filter(clip="a")},
        {"$filter": forged_filter(kind="LearningFilter")},
        {"$filter": forged_filter(delta={"n": np.int64(1), "mean": np.zeros(3)})},
        {"$filter": forged_filter(state=dict.fromkeys(("n", "mean", "m2"), np.full(3, np.nan)))},
    ],
)
def test_forged_marks_are_refused_by_name(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(value, ActorName, imports_code=True)
