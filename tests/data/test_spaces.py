"""Spaces as plain data, clipping and regrouping of actions."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.data.spaces import (
    MAX_SPACE_ELEMENTS,
    differ_in_order_only,
    space_from_dict,
    space_to_dict,
    with_sorted_keys,
)
from aiorl.errors import ConfigError, UnsupportedSpaceError

EXAMPLES = [
    spaces.Box(np.array([-np.inf, 0.1]), np.array([1.0, np.inf]), dtype=np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-3, 9, (), np.int16),
    spaces.Discrete(3, start=-1),
    spaces.MultiBinary(5),
    spaces.MultiBinary((2, 3)),
    spaces.MultiDiscrete(np.array([[2, 5], [3, 4]]), start=np.array([[1, 0], [-2, 7]])),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,))]),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.MultiBinary(3)])}),
]


@pytest.mark.parametrize("space", EXAMPLES, ids=str)
def test_a_space_survives_msgpack_and_strict_json(space):
    data = space_to_dict(space)
    assert len(msgpack.packb(data)) < 300, "equal bounds are one number"
    assert space_from_dict(msgpack.unpackb(msgpack.packb(data))) == space
    assert space_from_dict(json.loads(json.dumps(data, allow_nan=False))) == space


@given(
    low=hnp.arrays(
        np.float32,
        hnp.array_shapes(max_dims=3, max_side=4),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    room=st.floats(0, 1000, width=32),
)
def test_box_bounds_are_restored_bit_by_bit(low, room):
    space = spaces.Box(low, low + np.float32(room), dtype=np.float32)
    back = space_from_dict(json.loads(json.dumps(space_to_dict(space))))
    assert isinstance(back, spaces.Box)
    np.testing.assert_array_equal(back.low, space.low)
    np.testing.assert_array_equal(back.high, space.high)
    assert back.dtype == space.dtype


def test_a_text_space_is_refused():
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        space_to_dict(spaces.Text(5))


BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"kind": "Sphere"},
        BOX | {"shape": [1 << 20, 1 << 20]},
        BOX | {"shape": "ab"},
        BOX | {"shape": [1] * 40},
        BOX | {"dtype": "object"},
        BOX | {"low": [0.0, 1.0, 2.0]},
        BOX | {"low": "much"},
        {"kind": "Discrete", "n": 0, "start": 0},
        {"kind": "Discrete", "n": "2", "start": 0},
        {"kind": "MultiDiscrete", "nvec": [2, 10**30], "start": [0, 0], "dtype": "int64"},
        {"kind": "Tuple", "spaces": 3},
        {"kind": "Dict", "spaces": [["a"]]},
    ],
    ids=repr,
)
def test_a_damaged_description_is_a_config_error(data):
    with pytest.raises(ConfigError):
        space_from_dict(data)


@pytest.mark.parametrize("kind", ["Tuple", "Dict"])
def test_the_parts_of_a_space_share_its_limit(kind):
    part = BOX | {"shape": [MAX_SPACE_ELEMENTS // 2 + 1]}
    parts = [part, part] if kind == "Tuple" else [["a", part], ["b", part]]
    with pytest.raises(ConfigError):
        space_from_dict({"kind": kind, "spaces": parts})


def test_endless_nesting_is_refused():
    data = {"kind": "Discrete", "n": 2, "start": 0}
    for _ in range(2000):
        data = {"kind": "Tuple", "spaces": [data]}
    with pytest.raises(ConfigError):
        space_from_dict(data)


def parts_in_order(space):
    """Return the spaces within a space, depth first, each with its path."""
    if isinstance(space, spaces.Dict):
        subspaces = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        subspaces = enumerate(space.spaces)
    else:
        return [((), space)]
    return [
        ((name, *path), leaf) for name, part in subspaces for path, leaf in parts_in_order(part)
    ]


any_dicts = st.recursive(
    st.sampled_from(EXAMPLES[:7]),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        | st.lists(
            st.tuples(st.sampled_from("zaMb_"), inner),
            min_size=1,
            max_size=4,
            unique_by=lambda pair: pair[0],
        ).map(spaces.Dict)
    ),
    max_leaves=6,
)


@given(space=any_dicts)
def test_the_parts_of_a_dict_keep_their_order(space):
    data = space_to_dict(space)
    for back in (
        space_from_dict(data),
        space_from_dict(json.loads(json.dumps(data, sort_keys=True))),
        space_from_dict(msgpack.unpackb(msgpack.packb(data))),
    ):
        assert parts_in_order(back) == parts_in_order(space)
        assert space_to_dict(back) == data


@given(space=any_dicts)
def test_descriptions_that_differ_in_order_only_are_recognised(space):
    data = space_to_dict(space)
    sorted_data = with_sorted_keys(data)
    assert differ_in_order_only(data, sorted_data) is (data != sorted_data)
    assert space_from_dict(sorted_data) == space
    assert not differ_in_order_only(data, space_to_dict(spaces.Dict(z=space, b=spaces.Discrete(2))))


def test_the_dtype_of_a_described_box_can_be_left_out_and_a_missing_key_is_named():
    box = {"kind": "Box", "shape": [3], "low": -1, "high": 1}
    assert space_from_dict(box) == spaces.Box(-1, 1, (3,))
    del box["high"]
    with pytest.raises(ConfigError, match="'high'"):
        space_from_dict(box)


def test_the_start_of_a_described_space_can_be_left_out():
    assert space_from_dict({"kind": "Discrete", "n": 3}) == spaces.Discrete(3)
    assert space_from_dict({"kind": "MultiDiscrete", "nvec": [2, 3]}) == spaces.MultiDiscrete(
        [2, 3]
    )
