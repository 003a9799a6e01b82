"""Policies run by TensorFlow: acting, learning from a custom loss, and as a worker's fallback."""

from __future__ import annotations

import logging
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from plain_graph import load_policy
from safetensors.numpy import load_file

from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import CheckpointError, ExportError, PolicyError, UnsupportedSpaceError
from aiorl.learning.algorithms.dqn import DQNConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.models import export
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.export import describe_policy, export_acting_graph
from aiorl.learning.models.tf_policy import TFPolicy
from aiorl.run.build import build_learning

BOX = spaces.Box(-1.0, 1.0, (4,))
SMALL = {"fcnet_hiddens": [8], "lstm_cell_size": 5}
KINDS = {
    "mlp": (spaces.Discrete(3), SMALL),
    "uses_previous_step": (
        spaces.Discrete(3),
        SMALL | {"use_lstm": True, "lstm_use_prev_action_reward": True},
    ),
    "tuple": (
        spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))]),
        SMALL | {"use_gru": True},
    ),
}


def make_policy(kind="mlp", **config):
    action_space, model = KINDS[kind]
    return TFPolicy(BOX, action_space, {"model": model, "seed": 0, **config})


def obs_of(rows):
    return np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_as_its_exported_graph_does(kind):
    policy = make_policy(kind)
    other = OnnxPolicy(*export_acting_graph(policy.model), seed=0)
    other.set_weights(policy.get_weights())
    for rows in (1, 5):
        state = policy.initial_state(rows)
        actions, state_out, columns = policy.compute_actions(obs_of(rows), state)
        wanted, wanted_state, wanted_columns = other.compute_actions(obs_of(rows), state)
        np.testing.assert_array_equal(
            policy.layout.to_column(actions)[..., :1], other.layout.to_column(wanted)[..., :1]
        )
        for name, column in wanted_columns.items():
            np.testing.assert_allclose(columns[name], column, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(state_out, wanted_state, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_arrays_that_do_not_fit_are_refused():
    policy = make_policy("uses_previous_step")
    previous = (np.zeros(2, np.int64), np.zeros(2, np.float32))
    for given in ({"prev": previous}, {"state": policy.initial_state(2)}):
        with pytest.raises(PolicyError):
            policy.act(obs_of(2), **given)
    with pytest.raises(PolicyError):
        make_policy().act(obs_of(2)[:, :3])


def test_r32_a_space_that_is_no_box_is_refused():
    for space in (spaces.Discrete(3), spaces.Dict({"a": BOX})):
        with pytest.raises(UnsupportedSpaceError):
            TFPolicy(space, spaces.Discrete(2), {})


class Cloning(TFPolicy):
    """Policy that imitates the actions in the batch."""

    def loss(self, batch):
        dist_inputs, _ = self.model.forward(batch[c.OBS])
        return -tf.reduce_mean(self.tf_distribution.logp(dist_inputs, batch[c.ACTIONS]))


def make_batch(rows=64):
    obs = np.random.default_rng(1).standard_normal((rows, 4)).astype(np.float32)
    actions = (obs[:, 0] > 0).astype(np.int64)
    return SampleBatch(
        {c.OBS: obs, c.ACTIONS: actions, c.INFOS: np.array([{}] * rows, dtype=object)}
    )


def test_r43_computing_and_applying_gradients_equals_learning_on_the_batch():
    whole, apart = (
        Cloning(BOX, spaces.Discrete(3), {"model": SMALL, "seed": 0, "lr": 0.2}) for _ in range(2)
    )
    batch = make_batch()
    losses = []
    for _ in range(10):
        losses.append(whole.learn_on_batch(batch)["loss"])
        gradients, figures = apart.compute_gradients(batch)
        assert gradients.keys() == apart.get_weights().keys()
        assert figures == {"loss": losses[-1]}
        assert apart.apply_gradients(gradients)["grad_norm"] > 0
    assert losses[-1] < 0.3 * losses[0]
    for name, weight in whole.get_weights().items():
        np.testing.assert_array_equal(weight, apart.get_weights()[name])


def test_the_optimizers_step_is_traced_once(monkeypatch):
    traced = []
    apply = keras.optimizers.Adam.apply
    monkeypatch.setattr(
        keras.optimizers.Adam, "apply", lambda *arguments: traced.append(1) or apply(*arguments)
    )
    policy = Cloning(BOX, spaces.Discrete(3), {"model": SMALL, "seed": 0})
    for _ in range(3):
        policy.learn_on_batch(make_batch())
    assert len(traced) == 1


def test_r51_a_restored_state_has_the_optimizers_moments():
    first, second = (
        Cloning(BOX, spaces.Discrete(3), {"model": SMALL, "seed": seed, "lr": 0.05})
        for seed in (0, 1)
    )
    second.learn_on_batch(make_batch(8))
    first.learn_on_batch(make_batch())
    first.on_global_var_update({"timestep": 9})
    second.set_state(first.get_state())
    assert second.global_timestep == 9
    for policy in (first, second):
        policy.learn_on_batch(make_batch())
    for name, weight in first.get_weights().items():
        np.testing.assert_array_equal(weight, second.get_weights()[name])
    fresh = Cloning(BOX, spaces.Discrete(3), {"model": SMALL, "seed": 0})
    fresh.set_state(make_policy().get_state())


def test_a_policy_without_a_loss_does_not_learn():
    with pytest.raises(NotImplementedError, match="TFPolicy"):
        make_policy().learn_on_batch(make_batch())


def test_gradients_that_do_not_fit_or_are_not_finite_change_nothing():
    policy = Cloning(BOX, spaces.Discrete(3), {"model": SMALL, "seed": 0})
    before = policy.get_weights()
    gradients, _ = policy.compute_gradients(make_batch())
    name = next(iter(gradients))
    with pytest.raises(PolicyError):
        policy.apply_gradients({**gradients, name: np.full_like(gradients[name], np.nan)})
    del gradients[name]
    with pytest.raises(PolicyError, match=name):
        policy.apply_gradients(gradients)
    for name, weight in before.items():
        np.testing.assert_array_equal(weight, policy.get_weights()[name])


def test_r53_exports_and_h5_import_carry_the_weights(tmp_path):
    policy = make_policy("uses_previous_step")
    policy.export_model(str(tmp_path / "saved"))
    act = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    state = policy.initial_state(2)
    outputs = act(
        obs=tf.constant(obs_of(2)),
        prev_actions=tf.constant([0, 0], tf.int64),
        prev_rewards=tf.zeros(2),
        **{f"state_in_{i}": tf.constant(item) for i, item in enumerate(state)},
    )
    wanted = policy.compute_actions(obs_of(2), state)[2]
    np.testing.assert_allclose(
        outputs["dist_inputs"], wanted[c.ACTION_DIST_INPUTS], rtol=1e-5, atol=1e-6
    )
    policy.export_checkpoint(str(tmp_path / "weights"))
    saved = load_file(tmp_path / "weights" / "model.safetensors")
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        for name, weight in saved.items():
            file[name] = weight + 1
    policy.import_model_from_h5(str(tmp_path / "weights.h5"))
    for name, weight in saved.items():
        np.testing.assert_array_equal(policy.get_weights()[name], weight + 1)
    policy.import_model_from_h5(str(tmp_path / "weights" / "model.safetensors"))
    for name, weight in saved.items():
        np.testing.assert_array_equal(policy.get_weights()[name], weight)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save_weights(
        str(tmp_path / "of.weights.h5")
    )
    with pytest.raises(CheckpointError, match="Keras"):
        policy.import_model_from_h5(str(tmp_path / "of.weights.h5"))
    with h5py.File(tmp_path / "weights.h5", "a") as file:
        del file[next(iter(saved))]
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    for path in (tmp_path / "weights.h5", tmp_path / "none.h5", tmp_path / "bad.safetensors"):
        with pytest.raises(CheckpointError, match=path.name):
            policy.import_model_from_h5(str(path))


@pytest.fixture
def unexportable(monkeypatch):
    """Make every model lack an acting graph, as if it contained an operator that ONNX doesn't
    have.
    """

    def fail(*_):
        raise export.ExportError("an operator has no ONNX form")

    monkeypatch.setattr(export, "_convert", fail)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_acting_graph_acts_in_tensorflow_and_both_sides_log_it(
    unexportable, kind, caplog
):
    action_space, settings = KINDS[kind]
    model = build_model((4,), "float32", make_distribution(action_space), settings, seed=3)
    with caplog.at_level(logging.WARNING):
        graph, description = describe_policy(model, settings)
        assert graph == b""
        policy = load_policy(graph, description, seed=0)
    assert isinstance(policy, TFPolicy)
    reason, _ = caplog.messages
    assert "an operator has no ONNX form" in reason
    policy.set_weights(model.get_weights())
    state = policy.initial_state(2)
    previous = (
        [np.zeros((2, *model.distribution.action_shape)), np.zeros(2)]
        if model.uses_previous_step
        else []
    )
    wanted = model.forward_step(obs_of(2), state, *previous)
    columns = policy.compute_actions(obs_of(2), state)[2]
    np.testing.assert_allclose(columns[c.ACTION_DIST_INPUTS], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(columns[c.VF_PREDS], wanted[1], rtol=1e-5, atol=1e-6)


def test_a_model_with_an_acting_graph_needs_no_tensorflow(caplog):
    model = build_model((4,), "float32", make_distribution(spaces.Discrete(2)), SMALL)
    policy = load_policy(*describe_policy(model, SMALL))
    assert isinstance(policy, OnnxPolicy)
    assert not caplog.messages


def test_a_network_that_differs_from_the_learners_is_refused(unexportable):
    model = build_model((4,), "float32", make_distribution(spaces.Discrete(2)), SMALL)
    graph, description = describe_policy(model, SMALL)
    with pytest.raises(PolicyError):
        load_policy(graph, description | {"tf_model": {"fcnet_hiddens": [9]}})
    with pytest.raises(PolicyError):
        load_policy(
            graph, {name: value for name, value in description.items() if name != "tf_model"}
        )


def test_r33_without_tensorflow_the_fallback_is_an_import_error(unexportable, monkeypatch):
    model = build_model((4,), "float32", make_distribution(spaces.Discrete(2)), SMALL)
    graph, description = describe_policy(model, SMALL)
    monkeypatch.setitem(sys.modules, "aiorl.learning.models.tf_policy", None)
    with pytest.raises(ImportError, match=r"pip install -e '?/.*\[learner\]"):
        load_policy(graph, description)


def test_a_network_that_workers_cannot_build_must_have_an_acting_graph(monkeypatch):
    def refuse(model):
        raise ExportError("it has none")

    monkeypatch.setattr("aiorl.learning.models.export.export_acting_graph", refuse)
    with pytest.raises(ExportError, match="it has none"):
        build_learning(DQNConfig.from_mapping({"env": "CartPole-v1", "replay_capacity": 1000}))
    assert not build_learning(PPOConfig.from_mapping({"env": "CartPole-v1"})).graphs[
        "default_policy"
    ]["graph"]
