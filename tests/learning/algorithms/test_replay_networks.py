"""What algorithms with a replay share: custom models that give features, and observations filtered when drawn."""

from __future__ import annotations

import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.filters import MeanStdFilter
from aiorl.acting.onnx_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.functional import FunctionalNetwork, FunctionalQNetwork

WIDTH = 5
NUM_OBS = 3
BOX = spaces.Box(-2.0, 2.0, (2,), np.float32)
CHOICES = spaces.Discrete(3)
OFFLINE: dict[str, Any] = {"input": "x.json", "learning_starts": 8}


def normalised(obs_shape, num_outputs, model_config):
    """Features, by layers with weights that are not trained, and counts."""
    return keras.Sequential(
        [
            keras.layers.Input(obs_shape),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(model_config.get("width", num_outputs), activation="tanh"),
        ]
    )


KINDS = {
    "dqn": ("dqn", CHOICES, {"num_atoms": 11, "dueling_hiddens": [4]}),
    "sac": ("sac", CHOICES, {}),
    "td3": ("td3", BOX, {"policy_delay": 1}),
    "cql": ("cql", BOX, {**OFFLINE, "cql_actions": 2}),
    "iql": ("iql", BOX, OFFLINE),
}


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    shared = keras.Sequential([keras.layers.Input((NUM_OBS,)), keras.layers.Dense(4)])
    module = types.SimpleNamespace(
        normalised=normalised,
        with_values=lambda shape, outputs, _: _with_values(shape, outputs),
        flat=lambda shape, outputs, _: keras.Sequential([keras.layers.Input(shape), keras.layers.Reshape([3, 1])]),
        shared=lambda *_: shared,
    )
    monkeypatch.setitem(sys.modules, "users_models", module)


def _with_values(shape, outputs):
    obs = keras.layers.Input(shape)
    return keras.Model(obs, [keras.layers.Dense(outputs)(obs), keras.layers.Dense(1)(obs)])


def made(kind: str, custom_model: str = "normalised", **settings: Any):
    algo, space, own = KINDS[kind]
    custom = {"custom_model": f"users_models:{custom_model}", "width": WIDTH} if custom_model else {}
    model = {**custom, "fcnet_hiddens": [7]}
    config = config_class(algo).from_mapping(
        {
            "env": "x", "algo": algo, "seed": 1, "train_batch_size": 4, "replay_capacity": 64, "eager": True,
            "training_intensity": 0.5,
            "num_envs_per_worker": 1, "rollout_fragment_length": 8, "learning_starts": 8, "model": model,
            **own, **settings,
        }
    )  # fmt: skip
    cls = algorithm_class(algo)
    network = cls.build_model(config, Observations((NUM_OBS,), "float32", ObsLayout((NUM_OBS,))), space, 1)
    return cls(config, network)


def fragment(space: spaces.Space[Any], number: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    space.seed(number)
    return {
        c.OBS: rng.normal(size=(8, 1, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(8, 1, NUM_OBS)).astype(np.float32),
        c.ACTIONS: np.stack([space.sample() for _ in range(8)])[:, None].astype(space.dtype),
        c.N_STEP_RETURNS: rng.normal(size=(8, 1)).astype(np.float32),
        c.DISCOUNTS: np.full((8, 1), 0.9, np.float32),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_custom_model_gives_features_that_are_trained_exported_and_acted_with(kind: str) -> None:
    algorithm = made(kind)
    before = algorithm.get_state().tensors
    algorithm.update(algorithm.make_batch([fragment(KINDS[kind][1])]), 0)
    after = algorithm.get_state().tensors
    own = [name for name in after if "custom/" in name and "optimizer" not in name and "/kernel" in name]
    assert own
    assert all((before[name] != after[name]).any() for name in own if "target" not in name)
    frozen = [name for name in after if "custom/" in name and "moving_mean" in name]
    assert frozen
    assert all((before[name] == after[name]).all() for name in frozen)
    model = algorithm.model

    policy = OnnxPolicy(*export_acting_graph(model))
    policy.set_weights(model.get_weights())
    obs = np.random.default_rng(3).normal(size=(4, NUM_OBS)).astype(np.float32)
    inputs, values, _ = model.forward_step(obs, [])
    found = policy.act(obs).columns
    np.testing.assert_allclose(found[c.ACTION_DIST_INPUTS], inputs, atol=1e-5)
    np.testing.assert_allclose(found[c.VF_PREDS], values, atol=1e-5)
    settings, weights = algorithm.config.model.model_dump(), model.get_weights()
    form: Any = FunctionalNetwork
    more = {}
    if kind == "dqn":
        form, more = FunctionalQNetwork, {"returns": (-10.0, 10.0)}
    network = form(ObsLayout((NUM_OBS,)), "float32", model.distribution, settings, weights, **more)
    given = keras.Input((NUM_OBS,))
    np.testing.assert_allclose(keras.Model(given, network(given, [])[0])(obs), inputs, atol=1e-5)


def test_each_network_has_a_custom_model_with_first_weights_of_its_own_that_the_seed_decides() -> None:
    first, again = made("sac").get_state().tensors, made("sac").get_state().tensors
    kernels = [name for name in first if name.endswith("custom/4/kernel") and "target" not in name]
    assert kernels == [f"{net}/custom/4/kernel" for net in ("weights/policy", "critics/critic_0", "critics/critic_1")]
    assert len({first[name].tobytes() for name in kernels}) == 3
    assert all((first[name] == again[name]).all() for name in kernels)


def test_an_update_with_a_custom_model_is_compiled_once() -> None:
    algorithm = made("td3", eager=False, xla="off")
    algorithm.warm_up()
    for number in range(2):
        algorithm.update(algorithm.make_batch([fragment(BOX, number)]), 8 * number)
    assert algorithm.compiled.traces == 1


@pytest.mark.parametrize(("name", "said"), [("with_values", "one output"), ("flat", "one output"), ("shared", "twice")])
def test_a_custom_model_that_gives_no_features_of_its_own_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        made("sac", name)
    assert caught.value.key == "model.custom_model"


@pytest.mark.parametrize("kind", ["dqn", "iql"])
def test_raw_rows_are_filtered_when_drawn_by_what_the_merged_filter_knows_then(kind: str) -> None:
    space = KINDS[kind][1]
    own = MeanStdFilter((NUM_OBS,))
    filtered, plain = made(kind, "", observation_filter="MeanStdFilter"), made(kind, "")
    filtered.merged_filter = own
    assert filtered.sample_plan(filtered.config).raw_obs
    assert not plain.sample_plan(plain.config).raw_obs
    raw = fragment(space)
    for name in (c.OBS, c.NEW_OBS):
        raw[name] = 100.0 + 5.0 * raw[name]
    stored = filtered.make_batch([raw])
    own.learn(raw[c.OBS].reshape(-1, NUM_OBS))  # after the rows were stored
    changed = {name: own(raw[name][:, 0], update=False)[:, None] for name in (c.OBS, c.NEW_OBS)}
    filtered.update(stored, 0)
    plain.update(plain.make_batch([{**raw, **changed}]), 0)
    after, expected = filtered.get_state().tensors, plain.get_state().tensors
    assert (after["weights/" + next(iter(filtered.get_weights()))] != 0).any()
    for name, tensor in expected.items():
        np.testing.assert_allclose(after[name], tensor, atol=1e-4, err_msg=name)
