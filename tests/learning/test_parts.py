"""Parts of built-in algorithms serve algorithms outside of the package: heads, critics, optimisers of
layers.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import BOX, CHOICES, Case, descents_of
from gymnasium import spaces

from aiorl import algorithms
from aiorl.acting.acting_graph import ActingGraph
from aiorl.algorithms import (
    DQN,
    PPO,
    SAC,
    DQNConfig,
    Learner,
    Networks,
    Observations,
    Part,
    QHead,
    SACConfig,
    build_actor,
    build_q_network,
    make_critics,
)
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.functional import FunctionalNetwork

SEEN = Observations((4,), "float32", ObsLayout((4,)))


NETWORKS = ("ActorCritic", "Critics", "Actor", "QNetwork", "Network", "NoisyDense")


def test_every_algorithm_and_config_is_importable_without_tensorflow() -> None:
    """Configs are read before TensorFlow, which takes seconds to import."""
    names = [name for kind in ALGORITHMS.values() for name in (kind, f"{kind}Config")]
    code = (
        f"import sys; from aiorl.algorithms import {', '.join(names)}; import aiorl;"
        " from aiorl.learning.algorithms.registry import ALGORITHMS, config_class;"
        " [config_class(name)() for name in ALGORITHMS];"
        " assert not {'tensorflow', 'keras', 'onnx'} & sys.modules.keys();"
        f" assert [aiorl.{ALGORITHMS['sac']}Config] == [SACConfig]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_networks_load_tensorflow_when_they_are_imported() -> None:
    code = f"import sys; from aiorl.algorithms import {', '.join(NETWORKS)};"
    code += " assert 'tensorflow' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_importable_next_to_the_algorithms(name: str) -> None:
    assert isinstance(getattr(algorithms, name), type)


@pytest.mark.parametrize("settings", [{}, {"dueling": True}])
def test_a_head_says_how_outputs_of_each_action_become_values_for_all_that_act(
    settings: dict[str, Any],
) -> None:
    config = DQNConfig(env="x", model={"fcnet_hiddens": [8]}, **settings)
    head = QHead(5, lambda outputs: tf.reduce_max(outputs, axis=-1))
    model = build_q_network(config, SEEN, CHOICES, 1, head=head)
    obs = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    outputs, _ = model.q(obs)
    assert outputs.shape == (6, 3, 5)
    expected = outputs.numpy().max(axis=-1)
    graph, spec = export_acting_graph(model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    values, best, _ = acting.run(obs)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(best, expected.max(axis=1), atol=1e-5)
    with pytest.raises(ConfigError, match="onnx"):
        # a form that knows values and atoms alone must not take these outputs for atoms
        FunctionalNetwork(
            layout=model.layout,
            obs_dtype="float32",
            distribution=model.distribution,
            model_config={"fcnet_hiddens": [8]},
            weights=model.get_weights(),
            returns=(-10.0, 10.0),
        )


def test_a_head_is_not_combined_with_atoms_or_the_loss_of_values() -> None:
    config = DQNConfig(env="x", num_atoms=11)
    head = QHead(5, lambda outputs: tf.reduce_mean(outputs, axis=-1))
    with pytest.raises(ConfigError, match="num_atoms is 11"):
        build_q_network(config, SEEN, CHOICES, 1, head=head)
    model = build_q_network(DQNConfig(env="x"), SEEN, CHOICES, 1, head=head)
    with pytest.raises(ConfigError, match="take for values"):
        DQN.update(config, Networks.of(model))


@pytest.mark.parametrize(("space", "shape"), [(BOX, (3, 6, 5)), (spaces.Discrete(3), (3, 6, 3, 5))])
def test_critics_may_have_several_outputs_and_be_many(
    space: spaces.Space[Any], shape: tuple[int, ...]
) -> None:
    config = SACConfig(env="x", seed=1, model={"fcnet_hiddens": [8]})
    critics = make_critics(
        config, build_actor(config, SEEN, space, 1), num_critics=3, num_outputs=5
    )
    unit_actions = np.zeros((6, 2), np.float32) if space is BOX else None
    assert critics.q(np.ones((6, 4), np.float32), unit_actions).shape == shape
    kernels = [critics.variables[f"critic_{index}/head/kernel"] for index in range(3)]
    assert not np.allclose(kernels[0], kernels[1])


def moved(kind: Any, case: Case, changes: Any) -> dict[str, np.ndarray]:
    """Return how far an update by plain gradients moves each weight."""

    class Changed(kind):
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            update = kind.update(config, networks)
            return update.with_descent(optimizer=keras.optimizers.SGD(), **changes(networks.model))

    before = case.model.get_weights()
    learner = Learner(Changed, case.config, case.model)
    learner.update(learner.make_batch(case.fragments()), 0)
    after = case.model.get_weights()
    return {name: after[name] - before[name] for name in before}


def first_layer(model: Any) -> list[Any]:
    return [variable for name, variable in model.trainable.items() if "policy/dense_0" in name]


def test_layers_have_learning_rates_of_their_own_under_a_built_in_loss() -> None:
    usual = moved(PPO, Case("ppo", sgd_minibatch_size=48, grad_clip=None), lambda model: {})
    slow = moved(
        PPO,
        Case("ppo", sgd_minibatch_size=48, grad_clip=None),
        lambda model: {"parts": [Part(first_layer(model), rate=0.25)]},
    )
    assert np.abs(usual["policy/dense_0/kernel"]).max() > 0
    for name, step in usual.items():
        factor = 0.25 if "policy/dense_0" in name else 1.0
        np.testing.assert_allclose(slow[name], factor * step, atol=1e-7, rtol=1e-3)


def test_gradients_are_clipped_as_a_function_says_and_parts_by_a_norm_of_their_own() -> None:
    signs = moved(
        PPO,
        Case("ppo", sgd_minibatch_size=48),
        lambda model: {
            "clip": lambda gradients: [tf.sign(gradient) for gradient in gradients],
            "parts": [Part(first_layer(model), clip=1e-3)],
        },
    )
    np.testing.assert_allclose(np.abs(signs["value/head/bias"]), 0.01, rtol=1e-4)
    of_part = [step for name, step in signs.items() if "policy/dense_0" in name]
    norm = np.sqrt(sum(np.square(step).sum() for step in of_part))
    assert norm == pytest.approx(0.01 * 1e-3, rel=1e-3)


def test_one_step_of_several_takes_another_optimiser_and_checkpoints_have_its_state() -> None:
    class Slower(SAC):
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            part = Part(first_layer(networks.model), optimizer=keras.optimizers.SGD(momentum=0.5))
            return SAC.update(config, networks).with_descent("actor", parts=[part])

    case = Case("sac", BOX)
    learner = Learner(Slower, case.config, case.model)
    kinds = [
        [type(optimizer).__name__ for optimizer in descent.optimizers]
        for descent in descents_of(learner.update_plan.loop.step)
    ]
    assert kinds == [["Adam"], ["SGD", "Adam"], ["Adam"]]
    learner.update(learner.make_batch(case.fragments()), 100)
    again = Learner(Slower, case.config, case.model)
    again.set_state(learner.get_state())
    tensors = again.get_state().tensors
    for name, tensor in learner.get_state().tensors.items():
        np.testing.assert_array_equal(tensor, tensors[name])
    _, actor, _ = descents_of(again.update_plan.loop.step)
    momenta = [np.asarray(variable) for variable in actor.optimizers[0].variables[2:]]
    assert [momentum.shape for momentum in momenta] == [(4, 8), (8,)]
    assert all(momentum.any() for momentum in momenta)


def test_parts_stay_when_something_else_of_a_step_changes() -> None:
    case = Case("dqn")
    part = Part([case.model.trainable_variables[0]], optimizer=keras.optimizers.SGD())
    update = DQN.update(case.config, case.learner.networks).with_descent(parts=[part])
    (descent,) = descents_of(update.with_descent(clip=0.5).loop.step)
    assert descent.clip == 0.5
    assert [type(optimizer).__name__ for optimizer in descent.optimizers] == ["SGD", "Adam"]


def predicted(columns: Any, knobs: Any, weight: Any) -> Any:
    """Return the errors of a prediction of the value targets, which the weight alone makes."""
    return tf.reduce_mean(tf.square(weight - columns["value_targets"])), {"aux": weight[0]}


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_further_loss_joins_the_one_of_a_built_in_step_with_variables_of_its_own(
    kind: Any,
) -> None:
    class Predicting(PPO):
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            weight = kind([1.0], dtype="float32")
            kernel = networks.model.trainable["policy/head/kernel"]

            def loss(columns: Any, knobs: Any) -> Any:
                value, tensors = predicted(columns, knobs, tf.convert_to_tensor(weight))
                return value + 1e3 * tf.reduce_sum(kernel), tensors

            return PPO.update(config, networks).with_loss(loss, {"weight": weight})

    case = Case("ppo", sgd_minibatch_size=48, kl_stop=10.0)
    before = case.model.get_weights()["policy/head/kernel"]
    learner = Learner(Predicting, case.config, case.model)
    metrics = learner.update(learner.make_batch(case.fragments()), 0).metrics
    assert metrics["aux"] != 0
    assert {"kl", "policy_loss", "loss"} <= metrics.keys(), "the step has its own metrics, too"
    assert (case.model.get_weights()["policy/head/kernel"] < before).all()
    (name,) = [name for name in learner.get_state().tensors if name.endswith("weight")]
    assert learner.get_state().tensors[name] != 1.0
    again = Learner(Predicting, case.config, case.model)
    again.set_state(learner.get_state())
    np.testing.assert_array_equal(
        again.get_state().tensors[name], learner.get_state().tensors[name]
    )


def test_names_of_a_further_loss_are_its_own() -> None:
    case = Case("ppo")
    update = PPO.update(case.config, case.learner.networks)
    weight = tf.Variable([1.0])
    with pytest.raises(ConfigError, match=r"0 steps.*'critic'.*''"):
        update.with_loss(lambda columns, knobs: (0.0, {}), name="critic")
    once = update.with_loss(lambda *_: (tf.constant(0.0), {}), {"weight": weight})
    with pytest.raises(ConfigError, match="weight"):
        once.with_loss(lambda *_: (tf.constant(0.0), {}), {"weight": weight})

    class Clashing(PPO):
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            return update.with_loss(lambda *_: (tf.constant(0.0), {"kl": tf.constant(0.0)}))

    learner = Learner(Clashing, case.config, case.model)
    with pytest.raises(ConfigError, match="kl"):
        learner.update(learner.make_batch(case.fragments()), 0)


def test_mistakes_in_parts_are_refused() -> None:
    case = Case("dqn")
    update = DQN.update(case.config, case.learner.networks)
    layer = [case.model.trainable_variables[0]]
    with pytest.raises(ConfigError, match=r"0 steps.*'critic'.*''"):
        update.with_descent("critic", clip=1.0)
    with pytest.raises(ConfigError, match="not among"):
        update.with_descent(parts=[Part([tf.Variable(1.0)])])
    with pytest.raises(ConfigError, match="another part"):
        update.with_descent(parts=[Part(layer), Part(layer)])
    with pytest.raises(ConfigError, match="no variables"):
        update.with_descent(parts=[Part([])])
