from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = {"num_envs_per_worker": 2, "rollout_fragment_length": 16, "train_batch_size": 32, "sgd_minibatch_size": 32,
         "num_sgd_iter": 1, "xla": "off", "checkpoint_interval_s": 0.0, "log_sys_usage": False}  # fmt: skip

SCRIPT = """
import sys
import aiorl
import gymnasium
from aiorl.testing.envs import CountingEnv


class Counting(CountingEnv):
    pass


gymnasium.register("OfTheScript-v0", entry_point=Counting)


class Hooks(aiorl.DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["module"] = float(__name__ == "my_training")


class Halved(aiorl.Preprocessor):
    def __init__(self, space):
        super().__init__(space, space.shape, "float32")

    def transform(self, obs):
        return obs / 2.0


if __name__ == "__main__":
    result = aiorl.train("OfTheScript-v0", num_workers=1, stop_timesteps=64, run_dir=sys.argv[1], callbacks=Hooks,
                         model={"custom_preprocessor": Halved}, **SETTINGS)
    print("custom:", result["custom_metrics"]["module_mean"])
    print("played:", len(aiorl.evaluate(result["checkpoint"], episodes=2).returns))
"""


def test_workers_import_what_the_script_that_is_run_defines_and_registers(tmp_path: Path) -> None:
    (tmp_path / "my_training.py").write_text(SCRIPT.replace("SETTINGS", repr(SMALL)))
    run = subprocess.run(
        [sys.executable, str(tmp_path / "my_training.py"), str(tmp_path / "run")],
        capture_output=True, text=True, check=False, cwd="/", timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
    )  # fmt: skip
    assert "custom: 1.0" in run.stdout, run.stdout + run.stderr
    assert "played: 2" in run.stdout
    assert "callbacks: my_training:Hooks" in (tmp_path / "run" / "config.yaml").read_text()
