from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aiorl.env import remote_child as wire
from aiorl.env.remote_env import ChildProcess
from aiorl.errors import ConfigError, EnvContractError, EnvError

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


def test_an_answer_of_the_kind_that_is_due_is_its_payload(child):
    assert json.loads(child("o", [1, 2]).receive(wire.RESULT)) == [1, 2]


def test_an_answer_of_another_kind_is_a_fault(child):
    with pytest.raises(EnvError, match="where b'o' was due") as caught:
        child("y").receive(wire.RESULT)
    assert (caught.value.env_id, caught.value.vector_index) == ("maze", 4)


def test_a_child_that_ends_is_told_with_its_status(child):
    with pytest.raises(EnvError, match="exit status 5"):
        child(None, status=5).receive(wire.RESULT)


def test_reported_faults_come_out_as_they_were_raised(child):
    facts = {"kind": "EnvContractError", "message": "no key", "config": False, "step": 7, "traceback": "in step"}
    with pytest.raises(EnvContractError, match="no key") as caught:
        child("e", facts).receive(wire.RESULT)
    assert (caught.value.step, caught.value.traceback_text, caught.value.vector_index) == (7, "in step", 4)
    facts = {"kind": "ConfigError", "message": "no such thing", "config": True, "key": "env", "hint": "Try another."}
    with pytest.raises(ConfigError, match="Try another") as told:
        child("e", facts).receive(wire.RESULT)
    assert told.value.key == "env"


def test_settings_that_json_cannot_express_are_refused_before_a_process_starts(child):
    with pytest.raises(ConfigError, match="env_config"):
        child(print)


def test_killing_is_at_once_and_hanging_up_may_be_repeated(child):
    process = child("o")
    process.kill()
    process.hang_up()
    process.hang_up()
    assert process.process.returncode is not None


def test_a_process_for_one_environment_loads_nothing_that_checks_settings_or_acts():
    code = "import aiorl.env.remote_child, sys; print({'pydantic', 'onnxruntime', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
