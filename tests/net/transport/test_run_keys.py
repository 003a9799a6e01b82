"""Keys made for a run: loopback is closed to other users, while the learner's own user needs to know nothing of it."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from aiorl.errors import SecurityError
from aiorl.net.transport.endpoint import EndpointLimits, EventKind
from aiorl.net.transport.run_keys import (
    RunKeyFile,
    find_run_keys,
    forget_run_keys,
    from_variable,
    make_learner_keys,
    make_worker_keys,
    to_variable,
)
from aiorl.net.transport.security import load_worker_keys

FAST = EndpointLimits(tick_s=0.05, retry_s=0.1, max_retry_s=0.2, handshake_s=0.5)
PORT = 5557


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "aiorl"


def _port(learner):
    return int(learner.endpoint.address.rpartition(":")[2])


def _worker_keys():
    return make_worker_keys(make_learner_keys())


async def _exchange(learner, worker):
    count = len(learner.messages)
    assert worker.endpoint.send([b"hello"])
    await learner.until(lambda: len(learner.messages) > count)
    learner.endpoint.broadcast([b"news"])
    await worker.until(lambda: worker.broadcasts)


# --- the same user


def test_a_worker_of_the_same_user_joins_by_a_file_that_only_this_user_can_read_and_that_goes_with_the_learner(
    run, place, caplog
):
    async def test(stage):
        learner = stage.learner(insecure=False)
        worker = stage.worker(learner.endpoint.address)
        await worker.until_event(EventKind.CONNECTED)
        await _exchange(learner, worker)
        path = place / f"{_port(learner)}.key_secret"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        secret = learner.endpoint.worker_keys.secret_key.decode()
        assert secret in path.read_text()
        assert str(path) in caplog.text
        assert secret not in caplog.text
        assert secret not in repr(learner.endpoint.worker_keys)
        await learner.endpoint.close()
        assert not list(place.iterdir())

    with caplog.at_level(logging.DEBUG):
        run(test)


def test_a_worker_that_outlives_a_killed_learner_finds_the_key_of_the_next_one(run, place):
    async def test(stage):
        first = stage.learner(insecure=False, limits=FAST)
        worker = stage.worker(first.endpoint.address, limits=FAST)
        await worker.until_event(EventKind.CONNECTED)
        path = place / f"{_port(first)}.key_secret"
        left_behind = path.read_bytes()
        await first.endpoint.close()
        path.write_bytes(left_behind)
        path.chmod(0o600)
        second = stage.learner(first.endpoint.address, insecure=False, limits=FAST)
        assert path.read_bytes() != left_behind
        await worker.until_event(EventKind.CONNECTED, 2)
        await _exchange(second, worker)

    run(test)


def test_the_file_serves_as_keys_elsewhere_such_as_at_the_other_end_of_a_tunnel(run, place, tmp_path):
    async def test(stage):
        learner = stage.learner(insecure=False)
        copied = tmp_path / "copied.key_secret"
        (place / f"{_port(learner)}.key_secret").rename(copied)
        worker = stage.worker(learner.endpoint.address, keys=load_worker_keys(copied))
        await worker.until_event(EventKind.CONNECTED)

    run(test)


def test_a_learner_with_keys_admits_its_own_workers_by_a_key_of_the_run_and_writes_no_file(run, place, tmp_path):
    from aiorl.keys import make_keys
    from aiorl.net.transport.security import load_learner_keys

    async def test(stage):
        make_keys(tmp_path / "keys")
        learner = stage.learner(keys=load_learner_keys(tmp_path / "keys"), limits=FAST)
        own = from_variable(to_variable(learner.endpoint.worker_keys))
        worker = stage.worker(learner.endpoint.address, keys=own)
        await worker.until_event(EventKind.CONNECTED)
        (tmp_path / "keys" / "admitted" / "worker.key").unlink()
        await stage.eventually(lambda: len(learner.endpoint._acted_on) == 1)
        await _exchange(learner, worker)
        assert not place.exists()

    run(test)


# --- anybody else


def _plain(socket, learner):
    pass


def _password(socket, learner):
    socket.plain_username, socket.plain_password = b"aiorl", b"guess"


def _other_learners_key(socket, learner):
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_keypair()[0]


def _key_of_its_own(socket, learner):
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = learner.endpoint.worker_keys.learner_key


@pytest.mark.parametrize("present", [_plain, _password, _other_learners_key, _key_of_its_own])
def test_whoever_has_not_the_runs_key_is_refused_on_both_ports_of_a_loopback_learner(run, present):
    async def test(stage):
        learner = stage.learner(insecure=False, limits=FAST)
        worker = stage.worker(learner.endpoint.address)
        await worker.until_event(EventKind.CONNECTED)
        for count, kind in enumerate((zmq.DEALER, zmq.SUB), start=1):
            with zmq.Context() as context, context.socket(kind) as intruder:
                intruder.linger = 0
                present(intruder, learner)
                intruder.connect(f"tcp://127.0.0.1:{_port(learner) + count - 1}")
                intruder.subscribe(b"") if kind == zmq.SUB else intruder.send(b"I am a worker")
                await learner.until_event(EventKind.REFUSED, count)
                learner.endpoint.broadcast([b"weights"])
                assert not intruder.poll(30)
        assert not learner.messages
        await _exchange(learner, worker)
        assert EventKind.DISCONNECTED not in worker.kinds()

    run(test)


def test_a_worker_that_finds_no_key_and_its_learner_both_say_what_to_do(run, monkeypatch, tmp_path):
    async def test(stage):
        learner = stage.learner(insecure=False, limits=FAST)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "of another user"))
        worker = stage.worker(learner.endpoint.address, limits=FAST)
        theirs = (await worker.until_event(EventKind.REFUSED)).reason
        assert "as the learner's user on its host, or both with --keys DIR" in theirs
        ours = (await learner.until_event(EventKind.REFUSED)).reason
        assert "start learner and worker" in ours
        assert "--keys DIR" in ours

    run(test)


@pytest.mark.parametrize("insecure", [True, False], ids=["without keys", "with keys"])
def test_a_worker_does_not_trust_whoever_else_has_taken_its_learners_port(run, place, insecure):
    async def test(stage):
        impostor = stage.learner(insecure=insecure, limits=FAST)
        path = place / f"{_port(impostor)}.key_secret"
        forget_run_keys(_port(impostor))
        RunKeyFile(_port(impostor), _worker_keys()).keep()  # left behind by the learner that was here before
        assert path.exists()
        worker = stage.worker(impostor.endpoint.address, limits=FAST)
        reason = (await worker.until_event(EventKind.REFUSED)).reason
        assert "another user's learner" in reason
        assert not worker.endpoint.connected
        assert not impostor.messages

    run(test)


def test_an_insecure_learner_takes_everyone_and_clears_away_the_key_of_the_one_before(run, place):
    async def test(stage):
        former = stage.learner(insecure=False)
        address, port = former.endpoint.address, _port(former)
        await former.endpoint.close()
        RunKeyFile(port, _worker_keys()).keep()
        learner = stage.learner(address, insecure=True)
        assert learner.endpoint.worker_keys is None
        worker = stage.worker(address)
        await worker.until_event(EventKind.CONNECTED)
        assert not list(place.iterdir())

    run(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_can_read_neither_the_file_nor_a_workers_environment(tmp_path_factory, monkeypatch):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as reachable:
        os.chmod(reachable, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", reachable)
        keys = _worker_keys()
        RunKeyFile(PORT, keys).keep()
        path = Path(reachable) / "aiorl" / f"{PORT}.key_secret"
        assert path.exists()
        environment = {"AIORL_RUN_KEYS": to_variable(keys)}
        with subprocess.Popen(["sleep", "60"], env=environment) as worker:
            try:
                for wanted in (path, Path(f"/proc/{worker.pid}/environ")):
                    read = subprocess.run(
                        ["cat", str(wanted)], user=65534, group=65534, extra_groups=[], capture_output=True
                    )
                    assert read.returncode != 0
                    assert b"Permission denied" in read.stderr
            finally:
                worker.kill()


# --- the place of the file


def test_the_file_is_written_anew_when_it_has_been_cleaned_away(place):
    keys = _worker_keys()
    file = RunKeyFile(PORT, keys)
    file.keep()
    assert find_run_keys(PORT) == keys
    (place / f"{PORT}.key_secret").unlink()
    place.rmdir()
    assert find_run_keys(PORT) is None
    file.keep()
    assert find_run_keys(PORT) == keys
    file.remove()
    assert find_run_keys(PORT) is None


def _open_to_others(place, tmp_path):
    place.mkdir(mode=0o755)


def _linked(place, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")


def _of_another_user(place, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


@pytest.mark.parametrize("spoil", [_open_to_others, _linked, _of_another_user])
def test_a_place_that_others_may_have_made_is_neither_written_nor_believed(place, tmp_path, spoil, caplog):
    spoil(place, tmp_path)
    keys, other_place = _worker_keys(), tmp_path / f"aiorl-{os.geteuid()}"
    file = RunKeyFile(PORT, keys)
    file.keep()
    assert [path.name for path in other_place.iterdir()] == [f"{PORT}.key_secret"]
    assert find_run_keys(PORT) == keys
    with contextlib.suppress(PermissionError):
        assert not list(place.iterdir())
    file.remove()
    with pytest.raises(SecurityError, match="for keys of runs on this host"):
        find_run_keys(PORT)
    other_place.rename(tmp_path / "gone")
    other_place.symlink_to(tmp_path / "gone")
    file.keep()
    file.keep()
    assert caplog.text.count("will not find the run's key") == 1


def test_a_learner_whose_file_cannot_be_written_goes_on_with_the_workers_it_starts(run, place, caplog, tmp_path):
    place.mkdir(mode=0o755)
    (tmp_path / f"aiorl-{os.geteuid()}").write_text("in the way")

    async def test(stage):
        learner = stage.learner(insecure=False)
        worker = stage.worker(learner.endpoint.address, keys=from_variable(to_variable(learner.endpoint.worker_keys)))
        await worker.until_event(EventKind.CONNECTED)

    run(test)
    assert "will not find the run's key" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "x", "a b c", pytest.param(to_variable(_worker_keys()).rpartition(" ")[0], id="one key too few")]
)
def test_a_variable_that_holds_no_keys_is_refused(text):
    with pytest.raises(SecurityError, match="AIORL_RUN_KEYS"):
        from_variable(text)


def test_no_worker_knows_its_secrets_from_its_arguments(tmp_path, place):
    """A local worker gets its name and keys all the same: it says hello under the name its slot is reserved for."""
    import asyncio

    import psutil

    from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
    from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
    from aiorl.net.wire.decoding import decode
    from aiorl.run.local_workers import LocalWorkers

    async def main() -> None:
        endpoint = ZmqLearnerEndpoint("tcp://127.0.0.1:0")
        said = asyncio.get_running_loop().create_future()
        endpoint.on_message = lambda peer, frames, user_id: said.done() or said.set_result(decode(frames))
        endpoint.start()
        forget_run_keys(int(endpoint.address.rpartition(":")[2]))  # nothing but what it is given
        session = LearnerSession("run", "life", LearnerSettings(num_workers=1))
        reserved = []
        session.reserve_slot = lambda slot, worker_id: reserved.append((slot, worker_id))
        workers = LocalWorkers(
            1,
            endpoint.address,
            session,
            max_restarts=0,
            keys=endpoint.worker_keys,
            environment={},
            log_path=lambda slot: tmp_path / "log.txt",
            on_event=lambda event: None,
            on_failure=pytest.fail,
        )
        try:
            await workers.start()
            async with asyncio.timeout(20):
                hello = await said
            assert [(hello.slot_hint, hello.worker_id)] == reserved
            arguments = " ".join(psutil.Process(workers.pids[1]).cmdline())
            assert hello.worker_id not in arguments
            for word in to_variable(endpoint.worker_keys).split():
                assert word not in arguments
        finally:
            await workers.stop(0.0)
            await endpoint.close()
        assert to_variable(endpoint.worker_keys).split()[1] not in (tmp_path / "log.txt").read_text()

    asyncio.run(main())


def test_what_an_environment_starts_inherits_no_secrets():
    """`python -m aiorl.worker` takes them out of its environment before anything else can be started."""
    program = (
        "import asyncio, os, sys\n"
        "from aiorl.worker import parse_worker_args\n"
        "import aiorl.worker as main\n"
        "import aiorl.run.worker.service as service\n"
        "class Stop(Exception): pass\n"
        "def look(*arguments):\n"
        "    assert not [name for name in os.environ if name.startswith('AIORL_')]\n"
        "    raise Stop\n"
        "service.WorkerService = look\n"
        "try:\n"
        "    asyncio.run(main._work(parse_worker_args(['--connect', 'tcp://127.0.0.1:1'])))\n"
        "except Stop:\n"
        "    sys.exit(42)\n"
    )
    secrets = {"AIORL_RUN_KEYS": to_variable(_worker_keys()), "AIORL_WORKER_ID": "w"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **secrets}, capture_output=True, text=True
    )
    assert done.returncode == 42, done.stderr
