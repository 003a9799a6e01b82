"""The child's main, in a thread of this process: what it sends for what it is sent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from dataclasses import asdict

import numpy as np
import pytest

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.data.nested_codec import pack, unpack
from aiorl.env import remote_child as wire
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.remote_env import ChildProcess
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, EnvContractError

NOTHING = pack(None)


@pytest.fixture
def served(monkeypatch):
    """Starts the child's main in a thread; gives our end of the connection and the thread's exit status."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    monkeypatch.setattr("sys.argv", ["child", str(theirs.detach()), "0"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(wire, "_end_with_parent", lambda life: None)
    status = []
    thread = threading.Thread(target=lambda: status.append(wire.main()))
    thread.start()

    def send(kind, payload=b""):
        wire.send_frame(ours, kind, payload)

    def setup(env, **env_config):
        settings = {"env": env, "env_config": env_config, "worker_index": 1, "vector_index": 2, "seed": 3}
        send(wire.SETUP, json.dumps({**settings, "wrapping": asdict(Wrapping())}).encode())
        return wire.receive_frame(ours)

    def ask(kind, payload=NOTHING):
        send(kind, payload)
        return wire.receive_frame(ours)

    def end():
        ours.close()
        thread.join(20)
        return status[0]

    yield setup, ask, end
    ours.close()
    thread.join(20)


def test_resets_and_steps_are_answered_with_all_that_a_poll_has(served):
    setup, ask, end = served
    kind, ready = setup("aiorl.testing.envs:CountingEnv", length=1)
    assert kind == wire.READY
    facts = json.loads(ready)
    assert facts["action_space"]["n"] == 2
    assert facts["counts_games"] is False
    for episode in range(2):
        kind, payload = ask(wire.RESET)
        obs, rewards, terminateds, truncateds, infos, games, dropped = unpack(payload)
        assert kind == wire.RESULT
        assert (obs[AGENT].tolist(), rewards) == ([episode, 0, 0], {AGENT: None})
        assert terminateds == truncateds == {AGENT: False, ALL_AGENTS: False}
        assert (unpack(infos), games, dropped) == ({AGENT: {}}, [], 0)
        obs, rewards, terminateds, *_ = unpack(ask(wire.STEP, pack({AGENT: np.int64(0)}))[1])
        assert (obs[AGENT].tolist(), rewards) == ([episode, 1, 0], {AGENT: 1.0})
        assert terminateds[ALL_AGENTS]
    assert end() == 0


def test_a_fault_is_told_and_ends_the_child_with_status_1(served):
    setup, ask, end = served
    setup("aiorl.testing.multi_agent_envs:CountingMultiAgentEnv", fault="no_all", at_step=1)
    ask(wire.RESET)
    kind, payload = ask(wire.STEP, pack({"a0": 0, "a1": 0}))
    facts = json.loads(payload)
    assert kind == wire.ERROR
    assert (facts["kind"], facts["step"], facts["config"]) == ("EnvContractError", 1, False)
    assert end() == 1


ECHO = """
import json, socket, sys
from aiorl.env import remote_child as wire

connection = socket.socket(fileno=int(sys.argv[1]))
_, settings = wire.receive_frame(connection)
answer = json.loads(settings)["answer"]
if answer is not None:
    wire.send_frame(connection, answer.encode(), json.dumps(json.loads(settings)["facts"]).encode())
sys.exit(json.loads(settings)["status"])
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Makes children that give one answer and end."""
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(answer, facts=None, status=0, timeout_s=30.0):
        settings = {"answer": answer, "facts": facts, "status": status}
        made.append(ChildProcess("maze", 4, settings, timeout_s, "echo_child"))
        return made[-1]

    yield make
    for process in made:
        process.hang_up()
        process.wait()


def test_reported_faults_come_out_as_they_were_raised(child):
    facts = {"kind": "EnvContractError", "message": "no key", "config": False, "step": 7, "traceback": "in step"}
    with pytest.raises(EnvContractError, match="no key") as caught:
        child("e", facts).receive(wire.RESULT)
    assert (caught.value.step, caught.value.traceback_text, caught.value.vector_index) == (7, "in step", 4)
    facts = {"kind": "ConfigError", "message": "no such thing", "config": True, "key": "env", "hint": "Try another."}
    with pytest.raises(ConfigError, match="Try another") as told:
        child("e", facts).receive(wire.RESULT)
    assert told.value.key == "env"


def test_a_process_for_one_environment_loads_nothing_that_checks_settings_or_acts():
    code = "import aiorl.env.remote_child, sys; print({'pydantic', 'onnxruntime', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
