"""`aiorl launch slurm` on a real Slurm: three nodes, each with an address, a name and a cable of
its own.

Each node is a network and a UTS namespace; they share the file system, as on a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("n1", "n2", "n3")
NETWORK = "10.78.0"
NEEDS = ("ip", "slurmctld", "slurmd", "sbatch", "munged")
PYTHON = Path(sys.executable)
LOOP = Path(__file__).parents[1] / "support" / "launched_loop.py"

CONFIG = """\
ClusterName=test
SlurmctldHost=ctl({network}.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/ctl.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
{signalled}SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=6
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-3] NodeAddr={network}.[11-13] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=5 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""
SIGNALLED = "SlurmctldParameters=preempt_send_user_signal\n"
"""Setting of sites that announce preemption by the signal of --signal."""

ENVIRONMENT = """\
import time
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def step(self, action):
        time.sleep(0.001)
        return super().step(action)
"""
"""Module that exists only in the directory of the launch."""
LEARNER = (
    "--env=slow:Slow",
    "--train-batch-size=300",
    "--num-sgd-iter=1",
    "--num-envs-per-worker=2",
    "--rollout-fragment-length=25",
    "--xla=off",
    "--checkpoint-interval-s=5",
    "--run-dir=runs/mine",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux"
    ),
    *(
        pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed")
        for name in NEEDS
    ),
]


def call(*words: str, **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
    return str(done.stdout)


def until(has_come: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not has_come():
        assert time.monotonic() < deadline, "it has not come in time"
        time.sleep(0.2)


class Cluster:
    """A controller, on whose host people log in, and three nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del self.environment[name]
        self.hosts = {"ctl": 2, **{node: 11 + number for number, node in enumerate(NODES)}}

    def start(self) -> None:
        os.makedirs("/run/munge", exist_ok=True)
        for place in ("/run/munge", "/var/lib/munge", "/var/log/munge"):
            shutil.chown(place, "munge", "munge")
        self.munged = (
            subprocess.run(["munge", "-n"], check=False, capture_output=True).returncode != 0
        )
        if self.munged:
            call("runuser", "-u", "munge", "--", "munged")
        (self.folder / "state").mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.configure(SIGNALLED)
        call("ip", "link", "add", "launbr", "type", "bridge")
        call("ip", "link", "set", "launbr", "up")
        names = "127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}.{at} {name}\n" for name, at in self.hosts.items()
        )
        for name, at in self.hosts.items():
            space = f"laun-{name}"
            call("ip", "netns", "add", space)
            call("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            call("ip", "link", "set", space, "master", "launbr", "up")
            call("ip", "-n", space, "addr", "add", f"{NETWORK}.{at}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                call("ip", "-n", space, "link", "set", device, "up")
            os.makedirs(f"/etc/netns/{space}", exist_ok=True)
            Path(f"/etc/netns/{space}/hosts").write_text(names)
        self.daemon("ctl", "slurmctld", "-D")
        for node in NODES:
            self.boot(node)
        until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", 30.0)

    def configure(self, signalled: str) -> None:
        text = CONFIG.format(folder=self.folder, network=NETWORK, signalled=signalled)
        (self.folder / "slurm.conf").write_text(text)

    def daemon(self, name: str, *words: str) -> None:
        shell = f'hostname {name}; exec "$@"'
        command = [
            "ip",
            "netns",
            "exec",
            f"laun-{name}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            shell,
            "sh",
            *words,
        ]
        self.daemons[name] = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def boot(self, node: str) -> None:
        self.daemon(node, "slurmd", "-D", "-N", node)

    def kill(self, name: str) -> None:
        """Kill all processes of a host at once."""
        for pid in call("ip", "netns", "pids", f"laun-{name}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if name in self.daemons:
            self.daemons.pop(name).wait(10)

    def cable(self, node: str, state: str) -> None:
        call("ip", "link", "set", f"laun-{node}", state)

    def state(self, node: str) -> str:
        return self.call("sinfo", "-h", "-n", node, "-o", "%T").strip()

    def call(self, *words: str) -> str:
        """Run a command where people log in."""
        return call(
            "ip", "netns", "exec", "laun-ctl", *words, env=self.environment, cwd=self.folder
        )

    def close(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "-u", "root", "--signal=KILL")
        for name in self.hosts:
            for command in (self.kill, lambda name: call("ip", "netns", "del", f"laun-{name}")):
                with contextlib.suppress(AssertionError):
                    command(name)
            # a namespace lives on, and its link with it, while a process of it ends
            subprocess.run(["ip", "link", "del", f"laun-{name}"], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/laun-{name}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", "launbr"], capture_output=True, check=False)
        if self.munged:
            os.kill(int(Path("/run/munge/munged.pid").read_text()), signal.SIGTERM)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.close()


class Launched:
    """A run launched in a directory of its own."""

    def __init__(
        self, cluster: Cluster, folder: Path, *options: str, launched: tuple[str, ...] = LEARNER
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.run = folder / "runs" / "mine"
        (folder / "slow.py").write_text(ENVIRONMENT)
        said = self.aiorl(*options, "--", *launched)
        self.job = re.findall(r"submitted job (\d+)", said)[0]

    def aiorl(self, *words: str) -> str:
        """Run `aiorl launch slurm` in the directory of the launch."""
        shell = 'cd "$0" && exec "$@"'
        command = [str(PYTHON), "-P", "-m", "aiorl", "launch", "slurm", *words]
        return self.cluster.call("sh", "-c", shell, str(self.folder), *command)

    def rows(self) -> list[str]:
        """Return the results that are on the disk."""
        with contextlib.suppress(FileNotFoundError):
            return [
                line for line in (self.run / "result.jsonl").read_text().split("\n")[:-1] if line
            ]
        return []

    def workers(self) -> int:
        return int(json.loads(self.rows()[-1])["num_healthy_workers"])

    def facts(self) -> dict[str, str]:
        shown = self.cluster.call("scontrol", "show", "job", self.job, "-o").split()
        return dict(word.split("=", 1) for word in shown if "=" in word)

    def has_restarted(self, times: int) -> bool:
        facts = self.facts()
        return facts["Restarts"] == str(times) and facts["JobState"] == "RUNNING"

    def log(self) -> str:
        """Return the job's log since its last start; "" before the first one."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run / f"slurm-{self.job}.log").read_text().rpartition("=== start")[2]
        return ""

    def until_it_trains(self, workers: int, within_s: float = 60.0) -> None:
        """Wait for results after this moment, with a number of workers."""
        before = len(self.rows())
        until(lambda: len(self.rows()) > before and self.workers() == workers, within_s)

    def check_kept(self, rows: list[str], lost_s: float = 0.0) -> None:
        """Check that the run has all results of an earlier moment, except those of its last
        seconds.
        """
        end = json.loads(rows[-1])["timestamp"] - lost_s
        assert {row for row in rows if json.loads(row)["timestamp"] <= end} <= set(self.rows())


SCRIPT = ("--run-dir=runs/mine", "--script", "my_loop.py")


def test_a_script_has_the_processes_of_all_nodes_and_another_turn_after_a_time_limit(
    cluster: Cluster, tmp_path: Path
) -> None:
    """R255"""
    shutil.copy(LOOP, tmp_path / "my_loop.py")
    run = Launched(cluster, tmp_path, "--nodes=3", "--cpus-per-node=2", launched=(*SCRIPT, "wait"))
    until(lambda: "5 actors, 4 joined, on n1 n2 n3" in run.log())
    cluster.call("scancel", "--signal=USR1", "--batch", run.job)
    until(lambda: run.has_restarted(1))
    until(lambda: "5 actors, 4 joined, on n1 n2 n3" in run.log().partition("turn 2")[2])
    run.aiorl("stop", "runs/mine")
    until(lambda: run.facts()["JobState"] == "FAILED")
    assert run.facts()["ExitCode"] == f"{128 + signal.SIGINT}:0"
    assert run.log().count("ending in order") == 1


def test_a_script_ends_the_array_of_its_processes_with_its_own_status(
    cluster: Cluster, tmp_path: Path
) -> None:
    shutil.copy(LOOP, tmp_path / "my_loop.py")
    run = Launched(
        cluster,
        tmp_path,
        "--elastic=2",
        "--cpus-per-node=1",
        launched=(*SCRIPT, "count=2", "seven"),
    )
    until(lambda: not cluster.call("squeue", "-h"))
    assert "2 actors, 2 joined" in run.log()
    assert run.facts()["ExitCode"] == "7:0"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "preemptions",
    [
        pytest.param([""], id="preempted"),
        pytest.param([SIGNALLED, ""], id="preempted twice", marks=pytest.mark.nightly),
    ],
)
def test_a_job_continues_after_time_limit_preemption_and_lost_nodes(
    cluster: Cluster, tmp_path: Path, preemptions: list[str]
) -> None:
    """Preemption that is announced by a signal comes like a time limit."""
    run = Launched(
        cluster,
        tmp_path,
        "--nodes=2",
        "--cpus-per-node=1",
        "--time=60",
        "--signal=B:USR1@115",
        "--comment=passed on",
    )
    until(lambda: run.facts()["JobState"] == "RUNNING")
    assert run.facts()["Comment"] == "passed"
    with pytest.raises(AssertionError, match="is trained by job"):
        Launched(cluster, tmp_path)
    keys = sorted((run.run / "keys").glob("*.key_secret"))
    assert [stat.S_IMODE(key.stat().st_mode) for key in keys] == [0o600, 0o600]
    until(run.rows)
    run.until_it_trains(2)

    facts = run.facts()
    nodes = cluster.call("scontrol", "show", "hostnames", facts["NodeList"]).split()
    (other,) = {*nodes} - {facts["BatchHost"]}
    for cut_s, left in ((5, 2), (25, 1)):  # Slurm gives a node up after 10 to 30 s
        cluster.cable(other, "down")
        time.sleep(cut_s)
        if left == 1:
            until(lambda: cluster.state(other).startswith("down"))
        cluster.cable(other, "up")
        run.until_it_trains(left)
    assert run.facts()["Restarts"] == "0"
    until(lambda: cluster.state(other) == "idle")

    rows = run.rows()
    cluster.call("scontrol", "requeue", run.job)
    until(lambda: run.facts()["JobState"] == "PENDING")
    cluster.call("scontrol", "update", f"JobId={run.job}", "TimeLimit=2")
    # the limit is announced within 30 s of the second start
    until(lambda: run.facts()["Restarts"] == "2")
    cluster.call("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    until(lambda: run.has_restarted(2))
    run.until_it_trains(2)
    run.check_kept(rows)
    assert "resuming from" in run.log()

    for times, signalled in enumerate(preemptions, 3):
        rows = run.rows()
        cluster.configure(signalled)
        cluster.call("scontrol", "reconfigure")
        cluster.call("sbatch", "-p", "urgent", "-N3", "--exclusive", "--wrap", "sleep 1")
        until(lambda times=times: run.has_restarted(times))
        run.until_it_trains(2)
        run.check_kept(rows)

    rows = run.rows()
    cluster.call("scancel", run.job)
    until(lambda: run.facts()["JobState"] == "CANCELLED")
    until(lambda: "Ended by SIGTERM" in run.log())
    last = max(
        int(path.name.rpartition("-")[2])
        for path in (run.run / "checkpoints").glob("checkpoint-*[0-9]")
    )
    assert last >= json.loads(rows[-1])["training_iteration"]
    assert "=== ended with status 143" in run.aiorl("logs", "runs/mine")


def test_an_elastic_run_has_workers_that_come_and_go_and_follows_its_learner(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Launched(
        cluster, tmp_path, "--elastic=1", "--cpus-per-node=2", "--worker-options=--comment=spot"
    )
    until(run.rows)
    run.until_it_trains(1 + 2)
    run.aiorl("scale", "runs/mine", "2")
    run.until_it_trains(1 + 4)
    run.aiorl("scale", "runs/mine", "1")
    run.until_it_trains(1 + 2)
    status = run.aiorl("status", "runs/mine")
    assert re.search(rf"^{run.job} +RUNNING", status, re.MULTILINE)
    assert len(re.findall(r"^\d\S* +RUNNING", status, re.MULTILINE)) == 2

    (worker,) = {"n1", "n2", "n3"} & set(re.findall(r"_0 +RUNNING +(n\d)", status))
    cluster.call("sbatch", "-p", "urgent", "-w", worker, "--exclusive", "--wrap", "sleep 1")
    until(lambda: len(run.rows()) and run.workers() == 1)
    run.until_it_trains(1 + 2)

    (learner,) = re.findall(
        r"NodeList=(n\d)", cluster.call("scontrol", "show", "job", run.job, "-o")
    )
    rows = run.rows()
    cluster.kill(learner)
    until(lambda: run.has_restarted(1))
    run.until_it_trains(1 + 2)
    run.check_kept(rows, lost_s=10.0)
    cluster.boot(learner)

    run.aiorl("stop", "runs/mine")
    until(lambda: not cluster.call("squeue", "-h"))
    assert run.facts()["JobState"] == "COMPLETED"
    assert "Ended by Ctrl-C" in run.log()
    assert "no learner" in run.aiorl("stop", "runs/mine")


def test_srun_starts_copies_that_find_their_part(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(ENVIRONMENT)
    command = [
        str(PYTHON),
        "-P",
        "-m",
        "aiorl",
        "launch",
        "here",
        "--",
        *LEARNER,
        "--num-workers=0",
    ]
    shell = 'cd "$0" && exec srun -N2 -n2 -c1 "$@"'
    cluster.call("sh", "-c", shell, str(tmp_path), *command, "--stop-timesteps=2000")
    last = (tmp_path / "runs" / "mine" / "result.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["num_healthy_workers"] == 1
