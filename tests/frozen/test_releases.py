"""What each release wrote and sent works with this version, or is refused by name: see
docs/upgrades.md.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnxruntime
import pytest

from aiorl import Trainer, load_policy
from aiorl.errors import VersionMismatch
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings, WorkerState
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.format import FORMAT_VERSION

RELEASES = sorted((Path(__file__).parent / "releases").iterdir())
PEER = b"worker"


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy what a release has left."""
    copy = tmp_path / "release"
    shutil.copytree(request.param, copy)
    return copy


def answers(release: Path) -> Any:
    """Return the observations, actions and distribution inputs of the only policy."""
    (known,) = json.loads((release / "run" / "answers.json").read_text()).values()
    return np.asarray(known["observations"], np.float32), known["actions"], known["dist_inputs"]


def messages(release: Path) -> list[tuple[str, list[bytes]]]:
    """Return direction and frames of all messages of a worker and its learner."""
    recorded = json.loads((release / "talk.json").read_text())
    return [
        (direction, [base64.b64decode(frame) for frame in frames]) for direction, frames in recorded
    ]


def test_there_is_a_release() -> None:
    assert "0.1.0" in [path.name for path in RELEASES]


def test_a_run_and_its_checkpoint_load_and_answer_as_they_did(release: Path) -> None:
    observations, actions, inputs = answers(release)
    (checkpoint,) = (release / "run" / "checkpoints").iterdir()
    for place in (release / "run", checkpoint):
        policy = load_policy(place)
        for obs, action, expected in zip(observations, actions, inputs, strict=True):
            computed, _, extra = policy.compute_single_action(obs, full_fetch=True)
            assert computed == action
            np.testing.assert_allclose(
                extra["action_dist_inputs"].ravel(), expected, rtol=1e-4, atol=1e-5
            )


def test_an_export_answers_as_its_policy_did(release: Path) -> None:
    observations, actions, inputs = answers(release)
    session = onnxruntime.InferenceSession(release / "exported" / "policy.onnx")
    action, computed = session.run(["action", "dist_inputs"], {"obs": observations})
    assert action.tolist() == actions
    np.testing.assert_allclose(computed, inputs, rtol=1e-4, atol=1e-5)


def test_a_run_and_an_export_are_served(release: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("httptools")
    from aiorl.serving.models import Models
    from aiorl.serving.service import Service
    from aiorl.web.access import WebOptions
    from aiorl.web.server import WebServer

    observations, actions, _ = answers(release)

    def ask(port: int, model: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(
            "POST", "/act", json.dumps({"policy": model, "observations": observations.tolist()})
        )
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer["actions"]

    async def serve() -> None:
        service = Service(Models((f"run={release / 'run'}", f"exported={release / 'exported'}")))
        async with WebServer(service.app, WebOptions()).running() as server:
            for model in ("run", "exported"):
                assert await asyncio.to_thread(ask, server.port, model) == actions

    asyncio.run(serve())


@pytest.mark.slow
def test_a_run_is_resumed(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = release / "run"
    before = json.loads((run / "result.jsonl").read_text().splitlines()[-1])
    monkeypatch.chdir(release)
    with Trainer.restore(run, run_dir=str(run), resume=str(run)) as trainer:
        result = trainer.train()
    assert result["training_iteration"] == before["training_iteration"] + 1
    assert result["env_steps_trained_total"] > before["env_steps_trained_total"]


def _is_refused(frames: list[bytes]) -> bool:
    """Return whether a message has another format; the refusal must name this one."""
    if msgpack.unpackb(frames[0])[0] == FORMAT_VERSION:
        return False
    with pytest.raises(VersionMismatch, match=str(FORMAT_VERSION)):
        decode(frames)
    return True


def _is_refused_by_name(learner: LearnerSession, hello: m.Hello) -> bool:
    """Return whether a worker speaks another protocol; the refusal must name both versions, and end
    the worker.
    """
    if hello.protocol == m.PROTOCOL_VERSION:
        return False
    learner.receive(PEER, hello, 0.0)
    ((_, refusal),) = learner.messages_to_send()
    assert isinstance(refusal, m.Refused)
    assert (refusal.code, refusal.retry) == (m.RefusalCode.VERSION, False)
    assert {str(hello.protocol), str(m.PROTOCOL_VERSION)} <= {
        word.strip(",;") for word in refusal.reason.split()
    }
    return True


def test_an_older_worker_joins_and_its_fragments_are_accepted_or_it_is_refused_by_name(
    release: Path,
) -> None:
    recorded = messages(release)
    said = [frames for direction, frames in recorded if direction == "up"]
    if _is_refused(said[0]):
        return
    hello = decode_hello(said[0])
    assert isinstance(hello, m.Hello)
    sent = [decode(frames) for frames in said]
    got = [decode(frames) for direction, frames in recorded if direction != "up"]
    welcome = next(message for message in got if isinstance(message, m.Welcome))
    learner = LearnerSession(welcome.run_id, welcome.learner_incarnation)
    if _is_refused_by_name(learner, hello):
        return
    learner.begin(welcome.config, welcome.graphs, 0.0)
    learner.publish(welcome.snapshot, 0.0)
    learner.receive(PEER, hello, 0.0)
    assert any(isinstance(message, m.Welcome) for _, message in learner.messages_to_send())
    fragments = [message for message in sent if isinstance(message, m.Samples)]
    learner.deal(learner.version, len(fragments))
    (lease,) = [
        message for _, message in learner.messages_to_send() if isinstance(message, m.Lease)
    ]
    assert lease.lease_id == fragments[0].lease_id
    learner.receive(PEER, fragments[0], 0.0)
    accepted = [event for event in learner.events() if isinstance(event, ev.SamplesAccepted)]
    assert [event.message.env_steps for event in accepted] == [fragments[0].env_steps]


def test_a_worker_understands_an_older_learner_or_is_refused_by_it(release: Path) -> None:
    worker = WorkerSession(WorkerSettings("worker"))
    worker.connected(0.0)
    incarnation = None
    for direction, frames in messages(release):
        if direction == "up":
            continue
        if _is_refused(frames):
            return
        message = decode(frames)
        if isinstance(message, m.Welcome):
            message = message._replace(incarnation=worker.incarnation)
            incarnation = message.incarnation
        if direction == "broadcast":
            worker.broadcast(message, 0.0)
        else:
            worker.receive(message, 0.0)
    assert incarnation is not None
    assert worker.state is WorkerState.ENDED, "the learner has said goodbye"
