"""Planning of a run, before anything is made."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces

from aiorl.env.external_env import ExternalEnv
from aiorl.env.registry import register_env
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.sac import SACConfig
from aiorl.run.build import build_learning, plan_learning

BOX, TWO = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2)


class Client(ExternalEnv):
    def run(self) -> None:
        raise AssertionError("the learner starts no clients")


def test_a_worker_has_one_external_environment_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    register_env("planned", lambda context: Client(TWO, BOX))
    with caplog.at_level("INFO"):
        plan = plan_learning(PPOConfig.from_mapping({"env": "planned"}))
    assert plan.config.num_envs_per_worker == 1
    assert "num_envs_per_worker" in caplog.text
    with pytest.raises(ConfigError) as caught:
        plan_learning(PPOConfig.from_mapping({"env": "planned", "num_envs_per_worker": 32}))
    assert (caught.value.key, caught.value.value) == ("num_envs_per_worker", 32)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"env": "planned", "vectorize": "native"}, "vectorize"),
        ({"env": "planned", "vectorize": "remote"}, "remote_worker_envs"),
        ({"env": "aiorl.testing.envs:CountingEnv", "vectorize": "native"}, "vectorize"),
        ({"env": "CartPole-v1", "vectorize": "native", "remote_worker_envs": True}, "vectorize"),
    ],
)
def test_unsupported_vectorize_modes_are_refused(settings: dict[str, Any], key: str) -> None:
    register_env("planned", lambda context: Client(TWO, BOX))
    with pytest.raises(ConfigError) as caught:
        plan_learning(PPOConfig.from_mapping(settings))
    assert caught.value.key == key


def test_policies_have_different_initial_critics() -> None:
    several = {
        "policies": {"even": None, "odd": None},
        "policy_mapping_fn": "examples.multi_agent_cartpole:policy_for",
    }
    config = SACConfig(
        env="examples.multi_agent_cartpole:CartPoles",
        seed=3,
        model={"fcnet_hiddens": [4]},
        replay_capacity=1000,
        multiagent=several,
    )
    group = build_learning(config).group
    even, odd = (group.learners[name].get_state().tensors for name in ("even", "odd"))
    kernels = [name for name in even if name.startswith("critics/") and name.endswith("kernel")]
    assert kernels
    assert all((even[name] != odd[name]).any() for name in kernels)


def test_callbacks_that_cannot_be_made_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("general_parts.Failing.__init__", lambda self: {}["speed"])
    config = PPOConfig.from_mapping({"env": "CartPole-v1", "callbacks": "general_parts:Failing"})
    with pytest.raises(ConfigError, match=r"'general_parts:Failing'.*KeyError\('speed'\)"):
        build_learning(config)


def test_a_run_draws_a_missing_seed_if_its_environment_can_be_seeded() -> None:
    settings = {"env": "CartPole-v1", "num_envs_per_worker": 2}
    seeds = {plan_learning(PPOConfig.from_mapping(settings)).config.seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert plan_learning(PPOConfig.from_mapping({**settings, "seed": 7})).config.seed == 7
    register_env("seedless", lambda context: Client(TWO, BOX))
    assert plan_learning(PPOConfig.from_mapping({"env": "seedless"})).config.seed is None


@pytest.mark.parametrize("model", [{}, {"custom_model": "export_worlds:sequential"}])
def test_state_dependent_noise_without_a_suitable_network_is_refused_before_workers_start(
    model: dict[str, Any],
) -> None:
    own = {"exploration": {"type": "StateDependentNoise", "sample_freq": 4}}
    register_env("planned", lambda context: Client(BOX, BOX))
    settings = {
        "env": "planned",
        "model": model,
        "multiagent": {"policies": {"default_policy": {"config": own}}},
    }
    with pytest.raises(ConfigError, match="StateDependentNoise") as caught:
        build_learning(PPOConfig.from_mapping(settings))
    assert "use_sde: true" in caught.value.hint
