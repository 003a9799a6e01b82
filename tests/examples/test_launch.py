"""The launch scripts parse, and ssh.sh works with a fake ssh that runs on this machine."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from aiorl.keys import make_keys
from aiorl.net.transport.security import load_worker_keys

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"

FAKE_SSH = """#!/usr/bin/env bash
# ssh [-o OPTION]... HOST COMMAND: each host is a home directory of its own on this machine
while [[ $1 == -o ]]; do shift 2; done
[[ $1 != unreachable ]] || { echo "ssh: connect to host unreachable: No route to host" >&2; exit 255; }
export HOME=$FAKE_HOMES/$1
mkdir -p "$HOME"
cd "$HOME"
exec bash -c "$2"
"""

FAKE_PYTHON = """#!/usr/bin/env bash
echo "arguments: $*"
[[ "$*" != *dies* ]] || { echo "it failed"; exit 1; }
exec -a "$0 $*" sleep 60
"""


@pytest.mark.parametrize("name", ["ssh.sh"])
def test_scripts_parse_and_are_clean_if_shellcheck_is_installed(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True, timeout=20)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", LAUNCH / name], check=True, timeout=60)


class Hosts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.homes = folder / "homes"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in (("ssh", FAKE_SSH), ("worker-python", FAKE_PYTHON)):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "FAKE_HOMES": str(self.homes),
            "PYTHON": str(bin_folder / "worker-python"),
            "KEYS": str(folder / "keys"),
        }

    def ssh(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LAUNCH / "ssh.sh", *arguments],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    if made.homes.exists():
        made.ssh("stop", *(home.name for home in made.homes.iterdir()))


@pytest.mark.slow
def test_workers_are_started_listed_and_stopped_on_every_host_of_a_file(hosts):
    make_keys(hosts.folder / "keys", ("worker", "host2"))
    (hosts.folder / "hosts.txt").write_text("host1\n# a comment\nuser@host2 = 16  # a big one\n\n")
    started = hosts.ssh("start", "tcp://10.0.0.1:5557", "hosts.txt")
    assert started.returncode == 0, started.stdout
    assert re.search(r"^host1: .*\b4\b", started.stdout, re.MULTILINE)
    assert re.search(r"^user@host2: .*\b16\b", started.stdout, re.MULTILINE)
    for host, own in (("host1", "worker"), ("user@host2", "host2")):
        folder = hosts.homes / host / ".aiorl"
        keys = load_worker_keys(folder / "keys")  # refuses keys that others can read
        assert keys.public_key == load_worker_keys(hosts.folder / "keys" / f"{own}.key_secret").public_key
        assert stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700
        assert sorted(path.name for path in (folder / "keys").iterdir()) == ["learner.key", "worker.key_secret"]
    log = (hosts.homes / "user@host2" / ".aiorl" / "worker.log").read_text()
    assert "-m aiorl.worker --connect tcp://10.0.0.1:5557 --num-workers 16 --keys=keys" in log

    again = hosts.ssh("start", "tcp://10.0.0.1:5557", "host1")
    assert again.returncode == 1
    pids = [int((home / ".aiorl" / "worker.pid").read_text()) for home in hosts.homes.iterdir()]
    running = hosts.ssh("status", "hosts.txt").stdout
    assert all(str(pid) in running for pid in pids)
    hosts.ssh("stop", "hosts.txt")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    ended = hosts.ssh("status", "hosts.txt").stdout
    assert not any(str(pid) in ended for pid in pids)
    assert hosts.ssh("stop", "host1").returncode == 0


@pytest.mark.slow
def test_hosts_that_fail_are_named_and_the_others_continue(hosts):
    hosts.environment["KEYS"] = ""
    started = hosts.ssh("start", "tcp://dies:5557", "unreachable", "host1")
    assert started.returncode == 1
    assert "unreachable: ssh: connect to host unreachable: No route to host" in started.stdout
    assert "it failed" in started.stdout
    assert "host1: " in hosts.ssh("start", "tcp://10.0.0.1:5557", "unreachable", "host1").stdout
    assert "--keys" not in (hosts.homes / "host1" / ".aiorl" / "worker.log").read_text()


def test_missing_keys_are_reported(hosts):
    started = hosts.ssh("start", "tcp://10.0.0.1:5557", "host1")
    assert started.returncode == 1
    assert "worker.key_secret: No such file" in started.stdout


@pytest.mark.parametrize("arguments", [(), ("start",), ("start", "host1", "host2"), ("restart", "host1"), ("stop",)])
def test_wrong_usage_shows_examples(hosts, arguments):
    shown = hosts.ssh(*arguments)
    assert shown.returncode == 2
    assert "ssh.sh start tcp://LEARNER:5557 host1 host2=16" in shown.stderr
