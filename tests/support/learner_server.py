"""Learner processes without the time to load TensorFlow: forked from one server process for all
processes of the tests.

A forked process does the same as ``python -m aiorl.learner``, or as another module or program: it
has its own session, arguments, working directory, environment and standard streams, and runs
``__main__`` from the first line. Only the modules are already loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quick_variables
from forked_children import (
    ROOM_FOR_A_COMMAND,
    fork_from_here,
    load,
    run_and_end,
    signal_at_end_of_parent,
)

can_fork = hasattr(os, "pidfd_open")
"""True if this platform has such learners; otherwise learners are usual processes."""

LEARNER = "aiorl.learner"
LOADED_CHILDREN = {"CHILDREN_OF_TESTS": "loaded"}
"""Environment variable of a learner whose children load all by themselves as users' processes do;
others are forked, with TensorFlow loaded."""
_MAX_REQUEST = 1 << 20
_CLONE_NEWNET = 0x40000000  # <sched.h>
_SHARED = "LEARNER_SERVER_OF_TESTS"  # without AIORL_: tests check for leaks of these
_server: _Server | None = None


def share_server() -> Callable[[], None]:
    """Start the server for this process and for the ones that it starts later, and return a
    function that ends it.
    """
    server = _Server()
    os.environ[_SHARED] = server.address
    return server.end


class ForkedLearner:
    """A forked learner, with the part of `subprocess.Popen` that tests use.

    Attributes:
        pid: its process id.
        stdout: its standard output and error, as text.
        returncode: as in `subprocess.Popen`; None while it runs.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        *,
        module: str = LEARNER,
        script: str = "",
        directory: str = "",
        namespace: str = "",
    ) -> None:
        """Start the learner.

        Args:
            arguments: command-line arguments.
            environment: all its environment variables.
            module: module to run as ``python -m`` does.
            script: path of a program to run instead of a module.
            directory: working directory; "" is the current one.
            namespace: name of its network namespace; "" is that of this process.
        """
        global _server
        if _server is None or not _server.is_alive:
            _server = _Server()
        read, write = os.pipe()
        self.stdout = os.fdopen(read, encoding="utf-8")
        self.returncode: int | None = None
        try:
            self._connection = _server.connect()
            request = {
                "arguments": arguments,
                "environment": environment,
                "module": module,
                "script": script,
                "directory": directory or os.getcwd(),
                "namespace": namespace,
            }
            socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], [write])
            self.pid = int(self._line() or "0")
        finally:
            os.close(write)
        if not self.pid:
            raise RuntimeError("the server of learners has ended")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = self._line()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("learner", timeout or 0.0) from None
            self.returncode = os.waitstatus_to_exitcode(int(status)) if status else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _line(self) -> str:
        """Read a short answer, which arrives as one message."""
        return self._connection.recv(64).decode()


class _Server:
    """Server process of the process that has started this one, or a new server process that ends
    with this one.
    """

    def __init__(self) -> None:
        self.address = os.environ.get(_SHARED, "")
        self._process: subprocess.Popen[bytes] | None = None
        if self.address:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="learners-")
        self.address = os.path.join(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, self.address, ROOM_FOR_A_COMMAND],
            stdin=subprocess.PIPE,
        )
        atexit.register(self.end)

    @property
    def is_alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                connection.connect(self.address)
                return connection
            except OSError:
                if time.monotonic() > deadline or not self.is_alive:
                    raise
                time.sleep(0.02)

    def end(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # it may still be loading
        self._process.communicate()
        self._folder.cleanup()


def _load() -> None:
    """Import a learner's modules, and TensorFlow as a learner does."""
    from aiorl.config.parts import RuntimePart
    from aiorl.learning import tf_runtime

    tf_runtime.import_tensorflow(RuntimePart())
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import tensorflow as tf
    import tf2onnx.convert  # noqa: F401
    import uvloop  # noqa: F401
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from aiorl.learning.algorithms import impala, ppo  # noqa: F401
    from aiorl.learning.models import catalog, export  # noqa: F401

    FigureCanvasAgg(Figure()).print_png(io.BytesIO())  # also finds fonts
    load()
    # tests run a graph only a few times: optimising it takes longer
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    quick_variables.install()


def _serve(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    _load()
    if threading.active_count() > 1:
        raise RuntimeError(
            "threads run after the imports, which forked processes would lack:"
            f" {threading.enumerate()}"
        )
    import gc

    gc.freeze()  # loaded modules stay shared
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            if key.fileobj is listener:
                _fork(listener, selector)
            else:
                pid, connection = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    connection.send(str(status).encode())
                connection.close()


def _fork(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    message, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 1)
    request = json.loads(message)
    pid = os.fork()
    if pid == 0:
        others = [key.fd for key in selector.get_map().values() if key.fd != 0]
        others += [
            key.data[1].fileno() for key in selector.get_map().values() if key.data is not None
        ]
        for descriptor in (*others, connection.fileno(), selector.fileno()):
            os.close(descriptor)
        _become_learner(request, descriptors[0])
    os.close(descriptors[0])
    connection.send(str(pid).encode())
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _become_learner(request: dict[str, Any], output: int) -> None:
    import runpy

    os.setsid()
    signal_at_end_of_parent(signal.SIGTERM)  # tests that are killed leave no learner behind
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 256)
    if request["namespace"]:
        _enter_network(request["namespace"])
    if not LOADED_CHILDREN.items() <= request["environment"].items():
        fork_from_here()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = dict.fromkeys([request["directory"], *path])
    sys.argv = ["-m", *request["arguments"]]

    def run() -> None:
        if request["script"]:
            runpy.run_path(request["script"], run_name="__main__")
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)

    run_and_end(run)


def _enter_network(namespace: str) -> None:
    """Enter a network namespace like `ip netns exec`; os.setns comes with Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    _serve(sys.argv[1])
