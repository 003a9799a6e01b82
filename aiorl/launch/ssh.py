"""`aiorl launch ssh`: a learner here or on a host, and workers on hosts that ssh can log in to.

One connection serves a host. All that goes there, keys too, goes through its standard input to
`aiorl.launch.ssh_host`, and the log comes back. Processes on hosts end with their connection, and
so with this program, which ``--detach`` moves into the background.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import psutil

import aiorl
from aiorl.config.addresses import url
from aiorl.config.command_line import Parser
from aiorl.config.files import check_regular, open_regular, read_regular
from aiorl.errors import AiorlError, ConfigError
from aiorl.launch import ssh_host
from aiorl.launch.job import CORES, Job, Verb, check_printable, saved
from aiorl.launch.logs import lines_of, printable, show_ends
from aiorl.launch.script_job import ScriptJob
from aiorl.launch.shipment import Shipment, archive, code_archive, look_through
from aiorl.process.children import status_text
from aiorl.process.imports import child_python, python_path
from aiorl.text import one_line

ABOUT = "Trains with workers on hosts that ssh can log in to, where the current directory is sent."
EXAMPLES = """
Examples:
  # a learner here, 16 workers on host2, and as many as it has cores on host1
  aiorl launch ssh --hosts host1 host2=16 -- --env my_envs:Heavy --stop-return 100
  # hosts in a file, HOST or HOST=N on each line; the learner on one of them; in the background
  aiorl launch ssh --hosts hosts.txt --learner host1 --detach -- --env CartPole-v1
  # a Python file of yours in place of the learner
  aiorl launch ssh --hosts host1=8 host2=16 -- --script my_loop.py --population 64
"""
_MODULES = (
    "gymnasium",
    "lz4",
    "msgpack",
    "numpy",
    "onnxruntime",
    "orjson",
    "psutil",
    "pydantic",
    "yaml",
    "zmq",
)
"""Modules that a host with aiorl's packages has."""
_HOST = re.compile(r"[A-Za-z0-9_][\w.@:%-]*")
_SSH = [
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=5",
    "-oControlMaster=no",
]
_PACKAGE = Path(aiorl.__file__).parent
_SOURCE = Path(ssh_host.__file__).read_bytes()
_CHECK = (
    "import sys; sys.version_info >= (3, 11) or sys.exit(sys.executable + ' is older than Python"
    " 3.11'); "
)
_PIPED: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
_PIPED |= {"start_new_session": True}  # Ctrl-C in the terminal does not reach ssh
_AGAIN_S = 5.0
_POLL_S = 0.3
_TWICE_S = 0.5
_LOCK = "launch.lock"
_QUESTION_S = 0.2
"""Seconds that a launcher waits for its lock, which questions share for an instant."""
_GOODBYE_S = 5.0
_END_S = 25.0
_LEARNER_LEAVE_S = 20.0
_WORKERS_LEAVE_S = 10.0
"""Seconds for an orderly end."""
_BY_SIGNAL = 128
"""From here on, exit statuses are those of a process that a signal ended; 255 is that of a broken
connection."""
_NOT_SENT = (
    "keys",
    "lock",
    "launch.json",
    _LOCK,
    "learner.sbatch",
    "worker.sbatch",
    "web.token",
    "client.token",
    "client.secret",
)
"""Files of a run directory that neither go to a host nor come from there."""
_MAX_KEY_BYTES = 16 << 10
_MAX_WORKERS = 100_000
_MAX_PORT = 65_535
_PORT_DIGITS = 5
_NUMBER = re.compile(r"[0-9]{1,9}")
_SAME_START_S = 5.0
"""Most seconds between two statements of when a process was started: clocks are set meanwhile."""


def _is_pid(value: Any) -> bool:
    return type(value) is int and 1 < value < 1 << 31


def _are_hosts(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    for host, count in value.items():
        if not _HOST.fullmatch(host):
            return False
        if count is not None and not (type(count) is int and 0 <= count <= _MAX_WORKERS):
            return False
    return True


_FACTS = {"pid": _is_pid, "hosts": _are_hosts}
"""Fact in launch.json -> its check."""


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """See `Engine`."""
    for name, metavar, about in (
        ("learner", "HOST", "Host of the learner. (default: this machine)"),
        ("code", "DIR", "Directory, or wheel, to send to hosts. (default: the current directory)"),
        ("python", "PATH", "Python on the hosts. (default: the path of this Python, or python3)"),
        (
            "address",
            "HOST",
            "Name or address of the learner's machine, for hosts. (default: as ssh sees it)",
        ),
        ("ssh", "COMMAND", "ssh with options of its own, such as 'ssh -p 2222'. (default: ssh)"),
        ("hosts", "HOST=N", "Hosts, with numbers of workers; or a file with one on each line."),
        (
            "include",
            "FILE",
            "Files of --code to send although they are left out, as secrets are, or patterns.",
        ),
    ):
        nargs = "+" if name in ("hosts", "include") else None
        parser.add_argument(f"--{name}", metavar=metavar, help=about, nargs=nargs)
    parser.add_argument(
        "--detach", action="store_true", help="Train in the background, also after a logout."
    )


def parse_hosts(words: Iterable[str]) -> dict[str, int | None]:
    """Return host -> number of workers, None for as many as it has cores.

    Args:
        words: HOST, HOST=N, or files with such lines, in which # begins a comment.

    Raises:
        ConfigError: a word is none of these, or a host is given twice.
    """
    hosts: dict[str, int | None] = {}
    for word in words:
        if word.endswith(".txt") and not os.path.isfile(word):  # no name of a host ends so
            raise ConfigError(f"--hosts: there is no file {word!r:.100}.")
        lines = _lines_in(word) if os.path.isfile(word) else [word]
        for line in filter(None, (re.sub(r"#.*|\s", "", line) for line in lines)):
            host, equals, number = line.partition("=")
            if not _HOST.fullmatch(host) or host in hosts or (equals and not _is_count(number)):
                raise ConfigError(
                    f"--hosts: {line!r:.100} is no new host:",
                    key="hosts",
                    value=word,
                    hint="write each host once, as HOST or HOST=N, or name a file with such lines.",
                )
            hosts[host] = int(number) if equals else None
    if not hosts:
        raise ConfigError(
            "--hosts names no host:", key="hosts", hint="write --hosts host1 host2=16"
        )
    return hosts


def _is_count(word: str) -> bool:
    return bool(_NUMBER.fullmatch(word)) and int(word) <= _MAX_WORKERS


def _is_port(word: str) -> bool:
    return (
        bool(_NUMBER.fullmatch(word)) and len(word) <= _PORT_DIGITS and 0 < int(word) <= _MAX_PORT
    )


def _lines_in(file: str) -> list[str]:
    try:
        return Path(file).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--hosts: {file} is no UTF-8 text:",
            key="hosts",
            value=file,
            hint="write HOST or HOST=N on each line.",
        ) from error


class Launch:
    """A run that this program launches.

    Attributes:
        job: the run.
        hosts: host -> number of workers, None for as many as it has cores.
        code: directory or wheel that is sent to hosts, and an archive of it.
        include: files of it that are sent in any case.
        place: directory of the run on each host.
        keys: directory of the run's keys here; "" if it has none.
        learner: host of the learner; "" for this machine.
        address: name or address of the learner for hosts; "" for the one from which ssh comes.
        port: the learner's port; 0 until it listens.
        ending: set when the run ends.
    """

    def __init__(self, job: Job, options: dict[str, Any]) -> None:
        """Take the engine's options.

        Raises:
            ConfigError: a value can't be used.
        """
        check_printable(options)
        self.job = job
        self.hosts = parse_hosts(options.get("hosts", ()))
        self.code = Path(os.path.abspath(os.path.expanduser(options.get("code", "."))))
        self.packed_code = b""
        self.place = f"~/.aiorl/runs/{job.name}-{secrets.token_hex(3)}"
        self.keys = "" if job.config["insecure"] else str(job.keys)
        self.include: list[str] = options.get("include", [])
        self.learner = options.get("learner", "")
        self.address = options.get("address", "")
        self.port = 0 if self.learner else job.port or 0
        self._ssh = options.get("ssh", "ssh")
        self._python = options.get("python", "")
        self.ending = threading.Event()
        self.to_learner = sys.stderr.buffer

    def files_for(self, *, is_learner: bool) -> bytes:
        """Return an archive of the keys that a host needs, and of the run for a learner that
        resumes it.
        """
        keys = Path(self.keys)
        files = dict[str, Path | bytes]()
        if self.keys:
            names = ["worker.key_secret", "learner.key"]
            if is_learner:
                admitted = (path.relative_to(keys) for path in keys.glob("admitted/*.key"))
                names = ["learner.key_secret", "learner.key", *map(str, admitted)]
            for name in names:
                # mounted secrets and dotfiles are links
                files[f"keys/{name}"] = read_regular(
                    keys / name, max_bytes=_MAX_KEY_BYTES, follow=True
                )
        if is_learner and (self.job.run_dir / "run.json").exists():
            for path in self.job.run_dir.rglob("*"):
                at = path.relative_to(self.job.run_dir)
                if path.is_file() and not path.is_symlink() and at.parts[0] not in _NOT_SENT:
                    files[f"run/{at}"] = path
        return archive(files)

    def show(self, line: str) -> None:
        """Show a line, among the learner's own if it runs here, and write it to
        ``logs/launch.txt``.
        """
        with (self.job.run_dir / "logs" / "launch.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        try:
            self.to_learner.write(f"{line}\n".encode())
            self.to_learner.flush()
        except (OSError, ValueError):
            sys.stderr.write(f"aiorl: {line}\n")

    @cached_property
    def shipment(self) -> Shipment | None:
        """The files of the directory of code; None for a wheel."""
        if not self.code.is_dir():
            return None
        return look_through(self.code, self.include)

    def script_there(self) -> str:
        """Return the path of the script on hosts, relative to the code; "" if there is none.

        Raises:
            ConfigError: the script does not exist, or is not sent.
        """
        if not isinstance(self.job, ScriptJob):
            return ""
        self.job.check_files()
        files = self.shipment.files if self.shipment is not None else []
        return self.job.path_in(self.code, files)

    def main_words(self, run_dir: str = "", keys: str = "") -> list[str]:
        """Return module and words of the command that hosts join, here or, with other directories
        of run and keys, on a host.
        """
        job = self.job
        if run_dir and job.is_script:
            job = replace(job, words=(self.script_there(), *job.words[1:]))
        place = ["--bind", job.bind]
        if self.keys:
            place += ["--keys", keys or self.keys]
        counts = list(self.hosts.values())
        joining = None  # of a host without a number, no one knows the cores yet
        if None not in counts:
            joining = sum(filter(None, counts))
        place += job.process_words(job.num_workers or 0, joining)
        is_resumed = (job.run_dir / "run.json").exists()
        return job.main_words(*place, resumed=is_resumed, run_dir=run_dir)

    def program(self, host: str) -> list[str]:
        """Return the command that runs `aiorl.launch.ssh_host` on a host."""
        python = f'p={shlex.quote(sys.executable)}; [ -x "$p" ] || p=python3'
        if self._python:
            path = re.sub("^~/", "$HOME/", self._python)  # the home directory there, not here
            python = f'p="{path}"'
        read = shlex.quote(f"{_CHECK}exec(sys.stdin.buffer.read({len(_SOURCE)}))")
        shell = shlex.join(["sh", "-c", f'{python}; exec "$p" -c {read}'])
        return [*shlex.split(self._ssh), *_SSH, host, f"exec {shell}"]


@cache
def _package_archive() -> bytes:
    files = {path for path in _PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    return archive({f"package/aiorl/{path.relative_to(_PACKAGE)}": path for path in files})


class Host(threading.Thread):
    """Process on one host: the parent of its workers, or the learner."""

    def __init__(
        self, launch: Launch, name: str, workers: int | None = None, *, is_learner: bool = False
    ) -> None:
        """Set the host.

        Args:
            launch: the run.
            name: the host as ssh knows it.
            workers: number of workers; None for as many as it has cores.
            is_learner: True if the process is the learner.
        """
        super().__init__(daemon=True)
        self.launch = launch
        self._name = name
        self.workers = workers
        self._is_learner = is_learner
        directory = re.sub(r"[^\w.-]", "_", name)
        if is_learner:
            directory = f"learner-{directory}"
        self.label = f"{name} (learner)" if is_learner else name
        self._place = f"{launch.place}/{directory}"
        self._log = launch.job.run_dir / "logs" / f"{directory}.txt"
        self._hint = f"its log is {self._log}"
        if is_learner:
            self._hint = f"its run stays there, in {self._place}+*/run"
        self.status: int | None = None
        self._last_line = ""
        self._failure = ""  # the last line of the failure that was shown; "" once it is over
        self._process: Any = None
        self._is_ready = False
        self._is_changed = False

    def run(self) -> None:
        """Keep the process running, through failures of the host, until it has ended for good, with
        `status`.
        """
        launch = self.launch
        ending = launch.ending
        while self.status is None:
            self._is_changed = False
            try:
                status = self._try_once()
            except (AiorlError, OSError, LookupError, ValueError, tarfile.TarError) as error:
                self.status = 1
                launch.show(f"{self.label}: {error}; {self._hint}")
                return
            if self.workers == 0:
                self.status = 0
            elif (
                self._is_learner
                or ending.is_set()
                or (status < _BY_SIGNAL and not self._is_changed)
            ):
                self.status = status
                if not ending.is_set() and status and (not self._is_learner or status > _BY_SIGNAL):
                    launch.show(f"{self.label}: {self._last_line} (status {status}); {self._hint}")
            elif not self._is_changed:
                if self._last_line != self._failure:
                    self._failure = self._last_line
                    launch.show(f"{self.label}: {self._last_line}; trying again")
                if ending.wait(_AGAIN_S):
                    self.status = status

    def _try_once(self) -> int:
        """Start the process, bring its log until it ends, and return its status, or that of ssh.

        Raises:
            ConfigError: the host lacks packages.
        """
        launch = self.launch
        command = launch.program(self._name)
        self._is_ready = False
        with self._log.open("ab", 0) as log, subprocess.Popen(command, **_PIPED) as self._process:
            facts = self._greet()
            if facts is None:
                return int(self._process.wait())
            self._send(*self._request(facts))
            self._is_ready = True
            if launch.ending.is_set():
                self.send_signal()
            if self._failure:
                launch.show(f"{self.label}: is back")
                self._failure = ""
            for line in lines_of(self._process.stdout):
                if line == ssh_host.RUN_FOLLOWS and self._is_learner:
                    self._take_run(self._process.stdout, facts["place"])
                    break
                text = self._as_here(printable(line), facts["place"])
                text, is_port, port = text.partition(ssh_host.PORT_IS)
                if is_port and self._is_learner and _is_port(port):
                    launch.port = int(port)
                    if not text:
                        continue
                log.write(f"{text}\n".encode())
                self._last_line = one_line(text.strip(), 300)
                if self._is_learner:
                    sys.stdout.write(f"{text}\n")
            return int(self._process.wait())

    def _greet(self) -> dict[str, Any] | None:
        """Begin with the program on the host, and return the facts that it sends; None if it does
        not run.
        """
        needs_tensorflow = self._is_learner and not self.launch.job.is_script
        request = {
            "place": f"{self._place}+{secrets.token_hex(2)}",
            "modules": (*_MODULES, "tensorflow") if needs_tensorflow else _MODULES,
        }
        self._send(_SOURCE, json.dumps(request).encode() + b"\n")
        for raw in lines_of(self._process.stdout):
            line = raw.decode(errors="replace")
            if line.startswith(ssh_host.GREETING):
                return ssh_host.checked_facts(json.loads(line.removeprefix(ssh_host.GREETING)))
            self._last_line = one_line(line.strip(), 300)
        return None

    def _send(self, *parts: bytes) -> None:
        # the process ends then, and its output says why
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(b"".join(parts))
            self._process.stdin.flush()

    def _request(self, facts: dict[str, Any]) -> list[bytes]:
        """Return the request for the program on the host: a line, and archives."""
        launch = self.launch
        place = facts["place"]
        if facts["missing"]:
            raise ConfigError(
                f"{facts['python']} lacks {', '.join(facts['missing'])}:",
                key="hosts",
                hint="install aiorl's packages there, or name another Python by --python",
            )
        archives = [launch.packed_code, launch.files_for(is_learner=self._is_learner)]
        if facts["digest"] != ssh_host.package_digest(_PACKAGE):
            archives.append(_package_archive())
        if self._is_learner:
            launch.address = launch.address or facts["server"]
            module = launch.main_words(f"{place}/run", f"{place}/keys")
        else:
            address = url(launch.address or facts["client"], launch.port)
            number = ssh_host.CORES if self.workers is None else str(self.workers)
            module = ["aiorl.worker", "--connect", address, "--num-workers", number]
            if launch.keys:
                module += ["--keys", f"{place}/keys"]
        request = {
            "command": [facts["python"], "-P", "-m", *module],
            "cores": CORES,
            "leave_s": _LEARNER_LEAVE_S if self._is_learner else _WORKERS_LEAVE_S,
            "spare": int(self._name == launch.learner),
            "folder": os.path.dirname(launch.script_there()),
            "archives": [len(content) for content in archives],
        }
        return [json.dumps(request).encode() + b"\n", *archives]

    def _take_run(self, stream: IO[bytes], place: str) -> None:
        """Take the run directory that a learner's host sends, and make paths in its config those of
        this machine.
        """
        run_dir = self.launch.job.run_dir
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                _, *parts = PurePosixPath(member.name).parts
                content = tar.extractfile(member) if member.isfile() else None
                if (
                    content is not None
                    and parts
                    and ".." not in parts
                    and parts[0] not in _NOT_SENT
                ):
                    path = run_dir.joinpath(*parts)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        shutil.copyfileobj(content, file)
        config = run_dir / "config.yaml"
        if config.exists():
            config.write_text(self._as_here(config.read_text("utf-8"), place), "utf-8")

    def _as_here(self, text: str, place: str) -> str:
        """Return a text with paths of this machine for those of the host."""
        text = text.replace(f"{place}/keys", self.launch.keys)
        return text.replace(f"{place}/run", str(self.launch.job.run_dir))

    def beat(self) -> None:
        """Tell the program on the host that this one is alive."""
        if self._is_ready:
            self._send(b"\n")

    def poll(self) -> int | None:
        """Return `status`; None while the process runs."""
        return self.status

    def send_signal(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end; a host knows no other signal."""
        if self._process is not None and self._is_ready:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        elif self._process is not None:
            self._process.terminate()

    def change(self, workers: int | None) -> None:
        """Start the workers again with another number; 0 ends them."""
        if workers != self.workers:
            self.workers = workers
            self._is_changed = True
            self.send_signal()


# The engine
# --------------------------------------------------------------------------------------------------


def artefact(job: Job, options: dict[str, Any]) -> str:
    """See `Engine`."""
    launch = Launch(job, options)
    launch.script_there()
    lines = [
        f"# on {launch.learner or 'this machine'}",
        shlex.join(["python", "-P", "-m", *launch.main_words()]),
    ]
    for host, workers in launch.hosts.items():
        lines += [
            f"# on {host}: {workers or 'as many workers as cores'}, by",
            shlex.join(launch.program(host)),
        ]
    names = [launch.code]
    if launch.shipment is not None:
        names = launch.shipment.files
        if launch.shipment.left_out:
            lines.append(f"# {launch.shipment.about_left_out()}")
    lines.append(f"# sent to {launch.place}:")
    lines += [f"#   {one_line(str(name), 4000)}" for name in names]
    return "\n".join(lines) + "\n"


def run(job: Job, options: dict[str, Any]) -> int:
    """See `Engine`."""
    launch = Launch(job, options)
    logs = job.run_dir / "logs"
    launch.packed_code = code_archive(launch.code, include=launch.include)
    if launch.shipment is not None and launch.shipment.left_out:
        sys.stderr.write(f"aiorl: {launch.shipment.about_left_out()}\n")
    launch.script_there()
    job.make_place()
    with launcher_lock(job.run_dir):
        if launch.keys:
            job.make_keys()
        size = f"{len(launch.packed_code) / 1024:.1f} kB of code"
        sys.stderr.write(f"aiorl: {job.run_dir}; {size} go to {', '.join(launch.hosts)}\n")
        if launch.learner:
            sys.stderr.write(job.forward(launch.learner, options.get("ssh", "ssh")))
        _save_facts(launch)
        if options.get("detach"):
            if os.fork():
                for verb in ("status", "stop"):
                    sys.stdout.write(f"aiorl launch ssh {verb} {job.run_dir}\n")
                return 0
            os.setsid()
            with open(os.devnull) as nothing, (logs / "screen.txt").open("a") as screen:
                for number, file in enumerate((nothing, screen, screen)):
                    os.dup2(file.fileno(), number)
            _save_facts(launch)
        return _run_attached(launch)


def _save_facts(launch: Launch) -> None:
    """Save what verbs need: this process and where it runs, and the hosts."""
    facts = {
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "hosts": launch.hosts,
    }
    launch.job.save("ssh", facts)


def _run_attached(launch: Launch) -> int:
    """Run learner and workers until the learner ends, and return its status."""
    learner: Host | subprocess.Popen[bytes]
    run_json = launch.job.run_dir / "run.json"
    former = ssh_host.state_of(run_json)
    if launch.learner:
        learner = Host(launch, launch.learner, is_learner=True)
        learner.start()
    else:
        learner = subprocess.Popen(
            _command_here(launch),
            stdin=subprocess.PIPE,
            env={**os.environ, **python_path()},
            # a script gets each signal once, from here; a learner ignores repeated ones
            process_group=0 if launch.job.is_script else None,
        )
        assert learner.stdin is not None
        if not launch.job.is_script:
            launch.to_learner = learner.stdin
    signal_times: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        signal_times.append(time.monotonic())
        launch.ending.set()
        if signal_times[-1] - signal_times[0] > _TWICE_S:
            os._exit(128 + number)  # processes on hosts end by themselves
        if len(signal_times) == 1:
            learner.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, on_signal)
    hosts: dict[str, Host] = {}
    has_failed = False
    while learner.poll() is None:
        # it listens, on its former port or any
        if not launch.learner and ssh_host.state_of(run_json) != former:
            launch.port = ssh_host.port_in(run_json)
        if launch.port and not launch.ending.is_set():
            _update_hosts(launch, hosts)
        if not has_failed and hosts and all(host.status for host in hosts.values()):
            has_failed = True
            launch.show("no host is left; the run ends")
            learner.send_signal(signal.SIGTERM)
        for host in (*hosts.values(), learner):
            if isinstance(host, Host):
                host.beat()
        time.sleep(_POLL_S)
    launch.ending.set()
    status = learner.poll() or 0
    if status < 0 and not signal_times:
        _show_signal(launch, status)
    deadline = time.monotonic() + _GOODBYE_S
    for host in hosts.values():
        host.join(max(0.0, deadline - time.monotonic()))
        host.send_signal()
    for host in hosts.values():
        host.join(_END_S)
        if host.is_alive():
            launch.show(f"{host.label}: did not end in time; its processes end by themselves")
    if has_failed and launch.job.port and not launch.learner:  # perhaps before there was a display
        sys.stderr.write((launch.job.run_dir / "logs" / "launch.txt").read_text("utf-8"))
    if has_failed:
        return 1
    return status if status >= 0 else _BY_SIGNAL - status


def _show_signal(launch: Launch, status: int) -> None:
    """Show that a signal has ended the learner or the script on this machine, which had no time to
    say so.
    """
    part = "script" if launch.job.is_script else "learner"
    again = "starts it again" if launch.job.is_script else "continues from the newest checkpoint"
    launch.show(f"the {part} ended with {status_text(status)}; the same command {again}")


def _command_here(launch: Launch) -> list[str]:
    """Return the command of the learner, or of the script in its place, on this machine."""
    module, *words = launch.main_words()
    if launch.job.is_script:
        return [*child_python(module), "--exit-with-parent", *words]
    return [*child_python("aiorl.launch.ssh_learner"), *words[1:]]


def _update_hosts(launch: Launch, hosts: dict[str, Host]) -> None:
    """Start what the verb `add` has changed, or what has not been started yet."""
    # if the file was removed or damaged meanwhile, the hosts stay as they are
    with contextlib.suppress(ConfigError):
        _, facts = saved(str(launch.job.run_dir), "ssh", _FACTS)
        launch.hosts = facts["hosts"]
    for name, workers in launch.hosts.items():
        if name in hosts and hosts[name].is_alive():
            hosts[name].change(workers)
        elif name not in hosts or workers != hosts[name].workers:
            hosts[name] = Host(launch, name, workers)
            hosts[name].start()


@contextlib.contextmanager
def launcher_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run's only launcher.

    A process that is forked meanwhile holds the lock, too, and keeps it when this one ends. So the
    file is closed, and not unlocked.

    Raises:
        ConfigError: another launcher holds it.
        OSError: the file is not regular, or can't be opened.
    """
    path = run_dir / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    with open(descriptor, "r+"):
        check_regular(descriptor, path)
        deadline = time.monotonic() + _QUESTION_S
        while not _can_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{run_dir} is being launched:",
                    key="run_dir",
                    hint="stop that run, or name another.",
                )
            time.sleep(_QUESTION_S / 10)
        yield


def is_running(run_dir: Path) -> bool:
    """Return whether a run has a launcher.

    A launcher's lock is exclusive, and this shares the file for an instant, for which a launcher
    that starts then waits. So a question can't be taken for a launcher, neither by one nor by
    another question.

    Raises:
        OSError: the file is not regular, or can't be opened.
    """
    try:
        with open_regular(run_dir / _LOCK) as file:
            return not _can_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _can_lock(descriptor: int, kind: int) -> bool:
    """Lock a file without waiting, until it is closed; return False if another lock forbids it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _launcher(facts: dict[str, Any]) -> psutil.Process:
    """Return the process that launched a run, after checking that it is still the one.

    Raises:
        AiorlError: it is on another host, or its id belongs to another process now.
    """
    pid = facts["pid"]
    host = facts.get("host", socket.gethostname())
    if host != socket.gethostname():
        raise AiorlError(f"the launcher runs on {host!r:.100}, as process {pid}: run this there.")
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        words = process.cmdline()
        is_launcher = "ssh" in words and any("launch" in word for word in words)
        created = process.create_time()
        began = facts.get("began", created)
        has_begun_then = isinstance(began, int | float) and abs(created - began) < _SAME_START_S
        if process.uids().real == os.getuid() and is_launcher and has_begun_then:
            return process
    raise AiorlError(
        f"process {pid} is not the launcher of this run, which some other process locks: end that"
        " one."
    )


def _status(run: str, count: int = 1) -> int:
    run_dir, _ = saved(run, "ssh", _FACTS)
    state = "is running" if is_running(run_dir) else "has ended"
    sys.stdout.write(f"The run in {one_line(str(run_dir), 4000)} {state}.\n")
    show_ends(sorted(run_dir.glob("logs/*.txt")), count)
    return 0


def _stop(run: str) -> int:
    run_dir, facts = saved(run, "ssh", _FACTS)
    if is_running(run_dir):
        _launcher(facts).terminate()
        while is_running(run_dir):
            time.sleep(_POLL_S)
    return 0


def _add(run: str, word: str) -> int:
    run_dir, facts = saved(run, "ssh", _FACTS)
    hosts = facts["hosts"] | parse_hosts([word])
    Job(run_dir, (), {}).save("ssh", {**facts, "hosts": hosts})  # which the launcher reads
    return int(not is_running(run_dir))


VERBS = {
    "status": Verb(_status, "", "whether it runs, and the last words of each host"),
    "logs": Verb(lambda run: _status(run, 10), "", "the ends of all logs"),
    "add": Verb(
        _add, "HOST", "HOST or HOST=N joins, or starts again with N workers; HOST=0 leaves"
    ),
    "stop": Verb(_stop, "", "ends the run everywhere"),
}
