"""Whole runs with real processes: solve, stop, resume, repeat."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from processes import Processes, StartedLearner
from safetensors.numpy import load_file


def newest_tensors(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(sorted(run_dir.glob("checkpoints/checkpoint-*"))[-1] / "tensors.safetensors")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedLearner]:
    """Finished run; do not change it."""
    started = Processes(tmp_path_factory.mktemp("ended"))
    learner = started.learner("--seed=1", "--num-workers=1", "--stop-timesteps=1500")
    assert learner.wait(90) == 0, learner.text
    yield learner
    started.end()


@pytest.fixture
def first(ended: StartedLearner, tmp_path: Path) -> Path:
    """Copy the directory of a finished run to a place where `processes` can resume it."""
    return Path(shutil.copytree(ended.run_dir, tmp_path / "run"))


def test_r3_one_command_trains_cartpole_through_worker_processes(
    processes, ledger_balances
) -> None:
    options = ("--stop-return=30", "--seed=1", "--stop-time-s=120", "--xla=off")
    learner = processes.learner(*options, is_forked=False)  # one starts like a user's command
    assert learner.wait(150) == 0, learner.text
    results = learner.results()
    for result in results:
        ledger_balances(result)
    last = results[-1]
    assert last["episode_reward_mean_last_100"] >= 30
    assert last["policy_lag"]["max"] == 0
    assert last["num_healthy_workers"] == 2
    files = {path.name for path in learner.run_dir.iterdir()}
    assert {
        "config.yaml",
        "progress.csv",
        "result.jsonl",
        "learning_curve.png",
        "log.txt",
        "checkpoints",
    } <= files
    assert any(name.startswith("events.out.tfevents") for name in files)
    assert f"--resume {learner.run_dir}" in learner.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "is_drawn"), [(1, True), pytest.param(2, False, marks=pytest.mark.nightly)]
)
def test_same_seed_gives_bit_equal_weights_after_20_updates(
    processes, until, tmp_path: Path, num_workers: int, is_drawn: bool
) -> None:
    """Holds even if the first run drew its seed, which its `config.yaml` contains. Early warnings
    are in `log.txt`.

    Holds, too, if the first run compiles its update and later ones, including a resumed one, use
    the compiled one.
    """
    # 20 updates of at most 512 steps: rows that only reset an environment are not counted
    options = (
        f"--num-workers={num_workers}",
        "--stop-timesteps=9750",
        "--observation-filter=MeanStdFilter",
        f"--xla={'off' if is_drawn else 'auto'}",
        f"--compilation-cache={tmp_path}/compiled",
    )
    slip, environment = "--multiagent.polices={}", {"TF_XLA_FLAGS": ""}
    first = processes.learner(
        *options, *([slip] if is_drawn else ["--seed=7"]), run="first", environment=environment
    )
    until((first.run_dir / "run.json").exists)
    facts = json.loads((first.run_dir / "run.json").read_text())
    settings = yaml.safe_load((first.run_dir / "config.yaml").read_text())
    assert isinstance(facts["seed"], int)
    assert facts["seed"] == settings["seed"]
    same = [f"--config={first.run_dir / 'config.yaml'}"] if is_drawn else [*options, "--seed=7"]
    if not is_drawn:
        assert first.wait(120) == 0, first.text
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.glob("compiled/*/*.pb*")}
    runs = [first, processes.learner(*same, run="second", environment=environment)]
    assert [run.wait(120) for run in runs] == [0, 0], runs[0].text
    assert len(compiled) == (0 if is_drawn else 1)
    if not is_drawn:
        copy = shutil.copytree(runs[1].run_dir, tmp_path / "third")
        third = processes.learner(
            "--stop-timesteps=10000", run=copy.name, resume=True, environment=environment
        )
        assert third.wait(120) == 0, third.text
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("compiled/*/*.pb*")} == compiled
    for told in (runs[0].text, (runs[0].run_dir / "log.txt").read_text()):
        assert told.count("multiagent.polices") == is_drawn
    first, second = (newest_tensors(run.run_dir) for run in runs)
    assert runs[0].results()[-1]["updates_total"] == runs[1].results()[-1]["updates_total"] >= 20
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_ctrl_c_saves_says_goodbye_and_ends_with_0_within_5_s(processes, until) -> None:
    learner = processes.learner("--seed=1")
    learner.wait_for_result(lambda result: result["updates_total"] >= 3)
    workers = [psutil.Process(pid) for pid in learner.worker_pids()]
    assert len(workers) == 2
    learner.send(signal.SIGINT)
    began = time.monotonic()
    assert learner.wait(10) == 0
    assert time.monotonic() - began < 5
    assert "Ctrl-C" in learner.text
    assert list((learner.run_dir / "checkpoints").glob("checkpoint-*"))
    assert (learner.run_dir / "learning_curve.png").exists()
    until(lambda: not any(worker.is_running() for worker in workers), what="the end of the workers")


def test_resume_continues_with_the_newest_intact_checkpoint(
    processes, ended, first: Path, ledger_balances
) -> None:
    before = ended.results()[-1]
    weights = newest_tensors(first)
    good = sorted((first / "checkpoints").iterdir())[-1]
    bad = shutil.copytree(good, good.with_name("checkpoint-999999")) / "tensors.safetensors"
    bad.write_bytes(bad.read_bytes()[:-8] + b"damaged!")
    second = processes.learner(f"--stop-timesteps={before['timesteps_total'] + 1}", resume=True)
    assert second.wait(90) == 0, second.text
    assert "checkpoint-999999" in second.text
    assert str(good) in second.text
    after = second.results()[-1]
    assert after["training_iteration"] > before["training_iteration"]
    assert after["updates_total"] == before["updates_total"] + 1
    assert after["timesteps_total"] > before["timesteps_total"]
    assert after["time_total_s"] > before["time_total_s"]
    assert after["episodes_total"] >= before["episodes_total"]
    ledger_balances(after)
    moved = newest_tensors(second.run_dir)
    assert moved.keys() == weights.keys()
    drift = max(
        float(np.abs(moved[name] - weights[name]).max()) for name in weights if "kernel" in name
    )
    assert 0 < drift < 0.5  # one update apart, not a new start


@pytest.mark.slow
def test_a_checkpoint_of_another_environment_is_refused_in_one_sentence(
    processes, first: Path
) -> None:
    config = (first / "config.yaml").read_text()
    second = processes.learner("--env=Acrobot-v1", "--stop-timesteps=3000", resume=True)
    assert second.wait(60) == 1
    assert re.search("'CartPole-v1' .*'Acrobot-v1'", second.text)
    assert "Traceback" not in second.text
    assert (first / "config.yaml").read_text() == config, (
        "else the next resume would be refused too"
    )


def test_results_hold_the_keys_of_spec_11_and_plain_lines_reach_a_pipe(ended) -> None:
    result = ended.results()[-1]
    wanted = {
        "timesteps_total",
        "time_total_s",
        "time_this_iter_s",
        "training_iteration",
        "episode_reward_mean",
        "episode_reward_min",
        "episode_reward_max",
        "episode_len_mean",
        "episodes_this_iter",
        "num_healthy_workers",
        "sampler_perf",
        "hist_stats",
        "policy_lag",
        "ledger",
        "sampled_steps_per_s",
        "trained_steps_per_s",
    }
    assert wanted <= result.keys()
    assert set(result["policy_lag"]) == {"min", "mean", "max"}
    assert "\x1b" not in ended.text  # no terminal codes in a pipe
    rows = (ended.run_dir / "progress.csv").read_text().splitlines()
    assert len(rows) == len(ended.results()) + 1
    assert json.loads((ended.run_dir / "run.json").read_text())["run_id"] == result["run_id"]


def test_an_evaluation_ends_a_run_and_the_best_checkpoint_is_named(
    processes, ledger_balances
) -> None:
    learner = processes.learner(
        "--seed=1",
        "--num-workers=1",
        "--xla=off",
        "--evaluation-interval=2",
        "--evaluation-num-episodes=3",
        "--stop-evaluation-return=8.5",
        "--stop-timesteps=20000",
    )
    assert learner.wait(90) == 0, learner.text
    results = learner.results()
    found = [result["evaluation"] for result in results if "evaluation" in result]
    assert found[-1]["episode_reward_mean"] >= 8.5
    assert all(each["episodes_this_iter"] == 3 for each in found)
    assert [each["training_iteration"] for each in found] == list(range(0, 2 * len(found), 2))
    for result in results:
        ledger_balances(result)
    best = learner.run_dir / "best"
    assert f"evaluate {best}" in learner.text
    assert json.loads((best / "evaluation.json").read_text())["episode_reward_mean"] >= 8.5
