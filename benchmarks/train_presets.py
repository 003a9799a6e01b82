"""Whole runs with presets of environments that cost more than the network: MuJoCo and Atari.

The baseline of PPO on HalfCheetah-v5 is one process with nothing between its parts: MuJoCo through Gymnasium, the
acting graph in ONNX Runtime, advantages by NumPy, and the same compiled update.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from benchmarks.measure import alternate, learner_rate, run_command
from benchmarks.result import Figure

__all__ = ["train_presets_halfcheetah", "train_presets_pong"]

ROUNDS = 3
SECONDS = 15.0
TARGET_RATIO = 0.7
TARGET_PONG = 1400
WARM_UPDATES = 3
_CHEETAH = "ppo-halfcheetah", "HalfCheetah-v5"


def train_presets_halfcheetah() -> list[Figure]:
    """PPO on HalfCheetah-v5 with its preset: MuJoCo, two workers."""
    preset, env = _CHEETAH
    value, baseline = alternate(
        lambda: learner_rate({"preset": preset, "env": env}, SECONDS),
        lambda: float(json.loads(run_command([sys.executable, "-m", "benchmarks.train_presets"]))),
        ROUNDS,
    )
    return [Figure("train/ppo HalfCheetah-v5", value, "env steps/s", baseline, target_ratio=TARGET_RATIO)]


def train_presets_pong() -> list[Figure]:
    """PPO on Pong with its preset: two workers with four games each."""
    rates = sorted(learner_rate({"preset": "ppo-pong", "env": "ALE/Pong-v5"}, SECONDS) for _ in range(ROUNDS))
    return [Figure("train/ppo Pong", rates[ROUNDS // 2], "agent steps/s", target=TARGET_PONG)]


def _bare_rate() -> float:
    import gymnasium

    from aiorl.algorithms.registry import config_class
    from aiorl.config.presets import named_preset
    from aiorl.learner.build import build_learning
    from aiorl.policy.acting_graph import ActingSpec
    from aiorl.policy.onnx_policy import OnnxPolicy

    preset, env_id = _CHEETAH
    settings = named_preset(preset).settings
    config: Any = config_class("ppo").from_mapping({**settings, "env": env_id, "seed": 0})
    learning = build_learning(config)
    algorithm = learning.group.algorithms[DEFAULT_POLICY_ID]
    algorithm.warm_up()
    made = learning.graphs[DEFAULT_POLICY_ID]
    policy = OnnxPolicy(made["graph"], ActingSpec.from_dict(made["spec"]))
    graph: Any = policy.graph
    num_envs, length = config.num_workers * config.num_envs_per_worker, config.rollout_fragment_length
    envs = [gymnasium.make(env_id) for _ in range(num_envs)]
    current = np.stack([env.reset(seed=index)[0] for index, env in enumerate(envs)]).astype(np.float32)
    size = envs[0].action_space.shape[0]  # type: ignore[index]
    rng = np.random.default_rng(0)

    def sampled() -> dict[str, Any]:
        nonlocal current
        session = graph._session
        run, given = session._session.run, session._given
        shape = (length, num_envs)
        obs = np.empty((length + 1, *current.shape), np.float32)
        actions, inputs = np.empty((*shape, size), np.float32), np.empty((*shape, 2 * size), np.float32)
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
            last = rewards[t] + config.gamma * live * (values[t + 1] + config.lambda_ * last) - values[t]
            advantages[t] = last
        return {
            c.OBS: obs[:-1], c.ACTIONS: actions, c.ACTION_LOGP: logp, c.ACTION_DIST_INPUTS: inputs,
            c.VF_PREDS: values[:-1], c.ADVANTAGES: advantages, c.VALUE_TARGETS: advantages + values[:-1],
        }  # fmt: skip

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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_bare_rate()))
