from __future__ import annotations

import os
import select
import subprocess
import sys

import numpy as np
import pytest

from aiorl.env.base_env import LockstepEnv, TrainingDisabled
from aiorl.env.env_maker import make_lockstep_env
from aiorl.env.wrapping import Wrapping

NO_ACTION = np.zeros(2, np.int64)


def remote(name, env_config=None, num_envs=1, horizon=None) -> LockstepEnv:
    return make_lockstep_env(name, env_config or {}, num_envs, "remote", horizon=horizon)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_copies_in_processes_give_what_copies_in_turn_give(name):
    remote = make_lockstep_env(name, {}, 2, "remote")
    serial = make_lockstep_env(name, {}, 2, "serial")
    assert remote.observation_space == serial.observation_space
    assert remote.action_space == serial.action_space
    assert remote.max_episode_steps == serial.max_episode_steps
    np.testing.assert_array_equal(remote.reset([3, 4]), serial.reset([3, 4]))
    serial.action_space.seed(0)
    ends = 0
    for _ in range(210):
        actions = np.stack([serial.action_space.sample() for _ in range(2)])
        one, other = remote.step(actions), serial.step(actions)
        for field in ("obs", "rewards", "terminateds", "truncateds", "final_index", "final_obs"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        ends += one.final_index is not None
    assert ends
    remote.close()
    remote.close()
    serial.close()


def _ended(pid: int) -> bool:
    """Wait up to 10 s for the end of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def stuck_env_path(tmp_path, monkeypatch):
    """Folder with a module whose environment's step never returns; it is importable here and by children."""
    (tmp_path / "stuck_env.py").write_text(
        "import threading\n"
        "from aiorl.testing.envs import CountingEnv\n"
        "class StuckEnv(CountingEnv):\n"
        "    def step(self, action):\n"
        "        threading.Event().wait()\n"
        "class UntrainedEnv(CountingEnv):\n"
        "    def step(self, action):\n"
        "        return (*super().step(action)[:4], {'training_enabled': False})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_step_that_is_not_to_be_trained_on_ends_lockstep_from_a_process_of_its_own_too(stuck_env_path):
    """R102."""
    env = remote("stuck_env:UntrainedEnv", {}, 2)
    env.reset()
    with pytest.raises(TrainingDisabled, match="UntrainedEnv' is not to be trained on"):
        env.step(NO_ACTION)
    env.close()


def test_no_child_outlives_a_parent_that_was_killed(stuck_env_path):
    code = (
        "import sys, threading\n"
        f"sys.path.insert(0, {str(stuck_env_path)!r})\n"
        "import numpy as np\n"
        "from aiorl.env.remote_env import RemoteEnv, RemoteSettings\n"
        "env = RemoteEnv(RemoteSettings('stuck_env:StuckEnv'), 2)\n"
        "poll = env.poll()\n"
        "env.send_actions({index: {'agent0': 0} for index in poll.obs})\n"
        "print(*env.pids, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        assert all(_ended(pid) for pid in pids)


def test_games_that_lives_cut_into_episodes_are_counted_in_the_processes_too():
    """R124."""
    pytest.importorskip("ale_py")
    made = {}
    for vectorize in ("remote", "serial"):
        env = make_lockstep_env(
            "ALE/Breakout-v5", {}, 1, vectorize, wrapping=Wrapping(deepmind=True, dim=42, framestack=False)
        )
        rng = np.random.default_rng(0)
        env.reset([1])
        games, lost = [], 0
        while not games:
            step = env.step(rng.integers(0, 4, 1))
            lost += int(step.terminateds.sum())
            games = env.take_finished_games()
        assert env.take_finished_games() == []
        made[vectorize] = games, lost
        env.close()
    assert made["remote"] == made["serial"]
    assert made["remote"][1] >= 5
