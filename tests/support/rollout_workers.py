"""Fixtures that make RolloutWorkers, for tests of sampling and of the older interfaces."""

from __future__ import annotations

import contextlib

import pytest
from gymnasium import spaces
from plain_policies import VECTOR, PlainPolicy, spec

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.errors import PolicyError
from aiorl.process.log_once import log_once
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

ACTIONS = spaces.Discrete(2)


@pytest.fixture(autouse=True)
def fresh_logging():
    log_once.reset()
    yield
    log_once.reset()


@pytest.fixture
def make_worker():
    """Return a function that makes RolloutWorkers, by default of CountingEnv and PlainPolicy; the
    end stops all.
    """
    with contextlib.ExitStack() as stack:

        def make(env_creator=lambda context: CountingEnv(), policy=PlainPolicy, **more):
            return stack.enter_context(
                RolloutWorker(env_creator=env_creator, policy=policy, **more)
            )

        yield make


def by_agent(agent):
    return agent[1:]


@pytest.fixture
def make_pair(make_worker):
    """Return a function that makes workers with agents "a0" and "a1" played by policies "0" and
    "1".
    """

    def make(**more):
        return make_worker(
            lambda context: CountingMultiAgentEnv((2, 3)),
            {name: spec(VECTOR, ACTIONS) for name in "01"},
            policy_mapping_fn=by_agent,
            **{"batch_mode": "complete_episodes", "rollout_fragment_length": 3, **more},
        )

    return make


class Refusing(PlainPolicy):
    """Policy that takes weights, and then refuses them."""

    def set_weights(self, weights):
        super().set_weights(weights)
        if self.weight[0] > 100:
            raise PolicyError("too large")


def make_refusing(make_worker, **more):
    return make_worker(
        lambda context: CountingMultiAgentEnv((3, 3)),
        {"0": spec(VECTOR, ACTIONS), "1": spec(VECTOR, ACTIONS, Refusing)},
        policy_mapping_fn=by_agent,
        **more,
    )
