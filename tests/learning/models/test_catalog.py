"""Networks from settings: shapes, names, equal numbers for steps and sequences, reading and setting
weights.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError, PolicyError
from aiorl.learning.models.branch import NATURE_FILTERS, channels_first
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.functional import FunctionalNetwork

DISCRETE = make_distribution(spaces.Discrete(3))
GAUSSIAN = make_distribution(spaces.Box(-1.0, 1.0, (2,)))
SMALL = {"fcnet_hiddens": [8], "lstm_cell_size": 5}


def obs_of(model, *leading, seed=0):
    rng = np.random.default_rng(seed)
    if model.obs_dtype == "uint8":
        return rng.integers(0, 256, (*leading, *model.obs_shape), dtype=np.uint8)
    return rng.standard_normal((*leading, *model.obs_shape)).astype(np.float32)


def test_names_do_not_depend_on_earlier_networks():
    names = []
    for _ in range(2):
        names.append(
            list(build_model((4,), "float32", DISCRETE, SMALL | {"use_gru": True}).variables)
        )
        build_model((4,), "float32", DISCRETE, {})
    assert names[0] == names[1]
    assert names[0][:5] == [
        "policy/dense_0/kernel",
        "policy/dense_0/bias",
        "policy/gru/kernel",
        "policy/gru/recurrent_kernel",
        "policy/gru/bias",
    ]
    assert names[0][-4:] == [
        "policy/head/kernel",
        "policy/head/bias",
        "value/head/kernel",
        "value/head/bias",
    ]


def test_shared_layers_appear_once():
    shared = build_model(
        (4,), "float32", GAUSSIAN, SMALL | {"vf_share_layers": True, "free_log_std": True}
    )
    assert list(shared.variables) == [
        "shared/dense_0/kernel",
        "shared/dense_0/bias",
        "policy/head/kernel",
        "policy/head/bias",
        "value/head/kernel",
        "value/head/bias",
        "policy/log_std",
    ]
    assert len(build_model((4,), "float32", GAUSSIAN, SMALL).variables) == 8


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    first, same, other = (
        build_model((4,), "float32", DISCRETE, SMALL, seed=seed).get_weights() for seed in (1, 1, 2)
    )
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, same[name])
    assert not np.array_equal(first["policy/dense_0/kernel"], other["policy/dense_0/kernel"])


def test_a_network_without_hidden_layers_is_linear():
    model = build_model((2,), "float32", DISCRETE, {"fcnet_hiddens": []}, seed=0)
    obs, weights = obs_of(model, 4), model.get_weights()
    np.testing.assert_allclose(
        model.forward(obs)[0], obs @ weights["policy/head/kernel"], rtol=1e-5
    )


def test_images_are_scaled_inside_the_network():
    model = build_model((84, 84, 4), "uint8", DISCRETE, {"vf_share_layers": True}, seed=0)
    twin = build_model((84, 84, 4), "float32", DISCRETE, {"vf_share_layers": True}, seed=0)
    obs = obs_of(model, 2)
    np.testing.assert_allclose(
        model.forward(obs)[0], twin.forward(obs.astype(np.float32) / 255.0)[0], rtol=1e-3, atol=1e-5
    )
    assert model.variables["shared/dense_0/kernel"].shape == (3136, 512)
    assert sum(name.endswith("kernel") and "conv" in name for name in model.variables) == len(
        NATURE_FILTERS
    )
    assert not any("conv" in name for name in build_model((4,), "float32", DISCRETE, {}).variables)


def test_free_log_std_is_the_same_for_all_observations_and_learned():
    model = build_model((4,), "float32", GAUSSIAN, SMALL | {"free_log_std": True}, seed=0)
    model.variables["policy/log_std"].assign([0.25, -1.0])
    with tf.GradientTape() as tape:
        dist_inputs, _ = model.forward(obs_of(model, 6))
        loss = tf.reduce_sum(dist_inputs)
    np.testing.assert_allclose(dist_inputs[:, 2:], [[0.25, -1.0]] * 6)
    np.testing.assert_allclose(tape.gradient(loss, model.variables["policy/log_std"]), [6.0, 6.0])


RECURRENT = [{"use_lstm": True}, {"use_gru": True}, {"use_lstm": True, "vf_share_layers": True}]


@pytest.mark.parametrize(
    ("config", "is_compiled"), list(zip(RECURRENT, (True, False, False), strict=True)), ids=str
)
def test_a_sequence_gives_the_numbers_of_its_steps(config, is_compiled):
    model = build_model((4,), "float32", DISCRETE, SMALL | config, seed=0)
    steps, rows = 4, 3
    obs = obs_of(model, steps, rows)
    resets = np.random.default_rng(1).random((steps, rows)) < 0.3
    state = [item + np.float32(0.5) for item in model.initial_state(rows)]
    assert len(state) == len(model.state_shapes)
    sequence = model.forward_sequence
    if is_compiled:
        sequence = tf.function(sequence, jit_compile=True, autograph=False)
    dist_inputs, values = sequence(
        tf.constant(obs), [tf.constant(item) for item in state], tf.constant(resets)
    )
    assert dist_inputs.shape == (steps, rows, 3)
    assert values.shape == (steps, rows)
    for t in range(steps):
        state = [np.where(resets[t][:, None], np.float32(0), item) for item in state]
        step_inputs, step_values, state = model.forward_step(obs[t], state)
        np.testing.assert_allclose(dist_inputs[t], step_inputs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(values[t], step_values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [{}, {"use_lstm": True}], ids=str)
def test_every_weight_gets_a_gradient(config):
    model = build_model((4,), "float32", GAUSSIAN, SMALL | config, seed=0)

    with tf.GradientTape() as tape:
        dist_inputs, values = model.forward_sequence(
            obs_of(model, 4, 2), model.initial_state(2), tf.zeros((4, 2), tf.bool)
        )
        loss = tf.reduce_mean(dist_inputs**2) + tf.reduce_mean(values**2)
    for name, gradient in zip(
        model.variables, tape.gradient(loss, model.trainable_variables), strict=True
    ):
        assert np.abs(gradient).max() > 0, name


@pytest.mark.parametrize("config", [{}, {"use_gru": True}], ids=str)
def test_given_weights_replace_all_variables_for_sequences_too(config):
    one, other = (
        build_model((4,), "float32", DISCRETE, SMALL | config, seed=seed) for seed in (0, 1)
    )
    obs, state = obs_of(one, 5, 2), [item + np.float32(0.5) for item in one.initial_state(2)]
    resets = np.zeros((5, 2), np.bool_)
    found, unchanged = (
        one.forward_sequence(obs, state, resets, weights=model.get_weights())
        for model in (other, one)
    )
    wanted = other.forward_sequence(obs, state, resets)
    for mine, others, own in zip(found, wanted, unchanged, strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-4, atol=1e-6)
        assert not np.allclose(mine, own)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda weights: weights.pop("policy/head/bias"), "policy/head/bias"),
        (lambda weights: weights.update(spy=np.zeros(1)), "spy"),
        (lambda weights: weights.update({"policy/head/bias": np.zeros(4)}), "policy/head/bias"),
        (
            lambda weights: weights.update({"policy/head/bias": np.full(3, np.nan)}),
            "policy/head/bias",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, name):
    model = build_model((4,), "float32", DISCRETE, SMALL, seed=0)
    before = model.get_weights()
    weights = build_model((4,), "float32", DISCRETE, SMALL, seed=1).get_weights()
    change(weights)
    with pytest.raises(PolicyError, match=name):
        model.set_weights(weights)
    for name, weight in model.get_weights().items():
        np.testing.assert_array_equal(weight, before[name])


def test_a_recurrent_network_needs_its_state():
    model = build_model((4,), "float32", DISCRETE, SMALL | {"use_lstm": True})
    with pytest.raises(PolicyError, match="forward_sequence"):
        model.forward(obs_of(model, 2))
    with pytest.raises(PolicyError, match=r"1 .*4"):
        model.forward_step(obs_of(model, 2), model.initial_state(2)[:1])


@pytest.mark.parametrize(
    ("shape", "distribution", "config"),
    [
        ((4,), DISCRETE, {"free_log_std": True}),
        ((4,), GAUSSIAN, {"initial_log_std": -2.0}),
        ((4,), DISCRETE, {"conv_filters": [[4, 3, 1]]}),
        ((9, 9, 1), DISCRETE, {"conv_filters": [[4, 3]]}),
        ((9, 9, 1), DISCRETE, {"conv_filters": [[4, 3, 0]]}),
        ((9, 9, 1), DISCRETE, {"conv_filters": [[4, [3, 3, 3], 1]]}),
        ((4,), DISCRETE, {"fcnet_hiddens": [0]}),
        ((4,), DISCRETE, {"lstm_cell_size": -1}),
        ((4,), DISCRETE, {"use_lstm": True, "use_gru": True}),
        ((4,), DISCRETE, {"fcnet_activation": "thanh"}),
    ],
)
def test_settings_that_make_no_network_are_config_errors(shape, distribution, config):
    with pytest.raises(ConfigError, match=[*config][-1]):
        build_model(shape, "float32", distribution, config)


LOOKS_BACK = SMALL | {"use_lstm": True, "lstm_use_prev_action_reward": True}


def test_looking_back_depends_on_the_previous_action_and_reward():
    model = build_model((4,), "float32", DISCRETE, LOOKS_BACK, seed=0)
    assert model.uses_previous_step
    assert model.variables["policy/lstm/kernel"].shape == (8 + 3 + 1, 20)
    obs, state = obs_of(model, 1), model.initial_state(1)
    values = [
        float(
            model.forward_step(obs, state, np.array([action]), np.array([reward], np.float32))[1][0]
        )
        for action, reward in ((0, 0.0), (1, 0.0), (2, 0.0), (0, 1.0))
    ]
    assert len(set(values)) == 4


@pytest.mark.parametrize("given", [(), (np.zeros(2, np.int64),)])
def test_a_network_that_looks_back_needs_the_previous_step(given):
    model = build_model((4,), "float32", DISCRETE, LOOKS_BACK)
    with pytest.raises(PolicyError):
        model.forward_step(obs_of(model, 2), model.initial_state(2), *given)
    with pytest.raises(PolicyError):
        model.forward_sequence(
            obs_of(model, 3, 2), model.initial_state(2), np.zeros((3, 2), np.bool_)
        )


def test_a_network_that_does_not_look_back_refuses_previous_steps():
    model = build_model((4,), "float32", DISCRETE, SMALL)
    assert not model.uses_previous_step
    with pytest.raises(PolicyError):
        model.forward_step(obs_of(model, 2), [], np.zeros(2, np.int64), np.zeros(2))


def test_looking_back_needs_a_recurrent_cell():
    with pytest.raises(ConfigError, match="lstm_use_prev_action_reward"):
        build_model((4,), "float32", DISCRETE, SMALL | {"lstm_use_prev_action_reward": True})


def test_byte_images_with_channels_first_are_transposed():
    first, last = (
        build_model(shape, "uint8", DISCRETE, SMALL, seed=3) for shape in ((3, 12, 14), (12, 14, 3))
    )
    assert {name: item.shape for name, item in first.variables.items()} == {
        name: item.shape for name, item in last.variables.items()
    }
    assert "policy/conv_0/kernel" in first.variables
    obs = obs_of(first, 4)
    turned = np.moveaxis(obs, 1, -1)
    expected = last.forward(turned)[0]
    np.testing.assert_allclose(first.forward(obs)[0], expected, rtol=1e-5)
    policy = OnnxPolicy(*export_acting_graph(first))
    policy.set_weights(first.get_weights())
    np.testing.assert_allclose(policy.act(obs).columns["action_dist_inputs"], expected, atol=1e-5)
    form = FunctionalNetwork(ObsLayout((3, 12, 14)), "uint8", DISCRETE, SMALL, first.get_weights())
    given = keras.Input((3, 12, 14), dtype="uint8")
    np.testing.assert_allclose(keras.Model(given, form(given, [])[0])(obs), expected, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(84, 84, 3), (12, 12, 12), (5, 7, 20), (3, 3, 1), (1, 6, 6), (84, 84)]
)
def test_other_observations_are_not_mistaken_for_images_with_channels_first(shape):
    assert not channels_first(shape, "uint8")
    assert not channels_first((3, 84, 84), "float32")
