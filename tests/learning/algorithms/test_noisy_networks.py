"""Noisy networks: what their noise does to the weights, who acts by it, and what is trained on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from q_networks import NUM_OBS, START, make_model
from restored_replays import assert_goes_on_to_the_bit

from aiorl.acting.onnx_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.q_network import QNetwork

KINDS = [
    {"dueling": False},
    {"dueling_hiddens": [6]},
    {"dueling_hiddens": [6], "num_atoms": 11, "v_min": -3.0, "v_max": 4.0},
]


def make_config(**settings: Any) -> DQNConfig:
    small = {
        "env": "E", "seed": 7, "model": {"fcnet_hiddens": [8]}, "num_envs_per_worker": 2, "rollout_fragment_length": 4,
        "train_batch_size": 4, "training_intensity": 3, "learning_starts": 16, "replay_capacity": 64, "xla": "off",
        "noisy": True,
    }  # fmt: skip
    return DQNConfig(**{**small, **settings})


def obs_of(rows: int) -> Any:
    return np.random.default_rng(rows).normal(size=(rows, NUM_OBS)).astype(np.float32)


def policy_of(model: QNetwork, **settings: Any) -> OnnxPolicy:
    policy = OnnxPolicy(*export_acting_graph(model), config={**DQN.acting_settings(make_config()), **settings}, seed=3)
    policy.set_weights(model.get_weights())
    return policy


def perturbed(weights: dict[str, Any], noise: Any) -> dict[str, Any]:
    """Weights of a network without noise that is what a noisy one is with this noise: one layer after the other."""
    found, start = dict(weights), 0
    for name in [name.removesuffix("/kernel_sigma") for name in weights if name.endswith("/kernel_sigma")]:
        kernel = weights[f"{name}/kernel"]
        scaled = np.sign(noise[start : start + sum(kernel.shape)]) * np.sqrt(
            np.abs(noise[start : start + sum(kernel.shape)])
        )
        start += sum(kernel.shape)
        of_inputs, of_outputs = scaled[: len(kernel)], scaled[len(kernel) :]
        found[f"{name}/kernel"] = kernel + found.pop(f"{name}/kernel_sigma") * np.outer(of_inputs, of_outputs)
        found[f"{name}/bias"] = weights[f"{name}/bias"] + found.pop(f"{name}/bias_sigma") * of_outputs
    assert start == len(noise)
    return found


@pytest.mark.parametrize("settings", KINDS)
def test_r196_each_row_is_acted_on_with_weights_of_its_own_noise(settings: dict[str, Any]) -> None:
    noisy, plain = (make_model(make_config(**settings, noisy=which)) for which in (True, False))
    weights, policy, obs = noisy.get_weights(), policy_of(noisy), obs_of(5)
    noise = policy.draw_noise(np.random.default_rng(0), 5)
    acted = policy.act(obs, noise=noise)
    for row in range(5):
        plain.set_weights(perturbed(weights, noise[row]))
        wanted = plain.forward(obs[row : row + 1])[0].numpy()[0]
        np.testing.assert_allclose(acted.columns[c.ACTION_DIST_INPUTS][row], wanted, rtol=1e-4, atol=1e-5)
        assert acted.actions[row] == START + wanted.argmax()


def test_r196_noise_is_drawn_anew_for_each_action_and_is_none_for_who_does_not_explore() -> None:
    model = make_model(make_config(**KINDS[1]))
    policy, obs = policy_of(model), obs_of(4)
    means = model.forward(obs)[0].numpy()
    first, second = (policy.act(obs).columns[c.ACTION_DIST_INPUTS] for _ in range(2))
    assert not np.isclose(first, second).any()
    again = policy_of(model)  # equal seeds, equal noise
    assert np.array_equal(again.act(obs).columns[c.ACTION_DIST_INPUTS], first)
    for kept in (policy.act(obs, explore=False), policy_of(model, explore=False).act(obs)):
        np.testing.assert_allclose(kept.columns[c.ACTION_DIST_INPUTS], means, rtol=1e-4, atol=1e-5)


def test_r196_a_graph_that_is_given_no_noise_has_the_mean_weights() -> None:
    model = make_model(make_config(**KINDS[0]))
    policy, obs = policy_of(model), obs_of(3)
    np.testing.assert_allclose(policy.graph.run(obs)[0], model.forward(obs)[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", KINDS[1:])
def test_noise_is_learned_and_a_restored_run_goes_on_to_the_bit(settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    first, second = (DQN(config, make_model(config, seed)) for seed in (1, 5))
    before = first.model.get_weights()
    feed(first, range(6))
    after = first.model.get_weights()
    sigmas = [name for name in before if name.endswith("_sigma")]
    assert len(sigmas) == 8
    assert all((before[name] != after[name]).any() for name in sigmas)
    assert_goes_on_to_the_bit(first, second, lambda own: feed(own, range(50, 53)))


def feed(algorithm: DQN, numbers: Any) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(number)]), 8 * number) for number in numbers]


def make_fragment(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (4, 2)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: START + rng.integers(0, 3, shape),
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
    }
