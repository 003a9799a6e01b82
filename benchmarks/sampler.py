"""Sampler alone: CartPole-v1, 64x64 tanh actor and critic, all PPO columns with GAE, on one core.

The baseline is a minimal loop in NumPy with the same environments, network and recorded columns,
but without GAE. Both count transitions: a row in which Gymnasium's vectorised environment resets a
copy does not count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.env.base_env import LockstepEnv
from aiorl.env.env_maker import EnvMaker
from aiorl.env.wrapping import EnvPlan
from aiorl.sampling.lockstep import Lockstep
from benchmarks.acting_mlp import NumpyActor, make_onnx_policy, mlp_weights
from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure

__all__ = [
    "PPO_COLUMNS",
    "make_lockstep_env",
    "sampler_native_64",
    "sampler_native_1024",
    "sampler_serial_1",
    "sampler_serial_8",
    "sampler_serial_64",
]

PPO_COLUMNS = (
    c.OBS,
    c.ACTIONS,
    c.REWARDS,
    c.TERMINATEDS,
    c.TRUNCATEDS,
    c.ACTION_LOGP,
    c.ACTION_DIST_INPUTS,
    c.VF_PREDS,
    c.ADVANTAGES,
    c.VALUE_TARGETS,
)

ENV_ID = "CartPole-v1"
TARGET_RATIO = 0.6
ROUND_S = 0.25
ROUNDS = 15

Advance = Callable[[], int]


def sampler_serial_1() -> list[Figure]:
    """Measure one Python CartPole."""
    return _measured("serial", 1)


def sampler_serial_8() -> list[Figure]:
    """Measure eight Python CartPoles, stepped in turn."""
    return _measured("serial", 8)


def sampler_serial_64() -> list[Figure]:
    """Measure 64 Python CartPoles, stepped in turn."""
    return _measured("serial", 64)


def sampler_native_64() -> list[Figure]:
    """Measure 64 copies in Gymnasium's vectorised CartPole."""
    return _measured("native", 64, target_ratio=0.85)


def sampler_native_1024() -> list[Figure]:
    """Measure 1024 copies in Gymnasium's vectorised CartPole."""
    return _measured("native", 1024)


def _measured(vectorize: str, num_envs: int, target_ratio: float = TARGET_RATIO) -> list[Figure]:
    value, baseline = run_fresh("benchmarks.sampler", vectorize, str(num_envs))
    name = f"sampler, {vectorize} CartPole x {num_envs}"
    return [Figure(name, value, "steps/s", baseline, target_ratio=target_ratio)]


def make_lockstep_env(
    env: Any, env_config: Mapping[str, Any], num_envs: int, vectorize: str = "auto", **plan: Any
) -> LockstepEnv:
    """Return copies of an environment that step together; see `EnvPlan`."""
    maker = EnvMaker(
        EnvPlan(env=env, env_config=env_config, num_envs=num_envs, vectorize=vectorize, **plan)
    )
    found = maker.to_base_env(maker.make_first()).in_lockstep(maker.plan.horizon)
    assert found is not None, f"{env} has no form that steps whole arrays"
    return found


def _make_subject(vectorize: str, num_envs: int, steps: int) -> Advance:
    env = make_lockstep_env(ENV_ID, {}, num_envs, vectorize)
    policy = make_onnx_policy(4, env.action_space, 2, mlp_weights(4, 2))
    plan = SamplePlan("gae", {"gamma": 0.99, "lam": 0.95}, PPO_COLUMNS)
    sampler = Lockstep(env, policy, plan, WorkerConfig(rollout_fragment_length=steps, seed=0))
    return lambda: sampler.sample().env_steps


class _SerialBaseline:
    """Plain environments in a list, each reset when it ends."""

    resets_take_a_step = False

    def __init__(self, num_envs: int) -> None:
        self._envs = [gymnasium.make(ENV_ID, disable_env_checker=True) for _ in range(num_envs)]

    def reset(self) -> NDArray[Any]:
        return np.stack([env.reset(seed=index)[0] for index, env in enumerate(self._envs)])

    def step(
        self,
        actions: NDArray[Any],
        obs: NDArray[Any],
        rewards: NDArray[Any],
        terms: NDArray[Any],
        truncs: NDArray[Any],
    ) -> None:
        for index, (env, action) in enumerate(zip(self._envs, actions.tolist(), strict=True)):
            one, rewards[index], terminated, truncated, _ = env.step(action)
            terms[index], truncs[index] = terminated, truncated
            obs[index] = env.reset()[0] if terminated or truncated else one


class _NativeBaseline:
    """Gymnasium's vector environment without additions."""

    resets_take_a_step = True

    def __init__(self, num_envs: int) -> None:
        self._env = gymnasium.make_vec(ENV_ID, num_envs, vectorization_mode="vector_entry_point")

    def reset(self) -> NDArray[Any]:
        return np.asarray(self._env.reset(seed=0)[0])

    def step(
        self,
        actions: NDArray[Any],
        obs: NDArray[Any],
        rewards: NDArray[Any],
        terms: NDArray[Any],
        truncs: NDArray[Any],
    ) -> None:
        obs[:], rewards[:], terms[:], truncs[:], _ = self._env.step(actions)


def _make_baseline(vectorize: str, num_envs: int, steps: int) -> Advance:
    env = _SerialBaseline(num_envs) if vectorize == "serial" else _NativeBaseline(num_envs)
    network = NumpyActor(mlp_weights(4, 2))
    rng = np.random.default_rng(0)
    last = env.reset()
    shape = (steps, num_envs)
    ended_before = 0

    def advance() -> int:
        nonlocal ended_before
        obs = np.empty((steps + 1, num_envs, 4), np.float32)
        actions, logp = np.empty(shape, np.int64), np.empty(shape, np.float32)
        logits_column, values = np.empty((*shape, 2), np.float32), np.empty(shape, np.float32)
        rewards, terms, truncs = (
            np.empty(shape, np.float32),
            np.empty(shape, np.bool_),
            np.empty(shape, np.bool_),
        )
        uniform = rng.random(shape, dtype=np.float32)
        obs[0] = last
        for t in range(steps):
            logits, value = network(obs[t])
            difference = logits[:, 1] - logits[:, 0]
            second = uniform[t] < 1.0 / (1.0 + np.exp(-difference))
            actions[t] = second
            logp[t] = -np.log1p(np.exp(np.where(second, -difference, difference)))
            logits_column[t], values[t] = logits, value
            env.step(actions[t], obs[t + 1], rewards[t], terms[t], truncs[t])
        last[:] = obs[-1]
        if not env.resets_take_a_step:
            return steps * num_envs
        ends = np.count_nonzero(terms | truncs, axis=1)
        resets, ended_before = ended_before + int(ends[:-1].sum()), int(ends[-1])
        return steps * num_envs - resets

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
    """Measure one width and print ``[value, baseline]`` as JSON."""
    vectorize, num_envs = sys.argv[1], int(sys.argv[2])
    pin_to_one_core()
    steps = max(32, min(500, 16_384 // num_envs))
    subject = _make_subject(vectorize, num_envs, steps)
    baseline = _make_baseline(vectorize, num_envs, steps)
    subject(), baseline()
    print(json.dumps(alternate(lambda: _rate(subject), lambda: _rate(baseline), ROUNDS)))


if __name__ == "__main__":
    main()
