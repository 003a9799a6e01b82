"""Distributions over Tuple and Dict spaces against their components', one by one."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import (
    Composite,
    SquashedComposite,
    SquashedGaussian,
    make_distribution,
    make_named_distribution,
)
from aiorl.errors import UnsupportedSpaceError

ROWS = 6
SPACES = [
    (spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 2])]), False),
    (spaces.Tuple([spaces.Discrete(4, start=-2), spaces.Box(-1, 1, (2, 2)), spaces.Box(0, 1, ())]), False),
    (spaces.Dict({"b": spaces.Box(-1, 3, (2,)), "a": spaces.Tuple([spaces.Discrete(3)])}), True),
]


def inputs_of(distribution, seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, distribution.num_inputs)).astype(np.float32)


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
def test_r117_samples_are_flat_rows_that_hold_actions_of_the_space(space, squash):
    distribution = make_distribution(space, squash=squash)
    assert isinstance(distribution, SquashedComposite if squash else Composite)
    noise = distribution.draw_noise(np.random.default_rng(1), 3, ROWS)
    assert noise.shape == (3, ROWS, distribution.noise_size)
    actions, logp = distribution.sample_with_logp(inputs_of(distribution), noise[0])
    for batch in (actions, distribution.deterministic(inputs_of(distribution))):
        assert batch.dtype == distribution.action_dtype
        assert batch.shape == (ROWS, *distribution.action_shape)
        if squash or all(isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) for leaf in space):
            assert all(space.contains(action) for action in distribution.layout.to_env(batch))
    np.testing.assert_allclose(distribution.logp(inputs_of(distribution), actions), logp, rtol=1e-4, atol=2e-4)
    again = distribution.sample_with_logp(inputs_of(distribution), noise[0])
    np.testing.assert_array_equal(again[0], actions)


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
def test_every_figure_is_the_sum_of_the_components(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs, other = inputs_of(distribution), inputs_of(distribution, 1)
    actions = distribution.sample(inputs, np.random.default_rng(0))
    logp, entropy, kl = np.zeros(ROWS), np.zeros(ROWS), np.zeros(ROWS)
    start = 0
    for leaf, batch in zip(distribution.layout.leaves, distribution.layout.split(actions), strict=True):
        part = make_distribution(leaf, squash=squash and isinstance(leaf, spaces.Box))
        mine, theirs = (array[:, start : start + part.num_inputs] for array in (inputs, other))
        logp += part.logp(mine, batch)
        entropy += part.entropy(mine)
        kl += part.kl(mine, theirs)
        start += part.num_inputs
    assert start == distribution.num_inputs
    np.testing.assert_allclose(distribution.logp(inputs, actions), logp, rtol=1e-5)
    np.testing.assert_allclose(distribution.entropy(inputs), entropy, rtol=1e-5)
    np.testing.assert_allclose(distribution.kl(inputs, other), kl, rtol=1e-5)


def test_components_are_independent_of_each_others_noise():
    distribution = make_distribution(spaces.Tuple([spaces.Discrete(5), spaces.Discrete(5)]))
    inputs = inputs_of(distribution)
    noise = distribution.draw_noise(np.random.default_rng(0), ROWS)
    changed = noise.copy()
    changed[:, 1] = 1.0 - changed[:, 1]
    first, second = (distribution.sample_with_logp(inputs, drawn)[0] for drawn in (noise, changed))
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    assert (first[:, 1] != second[:, 1]).any()


def test_the_name_and_the_space_give_it_back():
    for space, squash in SPACES:
        distribution = make_distribution(space, squash=squash)
        again = make_named_distribution(distribution.name, space)
        assert type(again) is type(distribution)
    squashed = make_named_distribution("squashed_composite", SPACES[2][0])
    assert any(isinstance(part.distribution, SquashedGaussian) for part in squashed.parts)


def test_a_component_without_a_distribution_is_refused():
    for space in (spaces.Tuple([]), spaces.Tuple([spaces.Text(2)]), spaces.Dict({"a": spaces.Text(2)})):
        with pytest.raises(UnsupportedSpaceError, match="not supported"):
            make_distribution(space)
