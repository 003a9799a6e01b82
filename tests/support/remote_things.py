"""Classes and functions for tests of remote workers, whose processes import them by name."""

from __future__ import annotations

from typing import Any

from plain_policies import PlainPolicy

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv


class OwnWorker(RolloutWorker):
    """Worker with a method of its own."""

    def twice_the_rows(self) -> int:
        return 2 * self.sample().count


def make_env(context: Any) -> CountingEnv:
    return CountingEnv()


def make_pair_env(context: Any) -> CountingMultiAgentEnv:
    return CountingMultiAgentEnv((2, 3))


def policy_of(agent: str) -> str:
    return agent[1:]


def spec_of(env: Any) -> int:
    return int(env.action_space.n)


def rows_of(worker: RolloutWorker, factor: int) -> int:
    return worker.sample().count * factor


def weight_of(policy: PlainPolicy) -> float:
    return float(policy.weight[0])


def name_and_weight(policy: PlainPolicy, policy_id: str) -> tuple[str, float]:
    return policy_id, float(policy.weight[0])
