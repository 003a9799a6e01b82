from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from aiorl.data.actions import ActionLayout
from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.wrapping import EnvPlan, Wrapping
from aiorl.errors import BadObservationError, ConfigError, EnvError, SamplerDied, UnknownEnvError
from aiorl.testing.envs import CountingEnv
from benchmarks.sampler import make_lockstep_env

COUNTING = "aiorl.testing.envs:CountingEnv"
FAULTY = "aiorl.testing.envs:FaultyEnv"
MULTI = "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv"

SLEEPY = '''
import ctypes
import os
import time
from aiorl.testing.envs import CountingEnv

class SleepyEnv(CountingEnv):
    """Sleeps in each step; copy v sleeps ``seconds[v]``, or until there is a file of that name."""

    def __init__(self, context):
        super().__init__(context.get("length", 5), index=context.vector_index)
        self.seconds = context["seconds"]
        self.context = context

    def step(self, action):
        seconds = self.seconds[self.context.vector_index]
        while isinstance(seconds, str) and not os.path.exists(seconds):
            time.sleep(0.01)
        if not isinstance(seconds, str):
            time.sleep(seconds)
        obs, reward, terminated, truncated, info = super().step(action)
        info = {"remote": self.context.remote, "worker": self.context.worker_index, "function": print}
        return obs, reward, terminated, truncated, info

class StuckEnv(SleepyEnv):
    """Sleeps in C, with Python's lock."""

    def step(self, action):
        ctypes.PyDLL(None).sleep(self.seconds[self.context.vector_index])
'''


NESTED = '''
import gymnasium
import numpy as np
from gymnasium import spaces

def kind_of(value):
    if isinstance(value, dict):
        return {name: kind_of(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(kind_of, value)]
    return f"{type(value).__name__} {value.dtype} {value.shape}"

class NestedEnv(gymnasium.Env):
    """Says in its infos of which kind an action was, and of which kind its space samples one."""

    observation_space = spaces.Dict([("z", spaces.Box(-1, 1, (2,))), ("a", spaces.Discrete(3))])
    action_space = spaces.Tuple([
        spaces.Discrete(3, start=2),
        spaces.Dict([("turn", spaces.Box(-1, 1, ())), ("gear", spaces.MultiDiscrete([[2, 3]], dtype=np.int32))]),
        spaces.MultiBinary(2),
    ])

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        kinds = {"got": str(kind_of(action)), "sampled": str(kind_of(self.action_space.sample()))}
        return self.observation_space.sample(), 0.0, False, False, kinds
'''


@pytest.fixture
def sleepy(tmp_path, monkeypatch):
    (tmp_path / "sleepy_env.py").write_text(SLEEPY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def make_remote():
    remotes = []

    def make(env, num_envs=1, **plan) -> RemoteEnv:
        remotes.append(RemoteEnv(EnvPlan(env=env, num_envs=num_envs, **plan)))
        return remotes[-1]

    yield make
    for env in remotes:
        env.stop()


def poll_all(base: RemoteEnv) -> dict:
    """Poll until every environment has reported; return their observations."""
    obs = {}
    while len(obs) < base.num_envs:
        obs.update(base.poll().obs)
    return obs


def test_r122_the_first_poll_opens_episodes_and_resets_come_by_later_polls(make_remote):
    def first_copy(poll):
        return poll.obs[0][AGENT].tolist(), poll.rewards[0][AGENT], poll.terminateds[0][ALL_AGENTS]

    base = make_remote(COUNTING, env_config={"length": 2})
    assert first_copy(base.poll()) == ([0, 0, 0], None, False)
    for step in (1, 2):
        base.send_actions({0: {AGENT: np.int64(1)}})
        assert first_copy(base.poll()) == ([0, step, 0], step, step == 2)
    assert base.try_reset(0) == ASYNC_RESET_RETURN
    assert first_copy(base.poll()) == ([1, 0, 0], None, False)
    assert base.observation_space == CountingEnv().observation_space
    assert base.get_unwrapped() == []
    assert base.take_finished_games() is None


def test_actions_of_a_remote_environment_are_of_the_kind_that_it_samples(
    make_remote, tmp_path, monkeypatch
):
    (tmp_path / "nested_env.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    base = make_remote("nested_env:NestedEnv")
    assert list(base.observation_space.spaces) == ["z", "a"]
    assert list(base.action_space[1].spaces) == ["turn", "gear"]
    layout = ActionLayout(base.action_space)
    base.poll()
    (action,) = layout.to_env(layout.to_row(base.action_space.sample())[None])
    base.send_actions({0: {AGENT: action}})
    kinds = base.poll().infos[0][AGENT]
    assert kinds["got"] == kinds["sampled"]


def test_r20_r164_with_wait_0_a_poll_returns_the_environments_that_are_ready(
    make_remote, sleepy, tmp_path
):
    may_go_on = tmp_path / "go"
    base = make_remote(
        "sleepy_env:SleepyEnv", 2, worker_index=3, env_config={"seconds": [0.0, str(may_go_on)]}
    )
    obs = poll_all(base)
    base.send_actions({index: {AGENT: 0} for index in obs})
    poll = base.poll()
    assert list(poll.obs) == [0]
    assert poll.infos[0][AGENT] == {"remote": True, "worker": 3}
    assert base.dropped_infos == 1
    base.send_actions({0: {AGENT: 0}})
    assert list(base.poll().obs) == [0]
    may_go_on.touch()
    assert list(base.poll().obs) == [1]


def test_r164_a_killed_child_is_reported(make_remote):
    base = make_remote(COUNTING, 2)
    poll_all(base)
    os.kill(base.pids[1], signal.SIGKILL)
    base.send_actions({1: {AGENT: 0}})
    with pytest.raises(EnvError, match="-9") as caught:
        base.poll()
    assert (caught.value.vector_index, caught.value.env_id) == (1, COUNTING)


@pytest.mark.parametrize(
    ("fault", "error"), [("step", EnvError), ("nan_obs", BadObservationError), ("exit", EnvError)]
)
def test_a_fault_in_a_child_is_an_error_with_copy_and_step(make_remote, fault, error):
    base = make_remote(FAULTY, env_config={"fault": fault, "at_step": 2})
    base.poll()
    base.send_actions({0: {AGENT: 0}})
    base.poll()
    base.send_actions({0: {AGENT: 0}})
    with pytest.raises(error) as caught:
        base.poll()
    assert (caught.value.vector_index, caught.value.step) == (0, 2)
    assert ("in step" in caught.value.traceback_text) == (fault == "step")


def test_a_child_that_fails_is_replaced_as_often_as_allowed_and_the_fault_is_reported(make_remote):
    base = make_remote(
        FAULTY, 2, max_restarts_per_hour=2, env_config={"fault": "exit", "at_step": 1}, seed=5
    )
    poll_all(base)
    before = list(base.pids)
    base.send_actions({0: {AGENT: 0}})
    poll = base.poll()
    assert list(poll.faults) == [0]
    assert "3" in poll.faults[0].message
    assert poll.obs == {}
    assert base.restarts == 1
    assert base.pids[0] != before[0]
    assert base.pids[1] == before[1]
    poll = base.poll()
    assert (poll.obs[0][AGENT].tolist(), poll.rewards[0]) == ([0, 0, 0], {AGENT: None})
    base.send_actions({0: {AGENT: 0}})
    assert list(base.poll().faults) == [0]
    base.poll()
    base.send_actions({0: {AGENT: 0}})
    with pytest.raises(EnvError) as caught:
        base.poll()
    assert "3" in caught.value.message


def test_a_replacement_process_does_not_play_the_same_episodes_again(make_remote):
    base = make_remote("CartPole-v1", max_restarts_per_hour=1, seed=5)
    first = base.poll().obs[0][AGENT]
    os.kill(base.pids[0], signal.SIGKILL)
    base.send_actions({0: {AGENT: 0}})
    assert list(base.poll().faults) == [0]
    assert base.poll().obs[0][AGENT].tolist() != first.tolist()


def test_a_child_that_does_not_answer_in_time_is_a_fault(make_remote, sleepy):
    base = make_remote(
        "sleepy_env:SleepyEnv", max_restarts_per_hour=1, env_config={"seconds": [60]}
    )
    base.poll()
    base.send_actions({0: {AGENT: 0}})
    base.processes.copies[0].answer_due = time.monotonic() + 0.2
    poll = base.poll()
    assert list(poll.faults) == [0]
    assert base.poll().obs[0][AGENT].tolist() == [0, 0, 0]


def test_lockstep_copies_in_processes_give_the_same_results_as_copies_in_turn():
    remote, serial = (
        make_lockstep_env("Pendulum-v1", {}, 2, vectorize) for vectorize in ("remote", "serial")
    )
    assert remote.max_episode_steps == serial.max_episode_steps
    np.testing.assert_array_equal(remote.reset([3, 4]), serial.reset([3, 4]))
    serial.action_space.seed(0)
    ends = 0
    for number in range(210):
        actions = np.stack([serial.action_space.sample() for _ in range(2)])
        if number % 2:
            remote.begin(slice(1), actions[:1])
        ours, theirs = remote.step(actions), serial.step(actions)
        for field in ("obs", "rewards", "terminateds", "truncateds", "final_index", "final_obs"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
        ends += ours.final_index is not None
    assert ends
    remote.close()
    remote.close()
    serial.close()


def test_an_environment_that_children_cannot_make_is_refused_immediately(make_remote):
    with pytest.raises(UnknownEnvError, match="CartPole-v1"):
        make_remote("CartPol-v1")
    with pytest.raises(EnvError) as caught:
        make_remote(FAULTY, env_config={"fault": "constructor"})
    assert caught.value.step == -1
    with pytest.raises(ConfigError, match="env_config"):
        make_remote(COUNTING, env_config={"length": print})


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_an_interrupt_ends_a_wait_and_every_later_one(make_remote, sleepy, in_lockstep):
    env = make_remote("sleepy_env:SleepyEnv", 1, env_config={"seconds": [20.0]})
    if in_lockstep:
        lockstep = env.in_lockstep()
        lockstep.reset()
        wait = lambda: lockstep.step(np.zeros(1, np.int64))  # noqa: E731
    else:
        env.poll()
        env.send_actions({0: {AGENT: 0}})
        wait = env.poll
    timer = threading.Timer(0.1, env.interrupt)
    timer.start()
    for _ in range(2):
        with pytest.raises(SamplerDied):
            wait()
    timer.join()
    os.kill(env.pids[0], signal.SIGKILL)  # it would be waited for
    env.stop()
    env.interrupt()  # too late to matter


def test_children_end_when_the_environment_is_garbage_collected():
    env = RemoteEnv(EnvPlan(env=COUNTING, num_envs=2))
    children = [psutil.Process(pid) for pid in env.pids]
    del env
    gc.collect()
    assert not any(child.is_running() for child in children)


def _ended(pid: int) -> bool:
    """Wait up to 10 s for the end of a process that need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["SleepyEnv", "StuckEnv"])
def test_no_child_outlives_a_parent_that_was_killed(name, sleepy, tmp_path):
    code = (
        "import sys, threading\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from aiorl.env.remote_env import RemoteEnv\n"
        "from aiorl.env.wrapping import EnvPlan\n"
        f"plan = EnvPlan(env='sleepy_env:{name}', env_config={{'seconds': [60, 60]}}, num_envs=2)\n"
        "env = RemoteEnv(plan)\n"
        "poll = env.poll()\n"
        "env.send_actions({index: {'agent0': 0} for index in poll.obs})\n"
        "print(*env.pids, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        assert all(_ended(pid) for pid in pids)


def test_r124_whole_games_are_counted_in_the_processes_too(make_remote):
    pytest.importorskip("ale_py")
    base = make_remote(
        "ALE/Breakout-v5", wrapping=Wrapping(deepmind=True, dim=42, framestack=False), seed=1
    )
    rng = np.random.default_rng(0)
    poll, games, lost = base.poll(), [], 0
    while not games:
        base.send_actions({0: {AGENT: rng.integers(4)}})
        poll = base.poll()
        if poll.terminateds[0][ALL_AGENTS]:
            lost += 1
            games = base.take_finished_games()
            base.try_reset(0)
            base.poll()
    assert (len(games), lost) == (1, 5)
    assert base.take_finished_games() == []


def test_a_poll_without_a_wait_limit_returns_all_in_order(make_remote, sleepy):
    base = make_remote(
        "sleepy_env:SleepyEnv",
        2,
        remote_wait_ms=np.inf,
        env_config={"seconds": [0.2, 0.0], "length": 2},
    )
    for _ in range(2):
        assert list(base.poll().obs) == [0, 1]
        base.send_actions({index: {AGENT: 0} for index in (0, 1)})
    assert list(base.poll().obs) == [0, 1]
    for index in (0, 1):
        base.try_reset(index)
    assert list(base.poll().rewards.values()) == [{AGENT: None}] * 2


def test_a_process_for_one_environment_does_not_import_configs_or_policies():
    code = (
        "import aiorl.env.remote_child, sys; print({'pydantic', 'onnxruntime', 'zmq'} &"
        " set(sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == "set()"
