"""The general path alone on one core: any number of agents and policies, with dicts as input and
output.

There are two settings: CartPole with four agents in each of 16 environments, where odd and even
agents have different policies; and 64 copies of plain CartPole with a hook that sees every step.
The network is that of the sampler benchmark, and the rows hold all columns that the general path
records. The baseline is a minimal loop over the same environments with the same hook. It records
the same columns, trajectory by trajectory, with the same networks in NumPy.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.typing import NDArray

from aiorl.acting.filters import NoFilter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.config.worker import WorkerConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.base_env import BaseEnv
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.vector_env import Copies, VectorBaseEnv
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SamplerSetup
from benchmarks.acting_mlp import NumpyActor, make_onnx_policy, mlp_weights
from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure

__all__ = ["MultiAgentCartPole", "general_multi_agent", "general_single_agent"]

AGENTS = 4
TARGET_RATIO = 0.85
ROUND_S = 0.25
ROUNDS = 15
FRAGMENT = 100

Advance = Callable[[], int]


class MultiAgentCartPole(MultiAgentEnv):
    """CartPole for several agents: an agent is done when its pole has fallen, the episode ends when
    all have.
    """

    def __init__(self, agents: int = AGENTS) -> None:
        """Make the poles."""
        self._poles = [CartPoleEnv() for _ in range(agents)]
        self.observation_space = self._poles[0].observation_space
        self.action_space = self._poles[0].action_space
        self._fallen: set[int] = set()
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all poles to upright."""
        self._fallen = set()
        self._steps = 0
        return {
            index: pole.reset(seed=None if seed is None else seed + index)[0]
            for index, pole in enumerate(self._poles)
        }, {}

    def step(self, action_dict: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Push the carts."""
        self._steps += 1
        obs, rewards, terminateds, truncateds = {}, {}, {}, {}
        for index, action in action_dict.items():
            obs[index], rewards[index], terminateds[index], truncateds[index], _ = self._poles[
                index
            ].step(action)
            if terminateds[index]:
                self._fallen.add(index)
        terminateds["__all__"] = len(self._fallen) == len(self._poles)
        truncateds["__all__"] = self._steps >= 500
        return obs, rewards, terminateds, truncateds, {}


def general_multi_agent() -> list[Figure]:
    """Measure four agents in each of 16 CartPoles with two policies, in agent steps."""
    return _measured("multi", 16, "general, 4 agents x 16 CartPoles, 2 policies", "agent steps/s")


def general_single_agent() -> list[Figure]:
    """Measure 64 Python CartPoles that are polled because a hook sees every step."""
    return _measured("single", 64, "general, CartPole x 64, a hook per step", "steps/s")


class LooksAtSteps(DefaultCallbacks):
    """Callbacks that do nothing at every step."""

    def on_episode_step(self, **kwargs: Any) -> None:
        """Do nothing."""


def _measured(kind: str, num_envs: int, name: str, unit: str) -> list[Figure]:
    value, baseline = run_fresh("benchmarks.general", kind, str(num_envs))
    return [Figure(name, value, unit, baseline, target_ratio=TARGET_RATIO)]


def _policy_of(agent_id: Any) -> str:
    return f"policy_{agent_id % 2}"


def _make_subject(kind: str, num_envs: int) -> Advance:
    env: BaseEnv
    if kind == "multi":
        env = MultiAgentBaseEnv([MultiAgentCartPole() for _ in range(num_envs)], seed=0)
        ids, mapping = ("policy_0", "policy_1"), _policy_of
    else:
        copies = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(num_envs)]
        env = VectorBaseEnv(Copies(copies, seed=0))
        ids, mapping = (DEFAULT_POLICY_ID,), None  # type: ignore[assignment]
    space = CartPoleEnv().observation_space
    policies = {
        policy_id: make_onnx_policy(4, spaces.Discrete(2), 2, mlp_weights(4, 2, seed=seed))
        for seed, policy_id in enumerate(ids)
    }
    sampler = SyncSampler(
        SamplerSetup(
            worker=None,
            base_env=env,
            policy_map=PolicyMap(policies, mapping),
            preprocessors={policy_id: preprocessor_for(space) for policy_id in ids},
            filters={policy_id: NoFilter() for policy_id in ids},
            settings=WorkerConfig(rollout_fragment_length=FRAGMENT),
            callbacks=DefaultCallbacks() if kind == "multi" else LooksAtSteps(),
        )
    )

    def advance() -> int:
        rows = sum(sampler.get_data().total() for _ in range(num_envs))
        sampler.get_metrics()
        return rows

    return advance


_DTYPES = {
    "obs": np.float32,
    "logits": np.float32,
    "rewards": np.float32,
    "prev_rewards": np.float32,
    "infos": object,
}
_NAMES = (
    *(
        "obs",
        "actions",
        "logp",
        "logits",
        "values",
        "prev_actions",
        "prev_rewards",
        "rewards",
        "terminateds",
    ),
    *("truncateds", "dones", "new_obs", "infos", "t", "eps_id", "agent_index"),
)


class _Agent:
    """One agent's rows in an episode, as plain tuples."""

    def __init__(self, eps_id: int, index: int, obs: NDArray[Any]) -> None:
        self.identity = (eps_id, index)
        self.obs = obs
        self.last: tuple[int, float] = (0, 0.0)
        self.rows: list[tuple[Any, ...]] = []


def _make_baseline(kind: str, num_envs: int) -> Advance:
    """Return a loop: observations to arrays, one evaluation per policy, actions back; rows by
    agent, then columns.
    """
    multi = kind == "multi"
    envs: list[Any] = [
        MultiAgentCartPole() if multi else gymnasium.make("CartPole-v1", disable_env_checker=True)
        for _ in range(num_envs)
    ]
    networks = [NumpyActor(mlp_weights(4, 2, seed=seed)) for seed in range(2 if multi else 1)]
    rng = np.random.default_rng(0)
    hook = LooksAtSteps().on_episode_step
    episodes = itertools.count()

    def begin(env: Any, seed: int | None = None) -> dict[Any, _Agent]:
        first = env.reset(seed=seed)[0]
        eps_id = next(episodes)
        return {a: _Agent(eps_id, a, obs) for a, obs in (first.items() if multi else [(0, first)])}

    live = [begin(env, index) for index, env in enumerate(envs)]
    steps = [0] * num_envs
    finished: list[list[list[tuple[Any, ...]]]] = [[] for _ in networks]

    def turn() -> None:
        acted: list[dict[Any, tuple[Any, ...]]] = [{} for _ in envs]
        for number, network in enumerate(networks):
            keys = [
                (e, a)
                for e, agents in enumerate(live)
                for a in agents
                if a % len(networks) == number
            ]
            if not keys:
                continue
            obs = np.array([live[e][a].obs for e, a in keys], np.float32)
            logits, values = network(obs)
            difference = logits[:, 1] - logits[:, 0]
            second = rng.random(len(keys), dtype=np.float32) < 1.0 / (1.0 + np.exp(-difference))
            logp = -np.log1p(np.exp(np.where(second, -difference, difference)))
            for (e, a), *results in zip(
                keys, obs, second.astype(np.int64).tolist(), logp, logits, values, strict=True
            ):
                acted[e][a] = tuple(results)
        for e, env in enumerate(envs):
            if multi:
                shown, rewards, terms, truncs, infos = env.step(
                    {a: row[1] for a, row in acted[e].items()}
                )
                over = terms["__all__"] or truncs["__all__"]
            else:
                one, reward, term, trunc, info = env.step(acted[e][0][1])
                shown, rewards, terms, truncs, infos = (
                    {0: one},
                    {0: reward},
                    {0: term},
                    {0: trunc},
                    {0: info},
                )
                over = term or trunc
            for a, row in acted[e].items():
                agent, reward, term, trunc = live[e][a], rewards[a], terms[a], truncs[a]
                done = term or trunc or over
                after = (
                    reward,
                    term,
                    trunc,
                    done,
                    shown[a],
                    infos.get(a, {}),
                    steps[e],
                    *agent.identity,
                )
                agent.rows.append((*row, *agent.last, *after))
                agent.last = (row[1], reward)
                agent.obs = shown[a]
                if done:
                    finished[a % len(networks)].append(agent.rows)
                    del live[e][a]
            steps[e] += 1
            if not multi:
                hook(worker=None, base_env=envs, episode=live[e])
            if over:
                live[e], steps[e] = begin(env), 0

    def take(number: int) -> int:
        rows = [row for trajectory in finished[number] for row in trajectory]
        finished[number] = []
        for agents in live:
            for a, agent in agents.items():
                if a % len(networks) == number:
                    rows += agent.rows
                    agent.rows = []
        columns = {
            name: np.array(column, _DTYPES.get(name))
            for name, column in zip(_NAMES, zip(*rows, strict=True), strict=True)
        }
        return len(columns["rewards"])

    def advance() -> int:
        for _ in range(FRAGMENT):
            turn()
        return sum(take(number) for number in range(len(networks)))

    return advance


def _rate(advance: Advance) -> float:
    """Return steps per second of this process's own time: other work on the machine is not
    counted.
    """
    steps, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < ROUND_S:
        steps += advance()
    return steps / elapsed


def main() -> None:
    """Measure one setting and print ``[value, baseline]`` as JSON."""
    kind, num_envs = sys.argv[1], int(sys.argv[2])
    pin_to_one_core()
    subject, baseline = _make_subject(kind, num_envs), _make_baseline(kind, num_envs)
    subject(), baseline()
    print(json.dumps(alternate(lambda: _rate(subject), lambda: _rate(baseline), ROUNDS)))


if __name__ == "__main__":
    main()
