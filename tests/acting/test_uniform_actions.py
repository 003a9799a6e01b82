from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.acting.exploration import UniformActions
from aiorl.data.actions import ActionLayout

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
def test_whole_numbers_are_equally_frequent(space, values):
    actions, logp = choose(space)
    columns = actions.reshape(ROWS, -1)
    for column in columns.T:
        distinct, counts = np.unique(column, return_counts=True)
        assert distinct.tolist() == values
        np.testing.assert_allclose(counts / ROWS, 1 / len(values), atol=0.02)
    np.testing.assert_allclose(logp, -columns.shape[1] * np.log(len(values)), rtol=1e-5)


def test_unbounded_components_among_others_are_standard_normal():
    space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (1,))])
    actions, logp = choose(space)
    free = actions[:, 1]
    np.testing.assert_allclose([free.mean(), free.std()], [0, 1], atol=0.03)
    np.testing.assert_allclose(
        logp, -np.log(2) - 0.5 * free**2 - 0.5 * np.log(2 * np.pi), rtol=1e-4, atol=1e-5
    )


FORBIDDEN = MASKED_LOGIT


@pytest.mark.parametrize(
    ("space", "inputs", "legal"),
    [
        (spaces.Discrete(4, start=1), [FORBIDDEN, 9.0, FORBIDDEN, 0.0], {(2,): 1 / 2, (4,): 1 / 2}),
        (
            spaces.MultiDiscrete([2, 3], start=[0, 5]),
            [0.0, FORBIDDEN, 5.0, FORBIDDEN, 0.0],
            {(0, 5): 1 / 2, (0, 7): 1 / 2},
        ),
        (spaces.MultiBinary(2), [FORBIDDEN, 3.0], {(0, 0): 1 / 2, (0, 1): 1 / 2}),
        (
            spaces.Tuple([spaces.MultiBinary(1), spaces.Discrete(3)]),
            [0.0, FORBIDDEN, 0.0, 0.0],
            {(bit, number): 1 / 4 for bit in (0, 1) for number in (1, 2)},
        ),
    ],
    ids=str,
)
def test_forbidden_actions_are_never_chosen_and_the_others_are_equally_frequent(
    space, inputs, legal
):
    uniform, layout = UniformActions(space), ActionLayout(space)
    noise = uniform.draw_noise(np.random.default_rng(0), ROWS)
    actions, logp = np.empty((ROWS, *layout.shape), layout.dtype), np.empty(ROWS, np.float32)
    uniform.choose_into(noise, actions, logp, np.tile(np.array(inputs, np.float32), (ROWS, 1)))
    distinct, counts = np.unique(actions.reshape(ROWS, -1), axis=0, return_counts=True)
    assert {tuple(row) for row in distinct.tolist()} == legal.keys()
    np.testing.assert_allclose(counts / ROWS, list(legal.values()), atol=0.02)
    np.testing.assert_allclose(np.exp(logp), next(iter(legal.values())), rtol=1e-5)


def test_numbers_next_to_forbidden_choices_stay_unchanged():
    space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-2, 2, (1,)), spaces.Discrete(2)])
    uniform = UniformActions(space)
    noise = uniform.draw_noise(np.random.default_rng(0), ROWS)
    free, masked = np.empty((2, ROWS, 3), np.float32)
    logp = np.empty(ROWS, np.float32)
    uniform.choose_into(noise, free, logp)
    uniform.choose_into(
        noise, masked, logp, np.tile(np.array([0, 0, 0, 0, FORBIDDEN, 0], np.float32), (ROWS, 1))
    )
    np.testing.assert_array_equal(masked[:, :2], free[:, :2])
    assert set(masked[:, 2].tolist()) == {1.0}
    np.testing.assert_allclose(logp, -np.log(2 * 4), rtol=1e-5)
