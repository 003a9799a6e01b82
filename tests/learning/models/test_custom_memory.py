"""Custom networks with memory: state in and out, sequences, exports, and a task that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from algorithm_cases import CHOICES, Case
from gymnasium import spaces

import aiorl
from aiorl import PPOConfig
from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.distributions import make_distribution
from aiorl.errors import ConfigError
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.export import export_acting_graph

DISCRETE = make_distribution(spaces.Discrete(3))
SHAPES = ((4,), (3, 5))


def with_attention(obs_shape: Any, num_outputs: int, settings: Any) -> keras.Model:
    """A GRU cell, and attention over the last steps, which are the second part of the state."""
    units, (slots, width) = settings["custom_state"][0][0], settings["custom_state"][1]
    obs = keras.Input(obs_shape)
    before = keras.Input((units,))
    memory = keras.Input((slots, width))
    output, after = keras.layers.GRUCell(units)(obs, [before])
    entry = keras.layers.Dense(width, activation="tanh")(obs)
    memory_after = keras.ops.concatenate([memory[:, 1:], entry[:, None]], axis=1)
    query = keras.layers.Dense(width)(output)
    weights = keras.ops.softmax(keras.ops.sum(memory_after * query[:, None], axis=-1))
    seen = keras.ops.sum(memory_after * weights[:, :, None], axis=1)
    features = keras.ops.concatenate([output, seen], axis=-1)
    after = after[0] if isinstance(after, list) else after
    outputs = [features]
    if settings.get("heads", True):
        outputs = [keras.layers.Dense(num_outputs)(features), keras.layers.Dense(1)(features)]
    return keras.Model([obs, before, memory], [*outputs, after, memory_after])


def policy_only(obs_shape: Any, num_outputs: int, settings: Any) -> keras.Model:
    obs, before = keras.Input(obs_shape), keras.Input((4,))
    after = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([obs, before]))
    return keras.Model([obs, before], [keras.layers.Dense(num_outputs)(after), after])


def forgetful(obs_shape: Any, num_outputs: int, settings: Any) -> keras.Model:
    obs, before = keras.Input(obs_shape), keras.Input((4,))
    return keras.Model([obs, before], keras.layers.Dense(num_outputs)(obs))


def settings_of(make: Any, *shapes: tuple[int, ...]) -> dict[str, Any]:
    return {"custom_model": make, "custom_state": shapes}


@pytest.mark.parametrize(("make", "shapes"), [(with_attention, SHAPES), (policy_only, ((4,),))])
def test_sequences_equal_single_steps_and_the_acting_graph(make: Any, shapes: Any) -> None:
    model = build_model((2,), "float32", DISCRETE, settings_of(make, *shapes), seed=3)
    assert model.state_shapes == shapes
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(4, 3, 2)).astype(np.float32)
    state = [rng.normal(size=(3, *shape)).astype(np.float32) for shape in shapes]
    resets = np.zeros((4, 3), bool)
    resets[3, 1] = resets[2, 2] = True
    dist_inputs, values = model.forward_sequence(obs, state, resets)
    graph, spec = export_acting_graph(model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    for step in range(4):
        for component in state:
            component[resets[step]] = 0
        expected, expected_values, following = model.forward_step(obs[step], state)
        np.testing.assert_allclose(dist_inputs[step], expected, atol=1e-5)
        np.testing.assert_allclose(values[step], expected_values, atol=1e-5)
        acted, acted_values, state = acting.run(obs[step], state)
        np.testing.assert_allclose(acted, expected, atol=1e-5)
        np.testing.assert_allclose(acted_values, expected_values, atol=1e-5)
        for component, after in zip(state, following, strict=True):
            np.testing.assert_allclose(component, after, atol=1e-5)
        state = [np.array(component) for component in state]


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ppo", {"rollout_fragment_length": 2, "train_batch_size": 16, "sgd_minibatch_size": 8}),
        ("dqn", {"replay_sequence_length": 4, "burn_in": 1}),
    ],
)
def test_algorithms_train_custom_networks_with_memory(name: str, more: dict[str, Any]) -> None:
    """PPO, IMPALA and APPO run a network over sequences by the same function, DQN by its own."""
    model = {**settings_of(with_attention, *SHAPES), "heads": name != "dqn"}
    case = Case(name, CHOICES, model=model, **more)
    before = case.model.get_weights()
    results = case.train()
    assert np.isfinite(results[-1].metrics["loss"])
    after = case.model.get_weights()
    assert all(np.any(before[weight] != after[weight]) for weight in before)


def test_features_with_memory_are_trained_under_built_in_heads() -> None:
    model = settings_of(with_attention, *SHAPES)
    model |= {"heads": False, "custom_features": True, "vf_share_layers": True}
    short = {"rollout_fragment_length": 2, "train_batch_size": 16, "sgd_minibatch_size": 16}
    case = Case("ppo", CHOICES, model=model, **short)
    assert case.model.state_shapes == SHAPES
    assert np.isfinite(case.train(0)[-1].metrics["loss"])


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (settings_of(forgetful, (4,)), r"expected|must be \[\(2, 4\)\]"),
        (settings_of(policy_only, (5,)), "can't process"),
        ({**settings_of(policy_only, (4,)), "use_lstm": True}, "without a built-in cell"),
        ({"custom_state": [[4]]}, "custom_model"),
        ({**settings_of(policy_only, (4,)), "lstm_use_prev_action_reward": True}, "recurrent cell"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        build_model((2,), "float32", DISCRETE, settings)


def test_algorithms_that_train_no_memory_name_the_key() -> None:
    with pytest.raises(ConfigError) as raised:
        Case("td3", model=settings_of(policy_only, (4,)))
    assert raised.value.key == "model.custom_state"


@pytest.mark.slow
def test_a_custom_network_solves_a_task_that_needs_memory_as_a_built_in_one_does(
    tmp_path: Path,
) -> None:
    run = str(tmp_path / "run")
    config = PPOConfig(
        env="examples.recurrent_memory:Remember",
        num_workers=0,
        seed=1,
        xla="off",
        run_dir=run,
        num_envs_per_worker=16,
        train_batch_size=2048,
        sgd_minibatch_size=512,
        num_sgd_iter=6,
        lr=3e-3,
        model=settings_of(with_attention, (32,), (3, 16)),
    )
    with config.build() as trainer:
        for result in trainer.iterate(stop_return=0.95, stop_timesteps=150_000):
            last = result["episode_reward_mean_last_100"]
    assert last >= 0.95, "a guess would be right half of the time"
    policy = aiorl.load_policy(run)
    assert [component.shape for component in policy.get_initial_state()] == [(32,), (3, 16)]
    assert aiorl.evaluate(run, episodes=50).mean >= 0.9
    # each file is compared with the policy before it is put in place
    exported = aiorl.export_policy(run, tmp_path / "exported", ("onnx", "keras"))
    assert all(path.exists() for path in exported.values())
