"""`aiorl launch ssh` on three hosts: network namespaces with an address and an sshd of their
own.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import termios
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import SMALL, Started, wait_until

from aiorl.errors import ConfigError
from aiorl.launch import ssh_host
from aiorl.launch.job import checked
from aiorl.launch.shipment import code_archive, look_through
from aiorl.launch.ssh import Host, Launch, is_running, launcher_lock, parse_hosts

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ENV = '''
import gymnasium, numpy
class Lane(gymnasium.Env):
    """Each step asks for the action that the observation shows."""
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.look(), {}
    def look(self):
        self.wanted = int(self.np_random.integers(2))
        return numpy.array([1 - 2 * self.wanted, 0], numpy.float32)
    def step(self, action):
        reward, self.left = float(action == self.wanted), self.left - 1
        return self.look(), reward, self.left == 0, False, {}
'''
LANE = ("--env=lane:Lane", *SMALL, "--lr=0.01")
LOOP = Path(__file__).parents[1] / "support" / "launched_loop.py"
AIORL = (sys.executable, "-m", "aiorl", "launch", "ssh")
_LACKS = "root on Linux" if sys.platform != "linux" or os.geteuid() else ""
_LACKS = _LACKS or ", ".join(name for name in ("ip", "ssh-keygen", SSHD) if not shutil.which(name))


def needs_hosts(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that uses hosts."""
    return pytest.mark.slow(pytest.mark.skipif(bool(_LACKS), reason=f"hosts need {_LACKS}")(test))


# Without hosts
# --------------------------------------------------------------------------------------------------


def test_hosts_come_from_words_and_files(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# my hosts\nn1\nme@n2 = 16  # a big one\n\n")
    assert parse_hosts([str(tmp_path / "hosts"), "n3=0"]) == {"n1": None, "me@n2": 16, "n3": 0}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-oProxyCommand=x"],
        ["n1=many"],
        ["n1", "n1=2"],
        ["n1 n2;x"],
        ["n1=100001"],
        ["no_such_hosts.txt"],
        ["n1=" + "9" * 5000],
    ],
)
def test_other_words_are_no_hosts(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(words)


@pytest.mark.parametrize("has_git", [True, False])
def test_only_code_is_sent(tmp_path: Path, has_git: bool) -> None:
    left_out = [
        "data.bin",
        "venv/pyvenv.cfg",
        "venv/a.py",
        "runs/x/run.json",
        "runs/x/a.py",
        "__pycache__/a.pyc",
        "out/a",
    ]
    for name in ("env.py", "pack/__init__.py", ".gitignore", *left_out):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("*.bin\n/out/\n")
    if has_git:
        subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=20)
    ignored = [] if has_git else ["data.bin", "out/a"]
    assert [path.as_posix() for path in look_through(tmp_path).files] == sorted(
        [".gitignore", "env.py", "pack/__init__.py", *ignored]
    )


def test_too_much_code_is_an_error_that_names_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("")
    (tmp_path / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(ConfigError, match=r"big \(2 MB\)"):
        code_archive(tmp_path, 1)
    with pytest.raises(ConfigError, match="neither"):
        code_archive(tmp_path / "missing", 1)


def test_a_home_directory_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="home"):
        code_archive(tmp_path)


@pytest.mark.parametrize("is_learner", [True, False])
def test_keys_behind_links_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_learner: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = checked(["--env", "CartPole-v1", "--run-dir", "first"]).make_keys()
    linked = tmp_path / "linked"
    for path in filter(Path.is_file, keys.rglob("*")):
        link = linked / path.relative_to(keys)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    job = checked(["--env", "CartPole-v1", "--run-dir", "mine", "--keys", str(linked)])
    packed = Launch(job, {"hosts": ["n1"]}).files_for(is_learner=is_learner)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames()}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    secret = "learner.key_secret" if is_learner else "worker.key_secret"
    assert contents[f"keys/{secret}"] == (keys / secret).read_bytes()
    assert ("keys/admitted/worker.key" in contents) == is_learner


def test_lines_of_a_host_that_name_no_port_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = checked(["--env", "CartPole-v1", "--run-dir", "mine", "--insecure"])
    job.make_place()
    package = Path(ssh_host.__file__).parent.parent
    facts = {"place": "/x", "client": "", "server": "", "python": "", "missing": []}
    facts["digest"] = ssh_host.package_digest(package)
    ports = ["5557", "9" * 5000, "65536", "000005558", "0", "-1", "\u0665\u0665"]
    (tmp_path / "host.py").write_text(f"""
import json, sys
sys.stdin.buffer.read({len(Path(ssh_host.__file__).read_bytes())})
sys.stdin.buffer.readline()
print({ssh_host.GREETING!r} + {json.dumps(facts)!r}, flush=True)
for size in json.loads(sys.stdin.buffer.readline())["archives"]:
    sys.stdin.buffer.read(size)
for port in {ports!r}:
    sys.stdout.buffer.write(({ssh_host.PORT_IS!r} + port + chr(10)).encode())
""")
    launch = Launch(
        job, {"hosts": ["n1"], "learner": "n1", "ssh": f"{sys.executable} {tmp_path / 'host.py'}"}
    )
    host = Host(launch, "n1", is_learner=True)
    host.run()
    assert (host.status, launch.port) == (0, 5557)


def test_a_run_has_one_launcher_and_its_forks_keep_the_lock(tmp_path: Path) -> None:
    with launcher_lock(tmp_path):
        assert is_running(tmp_path)
        with pytest.raises(ConfigError, match="is being launched"), launcher_lock(tmp_path):
            pass
    script = """
import os, sys
from pathlib import Path
from aiorl.launch.ssh import launcher_lock

with launcher_lock(Path(sys.argv[1])):
    if not os.fork():
        sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as launcher:
        assert launcher.wait(60) == 0
        assert is_running(tmp_path)
    wait_until(lambda: not is_running(tmp_path), 10, "the end of the fork")


def test_asking_whether_a_run_has_a_launcher_neither_hinders_one_nor_leaves_a_file(
    tmp_path: Path,
) -> None:
    assert not is_running(tmp_path)
    assert not [*tmp_path.iterdir()]
    with launcher_lock(tmp_path):
        pass
    with (tmp_path / "launch.lock").open("rb") as question:  # as a question that takes long
        fcntl.flock(question, fcntl.LOCK_SH)
        assert not is_running(tmp_path)
        threading.Timer(0.05, question.close).start()
        with launcher_lock(tmp_path):
            assert is_running(tmp_path)


def test_a_wheel_is_sent_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mine.whl", "w") as wheel:
        wheel.writestr("mine.py", "x = 1")
    assert code_archive(tmp_path / "mine.whl")


# With hosts
# --------------------------------------------------------------------------------------------------


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Hosts:
    """Hosts n1, n2 and n3, and a directory to launch from; `down` is an address where nothing
    answers.
    """

    def __init__(self, folder: Path) -> None:
        number = secrets.randbelow(250)
        self.folder, self.tag, self.net = folder, f"ssh{number}", f"10.79.{number}"
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "lane.py").write_text(ENV)
        self._started: list[Started] = []
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        config = f"User root\nIdentityFile {folder}/key\nIdentitiesOnly yes\nIdentityAgent none\n"
        config += "UserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
        run("ip", "link", "add", self.tag, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.tag)
        run("ip", "link", "set", self.tag, "up")
        for number in (1, 2, 3):
            space, link = f"{self.tag}n{number}", f"{self.tag}v{number}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", link, "master", self.tag, "up")
            run("ip", "-n", space, "addr", "add", f"{self.net}.1{number}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            self.home(f"n{number}").mkdir()
            self.boot(f"n{number}")
            config += f"Host n{number}\nHostName {self.net}.1{number}\n"
        (folder / "config").write_text(
            f"{config}Host down\nHostName {self.net}.99\nConnectTimeout 2\n"
        )

    def home(self, host: str) -> Path:
        return self.folder / host

    def boot(self, host: str) -> None:
        config = self.folder / f"sshd-{host}"
        address, key = f"{self.net}.1{host[1]}", self.folder / "key"
        config.write_text(
            f"ListenAddress {address}\nHostKey {key}\nAuthorizedKeysFile {key}.pub\nSetEnv"
            f" HOME={self.home(host)}\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin"
            " yes\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        command = ["ip", "netns", "exec", f"{self.tag}{host}", SSHD, "-D", "-e", "-f", config]
        self._sshd[host] = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def processes(self, host: str, *, with_sshd: bool = False) -> list[int]:
        """Return the processes on a host."""
        pids = [int(pid) for pid in run("ip", "netns", "pids", f"{self.tag}{host}").split()]
        names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
        return [pid for pid in pids if pid in names and (with_sshd or names[pid] != "sshd")]

    def kill(self, host: str) -> None:
        for pid in self.processes(host, with_sshd=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._sshd[host].wait(10)

    def crash(self, host: str) -> None:
        """Kill every process of a host; connections get no answer."""
        self.cut(host)
        self.kill(host)

    def cut(self, host: str) -> None:
        run("ip", "link", "set", f"{self.tag}v{host[1]}", "down")

    def plug_in(self, host: str) -> None:
        run("ip", "link", "set", f"{self.tag}v{host[1]}", "up")

    def left(self) -> list[object]:
        """Return processes and files that are left on hosts."""
        there = [process for host in self._sshd for process in self.processes(host)]
        return [
            *there,
            *(path for host in self._sshd for path in self.home(host).glob(".aiorl/runs/*")),
        ]

    def start(
        self, *words: str, hosts: str = "n1=1 n2=1 n3=1", terminal: int | None = None
    ) -> Started:
        """Launch a learner, or what `words` name with --script."""
        ssh = ("--ssh", f"ssh -F {self.folder}/config", "--hosts", *hosts.split())
        learner = () if "--script" in words else (*LANE, "--run-dir=run")
        self._started.append(_Launched([*AIORL, *ssh, *words, *learner], self.work, terminal))
        return self._started[-1]

    def add_loop(self) -> str:
        """Put a script into a folder of the directory to launch from, and return its path."""
        (self.work / "loops").mkdir()
        shutil.copy(LOOP, self.work / "loops" / "my_loop.py")
        return "loops/my_loop.py"

    def close(self) -> None:
        for started in self._started:
            started.end()
        for host in self._sshd:
            self.kill(host)
            run("ip", "link", "del", f"{self.tag}v{host[1]}")
            run("ip", "netns", "del", f"{self.tag}{host}")
        run("ip", "link", "del", self.tag)


class _Launched(Started):
    """The launcher, in a directory of its own, with a terminal if it is given one."""

    def __init__(self, command: list[str], place: Path, terminal: int | None) -> None:
        self._place, self._terminal = place, terminal
        super().__init__(command)

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        take = None if self._terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        return subprocess.Popen(
            command,
            cwd=self._place,
            env=environment,
            text=True,
            stdin=self._terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=take,
        )


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("ssh"))
    try:
        yield made
    finally:
        made.close()


def skip_without_sighup(how: str) -> None:
    """Skip a test that closes a terminal if no process here notices that."""
    if how == "terminal" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, so a closed terminal ends no launcher")


def joined(started: Started, count: int) -> None:
    """Wait until workers have joined."""
    after = 0
    for _ in range(count):
        after = started.wait_for(r"worker \d+ joined", after=after)


@needs_hosts
def test_hosts_train_an_environment_of_the_current_directory(hosts: Hosts) -> None:
    """A host that can't be reached is named, keys are private, and nothing is left on hosts."""
    started = hosts.start("--", "--stop-return=7.9", hosts="n1=1 n2=1 down")
    joined(started, 1)
    homes = [hosts.home(host) for host in ("n1", "n2")]
    keys = [path for home in homes for path in home.glob(".aiorl/runs/*/*/keys/*")]
    assert {path.name for path in keys} == {"worker.key_secret", "learner.key"}
    assert {path.stat().st_mode & 0o177 for path in keys} == {0}
    secret = re.search(r'secret-key = "(.+)"', keys[0].with_name("worker.key_secret").read_text())
    assert secret is not None
    for pid in hosts.processes("n1"):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            assert secret[1] not in f"{process.cmdline()} {process.environ()}"
    assert started.wait(90) == 0, started.text
    assert re.search("down: .*(route|timed out)", started.text), started.text
    wait_until(lambda: not hosts.left(), 10, "that nothing is left")
    logs = [path.read_text() for path in (hosts.work / "run/logs").glob("n?.txt")]
    assert len(logs) == 2
    assert all("Solved" in log for log in logs), logs
    assert not any(secret[1] in log for log in logs)


@needs_hosts
def test_hosts_that_lack_packages_are_named(hosts: Hosts) -> None:
    started = hosts.start("--python=/usr/bin/python3", "--", hosts="n1=1 n2=1")
    assert started.wait(60) not in (0, 2)
    assert (
        len(re.findall("^.*n[12]: .*(?:lacks|older|not found)", started.text, re.MULTILINE)) == 2
    ), started.text


@needs_hosts
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("Ctrl-C", marks=pytest.mark.nightly),
        pytest.param("terminal", marks=pytest.mark.nightly),
        pytest.param("stop", marks=pytest.mark.nightly),
        "SIGKILL",
    ],
)
def test_all_ends_with_the_launcher(hosts: Hosts, how: str) -> None:
    skip_without_sighup(how)
    ours, terminal = pty.openpty()
    started = hosts.start("--", hosts="n1=1 n2=1", terminal=terminal)
    os.close(terminal)
    started.wait_for("iteration")
    match how:
        case "Ctrl-C":
            started.send(signal.SIGINT)
        case "terminal":
            os.close(ours)
        case "stop":
            run(*AIORL, "stop", hosts.work / "run")
        case "SIGKILL":
            started.send(signal.SIGKILL)
    status = started.wait(60)
    if how == "stop":
        assert status == 128 + signal.SIGTERM
    wait_until(lambda: not hosts.left(), 30, "that nothing is left")
    wait_until(lambda: [*(hosts.work / "run/checkpoints").glob("checkpoint-*")], 30, "a checkpoint")


@needs_hosts
def test_hosts_come_and_go_and_a_learner_that_is_killed_is_named_with_its_signal(
    hosts: Hosts,
) -> None:
    """A host that crashed joins again, one that is cut off ends by itself, and hosts can be
    added.
    """
    started = hosts.start("--", hosts="n1=1 n2=1")
    joined(started, 2)
    hosts.crash("n1")
    hosts.cut("n2")
    after = started.wait_for("n1: .*trying again")
    assert "is running" in run(*AIORL, "status", hosts.work / "run")
    hosts.boot("n1")
    hosts.plug_in("n1")
    after = started.wait_for("n1: is back", after=after)
    run(*AIORL, "add", hosts.work / "run", "n3=1")
    after = started.wait_for(r"worker \d+ joined", after=after)
    wait_until(lambda: not hosts.processes("n2"), 60, "that n2 has ended by itself")
    holder = json.loads((hosts.work / "run/lock").read_text())
    os.kill(holder["pid"], signal.SIGKILL)
    assert started.wait(60) == 128 + signal.SIGKILL
    assert "SIGKILL" in started.text
    assert "SIGKILL" in (hosts.work / "run/logs/launch.txt").read_text()
    hosts.plug_in("n2")
    assert not hosts.left()


@needs_hosts
def test_a_learner_on_a_host_brings_its_run_back(hosts: Hosts) -> None:
    started = hosts.start("--learner=n1", "--", "--stop-return=7.9", hosts="n2=1")
    assert started.wait(120) == 0, started.text
    assert "iteration 1" in started.text
    assert str(hosts.home("n1")) not in (hosts.work / "run/config.yaml").read_text()
    started = hosts.start("--", "--stop-timesteps=1", hosts="n3=1")
    assert started.wait(120) == 0, started.text
    assert not hosts.left()


@needs_hosts
def test_a_run_in_the_background_continues_until_it_is_stopped(hosts: Hosts) -> None:
    started = hosts.start("--detach", "--", hosts="n2=1")
    assert started.wait(60) == 0, started.text
    place = hosts.work / "run"
    wait_until((place / "result.jsonl").exists, 60, "an iteration")
    wait_until(lambda: "iteration" in run(*AIORL, "logs", place), 60, "its line")
    run(*AIORL, "add", place, "n3=1")
    wait_until((place / "logs" / "n3.txt").exists, 60, "a worker")
    assert "n3.txt" in run(*AIORL, "status", place)
    run(*AIORL, "stop", place)
    assert "ended" in run(*AIORL, "status", place)
    assert [*(place / "checkpoints").glob("checkpoint-*")]
    assert not hosts.left()


@needs_hosts
def test_a_script_gets_the_processes_of_all_hosts_and_its_status_is_the_launchers(
    hosts: Hosts,
) -> None:
    """R255"""
    loop = hosts.add_loop()
    started = hosts.start("--", "--run-dir=run", "--script", loop, "seven", hosts="n1=2 n2=1")
    assert started.wait(90) == 7, started.text
    assert "3 actors, 3 joined" in started.text
    wait_until(lambda: not hosts.left(), 10, "that nothing is left")


@needs_hosts
@pytest.mark.parametrize("how", ["Ctrl-C", "terminal", "SIGKILL", "stop"])
def test_a_script_and_its_processes_end_with_the_launcher(hosts: Hosts, how: str) -> None:
    skip_without_sighup(how)
    loop = hosts.add_loop()
    ours, terminal = pty.openpty()
    started = hosts.start(
        "--", "--run-dir=run", "--script", loop, "wait", hosts="n1=1 n2=1", terminal=terminal
    )
    os.close(terminal)
    started.wait_for("2 actors, 2 joined")
    match how:
        case "Ctrl-C":
            os.write(ours, b"\x03")
            assert started.wait(60) == 128 + signal.SIGINT
        case "terminal":
            os.close(ours)
            started.wait(60)
        case "stop":
            assert "is running" in run(*AIORL, "status", hosts.work / "run")
            run(*AIORL, "stop", hosts.work / "run")
            assert started.wait(60) == 128 + signal.SIGTERM
        case "SIGKILL":
            started.send(signal.SIGKILL)
            started.wait(60)
    wait_until(lambda: not hosts.left(), 60, "that nothing is left")
    if how != "terminal":
        os.close(ours)
    assert "ending in order" in started.text


@needs_hosts
def test_a_script_on_a_host_brings_back_what_it_has_saved_and_finds_it_again(hosts: Hosts) -> None:
    loop = hosts.add_loop()
    words = ("--learner=n1", "--", "--run-dir=run", "--script", loop)
    for turn in (1, 2):
        started = hosts.start(*words, "seven", hosts="n2=1")
        assert started.wait(90) == 7, started.text
        assert f"turn {turn}" in started.text
        assert "1 actors, 1 joined" in started.text
        assert (hosts.work / "run/turns.txt").read_text() == "turn\n" * turn
    assert not hosts.left()
