"""Exploration: frequencies of actions, and their recorded log-probabilities."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import MASKED_LOGIT, make_distribution
from aiorl.acting.exploration import (
    EpsilonGreedy,
    Exploration,
    GaussianNoise,
    OrnsteinUhlenbeckNoise,
    Schedule,
    StochasticSampling,
    exploration_has_memory,
    make_exploration,
    worker_epsilon,
)
from aiorl.errors import ConfigError, UnsupportedSpaceError

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ROWS = 20_000


def choose(exploration, inputs, timestep=0, seed=0, keys=None):
    noise = exploration.draw_noise(np.random.default_rng(seed), len(inputs))
    assert noise.shape == (len(inputs), exploration.noise_size)
    assert noise.dtype == np.float32
    distribution = exploration.distribution
    actions = np.empty((len(inputs), *distribution.action_shape), distribution.action_dtype)
    logp = np.full(len(inputs), np.nan, np.float32)
    exploration.choose_into(inputs, noise, actions, logp, timestep=timestep, keys=keys)
    assert np.isfinite(logp).all()
    return actions, logp


def repeated(row, rows=ROWS):
    return np.tile(np.array(row, np.float32), (rows, 1))


def test_epsilon_greedy_takes_each_action_with_its_recorded_probability():
    exploration = EpsilonGreedy(make_distribution(spaces.Discrete(4, start=-1)), epsilon=0.2)
    actions, logp = choose(exploration, repeated([0.0, 3.0, 1.0, 2.0]))
    share = np.bincount(actions + 1, minlength=4) / ROWS
    np.testing.assert_allclose(share, [0.05, 0.85, 0.05, 0.05], atol=0.01)
    np.testing.assert_allclose(np.exp(logp), share[actions + 1], atol=0.01)
    np.testing.assert_allclose(np.exp(logp[actions == 0]), 0.85, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        "Random",
        {"type": "EpsilonGreedy", "epsilon": 0.5},
        {"type": "StochasticSampling", "random_timesteps": 9},
    ],
)
@pytest.mark.parametrize(
    ("space", "inputs", "legal"),
    [
        (spaces.Discrete(3), [0.0, MASKED_LOGIT, 1.0], {(0,), (2,)}),
        (spaces.MultiDiscrete([2, 2]), [MASKED_LOGIT, 1.0, 0.0, 2.0], {(1, 0), (1, 1)}),
        (spaces.MultiBinary(2), [MASKED_LOGIT, 1.0], {(0, 0), (0, 1)}),
        (
            spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(1)]),
            [MASKED_LOGIT, 1.0, 0.0],
            {(1, 0), (1, 1)},
        ),
    ],
    ids=str,
)
def test_no_exploration_takes_forbidden_actions(settings, space, inputs, legal):
    exploration = make_exploration(settings, make_distribution(space))
    actions, logp = choose(exploration, repeated(inputs))
    assert {tuple(np.atleast_1d(row)) for row in actions.tolist()} == legal
    assert (np.exp(logp) >= 0.249).all()


def test_epsilon_follows_its_schedule_over_timesteps():
    exploration = EpsilonGreedy(
        make_distribution(spaces.Discrete(2)), epsilon=[[0, 1.0], [100, 0.0]]
    )
    assert [exploration.figures(step)["epsilon"] for step in (0, 50, 100, 1000)] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    actions, _ = choose(exploration, repeated([0.0, 1.0]), timestep=50)
    np.testing.assert_allclose(actions.mean(), 0.75, atol=0.02)
    assert choose(exploration, repeated([0.0, 1.0]), timestep=100)[0].all()


def test_workers_have_different_epsilons():
    """Horgan et al. 2018, section 4.1, use 360 workers; here 8."""
    epsilons = [worker_epsilon(index, 8) for index in range(1, 9)]
    np.testing.assert_allclose(epsilons, [0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert worker_epsilon(0, 8) == 0.0
    assert worker_epsilon(1, 1) == pytest.approx(0.4)
    assert worker_epsilon(9, 8) == worker_epsilon(1, 8)  # a late joiner
    assert [worker_epsilon(index, 0) for index in range(1, 10)] == [
        *epsilons,
        epsilons[0],
    ], "their number is unknown"
    exploration = make_exploration(
        "PerWorkerEpsilonGreedy",
        make_distribution(spaces.Discrete(2)),
        worker_index=8,
        num_workers=8,
    )
    assert exploration.figures(10**9)["epsilon"] == pytest.approx(0.4**8)


def test_gaussian_noise_is_scaled_to_the_range_and_clipped_to_it():
    exploration = GaussianNoise(make_distribution(BOX), stddev=0.1, scale=[[0, 1.0], [100, 0.0]])
    inputs = repeated([0.0, 5.0, 0.0, 0.0])
    actions, logp = choose(exploration, inputs)
    np.testing.assert_allclose(actions.mean(axis=0), [0, 5], atol=0.03)
    np.testing.assert_allclose(actions.std(axis=0), [0.2, 0.5], rtol=0.03)
    assert not logp.any()
    assert exploration.figures(50) == {"scale": 0.5}
    np.testing.assert_array_equal(choose(exploration, inputs, timestep=100)[0], inputs[:, :2])
    at_edge, _ = choose(exploration, repeated([2.0, 10.0, 0.0, 0.0]))
    assert BOX.high.tolist() == at_edge.max(axis=0).tolist()


@pytest.mark.parametrize("kind", [GaussianNoise, StochasticSampling])
def test_the_first_timesteps_may_be_uniform(kind):
    exploration = kind(make_distribution(BOX), random_timesteps=100)
    inputs = repeated([0.0, 5.0, -20.0, -20.0])
    early, logp = choose(exploration, inputs, timestep=99)
    np.testing.assert_allclose(early.std(axis=0), np.array([4, 10]) / np.sqrt(12), rtol=0.03)
    np.testing.assert_allclose(logp, -np.log(40), rtol=1e-5)
    late, _ = choose(exploration, inputs, timestep=100)
    assert late.std(axis=0).max() < 0.6


def ou(**settings):
    return OrnsteinUhlenbeckNoise(make_distribution(spaces.Box(-np.inf, np.inf, (1,))), **settings)


def test_ou_noise_is_the_process_by_hand():
    exploration = ou(theta=0.15, sigma=0.2, stddev=0.5)
    state = 0.0
    for step in range(5):
        noise = exploration.draw_noise(np.random.default_rng(step), 1)
        actions, logp = np.empty((1, 1), np.float32), np.empty(1, np.float32)
        exploration.choose_into(
            np.array([[1.0, 0.0]], np.float32), noise, actions, logp, timestep=step
        )
        state += -0.15 * state + 0.2 * noise[0, 0]
        assert actions[0, 0] == pytest.approx(1.0 + 0.5 * state, abs=1e-5)


def test_ou_processes_follow_their_rows_in_any_batches():
    """Rows keyed by episode: a process continues whatever the other rows are, and ends with its
    episode.
    """
    together, alone = ou(), ou()
    inputs = np.zeros((2, 2), np.float32)
    for step in range(4):
        noise = together.draw_noise(np.random.default_rng(step), 2)
        actions, logp = np.empty((2, 1), np.float32), np.empty(2, np.float32)
        together.choose_into(inputs, noise, actions, logp, timestep=0, keys=[(1, 0), (2, 0)])
        single = np.empty((1, 1), np.float32)
        alone.choose_into(inputs[:1], noise[1:], single, logp[:1], timestep=0, keys=[(2, 0)])
        np.testing.assert_array_equal(actions[1], single[0])
    together.on_episode_end(None, episode=types.SimpleNamespace(episode_id=2))
    fresh = ou()
    noise = fresh.draw_noise(np.random.default_rng(9), 1)
    after, expected = np.empty((1, 1), np.float32), np.empty((1, 1), np.float32)
    together.choose_into(
        inputs[:1], noise, after, np.empty(1, np.float32), timestep=0, keys=[(2, 0)]
    )
    fresh.choose_into(inputs[:1], noise, expected, np.empty(1, np.float32), timestep=0)
    np.testing.assert_array_equal(after, expected)
    assert set(together.processes) == {(1, 0), (2, 0)}


def test_a_process_ends_with_its_agent():
    exploration = ou()
    keys = [(1, "a"), (1, "b")]
    noise = exploration.draw_noise(np.random.default_rng(1), 2)
    actions, logp = np.empty((2, 1), np.float32), np.empty(2, np.float32)
    exploration.choose_into(
        np.zeros((2, 2), np.float32), noise, actions, logp, timestep=0, keys=keys
    )
    exploration.on_agent_end(types.SimpleNamespace(episode_id=1), "a")
    assert list(exploration.processes) == [(1, "b")]


@pytest.mark.parametrize("kind", [EpsilonGreedy, GaussianNoise, OrnsteinUhlenbeckNoise])
def test_a_kind_that_does_not_support_the_space_is_refused(kind):
    space = BOX if kind is EpsilonGreedy else spaces.Discrete(2)
    with pytest.raises(UnsupportedSpaceError):
        kind(make_distribution(space))


def test_settings_name_a_kind_and_its_own_settings():
    distribution = make_distribution(spaces.Discrete(2))
    assert make_exploration(None, distribution) is None
    assert make_exploration("StochasticSampling", distribution) is None
    assert (
        make_exploration({"type": "StochasticSampling", "random_timesteps": 0}, distribution)
        is None
    )
    assert isinstance(make_exploration({"random_timesteps": 5}, distribution), StochasticSampling)
    exploration = make_exploration({"type": "EpsilonGreedy", "epsilon": 0.3}, distribution)
    assert isinstance(exploration, EpsilonGreedy)
    assert exploration.figures(7) == {"epsilon": 0.3}
    assert make_exploration("Random", distribution).figures(0) == {}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ("EpsilonGredy", "'EpsilonGreedy'"),
        ({"type": "EpsilonGreedy", "eps": 1}, "eps"),
        ({"type": "EpsilonGreedy", "epsilon": 2.0}, "epsilon"),
        ({"type": "EpsilonGreedy", "epsilon": [[5, 1.0], [5, 0.5]]}, "epsilon"),
        ({"type": "StochasticSampling", "epsilon": 1}, "epsilon"),
    ],
)
def test_settings_that_make_no_exploration_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        make_exploration(settings, make_distribution(spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("settings", "space"),
    [
        ({"type": "EpsilonGreedy", "epsilon": 0.5}, spaces.MultiDiscrete([2, 3])),
        ({"type": "GaussianNoise", "random_timesteps": 5}, BOX),
        ({"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 5}, BOX),
        ({"type": "StochasticSampling", "random_timesteps": 5}, BOX),
        ("Random", BOX),
    ],
    ids=str,
)
@pytest.mark.parametrize("timestep", [0, 100])
def test_actions_of_rows_do_not_depend_on_batching(settings, space, timestep):
    whole_batch, other = (make_exploration(settings, make_distribution(space)) for _ in range(2))
    distribution = whole_batch.distribution
    noise = whole_batch.draw_noise(np.random.default_rng(0), 3, 5)
    assert noise.shape == (3, 5, whole_batch.noise_size)
    inputs = (
        np.random.default_rng(1).standard_normal((3, 5, distribution.num_inputs)).astype(np.float32)
    )
    for step in range(3):
        whole, logp = (
            np.empty((5, *distribution.action_shape), distribution.action_dtype),
            np.empty(5, np.float32),
        )
        whole_batch.choose_into(
            inputs[step], noise[step], whole, logp, timestep=timestep, keys=range(5)
        )
        for part in (slice(0, 2), slice(2, 5)):
            actions, part_logp = np.empty_like(whole[part]), np.empty_like(logp[part])
            keys = range(5)[part]
            other.choose_into(
                inputs[step, part],
                noise[step, part],
                actions,
                part_logp,
                timestep=timestep,
                keys=keys,
            )
            np.testing.assert_array_equal(actions, whole[part])
            np.testing.assert_array_equal(part_logp, logp[part])


class Softmax(Exploration):
    """A user's own kind: samples after dividing the outputs by a temperature."""

    def __init__(self, distribution, *, temperature=1.0, worker_index=-1):
        super().__init__(distribution, distribution.noise_size)
        self.temperature, self.worker_index = temperature, worker_index

    def _draw(self, rng, *leading):
        return self.distribution.draw_noise(rng, *leading)

    def _choose(self, inputs, now, actions, logp):
        self.distribution.sample_into(inputs / self.temperature, now.own, actions, logp)


class Failing(Softmax):
    has_memory = True

    def _choose(self, inputs, now, actions, logp):
        raise KeyError("boom")


def test_a_users_exploration_is_named_by_its_import_path():
    settings = {"type": f"{__name__}:Softmax", "temperature": 0.01}
    exploration = make_exploration(settings, make_distribution(spaces.Discrete(3)), worker_index=4)
    assert (exploration.temperature, exploration.worker_index) == (0.01, 4)
    actions, logp = np.empty(9, np.int64), np.empty(9, np.float32)
    inputs = np.tile(np.array([0.0, 1.0, 0.0], np.float32), (9, 1))
    exploration.choose_into(
        inputs, exploration.draw_noise(np.random.default_rng(0), 9), actions, logp, timestep=0
    )
    assert (actions == 1).all()
    assert not exploration_has_memory(settings)
    assert exploration_has_memory(f"{__name__}:Failing")


@pytest.mark.parametrize(
    "path", ["collections:OrderedDict", "no_such_module:Own", f"{__name__}:Exploration", "softmax"]
)
def test_a_value_that_is_no_exploration_is_refused_with_its_key(path):
    with pytest.raises(ConfigError) as caught:
        make_exploration({"type": path}, make_distribution(spaces.Discrete(3)))
    assert caught.value.key in ("exploration.type", "exploration")


def test_errors_of_a_users_exploration_name_the_setting():
    exploration = make_exploration(f"{__name__}:Failing", make_distribution(spaces.Discrete(3)))
    noise = exploration.draw_noise(np.random.default_rng(0), 2)
    with pytest.raises(ConfigError, match="boom") as caught:
        exploration.choose_into(
            np.zeros((2, 3), np.float32),
            noise,
            np.empty(2, np.int64),
            np.empty(2, np.float32),
            timestep=0,
        )
    assert caught.value.key == "exploration"


# Schedules
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_steps", "value"),
    [(0, 1.0), (100, 1.0), (150, 0.75), (200, 0.5), (300, 0.25), (400, 0.0), (10**9, 0.0)],
)
def test_values_lie_on_straight_lines_between_the_points_and_stay_beyond_them(
    env_steps: int, value: float
) -> None:
    schedule = Schedule([[100, 1.0], [200, 0.5], [400, 0.0]])
    assert schedule.value(env_steps) == pytest.approx(value)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [[0, 1], [0, 2]],
        [[5, 1], [3, 2]],
        [[0, 1, 2]],
        [[-1, 1.0]],
        [[0, math.nan]],
        [[math.inf, 1.0]],
    ],
)
def test_invalid_points_are_refused_with_the_name_of_the_setting(points: list[list[float]]) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(points, key="lr_schedule")
    assert caught.value.key == "lr_schedule"
    assert "lr_schedule" in str(caught.value)
