"""Processes that aiorl starts in tests, without the time to load what they import.

They are forked from one process that has loaded these modules, and not TensorFlow. A forked child
runs ``__main__`` from the first line, and is a child of this process with its own session,
arguments, environment, streams and descriptors. The children of a forked learner are forked from a
fork of it (`fork_from_here`). Processes that are started by other programs of tests, which are
processes themselves, load all by themselves as users' processes do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, Self

import psutil
import pytest

MODULES = (
    "aiorl.actors.process",
    "aiorl.env.remote_child",
    "aiorl.run.evaluation",
    "aiorl.web.ports",
    "aiorl.worker",
)
"""Modules of which children are forked."""
_IMPORTED = (
    *MODULES,
    "aiorl.compat.rollout_worker",
    "aiorl.run.trainer.trainer",
    "aiorl.run.worker.service",
    "aiorl.serving.external",
    "aiorl.testing.envs",
    "aiorl.testing.multi_agent_envs",
    "aiorl.watch.app",
    "aiorl.web.server",
    "pytest",
    "uvloop",
)
_PYTHON = sys.executable
_FORKS_CHILDREN = "forks children"
"""What a process from which others are forked shows as its command."""
_MAX_REQUEST = 1 << 20
_MAX_DESCRIPTORS = 16
ROOM_FOR_A_COMMAND = " " * 1000
"""Last argument of a process from which others are forked: they write their commands there."""
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork the children that aiorl starts in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            _fork_children(patch)
        yield


def fork_from_here() -> None:
    """Fork the children that aiorl starts in this process from a fork of it.

    This process has loaded what they need, TensorFlow too, and has one thread.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()  # Ctrl-C in the terminal of a learner is not for this process
        signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        _serve(theirs)
    theirs.close()
    _servers[parent] = _Server(ours)
    _fork_children(pytest.MonkeyPatch())


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _fork_children(patch: pytest.MonkeyPatch) -> None:
    from aiorl.process import children

    own = SimpleNamespace(**{**vars(subprocess), "Popen": _start})
    patch.setattr(children, "subprocess", own)
    patch.setattr(asyncio, "create_subprocess_exec", _start_for_loop)


def children_of(pid: int) -> set[psutil.Process]:
    """Return all processes below a process, without those from which its children are forked."""
    below = psutil.Process(pid).children(recursive=True)
    return {process for process in below if not _forks_children(process)}


def _forks_children(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _FORKS_CHILDREN in process.cmdline()
    return False


_start_in_loop = asyncio.create_subprocess_exec


def is_child(command: Sequence[str]) -> bool:
    """Return whether a command is one of those of aiorl's children."""
    return [*command[:3]] == [_PYTHON, "-P", "-m"] and command[3] in MODULES


def _start(command: Sequence[str], **options: Any) -> Any:
    return (_Forked if is_child(command) else subprocess.Popen)(command, **options)


async def _start_for_loop(*command: str, **options: Any) -> Any:
    if not is_child(command):
        return await _start_in_loop(*command, **options)
    ours, theirs = socket.socketpair()
    with theirs:
        options |= {"stdin": theirs.fileno(), "stdout": theirs}
        limit = options.pop("limit")
        forked = _Forked(command, **options)
    return _InLoop(forked, *await asyncio.open_connection(sock=ours, limit=limit))


class _InLoop:
    """A forked child, with the part of `asyncio.subprocess.Process` that aiorl uses."""

    def __init__(
        self, forked: _Forked, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        self._forked = forked
        self.pid = forked.pid
        self.stdout = stdout
        self.stdin = stdin
        self.kill = forked.kill

    async def wait(self) -> int:
        self.stdin.close()
        return self._forked.wait()


class _Forked:
    """A forked child, with the part of `subprocess.Popen` that aiorl uses."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: IO[bytes] | socket.socket | None = None,
        stderr: IO[bytes] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args = command
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        if stdin == subprocess.PIPE:
            read, write = os.pipe()
            self.stdin = os.fdopen(write, "wb", buffering=0)
        elif stdin == subprocess.DEVNULL:
            read = os.open(os.devnull, os.O_RDONLY)
        else:
            assert stdin is not None
            read = os.dup(stdin)
        descriptors = {
            0: read,
            1: 1 if stdout is None else stdout.fileno(),
            2: 2 if stderr is None else stderr.fileno(),
            **{descriptor: descriptor for descriptor in pass_fds},
        }
        request = {
            "command": command,
            "environment": dict(env),
            "directory": os.getcwd(),
            "session": start_new_session,
            "descriptors": list(descriptors),
        }
        try:
            self.pid = _server().fork(request, list(descriptors.values()))
        finally:
            os.close(read)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.002)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_program(command: list[str], environment: Mapping[str, str]) -> Any:
    """Fork a process that runs ``python -c CODE WORDS`` or ``python -P -m MODULE WORDS``, and return
    it; its output and errors are read as text from its `stdout`.
    """
    if sys.platform != "linux":
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    read, write = os.pipe()
    with os.fdopen(write, "wb") as output:
        forked = _Forked(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    forked.stdout = os.fdopen(read, encoding="utf-8")
    return forked


class _Server:
    """Process from which the children of this process are forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._lock = threading.Lock()
        self._connection = connection
        self._libc = ctypes.CDLL(None)

    @classmethod
    def start(cls) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), ROOM_FOR_A_COMMAND],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": ""},
                pass_fds=(theirs.fileno(),),
            )

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)
        return cls(ours)

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the process id of a new child of this process."""
        with self._lock:
            # its parent in the server ends at once, so it gets this one
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                pid = int(self._connection.recv(64) or 0)
                self._connection.recv(64)  # the one between has ended
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not pid:
            raise RuntimeError("the process that forks children has ended")
        return pid


_servers: dict[int, _Server] = {}


def _server() -> _Server:
    """Return the server of this process; a fork of this process gets its own."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _Server.start()
    return _servers[os.getpid()]


# The process from which children are forked
# --------------------------------------------------------------------------------------------------


def load() -> None:
    """Import what children need."""
    for module in _IMPORTED:
        with contextlib.suppress(ImportError):  # an optional package is missing
            importlib.import_module(module)


def _serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _show([_FORKS_CHILDREN])
    load()
    for module in MODULES:
        del sys.modules[module]  # each child runs one of them as its main module
    if threading.active_count() > 1:
        raise RuntimeError(f"forked processes would lack these threads: {threading.enumerate()}")
    import gc

    gc.freeze()  # loaded modules stay shared
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child:
                connection.send(str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            _become(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.send(b"started")


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    from aiorl.process.early import begin

    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin()
    if request["session"]:
        os.setsid()
    numbers = request["descriptors"]
    above = max(*numbers, *descriptors, 255) + 1
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + place)
    os.closerange(3, above)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
    os.closerange(above, above + len(numbers))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = dict.fromkeys(path)
    _show(request["command"])
    sys.orig_argv = request["command"]
    run_and_end(functools.partial(_run, request["command"][1:]))


def run_and_end(run: Callable[[], object]) -> NoReturn:
    """Run a program in this forked process, with random numbers of its own, and end the process
    with the program's status.
    """
    import random

    import numpy as np

    random.seed()
    np.random.seed()
    status: Any = 1
    try:
        run()
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(status, str):
        os.write(2, f"{status}\n".encode())
    os._exit(status if isinstance(status, int) else int(status is not None))


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        _, _, module, *others = words
        sys.argv = [module, *others]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show(command: Sequence[str]) -> None:
    """Write a command where other processes see the arguments of this one."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])
    shown = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    low = os.dup(int(sys.argv[1]))
    os.close(int(sys.argv[1]))
    _serve(socket.socket(fileno=low))
