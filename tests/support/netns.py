"""Two simulated hosts: network namespaces joined by a link that can be cut, slowed and made lossy.

Needs root and iproute2. Delay and loss come from netem if the kernel has it, otherwise from a relay
between two TUN devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from learner_server import ForkedLearner, can_fork
from processes import Started

PORT = 5557
LEARNER_HOST, WORKER_HOST = "10.77.0.1", "10.77.0.2"

NEEDS_NAMESPACES = [
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux"
    ),
    pytest.mark.skipif(
        not shutil.which("ip") or not shutil.which("tc"),
        reason="iproute2 (ip, tc) is not installed",
    ),
]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class _Relay:
    """Relay of packets between two TUN devices, with delay and losses: netem in user space."""

    def __init__(self, names: tuple[str, str], delay_s: float, loss: float) -> None:
        self._files = [_open_tun(name) for name in names]
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)
        for file in self._files:
            os.close(file)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._ended.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, file, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the device is down
                    os.write(file, packet)
            pause = min(0.05, waiting[0][0] - now) if waiting else 0.05
            for file in select.select(self._files, [], [], max(0.0, pause))[0]:
                with contextlib.suppress(OSError):
                    packet = os.read(file, 65536)
                    if self._random.random() >= self._loss:
                        other = self._files[1 - self._files.index(file)]
                        due = time.monotonic() + self._delay_s
                        heapq.heappush(waiting, (due, next(numbers), other, packet))


def _open_tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # TUNSETIFF, TUN | NO_PI
    fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0001 | 0x1000))
    return file


class Network:
    """The namespaces ``learner`` and ``worker``, joined by one link."""

    def __init__(self, delay_s: float = 0.0, loss: float = 0.0) -> None:
        tag = secrets.token_hex(3)
        self.learner, self.worker = f"aiorl-l-{tag}", f"aiorl-w-{tag}"
        self._devices = {self.learner: f"al{tag}", self.worker: f"aw{tag}"}
        self._relay: _Relay | None = None
        self._processes: list[Process] = []
        try:
            self._build(delay_s, loss)
        except BaseException:
            self.close()
            raise

    def _build(self, delay_s: float, loss: float) -> None:
        for namespace in (self.learner, self.worker):
            _run("ip", "netns", "add", namespace)
        first, second = self._devices.values()
        netem = ("netem", "delay", f"{delay_s * 1000:.0f}ms", "loss", f"{loss * 100:g}%")
        if (delay_s or loss) and not _has_netem():
            self._relay = _Relay((first, second), delay_s, loss)
        else:
            _run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for (namespace, device), host in zip(
            self._devices.items(), (LEARNER_HOST, WORKER_HOST), strict=True
        ):
            _run("ip", "link", "set", device, "netns", namespace)
            _run("ip", "-n", namespace, "addr", "add", f"{host}/24", "dev", device)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "-n", namespace, "link", "set", device, "up")
            if (delay_s or loss) and self._relay is None:
                _run(
                    "ip",
                    "netns",
                    "exec",
                    namespace,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    *netem,
                )

    def cut(self) -> None:
        """Take the link down, unnoticed by connections."""
        _run("ip", "-n", self.worker, "link", "set", self._devices[self.worker], "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _run("ip", "-n", self.worker, "link", "set", self._devices[self.worker], "up")

    def start(self, namespace: str, *command: str) -> Process:
        """Start a command in a namespace; it ends with the network at the latest."""
        whole = ["ip", "netns", "exec", namespace, *command]
        return self._keep(
            subprocess.Popen(
                whole,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )

    def start_learner(self, *options: str) -> Process:
        """Run `python -m aiorl.learner` in the learner's namespace."""
        if not can_fork:
            return self.start(self.learner, sys.executable, "-m", "aiorl.learner", *options)
        return self._keep(ForkedLearner(list(options), dict(os.environ), namespace=self.learner))

    def _keep(self, process: subprocess.Popen[str] | ForkedLearner) -> Process:
        self._processes.append(Process(process))
        return self._processes[-1]

    def close(self) -> None:
        """End every process, and remove the namespaces."""
        for process in self._processes:
            process.end()
        if self._relay is not None:
            self._relay.close()
        for namespace, device in self._devices.items():
            for command in (
                ("ip", "-n", namespace, "link", "del", device),
                ("ip", "link", "del", device),
            ):
                subprocess.run(command, capture_output=True, timeout=20, check=False)
            subprocess.run(
                ("ip", "netns", "del", namespace), capture_output=True, timeout=20, check=False
            )


def _has_netem() -> bool:
    device = f"an{secrets.token_hex(3)}"
    try:
        _run("ip", "link", "add", device, "type", "veth", "peer", "name", f"{device}x")
        _run("tc", "qdisc", "add", "dev", device, "root", "netem", "delay", "1ms")
    except OSError:
        return False
    finally:
        subprocess.run(("ip", "link", "del", device), capture_output=True, timeout=20, check=False)
    return True


class Process(Started):
    """Process with its own session, with output lines to wait for."""

    def __init__(self, process: subprocess.Popen[str] | ForkedLearner) -> None:
        self._running = process
        super().__init__([])

    def _start(
        self, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[str] | ForkedLearner:
        return self._running

    def wait_for_text(self, pattern: str, timeout_s: float = 20.0) -> str:
        """Wait for a line that matches the pattern, and return it."""
        return self.lines[self.wait_for(pattern, timeout_s) - 1]

    def end(self) -> None:
        """Kill its whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().end()


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Return a function that makes `Network`s, which are always removed."""
    with contextlib.ExitStack() as stack:

        def make(**keywords: float) -> Network:
            made = Network(**keywords)
            stack.callback(made.close)
            return made

        yield make
