from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.actions import ActionLayout
from aiorl.errors import UnsupportedSpaceError
from aiorl.policy.uniform_actions import UniformActions

ROWS = 20_000


def choose(space):
    uniform, layout = UniformActions(space), ActionLayout(space)
    noise = uniform.draw_noise(np.random.default_rng(0), ROWS)
    assert noise.shape == (ROWS, uniform.noise_size)
    assert noise.dtype == np.float32
    actions, logp = np.empty((ROWS, *layout.shape), layout.dtype), np.empty(ROWS, np.float32)
    uniform.choose_into(noise, actions, logp)
    assert all(space.contains(action) for action in layout.to_env(actions[:50]))
    return actions, logp


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(3, start=-1), [-1, 0, 1]),
        (spaces.MultiDiscrete([2, 2]), [0, 1]),
        (spaces.MultiBinary(2), [0, 1]),
        (spaces.Box(3, 6, (2,), np.int64), [3, 4, 5, 6]),
    ],
    ids=str,
)
def test_whole_numbers_are_all_as_frequent(space, values):
    actions, logp = choose(space)
    columns = actions.reshape(ROWS, -1)
    for column in columns.T:
        found, counts = np.unique(column, return_counts=True)
        assert found.tolist() == values
        np.testing.assert_allclose(counts / ROWS, 1 / len(values), atol=0.02)
    np.testing.assert_allclose(logp, -columns.shape[1] * np.log(len(values)), rtol=1e-5)


def test_numbers_lie_anywhere_between_their_bounds():
    actions, logp = choose(spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)))
    np.testing.assert_allclose(actions.mean(axis=0), [0, 5], atol=0.1)
    np.testing.assert_allclose(actions.std(axis=0), np.array([4, 10]) / np.sqrt(12), rtol=0.02)
    np.testing.assert_allclose(logp, -np.log(40), rtol=1e-5)


def test_unbounded_components_beside_others_are_standard_normal():
    space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (1,))])
    actions, logp = choose(space)
    free = actions[:, 1]
    np.testing.assert_allclose([free.mean(), free.std()], [0, 1], atol=0.03)
    np.testing.assert_allclose(logp, -np.log(2) - 0.5 * free**2 - 0.5 * np.log(2 * np.pi), rtol=1e-4, atol=1e-5)


def test_a_space_without_a_uniform_distribution_is_refused():
    with pytest.raises(UnsupportedSpaceError):
        UniformActions(spaces.Text(3))
