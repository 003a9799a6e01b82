"""Custom Keras models: trained, exported, used for acting."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.models.catalog import CustomActorCritic, build_model
from aiorl.learning.models.export import export_acting_graph

DISCRETE = make_distribution(spaces.Discrete(3))


def policy_only(obs_shape, num_outputs, model_config):
    return keras.Sequential(
        [
            keras.layers.Input(obs_shape),
            keras.layers.Dense(model_config.get("width", 8), activation="relu"),
            keras.layers.Dense(num_outputs),
        ]
    )


def with_values(obs_shape, num_outputs, model_config):
    obs = keras.layers.Input(obs_shape)
    features = keras.layers.Rescaling(1 / 255)(obs)
    features = keras.layers.Conv2D(4, 3, strides=2, activation="relu")(features)
    features = keras.layers.BatchNormalization()(features)
    features = keras.layers.Dropout(0.5)(keras.layers.Flatten()(features))
    return keras.Model(
        obs, [keras.layers.Dense(num_outputs)(features), keras.layers.Dense(1)(features)]
    )


class Subclassed(keras.Model):
    def __init__(self, obs_shape, num_outputs, model_config):
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(num_outputs)
        self.value = keras.layers.Dense(1)

    def call(self, obs):
        features = self.hidden(obs)
        return self.out(features), tf.squeeze(self.value(features), -1)


class Shifting(keras.layers.Layer):
    """Layer with a tensor created before any graph is traced."""

    def __init__(self):
        super().__init__()
        self.shift = tf.constant([1.0, -2.0, 0.5, 3.0])

    def call(self, inputs):
        return inputs * self.shift + self.shift


def with_tensor(obs_shape, num_outputs, model_config):
    return keras.Sequential(
        [keras.layers.Input(obs_shape), Shifting(), keras.layers.Dense(num_outputs)]
    )


PARTS = ObsLayout((2 * 2 * 1 + 3 + 2,), {"camera": (2, 2, 1), "legs.0": (3,), "legs.1": (2,)})


def by_name(obs_shape, num_outputs, model_config, obs_parts):
    """Model that sees two of three parts."""
    assert obs_parts == PARTS.parts
    inputs = {name: keras.Input(obs_parts[name], name=name) for name in ("legs.1", "camera")}
    camera = keras.layers.Flatten()(keras.layers.Conv2D(3, 2)(inputs["camera"]))
    features = keras.layers.Concatenate()([camera, inputs["legs.1"]])
    return keras.Model(
        inputs, [keras.layers.Dense(num_outputs)(features), keras.layers.Dense(1)(features)]
    )


class ByName(keras.Model):
    """Model that sees all parts."""

    def __init__(self, obs_shape, num_outputs, model_config, obs_parts):
        super().__init__()
        self.wanted = dict(obs_parts)
        self.out = keras.layers.Dense(num_outputs)

    def call(self, parts):
        assert {name: tuple(part.shape[1:]) for name, part in parts.items()} == self.wanted
        return self.out(
            keras.ops.concatenate([keras.layers.Flatten()(part) for part in parts.values()], axis=1)
        )


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    module = types.SimpleNamespace(
        policy_only=policy_only,
        with_values=with_values,
        with_tensor=with_tensor,
        by_name=by_name,
        ByName=ByName,
        Subclassed=Subclassed,
        wrong_size=lambda shape, outputs, config: policy_only(shape, outputs + 1, config),
        no_model=lambda *_: 3,
        raising=lambda *_: 1 / 0,
        wrong_input=lambda _, outputs, config: policy_only((7,), outputs, config),
        three=lambda shape, outputs, _: _three(shape, outputs),
    )
    monkeypatch.setitem(sys.modules, "users_models", module)


def _three(shape, outputs):
    obs = keras.layers.Input(shape)
    return keras.Model(obs, [keras.layers.Dense(outputs)(obs)] * 3)


KINDS = {
    "policy_only": ((4,), "float32"),
    "with_values": ((12, 12, 2), "uint8"),
    "Subclassed": ((4,), "float32"),
    "with_tensor": ((4,), "float32"),
}


def custom(name, seed=0, **settings):
    shape, dtype = KINDS.get(name, ((4,), "float32"))
    return build_model(
        shape, dtype, DISCRETE, {"custom_model": f"users_models:{name}", **settings}, seed=seed
    )


def obs_of(model, *leading):
    rng = np.random.default_rng(0)
    if model.obs_dtype == "uint8":
        return rng.integers(0, 256, (*leading, *model.obs_shape), dtype=np.uint8)
    return rng.standard_normal((*leading, *model.obs_shape)).astype(np.float32)


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", KINDS)
def test_a_worker_acts_with_the_custom_model_before_and_after_new_weights(name):
    model = custom(name)
    assert isinstance(model, CustomActorCritic)
    policy = OnnxPolicy(*export_acting_graph(model))
    obs = obs_of(model, 5)
    rng = np.random.default_rng(1)
    for _ in range(2):
        policy.set_weights(model.get_weights())
        dist_inputs, values, _ = policy.graph.run(obs)
        wanted = model.network.keras_model(obs.astype(np.float32), training=False)
        wanted_inputs = wanted[0] if isinstance(wanted, list | tuple) else wanted
        np.testing.assert_allclose(dist_inputs, wanted_inputs, rtol=1e-4, atol=1e-5)
        mine_inputs, mine_values = model.forward(obs)
        np.testing.assert_allclose(mine_inputs, dist_inputs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine_values, values, rtol=1e-4, atol=1e-5)
        # every weight counts, moving averages included; variances stay positive
        model.set_weights(
            {
                k: np.abs(w + 0.1 * rng.standard_normal(w.shape)).astype(np.float32)
                for k, w in model.get_weights().items()
            }
        )


@pytest.mark.parametrize("name", KINDS)
def test_sequences_equal_single_steps_and_gradients_reach_trainable_weights(name):
    model = custom(name)
    obs = obs_of(model, 3, 2)
    dist_inputs, values = model.forward_sequence(tf.constant(obs), [], tf.zeros((3, 2), tf.bool))
    assert (dist_inputs.shape, values.shape) == ((3, 2, 3), (3, 2))
    flat_inputs, flat_values = model.forward(obs.reshape(6, *model.obs_shape))
    np.testing.assert_allclose(tf.reshape(dist_inputs, (6, 3)), flat_inputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tf.reshape(values, (6,)), flat_values, rtol=1e-5, atol=1e-6)
    with tf.GradientTape() as tape:
        outputs = model.forward(obs.reshape(6, *model.obs_shape))
        loss = tf.reduce_sum(outputs[0]) + tf.reduce_sum(outputs[1])
    gradients = tape.gradient(loss, model.trainable_variables)
    assert all(gradient is not None for gradient in gradients)
    assert len(model.variables) - len(model.trainable_variables) == (
        2 if name == "with_values" else 0
    )


@pytest.mark.parametrize(("name", "num_mask"), [("by_name", 3), ("ByName", 0)])
def test_a_model_can_request_the_parts_of_a_nested_observation_by_name(name, num_mask):
    layout = ObsLayout(PARTS.shape, PARTS.parts, num_mask)
    settings = {"custom_model": f"users_models:{name}"}
    model = build_model(layout.array_shape, "float32", DISCRETE, settings, seed=0, layout=layout)
    obs = obs_of(model, 4)
    obs[:, :num_mask] = 1
    inputs, _ = model.forward(obs)
    own = obs[:, num_mask:]
    parts = {"camera": own[:, :4].reshape(4, 2, 2, 1), "legs.0": own[:, 4:7], "legs.1": own[:, 7:9]}
    if name == "by_name":
        del parts["legs.0"]
    wanted = model.network.keras_model(parts, training=False)
    np.testing.assert_allclose(
        inputs, wanted[0] if name == "by_name" else wanted, rtol=1e-5, atol=1e-6
    )
    policy = OnnxPolicy(*export_acting_graph(model))
    policy.set_weights(model.get_weights())
    np.testing.assert_allclose(policy.graph.run(obs)[0], inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["policy_only", "Subclassed"])
def test_given_weights_replace_those_of_the_custom_model(name):
    one, other = (custom(name, seed=seed) for seed in (0, 1))
    obs = np.random.default_rng(0).standard_normal((3, *one.obs_shape)).astype(np.float32)
    for mine, others, own in zip(
        one.forward(obs, weights=other.get_weights()),
        other.forward(obs),
        one.forward(obs),
        strict=True,
    ):
        np.testing.assert_allclose(mine, others, rtol=1e-5, atol=1e-6)
        assert not np.allclose(mine, own)


def test_names_and_weights_depend_only_on_the_seed():
    before = random.getstate()
    first, second, other = (custom("policy_only", seed=seed) for seed in (1, 1, 2))
    assert random.getstate() == before
    assert list(first.variables) == list(second.variables)
    assert next(iter(first.variables)) == "custom/0/kernel"
    for name, weight in first.get_weights().items():
        np.testing.assert_array_equal(weight, second.get_weights()[name])
    assert (first.get_weights()["custom/0/kernel"] != other.get_weights()["custom/0/kernel"]).any()


@pytest.mark.parametrize(
    ("name", "settings", "fact"),
    [
        ("missing", {}, "'missing'"),
        ("no_model", {}, " int"),
        ("raising", {}, "ZeroDivisionError"),
        ("wrong_size", {}, r"\[\(2, 4\)\]"),
        ("three", {}, r"\(2, 3\), \(2"),
        ("wrong_input", {}, r"\[4\]"),
    ],
)
def test_custom_models_that_make_no_network_are_refused_with_the_reason(name, settings, fact):
    with pytest.raises(ConfigError, match=fact) as caught:
        custom(name, **settings)
    assert caught.value.key == "model.custom_model"


def test_a_worker_needs_neither_keras_nor_the_custom_module(tmp_path):
    model = custom("policy_only")
    graph, spec = export_acting_graph(model)
    (tmp_path / "graph.onnx").write_bytes(graph)
    (tmp_path / "spec.json").write_text(__import__("json").dumps(spec.to_dict()))
    np.savez(
        tmp_path / "weights.npz",
        **{name.replace("/", "|"): w for name, w in model.get_weights().items()},
    )
    code = f"""
        import json, sys
        import numpy as np
        from aiorl.acting.acting_graph import ActingSpec
        from aiorl.acting.graph_policy import OnnxPolicy
        spec = ActingSpec.from_dict(json.load(open(r"{tmp_path}/spec.json")))
        policy = OnnxPolicy(open(r"{tmp_path}/graph.onnx", "rb").read(), spec)
        weights = np.load(r"{tmp_path}/weights.npz")
        policy.set_weights({{name.replace("|", "/"): weights[name] for name in weights.files}})
        print(policy.compute_actions(np.ones((2, 4), np.float32), explore=False)[0].tolist())
        assert not {{"keras", "tensorflow", "users_models"}} & sys.modules.keys()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    wanted = np.argmax(model.forward(np.ones((2, 4), np.float32))[0], axis=1).tolist()
    assert done.stdout.strip() == str(wanted)
