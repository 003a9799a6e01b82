"""Facts found about environments of each kind, and clean-up afterwards."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.env.base_env import BaseEnv
from aiorl.env.external_env import ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.kinds import KINDS, EnvFacts
from aiorl.env.registry import register_env
from aiorl.errors import ConfigError, EnvError, UnsupportedEnvError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.run.build import look_at_env
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

KIND = {kind.name: kind for kind in KINDS}
BOX, TWO = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2)


def looked(creator: Any, **settings: Any) -> EnvFacts:
    register_env("looked-at", creator)
    return look_at_env(PPOConfig.from_mapping({"env": "looked-at", **settings}))


class Client(ExternalEnv):
    def run(self) -> None:
        raise AssertionError("the learner starts no clients")


class Simple(BaseEnv):
    observation_space, action_space = BOX, TWO
    stopped = False

    def poll(self) -> Any:
        raise AssertionError("the learner polls nothing")

    def send_actions(self, action_dict: Any) -> None:
        raise AssertionError

    def stop(self) -> None:
        self.stopped = True


class OldGym:
    observation_space, action_space = BOX, TWO

    def reset(self) -> Any:
        return np.zeros(3)

    def step(self, action: Any) -> Any:
        return np.zeros(3), 0.0, True, {}


def test_a_plain_environment_has_nothing_special_and_is_closed() -> None:
    made: list[Any] = []

    class Closed(gymnasium.Env[Any, Any]):
        observation_space, action_space = BOX, TWO
        closed = 0

        def __init__(self) -> None:
            made.append(self)

        def close(self) -> None:
            self.closed += 1

    assert looked(lambda context: Closed()) == EnvFacts(
        KIND["a gymnasium.Env"], BOX, TWO, is_seedable=True
    )
    assert [env.closed for env in made] == [1]


@pytest.mark.parametrize(
    ("creator", "kind", "has_agents"),
    [
        (lambda context: Client(TWO, BOX), "ExternalEnv", False),
        (lambda context: Simple(), "BaseEnv", True),
        (lambda context: OldGym(), "Gym", False),
        (lambda context: gymnasium.make_vec("CartPole-v1", 2), "Gymnasium", False),
    ],
)
def test_other_kinds_are_named(creator: Any, kind: str, has_agents: bool) -> None:
    facts = looked(creator, num_envs_per_worker=1)
    assert facts.kind.name.split()[-1] == kind
    assert facts.kind.has_agents == has_agents
    assert facts.action_space == TWO
    assert facts.observation_space is not None


def test_agents_spaces_are_known_by_agent_and_shared_where_all_are_equal() -> None:
    common = looked(lambda context: CountingMultiAgentEnv())
    assert common.kind.name == "a MultiAgentEnv"
    assert common.kind.has_agents
    assert common.observation_space is not None
    by_agent = looked(
        lambda context: ExternalMultiAgentEnv({"a": TWO, "b": TWO}, {"a": BOX, "b": TWO}),
        num_envs_per_worker=1,
    )
    assert by_agent.kind.name == "an ExternalMultiAgentEnv"
    assert by_agent.observation_space is None
    assert by_agent.action_space == TWO
    assert by_agent.observation_spaces == {"a": BOX, "b": TWO}


@pytest.mark.parametrize(
    ("env", "key", "value"),
    [
        ("client", "num_envs_per_worker", 4),
        ("client", "seed", 3),
        ("client", "horizon", 9),
        ("CartPole-v1", "horizon", 501),
    ],
)
def test_settings_that_an_environment_cannot_have_are_refused(
    env: str, key: str, value: int
) -> None:
    register_env("client", lambda context: Client(TWO, BOX))
    assert look_at_env(PPOConfig(env="client")).kind.is_external  # 32 is only the default of PPO
    with pytest.raises(ConfigError) as caught:
        look_at_env(PPOConfig.from_mapping({"env": env, key: value}))
    assert caught.value.key == key


def test_the_error_of_a_constructor_is_reported() -> None:
    def fail(context: Any) -> Any:
        raise ValueError("no such level")

    with pytest.raises(EnvError, match="ValueError: no such level"):
        looked(fail)
    with pytest.raises(UnsupportedEnvError, match=r"\bint\b"):
        looked(lambda context: 3)


@pytest.mark.parametrize(
    "creator",
    [
        lambda context: Simple(),
        lambda context: Client(TWO, BOX),
        lambda context: gymnasium.make_vec("CartPole-v1", 2),
    ],
)
def test_kinds_that_cannot_be_remote_are_refused_before_a_worker_starts(creator: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        looked(creator, num_envs_per_worker=1, remote_worker_envs=True)
    assert caught.value.key == "remote_worker_envs"
