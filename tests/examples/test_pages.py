"""The Python code of each page runs as one script, as a reader would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from learner_server import ForkedLearner, can_fork

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHORTER = {
    "stop_return=475": "stop_return=60",
    "stop_return=100": "stop_return=60",
    "num_workers=0,": 'num_workers=0, xla="off",',
    "num_workers=1,": 'num_workers=1, xla="off",',
    '"num_workers": 0,': '"num_workers": 0, "xla": "off",',
}
"""Changes to pages: compilation takes longer than short runs. Those with two workers keep it."""
TESTED_ELSEWHERE = {"clients.md", "exports.md", "own_code.md", "new_algorithm.md"}
ALONE = sorted(
    name
    for page in DOCS.rglob("*.md")
    if "```python" in page.read_text(encoding="utf-8")
    and (name := page.relative_to(DOCS).as_posix()) not in {"tutorial.md", *TESTED_ELSEWHERE}
)

pytestmark = pytest.mark.slow


def files_of(page: str) -> dict[str, str]:
    """Return the files that a page asks its reader to save, by name; its other blocks of code are
    "script.py".
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    for long, short in SHORTER.items() if "xla=" not in text else ():
        text = text.replace(long, short)
    files: dict[str, str] = {"script.py": ""}
    for file, code in re.findall(
        r"^```python(?: file=(\S+))?\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    ):
        name = file or "script.py"
        files[name] = files.get(name, "") + code
    return files


def run(folder: Path, *words: str) -> str:
    """Run a script or a learner, and return its output.

    It is forked from a process that has loaded TensorFlow where that can be.

    Args:
        folder: working directory.
        words: name of the script; or options of the learner, which begin with a dash.
    """
    is_script = not words[0].startswith("-")
    if not can_fork:
        return run_python(folder, *([] if is_script else ["-m", "aiorl.learner"]), *words)
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    options, script = ([], str(folder / words[0])) if is_script else (list(words), "")
    forked = ForkedLearner(options, environment, script=script, directory=str(folder))
    last = threading.Timer(240, forked.kill)
    last.start()
    with forked.stdout:
        text = forked.stdout.read()
    status = forked.wait(30)
    last.cancel()
    assert status == 0, text[-3000:]
    return text


def run_python(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for name, text in files_of(request.param).items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("saved", ["../README.md", *ALONE], indirect=True)
def test_the_code_of_a_page_runs(saved: Path) -> None:
    run(saved, "script.py")


@pytest.mark.parametrize("saved", ["tutorial.md"], indirect=True)
def test_t9_every_block_of_code_in_the_tutorial_runs(saved: Path) -> None:
    run(saved, "script.py")
    assert (saved / "exported" / "onnx" / "policy.json").exists()
    assert (saved / "rail.py").stat().st_size > 500


FLIPS = """
import gymnasium
import numpy as np

SIZE = 8


class Flips(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2 * SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(SIZE)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, SIZE))
        self.steps = 0
        return self.obs(), {}

    def step(self, action):
        self.bits[action] ^= 1
        self.steps += 1
        is_reached = bool((self.bits == self.goal).all())
        return self.obs(), float(is_reached) - 1, is_reached, self.steps == SIZE, {}

    def obs(self):
        return np.concatenate([self.bits, self.goal]).astype(np.float32)
"""
TRAIN = """
import aiorl
from hindsight import HindsightConfig

SETTINGS = {"num_workers": 0, "seed": 1, "xla": "off", "model": {"fcnet_hiddens": [64]}}
SETTINGS |= {"gamma": 0.95, "lr": 1e-3, "target_update_freq": 100, "training_intensity": 32}
SETTINGS |= {"epsilon_schedule": [(0, 1.0), (4000, 0.1)], "learning_starts": 500}
for kind in (aiorl.DQNConfig, HindsightConfig):
    config = kind(env="flips:Flips", run_dir=kind.__name__, **SETTINGS)
    with config.build() as trainer:
        for _ in trainer.iterate(stop_timesteps=8000):
            pass
    print(aiorl.evaluate(config.run_dir, episodes=100).mean)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("saved", ["new_replay_algorithm.md"], indirect=True)
def test_hindsight_flips_bits_to_a_goal_that_dqn_does_not_reach(saved: Path) -> None:
    """Of 8 bits, half are to be flipped on average, so the best mean return is -3; -8 is failure."""
    (saved / "flips.py").write_text(FLIPS)
    (saved / "train.py").write_text(TRAIN)
    *_, plain, hindsight = run(saved, "train.py").split()
    assert float(plain) < -6.5
    assert float(hindsight) > -4


@pytest.mark.parametrize("saved", ["actors.md"], indirect=True)
def test_the_evolution_strategy_of_the_page_about_actors_learns(saved: Path) -> None:
    *_, last = run_python(saved, "es.py").splitlines()
    assert float(last.split()[-1]) >= 400


LATER = """
import aiorl
trainer = aiorl.Trainer.restore("cartpole-awr")
result = trainer.train()
trainer.stop()
print(result["training_iteration"])
"""


@pytest.mark.parametrize("saved", ["new_algorithm.md"], indirect=True)
def test_a_users_own_algorithm_learns_as_its_page_shows(saved: Path) -> None:
    *_, evaluated = run(saved, "script.py").split()
    assert float(evaluated) >= 150
    (saved / "later.py").write_text(LATER)
    *_, iteration = run(saved, "later.py").split()
    assert int(iteration) > 1


@pytest.mark.parametrize("saved", ["new_algorithm.md"], indirect=True)
def test_a_users_own_algorithm_is_trained_resumed_and_evaluated_by_commands(saved: Path) -> None:
    learn = ["--seed=1", "--num-workers=1", "--xla=off"]
    run(
        saved,
        *learn,
        "--algo=awr:AWR",
        "--env=CartPole-v1",
        "--beta=0.7",
        "--stop-timesteps=4096",
        "--run-dir=run",
    )
    run(saved, *learn, "--resume=run", "--stop-timesteps=8192")
    rows = [json.loads(line) for line in (saved / "run" / "result.jsonl").read_text().splitlines()]
    assert rows[-1]["env_steps_trained_total"] >= 8192
    assert "\nbeta: 0.7\n" in (saved / "run" / "config.yaml").read_text()
    (saved / "awr.py").unlink()  # acting does not need it
    assert " ± " in run_python(saved, "-m", "aiorl.evaluate", "run", "--episodes=2")


@pytest.mark.parametrize("saved", ["new_algorithm.md"], indirect=True)
def test_policies_learn_together_as_the_page_shows(saved: Path) -> None:
    (saved / "poles.py").write_text(files_of("multi_agent.md")["poles.py"])
    run(
        saved,
        "--algo=awr:Central",
        "--env=poles:CartPoles",
        "--env-config={agents: 2}",
        "--multiagent.policies={even: null, odd: null}",
        "--multiagent.policy-mapping-fn=poles:policy_for",
        "--num-workers=1",
        "--xla=off",
        "--stop-timesteps=4096",
        "--run-dir=run",
    )
    *_, last = (saved / "run" / "result.jsonl").read_text().splitlines()
    assert {"even+odd/loss", "even+odd/even/loss"} <= json.loads(last)["learner"].keys()
