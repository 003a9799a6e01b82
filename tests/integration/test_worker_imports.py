"""A worker never loads a deep-learning framework, and needs only the base install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from processes import free_address
from saved_runs import save_run

ROOT = Path(__file__).parents[2]
HEAVY = ("tensorflow", "keras", "onnx", "tf2onnx", "torch", "jax")

REPORT = """
import sys, importlib, pkgutil
for folder in "run.worker sampling offline env acting net.transport net.protocol net.wire".split():
    package = f"aiorl.{folder}"
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import aiorl.evaluate, aiorl.keys, aiorl.worker
print(",".join(name for name in %r if name in sys.modules))
"""


def test_importing_all_modules_of_a_worker_loads_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT % (HEAVY,)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == ""


def base_install() -> dict[str, metadata.Distribution]:
    """Return the installed packages that the base install needs, directly or indirectly."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    wanted, found = [Requirement(text) for text in declared], {}
    while wanted:
        requirement = wanted.pop()
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_wanted and requirement.name not in found:
            found[requirement.name] = metadata.distribution(requirement.name)
            wanted += map(Requirement, found[requirement.name].requires or ())
    return found


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a Python environment with only the installed packages of the base install."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in base_install().values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / name).symlink_to(distribution.locate_file(name))
    (packages / "aiorl").symlink_to(ROOT / "aiorl")
    look = (
        "import onnxruntime; from importlib.util import find_spec; print(*filter(find_spec,"
        f" {HEAVY!r}))"
    )
    seen = subprocess.run(
        [python, "-c", look], capture_output=True, text=True, timeout=60, check=True
    )
    assert seen.stdout.strip() == ""
    return python


def test_a_worker_runs_in_an_environment_with_only_the_base_install(
    processes, base_python: str
) -> None:
    learner = processes.learner(
        "--num-workers=0", f"--bind={free_address()}", "--min-iter-time-s=0.2"
    )
    worker = processes.command([base_python, "-m", "aiorl.worker", f"--connect={learner.address}"])
    learner.wait_for_result(lambda result: result["updates_total"] >= 2, 100.0)
    learner.send(2)
    assert learner.wait() == 0
    assert worker.wait(10) == 0, worker.text
    evaluate = [base_python, "-m", "aiorl.evaluate", str(learner.run_dir), "--episodes", "2"]
    evaluated = subprocess.run(evaluate, capture_output=True, text=True, timeout=60, check=True)
    assert " ± " in evaluated.stdout


WORLDS = """
import gymnasium, numpy as np
from gymnasium import spaces

BOX, FRAMES = spaces.Box(-2.0, 2.0, (3,)), spaces.Box(0, 255, (84, 84, 4), np.uint8)
PARTS = spaces.Dict({"position": BOX, "room": spaces.Discrete(3)})


class Shown(gymnasium.Env):
    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 5, {}


def box(context): return Shown(BOX)
def frames(context): return Shown(FRAMES)
def parts(context): return Shown(PARTS)


def network(obs_shape, num_outputs, model_config):
    import keras
    return keras.Sequential([keras.layers.Input(obs_shape), keras.layers.Dense(num_outputs, activation="tanh")])
"""
KINDS: dict[str, dict[str, Any]] = {
    "MLP": {"env": "base_worlds:box", "observation_filter": "MeanStdFilter"},
    "CNN": {"env": "base_worlds:frames"},
    "LSTM": {"env": "base_worlds:box", "model": {"use_lstm": True, "lstm_cell_size": 8}},
    "custom": {"env": "base_worlds:box", "model": {"custom_model": "base_worlds:network"}},
    "Dict": {"env": "base_worlds:parts", "observation_filter": "MeanStdFilter"},
}
ACT = """
import json, sys
import aiorl

def outputs(folder):
    policy = aiorl.load_policy(folder)
    policy.observation_space.seed(5)
    seen = [policy.observation_space.sample() for _ in range(4)]
    return policy.compute_actions(seen)[2]["action_dist_inputs"].tolist()

if __name__ == "__main__":
    folders = sys.argv[1:]
    print(json.dumps([[outputs(folder), aiorl.evaluate(folder, episodes=2, seed=1).returns] for folder in folders]))
"""


@pytest.mark.slow
def test_t4_checkpoints_of_every_kind_act_and_are_evaluated_with_only_the_base_install(
    base_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base_worlds.py").write_text(WORLDS)
    (tmp_path / "act.py").write_text(ACT)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = {"MLP": 3, "Dict": 6}
    for name, settings in KINDS.items():
        rows = (
            np.random.default_rng(0).normal(size=(50, seen[name])).astype(np.float32)
            if name in seen
            else None
        )
        save_run(tmp_path / name, None if rows is None else {"default_policy": rows}, **settings)
    folders = [str(tmp_path / name) for name in KINDS]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    answers = []
    for python in (base_python, sys.executable):
        command = [python, str(tmp_path / "act.py"), *folders]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]
    assert [returns for _, returns in answers[0]] == [[5.0, 5.0]] * len(KINDS)
