"""Whole runs with presets for environments that cost more than the network: MuJoCo and Atari.

The baseline of PPO on HalfCheetah-v5 is one process that runs all parts directly: MuJoCo through
Gymnasium, the acting graph in ONNX Runtime, advantages in NumPy, and the same compiled update.
Unlike the preset, it scales neither observations nor rewards. The baseline of PPO on Pong runs its
parts one after the other: two processes that play without aiorl (`benchmarks.atari`), then the same
compiled update on all cores.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from benchmarks.atari import (
    NUM_ACTIONS,
    SIDE,
    STACK,
    load_policy,
    make_baseline,
    rate_of,
    save_policy,
)
from benchmarks.measure import alternate, learner_rate, run_command, run_fresh
from benchmarks.result import Figure

__all__ = ["train_presets_halfcheetah", "train_presets_pong"]

ROUNDS = 3
SECONDS = 15.0
TARGET_RATIO = 0.7
WARM_UPDATES = 3
_CHEETAH = "ppo-halfcheetah", "HalfCheetah-v5"
_PONG = "ppo-pong", "ALE/Pong-v5"
_SELF = "benchmarks.train_presets"


def train_presets_halfcheetah() -> list[Figure]:
    """Measure PPO on HalfCheetah-v5 with its preset: MuJoCo, two workers."""
    preset, env = _CHEETAH
    value, baseline = alternate(
        lambda: learner_rate({"preset": preset, "env": env}, SECONDS),
        lambda: _measured("cheetah"),
        ROUNDS,
    )
    return [
        Figure(
            "train/ppo HalfCheetah-v5", value, "env steps/s", baseline, target_ratio=TARGET_RATIO
        )
    ]


def train_presets_pong() -> list[Figure]:
    """Measure PPO on Pong with its preset: two workers with four games each."""
    preset, env = _PONG
    value, baseline = alternate(
        lambda: learner_rate({"preset": preset, "env": env}, SECONDS), _bare_pong, ROUNDS
    )
    return [Figure("train/ppo Pong", value, "agent steps/s", baseline, target_ratio=TARGET_RATIO)]


def _bare_pong() -> float:
    players = _config(*_PONG).num_workers
    with TemporaryDirectory() as directory, ThreadPoolExecutor(players) as threads:
        learning = _measured("learn-pong", directory)
        playing = sum(
            threads.map(lambda _: float(run_fresh(_SELF, "play-pong", directory)), range(players))
        )
    return 1 / (1 / playing + 1 / learning)


def _measured(role: str, *directory: str) -> float:
    return float(
        json.loads(run_command([sys.executable, "-m", _SELF, role, *directory], timeout_s=300.0))
    )


def _learn_pong(directory: Path) -> float:
    config, learning, graph, spec = _built(*_PONG)
    algorithm = learning.group.learners[DEFAULT_POLICY_ID]
    save_policy(directory, graph, spec, learning.group.get_weights()[DEFAULT_POLICY_ID])
    rng, shape = (
        np.random.default_rng(0),
        (config.rollout_fragment_length, config.num_envs_per_worker),
    )
    fragment: dict[str, Any] = {
        c.OBS: rng.integers(0, 256, (*shape, SIDE, SIDE, STACK), np.uint8),
        c.ACTIONS: rng.integers(0, NUM_ACTIONS, shape),
        c.ACTION_DIST_INPUTS: np.zeros((*shape, NUM_ACTIONS), np.float32),
        c.ACTION_LOGP: np.full(shape, -np.log(NUM_ACTIONS), np.float32),
    }
    for name in (c.VF_PREDS, c.ADVANTAGES, c.VALUE_TARGETS):
        fragment[name] = rng.standard_normal(shape, np.float32)
    fragments = [fragment] * (config.train_batch_size // (shape[0] * shape[1]))

    def advance() -> int:
        algorithm.update(algorithm.make_batch(fragments), 0)
        learning.group.get_weights()
        return int(config.train_batch_size)

    advance()
    return rate_of(advance, time.perf_counter)


def _play_pong(directory: Path) -> float:
    config = _config(*_PONG)
    advance = make_baseline(
        load_policy(directory), config.num_envs_per_worker, config.rollout_fragment_length
    )
    advance()
    return rate_of(advance, time.perf_counter)


def _config(preset: str, env_id: str) -> Any:
    from aiorl.config.presets import named_preset
    from aiorl.learning.algorithms.registry import config_class

    return config_class("ppo").from_mapping(
        {**named_preset(preset).settings, "env": env_id, "seed": 0}
    )


def _built(preset: str, env_id: str) -> tuple[Any, Any, bytes, ActingSpec]:
    """Return the config, the compiled learner, its acting graph and the spec of the graph."""
    from aiorl.run.build import build_learning

    config = _config(preset, env_id)
    learning = build_learning(config)
    learning.group.learners[DEFAULT_POLICY_ID].warm_up()
    made = learning.graphs[DEFAULT_POLICY_ID]
    return config, learning, made["graph"], ActingSpec.from_dict(made["spec"])


def _bare_cheetah() -> float:
    import gymnasium

    config, learning, acting, spec = _built(*_CHEETAH)
    algorithm = learning.group.learners[DEFAULT_POLICY_ID]
    policy = OnnxPolicy(acting, spec)
    graph: Any = policy.graph
    num_envs, length = (
        config.num_workers * config.num_envs_per_worker,
        config.rollout_fragment_length,
    )
    envs = [gymnasium.make(_CHEETAH[1]) for _ in range(num_envs)]
    current = np.stack([env.reset(seed=index)[0] for index, env in enumerate(envs)]).astype(
        np.float32
    )
    size = envs[0].action_space.shape[0]  # type: ignore[index]
    rng = np.random.default_rng(0)

    def sampled() -> dict[str, Any]:
        nonlocal current
        session = graph._session
        run, given = session._session.run, session._given
        shape = (length, num_envs)
        obs = np.empty((length + 1, *current.shape), np.float32)
        actions, inputs = (
            np.empty((*shape, size), np.float32),
            np.empty((*shape, 2 * size), np.float32),
        )
        logp, values = np.empty(shape, np.float32), np.empty((length + 1, num_envs), np.float32)
        rewards, dones = np.empty(shape, np.float32), np.zeros(shape, np.bool_)
        noise: Any = rng.standard_normal(actions.shape, np.float32)
        obs[0] = current
        for t in range(length):
            inputs[t], values[t] = run(["dist_inputs", "vf"], {**given, "obs": obs[t]}, None)
            mean, log_std = inputs[t, :, :size], inputs[t, :, size:]
            actions[t] = mean + np.exp(log_std) * noise[t]
            logp[t] = (-0.5 * noise[t] ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=1)
            for n, env in enumerate(envs):
                seen, reward, terminated, truncated, _ = env.step(actions[t, n])
                obs[t + 1, n], rewards[t, n] = seen, float(reward)
                if terminated or truncated:
                    dones[t, n] = True
                    obs[t + 1, n] = env.reset()[0]
        current = obs[length]
        values[length] = run(["dist_inputs", "vf"], {**given, "obs": current}, None)[1]
        advantages, last = np.empty(shape, np.float32), np.zeros(num_envs, np.float32)
        for t in range(length - 1, -1, -1):
            live = 1.0 - dones[t]
            last = (
                rewards[t]
                + config.gamma * live * (values[t + 1] + config.lambda_ * last)
                - values[t]
            )
            advantages[t] = last
        return {
            c.OBS: obs[:-1],
            c.ACTIONS: actions,
            c.ACTION_LOGP: logp,
            c.ACTION_DIST_INPUTS: inputs,
            c.VF_PREDS: values[:-1],
            c.ADVANTAGES: advantages,
            c.VALUE_TARGETS: advantages + values[:-1],
        }

    updates, began = 0, 0.0
    while True:
        policy.set_weights(learning.group.get_weights()[DEFAULT_POLICY_ID])
        algorithm.update(algorithm.make_batch([sampled()]), updates * config.train_batch_size)
        updates += 1
        elapsed = time.perf_counter() - began
        if updates == WARM_UPDATES:
            began = time.perf_counter()
        elif updates > WARM_UPDATES and elapsed >= SECONDS:
            return float((updates - WARM_UPDATES) * config.train_batch_size / elapsed)


def main(role: str, *directory: str) -> None:
    """Measure one part of a baseline in this process and print it as JSON."""
    roles: dict[str, Callable[..., float]] = {
        "cheetah": _bare_cheetah,
        "learn-pong": _learn_pong,
        "play-pong": _play_pong,
    }
    sys.stdout.write(json.dumps(roles[role](*map(Path, directory))))


if __name__ == "__main__":
    main(*sys.argv[1:])
