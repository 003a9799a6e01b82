"""TD3: its losses against the same formulas in NumPy, its delays, and DDPG as a setting of it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from restored_replays import assert_goes_on_to_the_bit

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.exploration import make_exploration
from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_replay import SEEDS
from aiorl.learning.algorithms.algorithm import AlgorithmState, Observations
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.td3 import TD3, TD3Config
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.functional import FunctionalNetwork

NUM_OBS = 4
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
DDPG = {
    "twin_q": False, "policy_delay": 1, "target_update_freq": 1, "smooth_target_policy": False,
    "noise_type": "ornstein_uhlenbeck", "exploration_noise": 0.2,
}  # fmt: skip


def make_config(**settings: Any) -> TD3Config:
    small = {
        "env": "E", "seed": 7, "model": {"fcnet_hiddens": [8], "fcnet_activation": "tanh"}, "num_envs_per_worker": 2,
        "rollout_fragment_length": 4,
        "train_batch_size": 4, "training_intensity": 2.5, "learning_starts": 16, "replay_capacity": 64, "lr": 0.01,
        "eager": True,  # the few minibatches here are over before they would be compiled
    }  # fmt: skip
    return TD3Config(**{**small, **settings})


def make(config: TD3Config) -> TD3:
    layout = ObsLayout((NUM_OBS,))
    return TD3(config, TD3.build_model(config, Observations((NUM_OBS,), "float32", layout), BOX, 1))


def make_fragment(number: int, length: int = 4, num_envs: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, num_envs)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: rng.uniform(BOX.low, BOX.high, (*shape, 2)).astype(np.float32),
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
    }


def feed(algorithm: TD3, numbers: Any) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(n)]), 8 * n) for n in numbers]


def values_of(algorithm: TD3, prefix: str, obs: Any, actions: Any) -> Any:
    """All critics, layer by layer: [C, B]."""
    tensors, found = algorithm.get_state().tensors, []
    for index in range(2 if algorithm.config.twin_q else 1):
        name = f"{prefix}/critic_{index}"
        hidden = np.concatenate([obs, actions], axis=1) @ tensors[f"{name}/dense_0/kernel"]
        hidden = np.tanh(hidden + tensors[f"{name}/dense_0/bias"])
        found.append((hidden @ tensors[f"{name}/head/kernel"] + tensors[f"{name}/head/bias"])[:, 0])
    return np.array(found)


def acts(algorithm: TD3, prefix: str, obs: Any) -> Any:
    tensors = algorithm.get_state().tensors
    hidden = np.tanh(obs @ tensors[f"{prefix}/policy/dense_0/kernel"] + tensors[f"{prefix}/policy/dense_0/bias"])
    return np.tanh(hidden @ tensors[f"{prefix}/policy/head/kernel"] + tensors[f"{prefix}/policy/head/bias"])


@pytest.mark.parametrize("settings", [{"target_noise": 0.4, "target_noise_clip": 0.3}, DDPG])
def test_losses_equal_the_formulas_in_numpy(settings: dict[str, Any]) -> None:
    algorithm = make(make_config(**settings))
    for target in algorithm.targets.values():
        for index, variable in enumerate(target.variables.values()):
            variable.assign(variable + 0.1 * (index + 1))
    batch = {name: array[:, 0] for name, array in make_fragment(3, 6, 1).items()}
    batch |= {WEIGHTS: np.linspace(0.1, 1, 6).astype(np.float32), SEEDS: np.array([[1, 2], [3, 4]], np.int32)}
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    spec = algorithm.update_spec()
    loss, given = spec.loss(tensors, {})

    next_actions = acts(algorithm, "target/actor", batch[c.NEW_OBS])
    if settings is not DDPG:
        noise = 0.4 * tf.random.stateless_normal([6, 2], batch[SEEDS][0]).numpy()
        assert (np.abs(noise) > 0.3).any()
        next_actions = np.clip(next_actions + np.clip(noise, -0.3, 0.3), -1, 1)
    next_q = values_of(algorithm, "target/critics", batch[c.NEW_OBS], next_actions).min(axis=0)
    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * next_q
    unit = (batch[c.ACTIONS] - BOX.low) / (BOX.high - BOX.low) * 2 - 1
    errors = values_of(algorithm, "critics", batch[c.OBS], unit) - targets
    assert float(loss) == pytest.approx((0.5 * (errors**2).sum(axis=0) * batch[WEIGHTS]).mean(), rel=1e-4)
    np.testing.assert_allclose(given["rows"], np.abs(errors).mean(axis=0), rtol=1e-3)
    (phase,) = spec.phases
    q = values_of(algorithm, "critics", batch[c.OBS], acts(algorithm, "weights", batch[c.OBS]))
    assert float(phase.loss(tensors, {})[0]) == pytest.approx(-q[0].mean(), rel=1e-4)


def test_the_actor_and_all_targets_rest_between_their_turns() -> None:
    """Its moments, too: they would move it on without a gradient. Compiled by XLA, once."""
    config = make_config(training_intensity=0.5, eager=False, xla="off")  # one minibatch a fragment
    algorithm = make(config)
    algorithm.warm_up()
    feed(algorithm, range(1))
    moved = []
    before = algorithm.get_state().tensors
    for number in range(1, 5):
        metrics = feed(algorithm, [number])[0].metrics
        after = algorithm.get_state().tensors
        moved.append({name.partition("/")[0] for name in after if (after[name] != before[name]).any()})
        assert ("actor_loss" in metrics) == (number > 1)
        before = after
    assert [kinds >= {"weights", "target"} for kinds in moved] == [False, True, False, True]
    assert moved[0] == moved[2] == {"critics", "optimizer"}
    assert algorithm.compiled.traces == 1


def test_the_next_update_after_a_restore_is_equal_to_the_bit() -> None:
    """An odd number of minibatches is made before: the delay goes on where it was."""
    first, second = (make(make_config(training_intensity=1.5, seed=seed)) for seed in (7, 8))
    feed(first, range(2))
    assert first.get_state().values["steps"] % 2 == 1
    assert_goes_on_to_the_bit(first, second, lambda algorithm: feed(algorithm, range(50, 52)))


@pytest.mark.parametrize("settings", [{}, DDPG])
def test_workers_get_the_actor_alone_and_add_noise_within_the_bounds(settings: dict[str, Any]) -> None:
    config = make_config(random_timesteps=5, **settings)
    algorithm = make(config)
    graph, spec = export_acting_graph(algorithm.actor)
    assert {weight.name.partition("/")[0] for weight in spec.weights} == {"policy"}
    acting = ActingGraph(graph, spec)
    acting.set_weights(algorithm.get_weights())
    obs = np.random.default_rng(0).normal(size=(500, NUM_OBS)).astype(np.float32)
    inputs, _, _ = acting.run(obs)
    kind = algorithm.actor.distribution
    best = kind.deterministic(inputs)
    np.testing.assert_allclose(best, BOX.low + 2 * (acts(algorithm, "weights", obs) + 1), rtol=1e-4)
    np.testing.assert_allclose(kind.sample(inputs, np.random.default_rng(1)), best, atol=1e-5)
    exploration = make_exploration(TD3.acting_settings(config)["exploration"], kind)
    assert exploration is not None
    actions, logp = np.empty((500, 2), np.float32), np.empty(500, np.float32)
    noise = exploration.draw_noise(np.random.default_rng(2), 500)
    exploration.choose_into(inputs, noise, actions, logp, timestep=5)
    assert all(BOX.contains(action) for action in actions)
    expected = 2 * config.exploration_noise
    np.testing.assert_allclose((actions - best).std(axis=0), expected, rtol=0.15)
    exploration.choose_into(inputs, noise, actions, logp, timestep=4)
    assert (actions - best).std() > 0.9


def test_the_actors_target_follows_weights_that_are_set_from_elsewhere() -> None:
    algorithm = make(make_config())
    state = algorithm.get_state()
    moved = {name: tensor + 1 if name.startswith("weights/") else tensor for name, tensor in state.tensors.items()}
    algorithm.set_state(AlgorithmState(moved, state.values))
    algorithm.weights_replaced()
    now = algorithm.get_state().tensors
    np.testing.assert_array_equal(now["target/actor/policy/head/bias"], moved["weights/policy/head/bias"])


def test_turns_of_actor_and_targets_are_counted_together() -> None:
    assert make_config(policy_delay=4, target_update_freq=6).minibatch_cycle() == 12


def test_its_keras_form_gives_what_the_network_gives() -> None:
    algorithm = make(make_config())
    settings = make_config().model.model_dump()
    weights = algorithm.get_weights()
    network = FunctionalNetwork(ObsLayout((NUM_OBS,)), "float32", algorithm.actor.distribution, settings, weights)
    given = keras.Input((NUM_OBS,))
    inputs, values, _ = network(given, [])
    obs = tf.constant(np.random.default_rng(0).normal(size=(5, NUM_OBS)).astype(np.float32))
    expected, zeros, _ = algorithm.actor.forward_step(obs, [])
    found = keras.Model(given, [inputs, values])(obs)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1], zeros)
    with pytest.raises(ConfigError, match="no Keras form"):
        FunctionalNetwork(
            ObsLayout((NUM_OBS,)), "float32", algorithm.actor.distribution, settings, {"q/head/kernel": np.zeros(1)}
        )


def test_noise_that_nobody_adds_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_noise is for smooth_target_policy"):
        make_config(smooth_target_policy=False, target_noise=0.1)
