"""Makes short runs of each algorithm, with outputs of their policies, for later versions to load
and resume.

    cd tests/frozen && PYTHONPATH=../support python make.py [NAME ...]

Existing runs are kept: the version that wrote them is one that a user can come from.
`test_frozen_runs.py` reads them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import aiorl

TINY: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "seed": 1,
    "compilation_cache": "off",
    "eager": True,
    "model": {"fcnet_hiddens": [8]},
}
ON_POLICY: dict[str, Any] = {
    "rollout_fragment_length": 16,
    "train_batch_size": 32,
    "stop_timesteps": 128,
}
SEVERAL_PASSES: dict[str, Any] = {**ON_POLICY, "sgd_minibatch_size": 16, "num_sgd_iter": 2}
REPLAY: dict[str, Any] = {
    "rollout_fragment_length": 4,
    "train_batch_size": 16,
    "learning_starts": 32,
    "replay_capacity": 200,
    "timesteps_per_iteration": 16,
    "stop_timesteps": 48,
    "eager": False,
    "xla": "off",
}
STORED: dict[str, Any] = {
    "input": "experience",
    "input_evaluation": [],
    "rollout_fragment_length": 16,
    "train_batch_size": 32,
    "stop_timesteps": 128,
}
OFFLINE_REPLAY: dict[str, Any] = {
    **STORED,
    "replay_capacity": 400,
    "learning_starts": 32,
    "train_batch_size": 16,
    "timesteps_per_iteration": 16,
    "stop_timesteps": 48,
    "eager": False,
    "xla": "off",
}
CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pg": ("pg", CARTPOLE, ON_POLICY),
    "a2c": ("a2c", CARTPOLE, ON_POLICY),
    "a3c": ("a3c", CARTPOLE, ON_POLICY),
    "ppo": (
        "ppo",
        CARTPOLE,
        {
            **SEVERAL_PASSES,
            "observation_filter": "MeanStdFilter",
            "lr_schedule": [[0, 1e-3], [256, 0.0]],
        },
    ),
    "ppo-continuous": (
        "ppo",
        PENDULUM,
        {**SEVERAL_PASSES, "normalize_rewards": True, "use_sde": True},
    ),
    "ppo-lstm": (
        "ppo",
        CARTPOLE,
        {
            **SEVERAL_PASSES,
            "model": {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4},
        },
    ),
    "ppo-two-policies": (
        "ppo",
        "general_runs:Poles",
        {
            **SEVERAL_PASSES,
            "multiagent": {
                "policies": {"left": None, "right": None},
                "policy_mapping_fn": "general_runs:side",
            },
        },
    ),
    "impala": ("impala", CARTPOLE, ON_POLICY),
    "appo": ("appo", CARTPOLE, SEVERAL_PASSES),
    "dqn": ("dqn", CARTPOLE, {**REPLAY, "prioritized_replay": True, "n_step": 3}),
    "apex": (
        "apex",
        CARTPOLE,
        {**REPLAY, "per_worker_epsilon": False, "epsilon_schedule": [[0, 0.5], [200, 0.1]]},
    ),
    "sac": ("sac", PENDULUM, REPLAY),
    "td3": ("td3", PENDULUM, REPLAY),
    "bc": ("bc", CARTPOLE, STORED),
    "marwil": ("marwil", CARTPOLE, STORED),
    "cql": ("cql", CARTPOLE, OFFLINE_REPLAY),
    "iql": ("iql", CARTPOLE, OFFLINE_REPLAY),
}
"""Algorithm, environment and settings by name."""


def answers(run: str) -> dict[str, Any]:
    """Return the outputs of each policy of a run for four observations: actions and distribution
    inputs.
    """
    policy_ids = ["left", "right"] if "two" in run else [None]
    found: dict[str, Any] = {}
    for policy_id in policy_ids:
        policy = aiorl.load_policy(run, policy_id)
        rng = np.random.default_rng(0)
        observations = rng.normal(0.0, 0.1, (4, *policy.observation_space.shape)).astype(np.float32)
        rows = [policy.compute_single_action(obs, full_fetch=True) for obs in observations]
        found[policy.policy_id] = {
            "observations": observations.tolist(),
            "actions": [np.asarray(action).tolist() for action, _, _ in rows],
            "dist_inputs": [extra["action_dist_inputs"].ravel().tolist() for _, _, extra in rows],
        }
    return found


def main() -> None:
    """Make the named runs, or all missing ones."""
    if not Path("experience").exists():
        aiorl.train(
            CARTPOLE,
            algo="pg",
            config={**TINY, **ON_POLICY, "output": "experience", "run_dir": "recorded"},
        )
        shutil.rmtree("recorded")
    for name in sys.argv[1:] or [name for name in RUNS if not Path(name).exists()]:
        algo, env, settings = RUNS[name]
        aiorl.train(env, algo=algo, config={**TINY, **settings, "run_dir": name})
        for pattern in ("events.*", "learning_curve.png", "log.txt", "lock", "logs/*"):
            for path in Path(name).glob(pattern):
                path.unlink()
        Path(name, "answers.json").write_text(json.dumps(answers(name)) + "\n")


if __name__ == "__main__":
    main()
