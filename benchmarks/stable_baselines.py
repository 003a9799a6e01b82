"""SAC and TD3 on HalfCheetah-v5, end to end, against Stable-Baselines3 on the same cores.

Networks are 256x256, minibatches have 256 rows, and each env step gets one update; both use their
default threads. Steps count once training has begun. Stable-Baselines3 has its own virtual
environment, which is made at first use (1 GB, in the user's cache directory). This file is also the
program that runs there, so its top imports nothing of aiorl. `benchmarks.comparison` trains whole
runs with the same program.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.result import Figure

__all__ = ["BREAKOUT", "breakout", "installed", "stable_baselines_sac", "stable_baselines_td3"]

PACKAGES = ("stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium[mujoco,box2d]")
GAMES = "MinAtar==1.0.15"
"""Installed without the requirements of its pictures, in a separate folder that aiorl's Python also
finds."""
BREAKOUT = "benchmarks.stable_baselines:breakout"
# a bare XLA loop of TD3's updates is at most twice as fast as theirs
TARGET_RATIOS = {
    "sac": 2.0,
    "td3": 1.5,
}
ROUNDS = 3
SECONDS = 15.0
FIRST_STEPS = 1000  # steps stored before training begins


def stable_baselines_sac() -> list[Figure]:
    """Measure SAC with automatic temperature."""
    return _measured("sac")


def stable_baselines_td3() -> list[Figure]:
    """Measure TD3."""
    return _measured("td3")


def _measured(algo: str) -> list[Figure]:
    from benchmarks.measure import alternate, learner_rate, run_command
    from benchmarks.result import Figure

    python, _ = installed()
    options = {
        "env": "HalfCheetah-v5",
        "algo": algo,
        "preset": f"{algo}-halfcheetah",
        "learning-starts": FIRST_STEPS,
        "random-timesteps": FIRST_STEPS,
    }
    value, baseline = alternate(
        lambda: learner_rate(options, SECONDS),
        lambda: float(run_command([str(python), str(Path(__file__)), "rate", algo])),
        ROUNDS,
    )
    name = f"{algo} on HalfCheetah-v5 against Stable-Baselines3"
    return [Figure(name, value, "env steps/s", baseline, target_ratio=TARGET_RATIOS[algo])]


def installed() -> tuple[Path, Path]:
    """Return the virtual environment's Python and MinAtar's folder; install them first if they are
    missing.
    """
    from benchmarks.virtual_environment import virtual_environment

    folder = virtual_environment("stable-baselines", PACKAGES, {"games": GAMES})
    return folder / "bin" / "python", folder / "games"


# The rest also runs in the virtual environment of Stable-Baselines3
# ---------------------------------------------------


def breakout(_: object = None) -> Any:
    """Return MinAtar's Breakout with flat observations; episodes end after 5,000 steps."""
    import gymnasium
    import numpy as np
    from minatar import Environment  # type: ignore[import-not-found]

    class Breakout(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            self.game = Environment("breakout")
            size = int(np.prod(self.game.state_shape()))
            self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (size,), np.float32)
            self.action_space = gymnasium.spaces.Discrete(self.game.num_actions())

        def reset(
            self, *, seed: int | None = None, options: Any = None
        ) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            if seed is not None:
                self.game.seed(seed)
            self.game.reset()
            return self._seen(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            reward, is_over = self.game.act(int(action))
            return self._seen(), float(reward), bool(is_over), False, {}

        def _seen(self) -> Any:
            return self.game.state().reshape(-1).astype(np.float32)

    return gymnasium.wrappers.TimeLimit(Breakout(), 5000)


def rate(algo: str) -> float:
    """Train with Stable-Baselines3 for some seconds; return env steps per second."""
    import stable_baselines3  # type: ignore[import-not-found]

    kind: Any = getattr(stable_baselines3, algo.upper())
    model = kind(
        "MlpPolicy",
        "HalfCheetah-v5",
        learning_starts=FIRST_STEPS,
        batch_size=256,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=0,
    )
    began: list[tuple[float, int]] = []

    def go_on(local: dict[str, Any], _: dict[str, Any]) -> bool:
        steps = local["self"].num_timesteps
        if not began and steps > FIRST_STEPS + 100:
            began.append((time.perf_counter(), steps))
        return not began or time.perf_counter() - began[0][0] < SECONDS

    model.learn(10**9, callback=go_on)
    started, first = began[0]
    return float((model.num_timesteps - first) / (time.perf_counter() - started))


def learned(wanted: dict[str, Any]) -> dict[str, float]:
    """Train a whole run with the defaults of Stable-Baselines3, and play episodes with the most
    likely actions.

    Args:
        wanted: the task, as sent by `benchmarks.comparison`.
    Returns: env steps, mean return of the last 100 training episodes and of those played
        afterwards, and CPU seconds.
    """
    import numpy as np
    import stable_baselines3
    import torch  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]
    from stable_baselines3.common.evaluation import evaluate_policy  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    env = breakout if wanted["env"] == BREAKOUT else wanted["env"]
    envs = make_vec_env(env, wanted["num_envs"], seed=wanted["seed"])
    kind: Any = getattr(stable_baselines3, wanted["algo"].upper())
    model = kind("MlpPolicy", envs, seed=wanted["seed"], device="cpu", **wanted["options"])
    model.learn(wanted["env_steps"])
    last = [episode["r"] for episode in model.ep_info_buffer]
    played = make_vec_env(env, 1, seed=10_000 + wanted["seed"])
    returns, _ = evaluate_policy(model, played, wanted["episodes"], return_episode_rewards=True)
    means = {"return_train": float(np.mean(last)), "return_greedy": float(np.mean(returns))}
    return {"env_steps": model.num_timesteps, **means, "cpu_s": time.process_time()}


def main(role: str, wanted: str) -> None:
    """Print the result of a role as JSON."""
    found = rate(wanted) if role == "rate" else learned(json.loads(wanted))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
