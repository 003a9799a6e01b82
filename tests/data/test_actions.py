"""Conversion of actions of any space to columns, and back to the form of environments."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from aiorl.data.actions import ActionLayout, leaf_spaces
from aiorl.errors import BatchError, UnsupportedSpaceError

BOX = spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
NESTED = spaces.Tuple(
    [
        spaces.Discrete(3, start=5),
        spaces.Dict({"aim": BOX, "keys": spaces.MultiBinary(2)}),
        spaces.Tuple([spaces.MultiDiscrete([[2, 3]])]),
    ]
)
WHOLE = spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 4])])
SIMPLE = [
    spaces.Discrete(4),
    spaces.MultiDiscrete([2, 3]),
    BOX,
    spaces.Box(-1, 1, (2, 2), np.float64),
]

simple_spaces = st.sampled_from(
    [
        *SIMPLE,
        spaces.MultiBinary((2, 1)),
        spaces.Discrete(2, start=-1),
        spaces.Discrete(3, dtype=np.int32),
        spaces.Box(-1, 1, ()),
        spaces.Box(-3, 9, (), np.int16),
        spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.MultiDiscrete([[2, 3], [4, 2]], dtype=np.int32, start=[[1, 0], [0, -1]]),
    ]
)
any_spaces = st.recursive(
    simple_spaces,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        # pairs keep their order
        | st.lists(
            st.tuples(st.sampled_from("cab"), inner),
            min_size=1,
            max_size=3,
            unique_by=lambda pair: pair[0],
        ).map(spaces.Dict)
    ),
    max_leaves=5,
)


def assert_same(space, mine, theirs):
    """Assert that values of the space are equal and of one kind: types, dtypes, shapes and order of
    names.
    """
    assert type(mine) is type(theirs), f"for {space}"
    if isinstance(space, spaces.Tuple):
        for part, a, b in zip(space.spaces, mine, theirs, strict=True):
            assert_same(part, a, b)
    elif isinstance(space, spaces.Dict):
        assert list(mine) == list(theirs) == list(space.spaces)
        for name, part in space.spaces.items():
            assert_same(part, mine[name], theirs[name])
    else:
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def has_choice(leaf):
    return isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)


# of Gymnasium, about its own samples of whole Boxes
@pytest.mark.filterwarnings("ignore:.*Casting input x")
@given(space=any_spaces, rows=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_r117_every_action_can_be_restored_from_its_column(space, rows, seed):
    """R117: for any space, the environment gets one action per row, of the kind that the space
    samples.
    """
    space.seed(seed)
    layout = ActionLayout(space)
    actions = [space.sample() for _ in range(rows)]
    column = np.stack([layout.to_row(action) for action in actions])
    assert column.shape == (rows, *layout.shape)
    assert column.dtype == layout.dtype
    assert layout.zeros(rows).shape == column.shape  # SPEC 4.10
    back = layout.to_env(column)
    assert len(back) == rows
    for mine, theirs, row in zip(back, actions, column, strict=True):
        assert_same(space, mine, theirs)
        assert space.contains(mine)
        if not any(map(has_choice, layout.leaves)):  # components are in Gymnasium's order
            np.testing.assert_allclose(row.ravel(), spaces.flatten(space, theirs), rtol=1e-6)
    np.testing.assert_array_equal(layout.to_column(layout.to_components(column)), column)


def test_r117_a_tuple_action_is_one_tuple_of_components_per_row():
    layout = ActionLayout(WHOLE)
    column = layout.to_column([np.array([1, 0]), np.array([[2, 3], [0, 1]])])
    assert column.dtype == np.int64
    assert column.tolist() == [[1, 2, 3], [0, 0, 1]]
    first, second = layout.to_env(column)
    assert type(first) is tuple
    assert first[0] == 1
    assert first[1].tolist() == [2, 3]
    assert second[1].tolist() == [0, 1]
    assert all(WHOLE.contains(row) for row in (first, second))


def test_r118_clipping_changes_only_bounded_components():
    layout = ActionLayout(NESTED)
    column = np.array([[7, 5.0, -9.0, 1, 0, 1, 2]], np.float32)
    assert layout.clip(column).tolist() == [[7, 1.0, -9.0, 1, 0, 1, 2]]
    assert column[0, 1] == 5.0
    whole = ActionLayout(WHOLE)
    unchanged = np.array([[9, 9, 9]])
    assert whole.clip(unchanged) is unchanged
    mixed = ActionLayout(spaces.Tuple([spaces.Discrete(2), spaces.Box(-3, 3, (1,), np.int16)]))
    assert mixed.clip(np.array([[1, -8]])).tolist() == [[1, -3]]
    plain = ActionLayout(BOX)
    assert plain.clip(np.array([[-5.0, 5.0]], np.float32)).tolist() == [[-1.0, 5.0]]
    unbounded = np.array([[7.0]])
    assert ActionLayout(spaces.Box(-np.inf, np.inf, (1,))).clip(unbounded) is unbounded
    discrete = ActionLayout(spaces.Discrete(2))
    assert discrete.clip(np.array([1])).tolist() == [1]


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (WHOLE, np.int64),
        (NESTED, np.float32),
        (spaces.Tuple([BOX, spaces.Box(0, 1, (1,), np.float64)]), np.float64),
        (spaces.Tuple([BOX, spaces.Discrete(1 << 26)]), np.float64),
        (spaces.Tuple([BOX, spaces.Box(0, 1 << 26, (1,), np.int32)]), np.float64),
    ],
)
def test_no_component_loses_its_value_in_the_common_dtype(space, dtype):
    assert ActionLayout(space).dtype == dtype


def test_environments_get_their_own_arrays():
    layout = ActionLayout(BOX)
    column = np.zeros((2, 2), np.float32)
    layout.to_env(column)[0][:] = 9.0
    assert not column.any()


@pytest.mark.parametrize(
    "actions",
    [
        (np.zeros(2), np.zeros((2, 2)), np.zeros(2)),
        (np.zeros(2), np.zeros((3, 2))),
        {"a": np.zeros(2)},
        np.zeros((2, 4)),
    ],
)
def test_batches_that_do_not_fit_are_refused(actions):
    with pytest.raises(BatchError):
        ActionLayout(WHOLE).to_column(actions)


PAIR = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)])


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (PAIR, [(1, 2), (0, 1)]),
        (PAIR, [[1, 2], [0, 1]]),
        (spaces.Tuple([PAIR, PAIR]), [((1, 2), (0, 1)), ((1, 1), (2, 0))]),
        (spaces.Dict({"a": PAIR}), {"a": [(1, 2), (0, 1)]}),
    ],
)
def test_r117_a_list_of_row_wise_tuples_is_refused_even_if_it_has_as_many_rows_as_components(
    space, actions
):
    with pytest.raises(BatchError):
        ActionLayout(space).to_column(actions)


MIXED = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
BYTES = spaces.Box(0, 255, (1,), np.uint8)


@pytest.mark.parametrize(
    ("space", "actions", "bad"),
    [
        (spaces.Discrete(3), [0.0, 0.7], "0.7"),
        (spaces.Discrete(3), [np.nan, 1.0], "nan"),
        (spaces.Discrete(3), np.array([1, None]), "None"),
        (BYTES, [[300], [4]], "300"),
        (BOX, [["a", "b"], ["c", "d"]], "a"),
        (WHOLE, ([0, 0.5], np.zeros((2, 2))), "0.5"),
        (MIXED, np.array([[0, 0.5, 0.5], [1.5, 0, 0]], np.float32), "1.5"),
        (MIXED, np.array([[0, 0.5, 0.5], [np.nan, 0, 0]]), "nan"),
    ],
)
def test_r96_actions_that_the_column_cannot_hold_are_refused(space, actions, bad):
    """R96, R118, R119: rows hold exactly the chosen actions."""
    with pytest.raises(BatchError, match=bad):
        ActionLayout(space).to_column(actions)
    if not isinstance(space, spaces.Tuple):
        with pytest.raises(BatchError):
            [ActionLayout(space).to_row(action) for action in actions]


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(3), np.array([2.0, 1.0])),
        (spaces.Discrete(3), np.array([True, False])),
        (BYTES, np.array([[255.0], [0.0]])),
        (MIXED, np.array([[2.0, 0.5, -0.5], [1.0, 0.0, 0.25]])),
        (spaces.Box(-1, 1, (1,)), np.array([[np.nan], [0.5]])),
    ],
)
def test_actions_of_another_dtype_are_accepted_if_no_value_changes(space, actions):
    layout = ActionLayout(space)
    column = layout.to_column(actions)
    assert column.dtype == layout.dtype
    np.testing.assert_array_equal(column, actions)


@pytest.mark.parametrize("action", [(1,), 3, (1, [2]), {"a": 1}])
def test_an_action_that_does_not_fit_is_refused(action):
    with pytest.raises(BatchError):
        ActionLayout(WHOLE).to_row(action)
    with pytest.raises(BatchError):
        ActionLayout(BOX).to_row(np.zeros(3))


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Tuple([]), spaces.Tuple([spaces.Text(2)]), spaces.Dict({})]
)
def test_other_spaces_are_refused(space):
    with pytest.raises(UnsupportedSpaceError, match="Discrete"):
        list(leaf_spaces(space))
