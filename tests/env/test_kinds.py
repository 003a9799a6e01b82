"""The table of kinds: the properties of environments; a new kind needs only one line."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env import kinds, registry
from aiorl.env.base_env import BaseEnv, as_poll, opening_poll
from aiorl.env.env_maker import EnvMaker, to_base_env
from aiorl.env.kinds import KINDS, EnvKind, check_can_be_remote, kind_of
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import ConfigError, EnvContractError, UnsupportedEnvError
from aiorl.run.build import look_at_env
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv


class Simulator:
    """New kind of environment: not one of aiorl's classes, and not gym-like."""

    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(2)


class SimulatorBaseEnv(BaseEnv):
    def __init__(self, simulator):
        self.simulator = simulator

    def poll(self):
        return opening_poll({0: {AGENT: np.int64(1)}})

    def send_actions(self, action_dict):
        pass


def test_a_new_kind_needs_one_line(monkeypatch):
    with pytest.raises(UnsupportedEnvError, match="reset, step"):
        kind_of(Simulator(), "simulator")
    line = EnvKind(
        "a Simulator",
        Simulator,
        lambda envs, env_id, seed: SimulatorBaseEnv(envs[0]),
        holds_copies=True,
    )
    monkeypatch.setattr(kinds, "KINDS", (line, *KINDS))
    monkeypatch.setitem(registry.registered_creators, "simulator", lambda context: Simulator())
    facts = look_at_env(CommonConfig(env="simulator"))
    assert (facts.kind.name, facts.observation_space) == (
        "a Simulator",
        Simulator.observation_space,
    )
    maker = EnvMaker(EnvPlan(env="simulator", num_envs=3))
    base = maker.to_base_env(maker.make_first())
    assert isinstance(base, SimulatorBaseEnv)
    assert isinstance(to_base_env(Simulator()), SimulatorBaseEnv)
    with pytest.raises(ConfigError, match="Simulator"):
        check_can_be_remote(Simulator(), "simulator")


@pytest.mark.parametrize("make", [CountingEnv, lambda: gymnasium.make("CartPole-v1")])
def test_copies_can_step_in_lockstep_with_the_same_seeds(make):
    base, other = (to_base_env(make(), lambda index: make(), 2, seed=5) for _ in range(2))
    lockstep = base.in_lockstep(horizon=3)
    first = other.poll().obs
    np.testing.assert_array_equal(lockstep.reset(), [first[0][AGENT], first[1][AGENT]])
    cuts = [lockstep.step(np.zeros(2, np.int64)).truncateds.tolist() for _ in range(3)]
    assert cuts == [[False] * 2, [False] * 2, [True] * 2]


@pytest.mark.parametrize(
    "env", [CountingMultiAgentEnv(), SimulatorBaseEnv(None)], ids=lambda env: type(env).__name__
)
def test_kinds_without_whole_arrays_do_not_step_in_lockstep(env):
    assert to_base_env(env).in_lockstep() is None


def test_environments_with_nested_observations_do_not_step_in_lockstep():
    class Nested(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({"a": self.observation_space})

    assert to_base_env(Nested()).in_lockstep() is None


@pytest.mark.parametrize("kind", [CountingEnv, CountingMultiAgentEnv])
def test_every_copy_is_closed_even_if_one_raises(kind):
    closed = []

    class Stuck(kind):
        def close(self):
            closed.append(self)
            raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        to_base_env(Stuck(), lambda index: Stuck(), 2).stop()
    assert len(closed) == 2


@pytest.mark.parametrize(
    "result", [None, (1, 2, 3), {}, ({}, {}, None, {}, {}), ({}, {}, {}, [], {}, {})]
)
def test_other_results_of_poll_are_refused(result):
    with pytest.raises(EnvContractError):
        as_poll(result)
