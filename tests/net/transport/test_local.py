"""This user's own Unix sockets: closed to other users, and found by this user's workers without
configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import free_address

from aiorl.errors import ConfigError, SecurityError
from aiorl.keys import make_keys
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes, EventKind
from aiorl.net.transport.local import find_local
from aiorl.net.transport.security import load_learner_keys, load_worker_keys

FAST = EndpointLimits(
    times=EndpointTimes(tick_s=0.05, retry_s=0.1, max_retry_s=0.2, handshake_s=0.5)
)


def _leave_behind(path):
    """Leave the socket file of a killed learner, without a listener."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@contextlib.contextmanager
def _impostor():
    port = int(free_address().rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.5)
        yield listener


async def test_a_worker_of_the_same_user_joins_through_private_sockets_that_end_with_the_learner(
    stage, place, caplog
):
    caplog.set_level(logging.INFO)
    learner = stage.learner(insecure=False)
    worker = await stage.joined(learner.endpoint.address)
    await stage.exchange(learner, worker)
    assert worker.endpoint.is_local
    path = place / str(learner.port)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert sorted(place.iterdir()) == [path, Path(f"{path}.broadcast")]
    assert str(path) in caplog.text
    for offset in (0, 1):  # no other connection is accepted at all
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", learner.port + offset), 1.0)
    await learner.endpoint.close()
    assert not list(place.iterdir())


async def test_large_messages_and_the_end_of_either_side_are_the_same_as_over_tcp(stage):
    learner = stage.learner(insecure=False, limits=FAST)
    worker = await stage.joined(learner.endpoint.local_address, limits=FAST)
    for _ in range(40):
        assert worker.endpoint.send([bytes(1 << 20)])
    await learner.until(lambda: len(learner.messages) == 40)
    peer, _ = await stage.exchange(learner, worker)
    learner.endpoint.drop(peer, "it is enough")
    await worker.until_event(EventKind.DISCONNECTED)
    await worker.until_event(EventKind.CONNECTED, 2)
    await stage.exchange(learner, worker)
    await worker.endpoint.close()
    await learner.until_event(EventKind.DISCONNECTED, 2)


async def test_a_worker_that_is_there_first_finds_its_learner_and_the_next_one_after_a_kill_and_never_an_impostor(
    stage, place
):
    with _impostor() as listener:
        port = listener.getsockname()[1]
        _leave_behind(place / str(port))
        worker = stage.worker(f"tcp://127.0.0.1:{port}", limits=FAST)
        assert f"ipc://{place / str(port)}" in (await worker.until_event(EventKind.WAITING)).reason
        with pytest.raises(TimeoutError):
            listener.accept()
    for count in (1, 2):
        learner = stage.learner(f"tcp://127.0.0.1:{port}", insecure=False, limits=FAST)
        await worker.until_event(EventKind.CONNECTED, count)
        await stage.exchange(learner, worker)
        await learner.endpoint.close()
        await worker.until_event(EventKind.DISCONNECTED, count)


async def test_a_worker_that_looked_on_the_network_before_its_learner_came_finds_it(stage):
    address = free_address()
    worker = stage.worker(address, limits=FAST)
    assert "tcp://" in (await worker.until_event(EventKind.WAITING)).reason
    stage.learner(address, insecure=False, limits=FAST)
    await worker.until_event(EventKind.CONNECTED)


async def test_a_learner_with_keys_keeps_its_own_workers_along_with_those_with_keys(
    stage, tmp_path
):
    keys = tmp_path / "keys"
    make_keys(keys)
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    own = stage.worker(learner.endpoint.local_address, limits=FAST)
    other = stage.worker(learner.endpoint.address, keys=load_worker_keys(keys), limits=FAST)
    for worker, key in ((own, ""), (other, load_worker_keys(keys).public_key.decode())):
        await worker.until_event(EventKind.CONNECTED)
        await stage.exchange(learner, worker)
        assert learner.messages[-1][2] == key
    (keys / "admitted" / "worker.key").unlink()
    await other.until_event(EventKind.DISCONNECTED)
    await stage.exchange(learner, own)
    assert EventKind.DISCONNECTED not in own.kinds()


async def test_an_insecure_learner_admits_everyone_and_deletes_sockets_of_the_previous_one(
    stage, place
):
    address = free_address()
    _leave_behind(place / address.rpartition(":")[2])
    learner = stage.learner(address, insecure=True)
    assert learner.endpoint.local_address == learner.endpoint.address
    assert not list(place.iterdir())
    await stage.joined(learner.endpoint.address)


@pytest.mark.parametrize("is_own", [True, False], ids=["of a learner", "of another program"])
async def test_a_port_in_use_is_refused_even_if_the_learner_would_not_listen_on_it(
    stage, tmp_path, is_own
):
    with contextlib.ExitStack() as stack:
        if is_own:
            former = stage.learner(insecure=False)
            port, path = former.port, find_local(former.port)
        else:
            port = stack.enter_context(_impostor()).getsockname()[1]
        for bind in (port, port - 1):
            with pytest.raises(ConfigError, match="--bind"):
                stage.learner(f"tcp://127.0.0.1:{bind}", insecure=False)
        if is_own:
            make_keys(tmp_path / "keys")
            for options in (
                {"insecure": True},
                {"insecure": False},
                {"keys": load_learner_keys(tmp_path / "keys")},
            ):
                with pytest.raises(ConfigError, match="--bind"):  # also on another address
                    stage.learner(f"tcp://127.0.0.2:{port}", **options)
            assert find_local(port) == path
            await stage.joined(former.endpoint.address)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_cannot_reach_the_sockets(stage, monkeypatch):
    def open_as(user):
        command = ["cat", str(path)]
        return subprocess.run(
            command, user=user, group=user, extra_groups=[], capture_output=True, text=True
        ).stderr

    with tempfile.TemporaryDirectory(dir="/tmp") as reachable:
        os.chmod(reachable, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", reachable)
        path = find_local(stage.learner(insecure=False).port)
        assert "Permission denied" in await asyncio.to_thread(open_as, 65534)
        assert "No such device" in await asyncio.to_thread(open_as, 0)  # a socket is found


async def test_deleted_sockets_are_made_again(stage, place, monkeypatch):
    monkeypatch.setattr("aiorl.net.transport.zmq_learner.LOOK_FOR_FILES_S", 0.05)
    learner = stage.learner(insecure=False, limits=FAST)
    early = await stage.joined(learner.endpoint.address, limits=FAST)
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    late = await stage.joined(learner.endpoint.address, limits=FAST)
    for worker in (early, late):
        await stage.exchange(learner, worker)


_BIND_AGAIN = """
import asyncio
import socket
import time
from pathlib import Path

from aiorl.net.transport import zmq_learner

zmq_learner.LOOK_FOR_FILES_S = 0.0


async def main():
    learner = zmq_learner.ZmqLearnerEndpoint("tcp://127.0.0.1:0")
    learner.start()
    path = Path(learner.local_address.removeprefix("ipc://"))
    for _ in range(1500):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
    time.sleep(1.0)  # the loop is busy, and ZeroMQ's thread waits for it
    path.unlink()
    while not path.exists():
        await asyncio.sleep(0.01)
    await learner.close()


asyncio.run(main())
"""


def test_deleted_sockets_are_made_again_while_connections_storm_in(place):
    """In a process of its own, which could stand still forever."""
    subprocess.run([sys.executable, "-c", _BIND_AGAIN], check=True, timeout=60)


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


def _replaceable(place, tmp_path):
    place.mkdir(mode=0o700)
    place.parent.chmod(0o777)


@pytest.mark.parametrize("spoil", [_open_to_others, _linked, _of_another_user, _replaceable])
async def test_a_directory_that_others_could_have_made_is_neither_used_nor_trusted(
    stage, place, tmp_path, spoil, monkeypatch
):
    spoil(place, tmp_path)
    good = place.parent / "good"
    good.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(good / ("long" * 30)))
    with pytest.raises(SecurityError, match="XDG_RUNTIME_DIR"):
        stage.learner(insecure=False)
    monkeypatch.setattr("tempfile.tempdir", str(good))
    learner = stage.learner(insecure=False)
    assert find_local(learner.port).is_relative_to(good)
    await stage.joined(learner.endpoint.address)
    await learner.endpoint.close()
    with pytest.raises(SecurityError) as caught:
        find_local(learner.port)
    assert caught.value.value == str(place)
