"""Admission: binds, key files, the admitted directory, and reports of refused handshakes on both
sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import itertools
import os
import pwd
import re
import shutil
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth
from hypothesis import given, strategies as st

from aiorl.config.addresses import dialable, reachable_from_here, split_address
from aiorl.errors import SecurityError
from aiorl.keys import make_keys
from aiorl.net.transport import admission
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes, EventKind
from aiorl.net.transport.security import (
    AdmittedKeys,
    Authenticator,
    load_learner_keys,
    load_worker_keys,
    read_public_key,
    read_secret_key,
)

FAST = EndpointLimits(
    times=EndpointTimes(tick_s=0.05, retry_s=0.1, max_retry_s=0.2, handshake_s=0.5)
)


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys", ("worker", "other"))
    return tmp_path / "keys"


async def test_an_insecure_learner_warns_if_others_can_reach_it(stage, caplog):
    for bind in ("tcp://127.0.0.1:0", "tcp://0.0.0.0:0"):
        stage.learner(bind, insecure=True)
        assert ("--insecure" in caplog.text) == ("0.0.0.0" in bind)


def test_keys_made_by_the_tool_load_on_both_sides(keys):
    learner, worker = load_both(keys)
    assert learner.public_key == worker.learner_key
    assert worker.public_key == read_public_key(keys / "admitted" / "worker.key")
    assert load_worker_keys(keys / "other.key_secret").public_key == read_public_key(
        keys / "other.key"
    )
    for loaded in (learner, worker):
        assert loaded.secret_key.decode() not in repr(loaded)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_private_key_that_others_can_read_is_refused_with_the_command_that_repairs_it(keys, mode):
    path = keys / "worker.key_secret"
    path.chmod(mode)
    with pytest.raises(SecurityError, match=rf"{mode:04o}.*chmod 600 {path}"):
        load_worker_keys(keys)


def load_both(keys):
    return load_learner_keys(keys), load_worker_keys(keys)


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("name", ["", "admitted", "learner.key"])
def test_keys_that_others_could_change_are_refused_with_the_command_that_repairs_them(
    keys, name, mode, monkeypatch
):
    monkeypatch.setattr(
        grp, "getgrgid", lambda number: grp.struct_group(("staff", "x", number, []))
    )
    path = keys / name
    path.chmod(path.stat().st_mode | mode)
    found = stat.S_IMODE(path.stat().st_mode)
    with pytest.raises(SecurityError, match=rf"{path} .*{found:04o}.*`chmod go-w {path}`"):
        load_both(keys)
    path.chmod(path.stat().st_mode & ~0o022)
    load_both(keys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    "name", ["", "admitted", "learner.key_secret", "learner.key", "worker.key_secret"]
)
def test_keys_of_another_user_are_refused_with_owner_and_command(keys, name, monkeypatch):
    for path in (keys, *keys.rglob("*")):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    load_both(keys)
    os.chown(keys / name, 54321, -1)
    with pytest.raises(
        SecurityError, match=rf"{keys / name} .*54321.*`sudo chown -R 12345 {keys / name}`"
    ):
        load_both(keys)
    os.chown(keys / name, 0, -1)  # owned by root, as on a system set up for its users
    load_both(keys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_accepts_another_users_directory_but_no_files_of_a_third_user_in_it(keys):
    for path in (keys, *keys.rglob("*")):
        os.chown(path, 12345, 12345)
    load_both(keys)
    os.chown(keys / "learner.key", 54321, -1)
    with pytest.raises(SecurityError, match=r"learner\.key .*54321"):
        load_worker_keys(keys)


def test_keys_made_under_any_umask_are_accepted(tmp_path):
    for umask in (0o000, 0o002, 0o022, 0o077):
        before = os.umask(umask)
        try:
            make_keys(tmp_path / f"{umask:o}" / "keys")
        finally:
            os.umask(before)
        load_both(tmp_path / f"{umask:o}" / "keys")


def test_a_directory_writable_by_a_private_group_is_accepted_unless_the_group_has_members(
    keys, monkeypatch
):
    """As made by `mkdir` with umask 0002."""
    name, members = pwd.getpwuid(os.geteuid()).pw_name, []
    monkeypatch.setattr(
        grp, "getgrgid", lambda number: grp.struct_group((name, "x", number, members))
    )
    os.chown(keys, -1, pwd.getpwuid(os.geteuid()).pw_gid)
    keys.chmod(0o775)
    load_both(keys)
    members.append("bob")
    with pytest.raises(SecurityError, match="chmod go-w"):
        load_learner_keys(keys)


def test_a_secret_mounted_by_kubernetes_is_accepted(keys, tmp_path):
    """A sticky directory of links to links, with files that no one else can replace."""
    mount = tmp_path / "mount"
    mount.mkdir()
    mount.chmod(0o1777)
    data = mount / "..2026_01_31_12_00_00.1"
    shutil.copytree(keys, data)
    (mount / "..data").symlink_to(data.name)
    for path in data.iterdir():
        (mount / path.name).symlink_to(f"..data/{path.name}")
    for path in data.rglob("*.key*"):
        path.chmod(0o400)
    learner, worker = load_both(mount)
    assert worker.learner_key == learner.public_key
    assert len(AdmittedKeys(learner.admitted).refresh()) == 2


def test_keys_added_to_a_directory_that_others_can_write_are_not_admitted_during_a_run(
    keys, tmp_path, caplog
):
    admitted = AdmittedKeys(keys / "admitted")
    make_keys(tmp_path / "intruder", ("intruder",))
    before = admitted.refresh()
    (keys / "admitted").chmod(0o757)
    shutil.copy(tmp_path / "intruder" / "intruder.key", keys / "admitted")
    for _ in range(3):
        assert admitted.refresh() == before
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"chmod go-w {keys / 'admitted'}" in said
    (keys / "admitted" / "other.key").unlink()
    assert [*admitted.refresh().values()] == ["worker"], "to shut one out takes effect all the same"
    (keys / "admitted").chmod(0o755)
    (keys / "admitted" / "intruder.key").chmod(0o646)
    assert [*admitted.refresh().values()] == ["worker"]
    assert f"chmod go-w {keys / 'admitted' / 'intruder.key'}" in caplog.text
    (keys / "admitted" / "intruder.key").chmod(0o644)
    assert [*admitted.refresh().values()] == ["intruder", "worker"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_admitted_key_file_of_another_user_is_ignored(keys, caplog):
    os.chown(keys / "admitted" / "other.key", 54321, -1)
    assert [*AdmittedKeys(keys / "admitted").refresh().values()] == ["worker"]
    assert re.search(r"other\.key .*54321.*0644", caplog.text)


def _remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replace_by_directory(path):
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def _replace_by_holes(path):
    path.unlink()
    path.touch(0o600)
    os.truncate(path, 20 << 30)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("admitted", _remove),
        ("learner.key", _replace_by_directory),
        *((name, _remove) for name in ("learner.key_secret", "learner.key")),
        *(
            (name, spoil)
            for name in ("learner.key_secret", "worker.key_secret", "learner.key")
            for spoil in (_replace_by_pipe, _replace_by_holes)
        ),
    ],
)
def test_missing_or_invalid_key_files_are_named_and_never_block(keys, name, spoil):
    spoil(keys / name)
    with pytest.raises(SecurityError) as caught:
        load_both(keys)
    assert (caught.value.key, caught.value.value) == ("keys", str(keys / name))


def test_a_worker_says_which_of_several_private_keys_it_cannot_choose_from(keys, tmp_path):
    with pytest.raises(SecurityError, match=f"`aiorl keys {tmp_path / 'nowhere'}`"):
        load_worker_keys(tmp_path / "nowhere")
    (keys / "worker.key_secret").unlink()
    shutil.copy2(keys / "other.key_secret", keys / "third.key_secret")
    with pytest.raises(SecurityError, match=r"other.key_secret, third.key_secret.*--keys"):
        load_worker_keys(keys)
    for name in ("other", "third"):
        (keys / f"{name}.key_secret").unlink()
    with pytest.raises(SecurityError, match=r"NAME\.key_secret"):
        load_worker_keys(keys)


@given(st.binary(max_size=300))
def test_any_file_content_gives_a_key_or_a_security_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("keys") / "x.key"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (read_public_key, read_secret_key):
        with contextlib.suppress(SecurityError):
            read(path)


def test_a_bare_key_and_pyzmqs_own_certificates_are_read_too(tmp_path):
    public, _ = zmq.curve_keypair()
    (tmp_path / "bare.key").write_bytes(public + b"\n")
    assert read_public_key(tmp_path / "bare.key") == public
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "theirs")
    os.chmod(secret_file, 0o600)
    expected = zmq.auth.load_certificate(secret_file)
    assert read_secret_key(Path(secret_file)) == expected
    assert read_public_key(Path(public_file)) == expected[0]


def test_admitted_keys_follow_the_directory_and_ignore_invalid_files(keys, caplog):
    admitted = AdmittedKeys(keys / "admitted")
    key = read_public_key(keys / "worker.key")
    assert admitted.refresh()[key] == "worker"
    (keys / "admitted" / "worker.key").rename(keys / "admitted" / "renamed.key")
    assert admitted.refresh()[key] == "renamed"
    (keys / "admitted" / "renamed.key").unlink()
    assert key not in admitted.refresh()
    (keys / "admitted" / "broken.key").write_text("not a key")
    (keys / "admitted" / "nowhere.key").symlink_to("nothing")
    os.mkfifo(keys / "admitted" / "pipe.key")
    shutil.copy(keys / "worker.key", keys / "admitted")
    assert admitted.refresh()[key] == "worker"
    assert "broken.key" in caplog.text
    assert "pipe.key" in caplog.text
    shutil.copy(keys / "other.key", keys / "admitted" / "worker.key")
    assert key not in admitted.refresh()
    shutil.rmtree(keys / "admitted")
    assert not admitted.refresh()


def test_a_directory_that_is_unreadable_for_a_while_leaves_admitted_keys_unchanged(
    keys, monkeypatch, caplog
):
    admitted = AdmittedKeys(keys / "admitted")
    before = admitted.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", _out_of_descriptors)
        assert admitted.refresh() == before
        assert admitted.refresh() == before
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    (keys / "admitted" / "other.key").unlink()
    assert set(admitted.refresh().values()) == {"worker"}


def _out_of_descriptors(path):
    raise OSError(errno.EMFILE, "Too many open files")


def test_frequent_handshakes_do_not_make_the_learner_reread_its_directory(keys, monkeypatch):
    looks = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    clock = itertools.count(0.0, 0.01)
    admitted = AdmittedKeys(keys / "admitted", clock=lambda: next(clock))
    for _ in range(200):
        assert admitted.name_of(b"stranger") is None
    assert len(looks) <= 11


# --- handshakes over loopback


async def test_a_key_that_is_not_admitted_is_refused_with_the_reason_on_both_sides_and_joins_once_it_is(
    stage, keys
):
    (keys / "admitted" / "other.key").unlink()
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    worker = stage.worker(
        learner.endpoint.address, keys=load_worker_keys(keys / "other.key_secret"), limits=FAST
    )
    theirs = await worker.until_event(EventKind.REFUSED)
    assert f"{keys / 'other.key'}" in theirs.reason
    ours = await learner.until_event(EventKind.REFUSED)
    assert read_public_key(keys / "other.key").decode() in ours.reason
    assert ours.address == "127.0.0.1"
    assert not learner.messages
    shutil.copy(keys / "other.key", keys / "admitted")
    await worker.until_event(EventKind.CONNECTED)
    assert (await stage.exchange(learner, worker))[1] == read_public_key(
        keys / "other.key"
    ).decode()


async def test_a_learner_that_answers_a_handshake_too_late_is_not_taken_for_one_with_other_keys(
    stage, keys, monkeypatch
):
    class SilentAuthenticator(Authenticator):
        """It answers as little as while its loop stands still."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.pump.close()

    monkeypatch.setattr(admission, "Authenticator", SilentAuthenticator)
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    worker = stage.worker(learner.endpoint.address, keys=load_worker_keys(keys), limits=FAST)
    reason = (await worker.until_event(EventKind.REFUSED)).reason
    assert "in time" in reason
    assert "key" not in reason


async def test_withdrawn_keys_are_cut_off_while_another_client_keeps_knocking_and_others_stay(
    stage, keys, tmp_path
):
    make_keys(tmp_path / "stranger")
    shutil.copy(keys / "learner.key", tmp_path / "stranger" / "learner.key")
    learner = stage.learner(
        keys=load_learner_keys(keys), limits=FAST._replace(times=FAST.times._replace(tick_s=0.5))
    )
    address, withdrawn = learner.endpoint.address, load_worker_keys(keys / "other.key_secret")
    stays = await stage.joined(address, keys=load_worker_keys(keys), limits=FAST)
    workers = [await stage.joined(address, keys=withdrawn, limits=FAST) for _ in range(3)]
    stage.worker(address, keys=load_worker_keys(tmp_path / "stranger"), limits=FAST)
    await learner.until_event(EventKind.REFUSED)
    (keys / "admitted" / "other.key").unlink()
    await learner.until_event(EventKind.REFUSED, learner.kinds().count(EventKind.REFUSED) + 2)
    dropped = await learner.until_event(EventKind.DROPPED, 6)  # three workers on two ports
    assert "'other'" in dropped.reason
    for worker in workers:
        await worker.until_event(EventKind.DISCONNECTED)
        await worker.until_event(EventKind.REFUSED)
    await stage.exchange(learner, stays)
    assert EventKind.DISCONNECTED not in stays.kinds()


async def test_a_key_replaced_under_its_name_is_another_key(stage, keys, tmp_path):
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    old = await stage.joined(
        learner.endpoint.address, keys=load_worker_keys(keys / "other.key_secret"), limits=FAST
    )
    _, former = await stage.exchange(learner, old)
    make_keys(tmp_path / "new", ("other",))
    shutil.copy(keys / "learner.key", tmp_path / "new" / "learner.key")
    shutil.copy(tmp_path / "new" / "other.key", keys / "admitted" / "other.key")
    await old.until_event(EventKind.REFUSED)
    new = await stage.joined(
        learner.endpoint.address, keys=load_worker_keys(tmp_path / "new"), limits=FAST
    )
    assert (await stage.exchange(learner, new))[1] != former, (
        "or it could take over the old key's registration"
    )


@contextlib.asynccontextmanager
async def _silent(stage, learner, keys, kind):
    """A client that shakes hands with the key 'other', on the port for its kind of socket, and
    sends nothing.
    """
    mine = load_worker_keys(keys / "other.key_secret")
    with zmq.Context() as context, context.socket(kind) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey = mine.public_key, mine.secret_key
        client.curve_serverkey = mine.learner_key
        port = int(learner.endpoint.address.rpartition(":")[2])
        with client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
            client.connect(f"tcp://127.0.0.1:{port + (kind == zmq.SUB)}")
            await stage.eventually(lambda: events.poll(0))
            client.disable_monitor()
        yield client


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB], ids=["samples", "broadcast"])
async def test_a_connection_that_was_silent_when_its_key_was_withdrawn_is_cut_off_too(
    stage, keys, kind
):
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    worker = await stage.joined(learner.endpoint.address, keys=load_worker_keys(keys), limits=FAST)
    async with _silent(stage, learner, keys, kind) as client:
        (keys / "admitted" / "other.key").unlink()
        await learner.until_event(EventKind.DROPPED)
        client.subscribe(b"") if kind == zmq.SUB else client.send(b"hello")
        await learner.until_event(EventKind.REFUSED)  # at its next attempt
        await stage.exchange(learner, worker)
        assert not client.poll(0)
    assert [frames for _, frames, _ in learner.messages] == [[b"hello"]], "only the worker's own"
    assert EventKind.DISCONNECTED not in worker.kinds()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB], ids=["samples", "broadcast"])
async def test_a_first_message_is_judged_by_the_keys_admitted_when_it_comes(
    stage, keys, kind, monkeypatch
):
    admitted = AdmittedKeys(keys / "admitted")
    monkeypatch.setattr(admission, "AdmittedKeys", lambda directory: admitted)
    learner = stage.learner(
        keys=load_learner_keys(keys), limits=FAST._replace(times=FAST.times._replace(tick_s=30.0))
    )
    async with _silent(stage, learner, keys, kind) as client:
        (keys / "admitted" / "other.key").unlink()
        admitted.refresh()  # as by another client's handshake
        client.subscribe(b"") if kind == zmq.SUB else client.send(b"hello")
        await learner.until_event(EventKind.DROPPED)
        await learner.until_event(EventKind.REFUSED)
    assert not learner.messages


@pytest.mark.parametrize(
    ("learner_has", "worker_has", "theirs", "ours"),
    [
        # either side may hang up first: the other side guesses the cause
        (
            True,
            "none",
            "--keys",
            "--keys",
        ),
        (False, "own", "--keys", "--keys"),
        (True, "another learner's", "learner.key", "learner.key"),
    ],
)
async def test_both_sides_of_a_handshake_refused_for_keys_report_what_to_do(
    stage, keys, tmp_path, monkeypatch, learner_has, worker_has, theirs, ours
):
    learner = stage.learner(
        limits=FAST, **({"keys": load_learner_keys(keys)} if learner_has else {})
    )
    if worker_has == "another learner's":
        make_keys(tmp_path / "elsewhere")
        shutil.copy(tmp_path / "elsewhere" / "learner.key", keys / "learner.key")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")  # as another user
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    mine = None if worker_has == "none" else load_worker_keys(keys)
    worker = stage.worker(learner.endpoint.address, keys=mine, limits=FAST)
    assert theirs in (await worker.until_event(EventKind.REFUSED)).reason
    assert ours in (await learner.until_event(EventKind.REFUSED)).reason


@pytest.mark.parametrize("kind", ["null", "plain", "junk", "silent"])
async def test_peers_without_a_key_are_refused_on_both_ports_without_affecting_others(
    stage, keys, kind
):
    learner = stage.learner(keys=load_learner_keys(keys), limits=FAST)
    worker = await stage.joined(learner.endpoint.address, keys=load_worker_keys(keys))
    port = int(learner.endpoint.address.rpartition(":")[2])
    for count, (number, socket_kind) in enumerate(
        [(port, zmq.DEALER), (port + 1, zmq.SUB)], start=1
    ):
        with zmq.Context() as context, contextlib.ExitStack() as stack:
            if kind in ("null", "plain"):
                intruder = stack.enter_context(context.socket(socket_kind))
                intruder.linger = 0
                if kind == "plain":
                    intruder.plain_username, intruder.plain_password = b"user", b"password"
                intruder.connect(f"tcp://127.0.0.1:{number}")
                if socket_kind == zmq.DEALER:
                    intruder.send(b"hello")
                else:
                    intruder.subscribe(b"")
            else:
                _, writer = await asyncio.open_connection("127.0.0.1", number)
                stack.callback(writer.close)
                writer.write(b"GET / HTTP/1.1\r\n\r\n" if kind == "junk" else b"\xff")
            await learner.until_event(EventKind.REFUSED, count)
            learner.endpoint.broadcast([b"secret"])
            if kind in ("null", "plain") and socket_kind == zmq.SUB:
                assert not intruder.poll(50)
            await worker.until(lambda count=count: worker.broadcasts.count([b"secret"]) == count)
    assert not learner.messages
    await stage.exchange(learner, worker)
    assert EventKind.DISCONNECTED not in worker.kinds()


@pytest.mark.parametrize(
    ("bound", "here"),
    [
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://10.0.0.3:5557", "tcp://10.0.0.3:5557"),
    ],
)
def test_local_workers_use_loopback_if_the_learner_listens_on_all_interfaces(
    bound: str, here: str
) -> None:
    assert reachable_from_here(bound) == here
    hosts = {split_address(each)[0] for each in dialable(bound)}
    assert (hosts == {split_address(bound)[0]}) == (bound == here or "10." in bound)
    assert not hosts & {"*", "0.0.0.0"}
