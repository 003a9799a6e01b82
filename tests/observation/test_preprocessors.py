from __future__ import annotations

import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.errors import BatchError, ConfigError, UnsupportedSpaceError
from aiorl.observation.preprocessors import (
    DiscretePreprocessor,
    IdentityPreprocessor,
    Preprocessor,
    make_preprocessor,
    preprocessor_for,
)


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "identity"),
    [
        (spaces.Box(-1, 1, (4,), np.float32), (4,), np.float32, True),
        (spaces.Box(-1, 1, (2, 3), np.float64), (2, 3), np.float32, False),
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), (84, 84, 4), np.uint8, True),
        (spaces.Box(0, 9, (3,), np.int32), (3,), np.float32, False),
        (spaces.Box(-1, 1, (), np.float32), (1,), np.float32, False),
        (spaces.Discrete(5, start=3), (5,), np.float32, False),
        (spaces.MultiBinary(3), (3,), np.float32, False),
        (spaces.MultiBinary([2, 3]), (2, 3), np.float32, False),
        (spaces.MultiDiscrete([2, 4]), (6,), np.float32, False),
        (spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[0, 1], [5, 0]]), (8,), np.float32, False),
    ],
)
def test_shape_and_dtype_of_what_the_model_gets(space, shape, dtype, identity):
    preprocessor = preprocessor_for(space)
    space.seed(0)
    obs = np.stack([np.asarray(space.sample()) for _ in range(7)])
    out = preprocessor.transform(obs)
    assert (preprocessor.shape, preprocessor.dtype, preprocessor.is_identity) == (shape, dtype, identity)
    assert (out.shape, out.dtype) == ((7, *shape), dtype)
    if not isinstance(space, spaces.Box):
        expected = [gymnasium.spaces.flatten(space, np.asarray(one)) for one in obs]
        np.testing.assert_array_equal(out.reshape(7, -1), expected)
    else:
        np.testing.assert_array_equal(out.reshape(obs.shape), obs.astype(dtype))


def test_one_hot_by_hand():
    assert preprocessor_for(spaces.Discrete(3, start=-1)).transform(np.array([-1, 1])).tolist() == [
        [1, 0, 0],
        [0, 0, 1],
    ]
    assert preprocessor_for(spaces.MultiDiscrete([2, 3])).transform(np.array([[1, 0]])).tolist() == [[0, 1, 1, 0, 0]]


NESTED = spaces.Dict(
    {
        "z": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2, 2), np.float64)]),
        "a": spaces.MultiBinary(2),
        "image": spaces.Box(0, 255, (2, 2, 1), np.uint8),
    }
)
simple_spaces = st.sampled_from(
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-np.inf, np.inf, (), np.float64),
        spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary((2, 2)),
    ]
)
nested_spaces = st.recursive(
    simple_spaces,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        | st.dictionaries(st.sampled_from("cab"), inner, min_size=1, max_size=3).map(spaces.Dict)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(space=nested_spaces, rows=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_space_flattens_as_gymnasium_does_it(space, rows, seed):
    space.seed(seed)
    observations = [space.sample() for _ in range(rows)]
    preprocessor = preprocessor_for(space)
    out = preprocessor.transform_rows(observations)
    assert (out.shape, out.dtype) == ((rows, *preprocessor.shape), preprocessor.dtype)
    wanted = [gymnasium.spaces.flatten(space, one) for one in observations]
    np.testing.assert_allclose(out.reshape(rows, -1), wanted, rtol=1e-6)
    # the same as a batch, in the form vector environments have it
    batch = gymnasium.vector.utils.concatenate(
        space, observations, gymnasium.vector.utils.create_empty_array(space, rows)
    )
    np.testing.assert_array_equal(preprocessor.transform(batch), out)


@settings(deadline=None)
@given(space=nested_spaces)
def test_the_policys_space_has_the_outputs_shape_and_bounds(space):
    """R39, R32: shape of filters, and never a nested space."""
    preprocessor = preprocessor_for(space)
    told = preprocessor.observation_space
    assert isinstance(told, spaces.Box)
    assert (told.shape, told.dtype) == (preprocessor.shape, preprocessor.dtype)
    space.seed(0)
    assert told.contains(preprocessor.transform_rows([space.sample()])[0])


@pytest.mark.parametrize(
    ("space", "observations"),
    [
        (spaces.Box(-1, 1, (2,)), [np.zeros(3)]),
        (spaces.Box(-1, 1, (2,)), [np.zeros(2), np.zeros(3)]),
        (spaces.Box(-1, 1, (2,)), ["text"]),
        (spaces.Box(0, 255, (2,), np.uint8), [np.array([0.5, 1.0])]),
        (spaces.Discrete(3), [3]),
        (spaces.Discrete(3), [-1]),
        (spaces.Discrete(3), [0.5]),
        (spaces.MultiDiscrete([2, 3]), [np.array([0, 3])]),
        (NESTED, [{"a": np.zeros(2)}]),
        (NESTED, [{"z": (1, np.zeros((2, 2))), "a": np.zeros(2), "picture": np.zeros((2, 2, 1))}]),
        (NESTED, [(1, 2, 3)]),
        (spaces.Tuple([spaces.Discrete(2)]), [3]),
        (spaces.Tuple([spaces.Discrete(2)]), [(0, 1)]),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_refused(space, observations):
    with pytest.raises(BatchError, match="obs"):
        preprocessor_for(space).transform_rows(observations)


def test_no_observation_gives_no_row():
    assert preprocessor_for(NESTED).transform_rows([]).shape == (0, 3 + 4 + 2 + 4)
    assert preprocessor_for(spaces.Discrete(3)).transform_rows([]).shape == (0, 3)


def test_r24_the_identity_takes_arrays_as_they_are():
    space = spaces.Box(-1, 1, (2, 2), np.float64)
    preprocessor = make_preprocessor(space, is_enabled=False)
    assert isinstance(preprocessor, IdentityPreprocessor)
    obs = np.zeros((3, 2, 2))
    assert preprocessor.transform(obs) is obs
    assert preprocessor.observation_space is space
    assert preprocessor.dtype == np.float64


@pytest.mark.parametrize("space", [spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])])
def test_r32_a_nested_space_needs_its_preprocessor(space):
    with pytest.raises(ValueError, match="without a preprocessor"):
        make_preprocessor(space, is_enabled=False)


class Doubled(Preprocessor):
    """A user's own."""

    def __init__(self, space):
        super().__init__(space, (2,), np.float32)

    def transform(self, obs):
        return np.stack([obs[:, 0], obs[:, 0]], axis=1).astype(np.float32)


def test_r23_a_custom_preprocessor_comes_first(monkeypatch):
    space = spaces.Box(-1, 1, (1,))
    monkeypatch.setitem(sys.modules, "users_module", types.SimpleNamespace(Doubled=Doubled, other=1))
    for custom in (Doubled, "users_module:Doubled"):
        preprocessor = make_preprocessor(space, custom_preprocessor=custom, is_enabled=False)
        assert preprocessor.transform_rows([np.array([0.5])]).tolist() == [[0.5, 0.5]]
    for wrong in ("users_module:other", "users_module:missing", int):
        with pytest.raises(ConfigError, match="custom_preprocessor"):
            make_preprocessor(space, custom_preprocessor=wrong)
    assert isinstance(make_preprocessor(spaces.Discrete(2)), DiscretePreprocessor)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Tuple([]), spaces.Tuple([spaces.Text(2)]), spaces.Dict({})])
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(UnsupportedSpaceError, match="Box, Discrete, MultiBinary, MultiDiscrete"):
        preprocessor_for(space)
