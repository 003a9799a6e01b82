"""Trainers with worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import free_address, wait_until

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import ConfigError, WorkerError
from aiorl.keys import make_keys
from aiorl.run import restoring

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "train_batch_size": 64,
    "xla": "off",
    "seed": 1,
    "model": {"fcnet_hiddens": [8]},
    "compilation_cache": "off",
    "num_workers": 2,
}
PPO = {**SMALL, "sgd_minibatch_size": 32, "num_sgd_iter": 2, "lr": 0.01}


DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Beginning of a script: Ctrl-C is ignored if the tests run in a shell's background."""


@contextlib.contextmanager
def script(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script, and kill it at the end of the block at the latest."""
    path = folder / "script.py"
    path.write_text(DEFAULT + text)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, path], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ledger(trainer: Any) -> dict[str, Any]:
    training = trainer._training
    return dict(trainer._loop.do(lambda: training.core.session.ledger.as_dict()))


def test_a_worker_that_is_reset_is_replaced(tmp_path: Path) -> None:
    with aiorl.PPOTrainer({**PPO, "run_dir": str(tmp_path / "run")}) as trainer:
        result = trainer.train()
        # workers sample while the update is compiled, and rates count these steps too
        assert result["trained_steps_per_s"] == result["sampled_steps_per_s"] > 0
        assert result["sampled_steps_per_s"] >= result["timesteps_total"] / result["time_total_s"]
        first, second = trainer.workers.remote_workers()
        trainer.workers.reset([first])
        wait_until(lambda: second not in trainer.workers.remote_workers())
        assert trainer.workers.remote_workers()[0].incarnation == first.incarnation
        assert trainer.train()["training_iteration"] == 2


@pytest.mark.slow
def test_r194_a_streaming_trainer_fills_its_leases_between_two_calls_and_counts_each_episode_once(
    tmp_path: Path,
) -> None:
    with aiorl.IMPALATrainer({**SMALL, "run_dir": str(tmp_path / "run")}) as trainer:
        results = [trainer.train() for _ in range(5)]
        sampled = -1
        while sampled != ledger(trainer)["sampled"]:  # until heartbeats bring no more
            sampled = ledger(trainer)["sampled"]
            time.sleep(2.5)
        held = ledger(trainer)
        assert held["trained"] == results[-1]["ledger"]["trained"]
        assert held["queued"] + held["in_flight"] <= 12 * 32
        results += [trainer.train() for _ in range(5)]
    assert sum(result["episodes_this_iter"] for result in results) == results[-1]["episodes_total"]
    assert [result["training_iteration"] for result in results] == list(range(1, 11))


@pytest.mark.slow
def test_r175_a_lost_worker_ends_training_with_a_hint_or_is_ignored_on_request(
    tmp_path: Path,
) -> None:
    settings = {**PPO, "max_worker_restarts": 0}
    with aiorl.PPOTrainer(
        {**settings, "run_dir": str(tmp_path / "a"), "ignore_worker_failures": True}
    ) as trainer:
        trainer.train()
        first, second = worker_pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(trainer.workers.remote_workers()) == 1)
        assert trainer.train()["num_healthy_workers"] == 1
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            train_on(trainer)
    with aiorl.PPOTrainer({**settings, "run_dir": str(tmp_path / "b")}) as trainer:
        trainer.train()
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="ignore_worker_failures"):
            train_on(trainer)
        trained = trainer._training.counters.env_steps_trained
    assert aiorl.load_policy(tmp_path / "b").env_steps == trained > 0


def train_on(trainer: aiorl.Trainer) -> None:
    while True:
        trainer.train()


def worker_pids() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [
        child.pid
        for child in children
        if "--slot" in child.cmdline() and "aiorl.worker" in child.cmdline()
    ]


NEARBY = """
import gymnasium


class Own(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.slow
def test_t2_ctrl_c_ends_a_script_with_a_checkpoint_of_the_last_update_and_without_processes(
    tmp_path: Path,
) -> None:
    """Workers and evaluations find the modules next to a script, from any directory."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "nearby.py").write_text(NEARBY)
    config = {
        **PPO,
        "eager": True,
        "run_dir": str(tmp_path / "run"),
        "evaluation_interval": 1,
        "evaluation_num_episodes": 1,
    }
    text = textwrap.dedent(f"""\
        import aiorl
        import nearby
        if __name__ == "__main__":
            trainer = aiorl.PPOTrainer({config!r}, env=nearby.Own)
            for result in trainer.iterate():
                assert result["evaluation"]["episodes_this_iter"] == 1
                print(result["env_steps_trained_total"], flush=True)
    """)
    with script(folder, text) as process:
        assert process.stdout is not None
        seen = [int(process.stdout.readline()) for _ in range(3)]
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert len(children) >= 2
    assert not any(child.is_running() for child in children)
    steps = aiorl.load_policy(tmp_path / "run").env_steps
    assert steps >= [*seen, *map(int, printed.split())][-1]


def test_with_an_address_and_no_local_workers_it_waits_for_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    settings = {**PPO, "num_workers": 0, "bind": free_address(), "keys": str(keys)}
    command = [
        sys.executable,
        "-m",
        "aiorl.worker",
        "--connect",
        settings["bind"],
        "--keys",
        str(keys),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        try:
            with aiorl.PPOTrainer({**settings, "run_dir": str(tmp_path / "run")}) as trainer:
                assert trainer.train()["num_healthy_workers"] == 1
                path = trainer.save()
                trainer.restore(path)  # in place: workers from other hosts come back
                result = trainer.train()
                assert (result["training_iteration"], result["num_healthy_workers"]) == (2, 1)
            assert worker.wait(30) == 0  # the learner has reported the end of the run
        finally:
            worker.kill()


@pytest.mark.slow
def test_train_does_the_same_as_the_command_line_until_ctrl_c(tmp_path: Path) -> None:
    settings = {
        **PPO,
        "eager": True,
        "num_workers": 1,
        "run_dir": str(tmp_path / "run"),
        "min_iter_time_s": 0.1,
    }
    text = f"""
import aiorl, json
if __name__ == "__main__":
    result = aiorl.train("CartPole-v1", config={settings!r}, evaluation_interval=3, evaluation_num_episodes=2)
    print("RESULT", json.dumps(result))
"""
    with script(tmp_path, text) as process:
        results = tmp_path / "run" / "result.jsonl"
        # an evaluation comes first
        wait_until(lambda: results.exists() and results.read_text(), 60)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    result = json.loads(printed.rpartition("RESULT ")[2])
    assert "Ctrl-C" in result["reason"]
    assert result["run_dir"] == str(tmp_path / "run")
    assert aiorl.load_policy(result["checkpoint"]).env_steps == result["env_steps_trained_total"]
    assert (tmp_path / "run" / "learning_curve.png").exists()
    assert (tmp_path / "run" / "best").is_dir()
    assert result["num_healthy_workers"] == 1


def test_train_refuses_impossible_settings_immediately(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        aiorl.train(run_dir=str(tmp_path / "run"))
    assert caught.value.key == "env"
    with pytest.raises(ConfigError, match="'stop_return'"):
        aiorl.train("CartPole-v1", stop_retrun=1.0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_last_checkpoint_contains_the_replay_even_if_batches_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The update thread leaves the batch that waits, as if learning were slower than sampling."""
    config = {
        **SMALL,
        "algo": "dqn",
        "num_workers": 1,
        "train_batch_size": 32,
        "training_intensity": 8,
        "learning_starts": 64,
        "replay_capacity": 2000,
        "eager": True,
        "run_dir": str(tmp_path / "run"),
        "timesteps_per_iteration": 32,
    }
    result = aiorl.train(config=config, stop_timesteps=160)
    checkpoint = find_checkpoint(result["checkpoint"])
    assert checkpoint.meta["experience"].keys() == {"default_policy"}
    with aiorl.Trainer.restore(
        result["checkpoint"], run_dir=str(tmp_path / "again"), num_workers=0
    ) as trainer:
        assert trainer.train()["learner"]["replay_rows"] >= 160
        assert restoring.__name__ not in [record.name for record in caplog.records]
        bare = tmp_path / "bare"
        trainer._write_checkpoint(bare, with_experience=False)
    aiorl.Trainer.restore(bare, run_dir=str(tmp_path / "third"), num_workers=0).stop()
    assert restoring.__name__ in [record.name for record in caplog.records]
