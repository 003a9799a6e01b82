"""Gaussian actions in units of a Box's range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.distributions import BoxScale, DiagGaussian, ScaledGaussian, make_distribution
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.data.spaces import space_to_dict
from aiorl.errors import PolicyError

THRUST = spaces.Box(300.0, 500.0, (2,))
MIXED = spaces.Box(
    np.array([-np.inf, 0.0, -4.0, 7.0, 1.0], np.float32),
    np.array([np.inf, np.inf, 2.0, 7.0, 3.0], np.float32),
)


def sampled(distribution, inputs, noise):
    return distribution.sample_with_logp(
        np.array([inputs], np.float32), np.array([noise], np.float32)
    )


def test_a_mean_of_0_is_the_middle_and_a_deviation_of_1_is_half_the_range():
    distribution = make_distribution(THRUST, scale=True)
    actions, logp = sampled(distribution, [0.0, 0.5, 0.0, math.log(2.0)], [1.0, -0.5])
    np.testing.assert_allclose(actions, [[500.0, 350.0]])
    density = -0.5 * (1.0 + 0.25) - math.log(2.0) - math.log(2.0 * math.pi) - 2.0 * math.log(100.0)
    np.testing.assert_allclose(logp, [density], rtol=1e-6)
    np.testing.assert_allclose(
        distribution.logp(np.array([[0.0, 0.5, 0.0, math.log(2.0)]]), actions), logp, rtol=1e-6
    )
    np.testing.assert_allclose(
        distribution.deterministic(np.array([[0.0, 0.5, 0.0, 0.0]])), [[400.0, 450.0]]
    )


def test_only_numbers_with_two_finite_and_different_bounds_are_scaled():
    distribution = make_distribution(MIXED, scale=True)
    actions, _ = sampled(distribution, [0.0] * 10, [1.0] * 5)
    np.testing.assert_allclose(actions, [[1.0, 1.0, 2.0, 8.0, 3.0]])
    np.testing.assert_allclose(
        distribution.deterministic(np.zeros((1, 10))), [[0.0, 0.0, -1.0, 7.0, 2.0]]
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_actions_have_the_dtype_of_the_space_and_no_bound_overflows(dtype):
    most = np.finfo(dtype).max
    space = spaces.Box(np.array([-most, 1.0], dtype), np.array([most, 1.5], dtype), dtype=dtype)
    distribution = make_distribution(space, scale=True)
    actions, logp = sampled(distribution, [0.0] * 4, [0.5, 0.5])
    assert actions.dtype == dtype
    assert np.isfinite(actions).all()
    assert np.isfinite(logp).all()
    assert actions[0, 1] == 1.375


def test_actions_in_nested_spaces_are_scaled_part_by_part():
    space = spaces.Dict(
        {"gear": spaces.Discrete(3), "by": spaces.Tuple([THRUST, spaces.Box(-1.0, 1.0, (1,))])}
    )
    distribution = make_distribution(space, scale=True)
    parts = [part.distribution.name for part in distribution.parts]
    assert sorted(parts) == ["categorical", "diag_gaussian", "scaled_gaussian"]
    mode = distribution.layout.to_env(
        distribution.deterministic(np.zeros((1, distribution.num_inputs)))
    )[0]
    np.testing.assert_allclose(mode["by"][0], [400.0, 400.0])
    np.testing.assert_allclose(mode["by"][1], [0.0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (3,)),
        spaces.Box(-np.inf, np.inf, (3,)),
        spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (1,)),
        spaces.Tuple([spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2)]),
        spaces.Discrete(4),
    ],
    ids=str,
)
def test_spaces_that_are_in_these_units_or_have_none_get_the_same_distribution_as_without(space):
    assert make_distribution(space, scale=True).name == make_distribution(space).name


def test_noise_of_the_state_is_scaled_too():
    distribution = make_distribution(THRUST, scale=True).with_features(3)
    assert isinstance(distribution, ScaledGaussian)
    assert distribution.num_outputs == 4 + 6
    np.testing.assert_allclose(sampled(distribution, [0.0] * 4, [0.1, 0.2])[0], [[410.0, 420.0]])


def test_the_log_volume_is_that_of_the_scaled_numbers():
    assert BoxScale(MIXED).log_volume == pytest.approx(math.log(3.0))


class Still:
    """Network without weights."""

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        return np.zeros((len(obs), 4), np.float32), np.zeros(len(obs), np.float32), []

    def set_weights(self, weights):
        assert not weights

    def get_weights(self):
        return {}


def policy_with(distribution: DiagGaussian) -> GraphPolicy:
    spec = ActingSpec(
        obs_shape=(1,),
        obs_dtype="float32",
        state_shapes=(),
        num_dist_inputs=4,
        distribution=distribution.name,
        action_space=space_to_dict(THRUST),
        weights=(),
    )
    return GraphPolicy(Still(), spec)


def test_a_saved_state_is_refused_by_a_policy_that_acts_in_other_units():
    plain = policy_with(make_distribution(THRUST))
    scaled = policy_with(make_distribution(THRUST, scale=True))
    scaled.set_state(scaled.get_state())
    plain.set_state({"weights": {}, "global_timestep": 0})  # as earlier versions saved it
    for policy, state in (
        (scaled, plain.get_state()),
        (scaled, {"weights": {}}),
        (plain, scaled.get_state()),
    ):
        with pytest.raises(PolicyError, match="normalize_actions"):
            policy.set_state(state)
