"""TensorFlow's distributions equal NumPy's, within 1e-5."""

from __future__ import annotations

from functools import partial

import entropies
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given, settings, strategies as st

from aiorl.acting import distributions as acting
from aiorl.learning.models.distributions import to_tf_distribution

BITS = spaces.MultiBinary(2)
SPACES = [
    (spaces.Discrete(2), False),
    (spaces.Discrete(6, start=-2), False),
    (spaces.MultiDiscrete([3, 2, 4]), False),
    (spaces.MultiDiscrete(np.array([[3, 3], [3, 3]]), start=np.array([[0, 1], [2, 3]])), False),
    (spaces.MultiBinary((2, 2)), False),
    (spaces.Box(-1.0, 1.0, (3,)), False),
    (spaces.Box(-1.0, 1.0, (2, 2), np.float64), False),
    (spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)), True),
    (
        spaces.Tuple(
            [spaces.Discrete(2), spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, (2, 2))]
        ),
        False,
    ),
    (
        spaces.Dict(
            {
                "b": spaces.Discrete(3, start=4),
                "a": spaces.Tuple([spaces.Box(-2.0, 1.0, (2,)), BITS]),
            }
        ),
        True,
    ),
]
SCALED = [
    spaces.Box(np.array([-2, 300, -np.inf], np.float32), np.array([2, 500, np.inf], np.float32)),
    spaces.Dict(
        {
            "b": spaces.Discrete(3),
            "a": spaces.Tuple([spaces.Box(-2.0, 1.0, (2,), np.float64), BITS]),
        }
    ),
]
KINDS = [acting.make_distribution(space, squash=squash) for space, squash in SPACES]
KINDS += [acting.make_distribution(space, scale=True) for space in SCALED]
TWINS = [(kind, to_tf_distribution(kind)) for kind in KINDS]
IDS = [f"{twin.name}-{twin.action_space}" for twin, _ in TWINS]
ROWS = 4


def all_of(twin, inputs, other, actions):
    return {
        "logp": twin.logp(inputs, actions),
        "entropy": twin.entropy(inputs),
        "kl to itself": twin.kl(inputs, inputs),
        "kl": twin.kl(inputs, other),
    }


# compiled together as in the learner's update; fixed shapes, so that each is traced once.
# Distributions of several parts consist of those of each kind of space.
COMPILED = {
    index: tf.function(partial(all_of, twin), jit_compile=True, autograph=False)
    for index, (kind, twin) in enumerate(TWINS)
    if isinstance(kind.action_space, spaces.Dict | spaces.Tuple)
}


def close(mine, theirs, atol=1e-5):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=atol)


@pytest.mark.rest_slow
@pytest.mark.parametrize("index", range(len(TWINS)), ids=IDS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 3.0), compiled=st.booleans())
def test_logp_entropy_and_kl_equal_those_of_numpy(index, seed, scale, compiled):
    numpy_twin, tf_twin = TWINS[index]
    rng = np.random.default_rng(seed)
    inputs, other = (scale * rng.standard_normal((2, ROWS, numpy_twin.num_inputs))).astype(
        np.float32
    )
    actions = numpy_twin.sample(inputs, rng)
    evaluate = COMPILED[index] if compiled and index in COMPILED else partial(all_of, tf_twin)
    found = evaluate(inputs, other, actions)
    # the rounding error of an action in float32 is divided by its deviation, the exponential of an
    # input
    is_continuous = np.asarray(actions).dtype.kind == "f"
    atol = 1e-5 * np.exp(2.0 * scale) if is_continuous else 1e-5
    close(found["logp"], numpy_twin.logp(inputs, actions), atol)
    close(found["entropy"], entropies.entropy(numpy_twin, inputs), 3e-5)
    close(found["kl to itself"], np.zeros(ROWS))
    # divergences grow with exp(log_std) squared; compare relative to their size
    np.testing.assert_allclose(
        found["kl"], entropies.kl(numpy_twin, inputs, other), rtol=1e-4, atol=1e-5
    )


def test_features_of_actions_by_hand():
    space = spaces.Tuple(
        [spaces.Discrete(2, start=1), spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, (2,))]
    )
    twin = to_tf_distribution(acting.make_distribution(space))
    assert twin.num_features == 2 + 5 + 2
    features = twin.features(np.array([[2, 2, 0, 0.5, -0.5], [0, 0, 0, 0, 0]], np.float32))
    np.testing.assert_array_equal(
        features, [[0, 1, 0, 0, 1, 1, 0, 0.5, -0.5], [0, 0, 1, 0, 0, 1, 0, 0, 0]]
    )


def test_features_of_scaled_actions_are_in_units_and_clipped_to_their_bounds():
    twin = to_tf_distribution(acting.make_distribution(SCALED[0], scale=True))
    actions = np.array([[1.0, 350.0, 20.0], [0.0, 0.0, 0.0], [-3.0, 500.0, -20.0]], np.float32)
    np.testing.assert_allclose(
        twin.features(actions), [[0.5, -0.5, 20.0], [0.0, -1.0, 0.0], [-1.0, 1.0, -20.0]]
    )


def test_samples_of_scaled_actions_have_the_density_of_the_space():
    numpy_twin = acting.make_distribution(SCALED[0], scale=True)
    inputs = np.array([[0.1, -0.2, 0.3, -1.0, 0.0, 0.5]] * 4, np.float32)
    actions, logp = to_tf_distribution(numpy_twin).sample_with_logp(inputs, [1, 2])
    np.testing.assert_allclose(logp, numpy_twin.logp(inputs, actions.numpy()), rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_squashed_samples_and_stay_finite_far_out():
    twin = to_tf_distribution(acting.make_distribution(spaces.Box(-1.0, 1.0, (1,)), squash=True))
    inputs = tf.Variable([[0.3, -1.0], [40.0, 1.0], [-40.0, -30.0]])
    with tf.GradientTape() as tape:
        actions, logp = twin.sample_with_logp(inputs, tf.constant([5, 6]))
        loss = tf.reduce_sum(actions) + tf.reduce_sum(logp) + tf.reduce_sum(twin.entropy(inputs))
    gradient = tape.gradient(loss, inputs).numpy()
    assert np.isfinite(gradient).all()
    assert gradient[0, 0] != 0.0


@pytest.mark.parametrize("squash", [False, True])
def test_samples_over_a_box_match_their_logp_and_depend_on_the_seed(squash):
    box = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    numpy_twin = acting.make_distribution(box, squash=squash)
    twin = to_tf_distribution(numpy_twin)
    inputs = (0.5 * np.random.default_rng(0).standard_normal((ROWS, 4))).astype(np.float32)
    (actions, logp), (again, _) = (
        twin.sample_with_logp(inputs, tf.constant([1, 2])) for _ in range(2)
    )
    np.testing.assert_array_equal(actions, again)
    np.testing.assert_allclose(logp, numpy_twin.logp(inputs, actions.numpy()), rtol=1e-4, atol=1e-4)
    assert not squash or all(numpy_twin.action_space.contains(action) for action in actions.numpy())
