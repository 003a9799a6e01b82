from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.errors import UnsupportedSpaceError
from aiorl.observation.preprocessors import preprocessor_for


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


@pytest.mark.parametrize("space", [spaces.Dict({"a": spaces.Discrete(2)}), spaces.Text(3), spaces.Tuple([])])
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(UnsupportedSpaceError, match="Box, Discrete, MultiBinary, MultiDiscrete"):
        preprocessor_for(space)
