"""Noisy networks: how noise changes the weights, when it is drawn, and how it is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from algorithm_cases import NUM_OBS, START, Case, equal

from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.learning.algorithms.dqn import DQN
from aiorl.learning.models.export import export_acting_graph

KINDS: list[dict[str, Any]] = [
    {"dueling": False},
    {"dueling_hiddens": [6]},
    {"dueling_hiddens": [6], "num_atoms": 11, "v_min": -3.0, "v_max": 4.0},
]


def make(noisy: bool = True, **settings: Any) -> Case:
    return Case("dqn", noisy=noisy, **settings)


def obs_of(rows: int) -> Any:
    return np.random.default_rng(rows).normal(size=(rows, NUM_OBS)).astype(np.float32)


def policy_of(case: Case, exported: Any = None, **settings: Any) -> OnnxPolicy:
    acting = {**DQN.acting_settings(case.config), **settings}
    policy = OnnxPolicy(*(exported or export_acting_graph(case.model)), config=acting, seed=3)
    policy.set_weights(case.model.get_weights())
    return policy


def perturbed(weights: dict[str, Any], noise: Any) -> dict[str, Any]:
    """Return the weights of a noiseless network that equals a noisy one with this noise: one layer
    after the other.
    """
    found, start = dict(weights), 0
    for name in [
        name.removesuffix("/kernel_sigma") for name in weights if name.endswith("/kernel_sigma")
    ]:
        kernel = weights[f"{name}/kernel"]
        scaled = np.sign(noise[start : start + sum(kernel.shape)]) * np.sqrt(
            np.abs(noise[start : start + sum(kernel.shape)])
        )
        start += sum(kernel.shape)
        of_inputs, of_outputs = scaled[: len(kernel)], scaled[len(kernel) :]
        found[f"{name}/kernel"] = kernel + found.pop(f"{name}/kernel_sigma") * np.outer(
            of_inputs, of_outputs
        )
        found[f"{name}/bias"] = (
            weights[f"{name}/bias"] + found.pop(f"{name}/bias_sigma") * of_outputs
        )
    assert start == len(noise)
    return found


@pytest.mark.parametrize("settings", KINDS[1:])
def test_r196_each_row_is_acted_on_with_its_own_noise(settings: dict[str, Any]) -> None:
    case, plain, obs = make(**settings), make(noisy=False, **settings).model, obs_of(5)
    weights, policy = case.model.get_weights(), policy_of(case)
    noise = policy.draw_noise(np.random.default_rng(0), 5)
    acted = policy.act(obs, noise=noise)
    for row in range(5):
        plain.set_weights(perturbed(weights, noise[row]))
        wanted = plain.forward(obs[row : row + 1])[0].numpy()[0]
        np.testing.assert_allclose(
            acted.columns[c.ACTION_DIST_INPUTS][row], wanted, rtol=1e-4, atol=1e-5
        )
        assert acted.actions[row] == START + wanted.argmax()


def test_r196_noise_is_drawn_for_each_action_and_only_for_exploration() -> None:
    case, obs = make(**KINDS[1]), obs_of(4)
    exported, means = export_acting_graph(case.model), case.model.forward(obs)[0].numpy()
    policy = policy_of(case, exported)
    first, second = (policy.act(obs).columns[c.ACTION_DIST_INPUTS] for _ in range(2))
    assert not np.isclose(first, second).any()
    again = policy_of(case, exported)  # equal seeds, equal noise
    assert np.array_equal(again.act(obs).columns[c.ACTION_DIST_INPUTS], first)
    without = policy_of(case, exported, explore=False)
    for kept in (policy.act(obs, explore=False), without.act(obs)):
        np.testing.assert_allclose(kept.columns[c.ACTION_DIST_INPUTS], means, rtol=1e-4, atol=1e-5)


def test_r196_a_graph_without_noise_has_the_mean_weights() -> None:
    case, obs = make(**KINDS[0]), obs_of(3)
    found = policy_of(case).graph.run(obs)[0]
    np.testing.assert_allclose(found, case.model.forward(obs)[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [KINDS[1], pytest.param(KINDS[2], marks=pytest.mark.slow)])
def test_noise_is_learned_and_a_restored_run_continues_bit_for_bit(
    settings: dict[str, Any],
) -> None:
    first, second = (make(**settings, net_seed=seed) for seed in (1, 5))
    before = first.tensors
    first.train()
    sigmas = [name for name in before if name.startswith("weights/") and name.endswith("_sigma")]
    assert len(sigmas) == 8
    assert all((before[name] != first.tensors[name]).any() for name in sigmas)
    second.restore(*first.saved())
    for case in (first, second):
        case.train(50)
    assert equal(first.tensors, second.tensors)
