"""State-dependent noise (gSDE): compared with the paper's formulas in NumPy, and the lifetime of
each row's matrix.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import (
    DiagGaussian,
    SquashedGaussian,
    make_distribution,
    make_named_distribution,
)
from aiorl.acting.exploration import StateDependentNoise, exploration_has_memory, make_exploration
from aiorl.errors import ConfigError, PolicyError

FEATURES, ACTIONS = 5, 2
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
RNG = np.random.default_rng(4)
SIGMA = np.exp(RNG.normal(-0.5, 0.4, (FEATURES, ACTIONS)))
MEANS = np.array([[0.3, -0.2], [-0.5, 0.1]])
STATES = RNG.normal(size=(2, FEATURES))


def inputs_of(means: Any, states: Any) -> np.ndarray[Any, Any]:
    """Return a network's outputs for features [N, F] and `SIGMA`: inputs of the distribution, then
    shares.
    """
    weighted = states[:, :, None] * SIGMA
    deviation = np.sqrt(np.square(weighted).sum(axis=1))
    shares = (weighted / deviation[:, None]).reshape(len(states), -1)
    return np.concatenate([means, np.log(deviation), shares], axis=1).astype(np.float32)


INPUTS = inputs_of(MEANS, STATES)


def make(
    sample_freq: int = 4, kind: type[DiagGaussian] = DiagGaussian, **settings: Any
) -> StateDependentNoise:
    return StateDependentNoise(kind(BOX, FEATURES), sample_freq=sample_freq, **settings)


def choose(
    exploration: StateDependentNoise, inputs: Any, noise: Any, keys: Any = None, timestep: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    actions, logp = np.empty((len(inputs), ACTIONS), np.float32), np.empty(len(inputs), np.float32)
    exploration.choose_into(inputs, noise, actions, logp, timestep=timestep, keys=keys)
    return actions, logp


def matrices_of(exploration: StateDependentNoise, noise: Any, keys: Any = None) -> Any:
    """Return the matrices [N, F, A] of noise [N, K], measured with states that have one feature
    each.
    """
    matrices = np.empty((len(noise), FEATURES, ACTIONS))
    for feature, state in enumerate(np.eye(FEATURES)):
        states = np.repeat(state[None], len(noise), axis=0)
        outputs = inputs_of(np.zeros((len(noise), ACTIONS)), states)
        actions, _ = choose(exploration, outputs, noise, keys)
        matrices[:, feature] = actions / SIGMA[feature]
    return matrices


def test_an_action_is_the_mean_plus_the_features_times_a_matrix_of_their_deviations() -> None:
    """Raffin et al. 2021, eq. 7: mu(s) + theta^T phi(s), theta of N(0, sigma^2), checked by the
    covariances.
    """
    exploration = make()
    noise = exploration.draw_noise(np.random.default_rng(0), 1)
    theta = SIGMA * matrices_of(exploration, noise)[0]
    for state in range(2):
        actions, _ = choose(exploration, INPUTS[state : state + 1], noise)
        np.testing.assert_allclose(
            actions[0], MEANS[state] + theta.T @ STATES[state], rtol=1e-5, atol=1e-6
        )


def test_log_probability_is_that_of_a_gaussian_with_the_deviation_of_the_state() -> None:
    """Eq. 8 and 9: variances sum_f phi_f^2 sigma_f^2."""
    exploration = make()
    actions, logp = choose(exploration, INPUTS, exploration.draw_noise(np.random.default_rng(1), 2))
    variance = np.square(STATES) @ np.square(SIGMA)
    expected = -0.5 * (np.square(actions - MEANS) / variance + np.log(2 * np.pi * variance)).sum(
        axis=1
    )
    np.testing.assert_allclose(logp, expected, rtol=1e-4)
    np.testing.assert_allclose(exploration.distribution.logp(INPUTS, actions), expected, rtol=1e-4)


def test_the_density_of_squashed_actions_is_that_of_the_normal_ones_by_the_slope_of_the_map() -> (
    None
):
    """The slope is computed by differences, in float64."""
    exploration = make(kind=SquashedGaussian)
    actions, logp = choose(exploration, INPUTS, exploration.draw_noise(np.random.default_rng(3), 2))
    assert all(BOX.contains(action) for action in actions)
    low, span = BOX.low.astype(np.float64), (BOX.high - BOX.low).astype(np.float64)
    squash = lambda u: low + span * (np.tanh(u) + 1) / 2  # noqa: E731
    normal = np.arctanh(2 * (actions - low) / span - 1)
    slope = (squash(normal + 1e-5) - squash(normal - 1e-5)) / 2e-5
    variance = np.square(STATES) @ np.square(SIGMA)
    density = (
        np.exp(-0.5 * np.square(normal - MEANS) / variance) / np.sqrt(2 * np.pi * variance) / slope
    )
    np.testing.assert_allclose(logp, np.log(density).sum(axis=1), rtol=1e-3, atol=1e-3)


def test_matrices_of_unchanged_rows_last_sample_freq_steps_however_noise_is_drawn() -> None:
    exploration, rng = make(4), np.random.default_rng(5)
    noise = np.concatenate([exploration.draw_noise(rng, steps, 3) for steps in (3, 6, 3)])
    by_step = np.stack([matrices_of(exploration, step) for step in noise]).reshape(3, 4, 3, -1)
    np.testing.assert_array_equal(by_step, np.broadcast_to(by_step[:, :1], by_step.shape))
    matrices = by_step[:, 0].reshape(9, -1)
    assert len(np.unique(matrices, axis=0)) == 9, "each row and each time another"
    np.testing.assert_array_equal(make(4).draw_noise(np.random.default_rng(5), 12, 3), noise)


def test_actions_of_rows_do_not_depend_on_other_rows() -> None:
    together, other = make(2), make(2)
    outputs = inputs_of(RNG.normal(size=(5, ACTIONS)), RNG.normal(size=(5, FEATURES)))
    for noise in together.draw_noise(np.random.default_rng(9), 4, 5):
        for keys in (None, range(5)):
            actions, logp = choose(together, outputs, noise, keys)
            for part in (slice(0, 2), slice(2, 5)):
                of_part = choose(
                    other, outputs[part], noise[part], None if keys is None else keys[part]
                )
                np.testing.assert_array_equal(of_part[0], actions[part])
                np.testing.assert_array_equal(of_part[1], logp[part])


def test_noise_drawn_ahead_does_not_grow_with_the_features_and_a_matrix_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each one is made by its own generator."""
    few, many = make(5), StateDependentNoise(DiagGaussian(BOX, 100 * FEATURES), sample_freq=5)
    ahead = few.draw_noise(np.random.default_rng(10), 20, 3)
    assert many.draw_noise(np.random.default_rng(10), 20, 3).nbytes == ahead.nbytes
    seeds, generator = [], np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: seeds.append(seed) or generator(seed)
    )
    for noise in ahead:
        choose(few, np.repeat(INPUTS[:1], 3, axis=0), noise)
    assert len(seeds) == 3 * 20 / 5


def test_an_agents_matrix_lasts_sample_freq_steps_and_ends_with_its_episode() -> None:
    """Other rows come and go without any effect."""
    exploration, rng = make(3), np.random.default_rng(7)

    def act(*keys: Any) -> dict[Any, tuple[float, ...]]:
        actions, _ = choose(
            exploration,
            np.repeat(INPUTS[:1], len(keys), axis=0),
            exploration.draw_noise(rng, len(keys)),
            keys,
        )
        return dict(zip(keys, map(tuple, actions.tolist()), strict=True))

    a, b = (1, "a"), (1, "b")
    track = [act(a)[a], *(act(b, a)[a] for _ in range(2)), act(a)[a]]
    assert len(set(track[:3])) == 1
    assert track[3] != track[0]
    assert act(a, b)[a] == track[3], "b's third step"
    both = act(b, a)
    assert both[a] == track[3] != both[b]
    exploration.on_episode_end(None, episode=types.SimpleNamespace(episode_id=1))
    assert not exploration.matrix_by_key
    assert act(a)[a] != track[3]


def test_equal_seeds_give_equal_actions_and_uniform_ones_come_first() -> None:
    matrices = []
    for _ in range(2):
        exploration = make(random_timesteps=10)
        noise = exploration.draw_noise(np.random.default_rng(8), 2)
        matrices.append(
            [choose(exploration, INPUTS, noise, range(2), timestep)[0] for timestep in (9, 10)]
        )
    np.testing.assert_array_equal(matrices[0], matrices[1])
    assert all(BOX.contains(action) for action in matrices[0][0])
    assert (matrices[0][0] != matrices[0][1]).all()


def test_a_policy_without_features_has_no_such_noise() -> None:
    with pytest.raises(ConfigError, match=r"sample_freq.* 0"):
        make(0)
    settings = {"type": "StateDependentNoise", "sample_freq": 4}
    for distribution in (make_distribution(BOX), make_distribution(spaces.Discrete(2))):
        with pytest.raises(ConfigError, match="use_sde: true"):
            make_exploration(settings, distribution)


def test_it_is_made_by_name_and_needs_no_environments_polled_in_turn() -> None:
    settings = {"type": "StateDependentNoise", "sample_freq": 4}
    kind = make_named_distribution("squashed_gaussian", BOX, FEATURES)
    assert isinstance(kind, SquashedGaussian)
    assert (kind.num_features, kind.num_inputs, kind.num_outputs) == (
        FEATURES,
        2 * ACTIONS,
        (2 + FEATURES) * ACTIONS,
    )
    exploration = make_exploration(settings, kind)
    assert isinstance(exploration, StateDependentNoise)
    assert exploration.has_memory
    assert not exploration_has_memory(settings)
    assert exploration_has_memory("OrnsteinUhlenbeckNoise")
    with pytest.raises(PolicyError, match="categorical"):
        make_named_distribution("categorical", spaces.Discrete(2), FEATURES)
