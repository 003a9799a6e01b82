"""Runs of an earlier version: this version acts from them, gives the same outputs, and continues
training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from aiorl import Trainer, load_policy

FROZEN = Path(__file__).parent
RUNS = sorted(path.parent.name for path in FROZEN.glob("*/answers.json"))


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a run, and the experience that some were trained on, to the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FROZEN / "experience", tmp_path / "experience")
    shutil.copytree(FROZEN / request.param, tmp_path / request.param)
    return tmp_path / request.param


def test_a_run_of_each_algorithm_is_kept() -> None:
    assert {json.loads(line)["algo"] for line in _meta_lines()} == {
        "pg",
        "a2c",
        "a3c",
        "ppo",
        "impala",
        "appo",
        "dqn",
        "apex",
        "sac",
        "td3",
        "bc",
        "marwil",
        "cql",
        "iql",
    }


def _meta_lines() -> list[str]:
    metas = [
        json.loads(path.read_text())["meta"] for path in FROZEN.glob("*/checkpoints/*/meta.json")
    ]
    return [json.dumps({"algo": meta["algo"]}) for meta in metas]


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_an_older_policy_gives_the_same_outputs(run: Path) -> None:
    for policy_id, known in json.loads((run / "answers.json").read_text()).items():
        policy = load_policy(run, policy_id)
        for obs, action, inputs in zip(
            known["observations"], known["actions"], known["dist_inputs"], strict=True
        ):
            found, _, extra = policy.compute_single_action(
                np.asarray(obs, np.float32), full_fetch=True
            )
            np.testing.assert_allclose(
                extra["action_dist_inputs"].ravel(), inputs, rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(found, action, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_an_older_run_continues(run: Path) -> None:
    before = json.loads((run / "result.jsonl").read_text().splitlines()[-1])
    with Trainer.restore(run, run_dir=str(run), resume=str(run)) as trainer:
        result = trainer.train()
    assert result["training_iteration"] == before["training_iteration"] + 1
    assert result["env_steps_trained_total"] > before["env_steps_trained_total"]
    assert result["updates_total"] > before["updates_total"]
