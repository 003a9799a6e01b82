"""SAC and TD3 on HalfCheetah-v5 from end to end, beside Stable-Baselines3 on the same cores.

256x256 networks, minibatches of 256, one update for each env step; both with their defaults for threads. Steps are
counted after training has begun. Stable-Baselines3 has a virtual environment of its own, which is made at first use
(1 GB, below the user's cache directory); this file is also the program that runs in it, so nothing of ours is imported
at its top.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.result import Figure

__all__ = ["stable_baselines_sac", "stable_baselines_td3"]

PACKAGES = ("stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium[mujoco]")
TARGET_RATIOS = {"sac": 2.0, "td3": 1.5}  # a bare XLA loop of TD3's cheaper updates reaches no more than twice theirs
ROUNDS = 3
SECONDS = 15.0
FIRST_STEPS = 1000  # stored before training begins


def stable_baselines_sac() -> list[Figure]:
    """SAC with automatic temperature."""
    return _measured("sac")


def stable_baselines_td3() -> list[Figure]:
    """TD3."""
    return _measured("td3")


def _measured(algo: str) -> list[Figure]:
    from benchmarks.measure import alternate, learner_rate, run_command
    from benchmarks.result import Figure

    python = _installed()
    options = {
        "env": "HalfCheetah-v5", "algo": algo, "preset": f"{algo}-halfcheetah", "learning-starts": FIRST_STEPS,
        "random-timesteps": FIRST_STEPS,
    }  # fmt: skip
    value, baseline = alternate(
        lambda: learner_rate(options, SECONDS),
        lambda: float(run_command([str(python), str(Path(__file__)), algo])),
        ROUNDS,
    )
    name = f"{algo} on HalfCheetah-v5 beside Stable-Baselines3"
    return [Figure(name, value, "env steps/s", baseline, target_ratio=TARGET_RATIOS[algo])]


def _installed() -> Path:
    """Python of the virtual environment; made first where there is none."""
    from benchmarks.recordings import default_cache

    folder = default_cache() / "stable-baselines"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        stamp.write_text(" ".join(PACKAGES))
    return folder / "bin" / "python"


def main(algo: str) -> None:
    """Train with Stable-Baselines3 for some seconds, and print env steps per second."""
    import stable_baselines3  # type: ignore[import-not-found]

    kind: Any = getattr(stable_baselines3, algo.upper())
    model = kind(
        "MlpPolicy", "HalfCheetah-v5", learning_starts=FIRST_STEPS, batch_size=256, train_freq=1, gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]}, seed=0,
    )  # fmt: skip
    began: list[tuple[float, int]] = []

    def go_on(local: dict[str, Any], _: dict[str, Any]) -> bool:
        steps = local["self"].num_timesteps
        if not began and steps > FIRST_STEPS + 100:
            began.append((time.perf_counter(), steps))
        return not began or time.perf_counter() - began[0][0] < SECONDS

    model.learn(10**9, callback=go_on)
    started, first = began[0]
    sys.stdout.write(f"{(model.num_timesteps - first) / (time.perf_counter() - started)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
