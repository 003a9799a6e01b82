"""What attacks cost: the training rate during one and after it, over what it would have been without.

A learner as a user would start it, with one worker of its own, is attacked by a process beside it (`attacker`), kind
after kind. A twin of it, which nobody attacks, tells how fast the machine is at that time: both are measured by turns,
a few seconds each, and the one whose turn it is not is stopped. A rate counts as a share of the twin's just before and
just after it, and that share is compared to the one before the attack; after it, the median of several counts. A kind
that seems to cost too much is measured twice more, and the median counts. Each round is printed, also with env steps
per second of processor time of learner and worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.chaos.link import free_pair
from benchmarks.chaos.progress import Progress
from benchmarks.result import Figure

__all__ = ["Window", "attacks_admitted", "attacks_closed", "attacks_open", "compared"]

DURING, AFTER = 0.7, 0.97
WINDOW_S, ATTACK_S = 3.0, 6.0
ROUNDS = 3
NUM_BEFORE, NUM_AFTER = 2, 3

_MAX_FILES = 1024
_STARTS_S, _SETTLES_S, _ENDS_S = 90.0, 6.0, 30.0
_GOES_ON_S = 1.0  # until it works as before it was stopped
_RESULT_S = 0.5  # until a result that comes after a window is there
_OPTIONS = ("--env=CartPole-v1", "--algo=impala", "--num-workers=1", "--num-envs-per-worker=64", "--vectorize=native")

_ANYONE = ("knocking", "resets", "descriptors", "silence", "garbage")
_UNREGISTERED = ("large messages", "decompression bombs", "long names", "pings")
_REGISTERED = ("hellos", "coming and going", "failures", "subscriptions", "metrics")


def attacks_open() -> list[Figure]:
    """A learner without keys (``--insecure``), where everyone may register."""
    with _run("--insecure") as run:
        kinds = (*_ANYONE, *_UNREGISTERED, *_REGISTERED)
        return [figure for kind in kinds for figure in run.measure(kind, "anyone", "open")]


def attacks_closed() -> list[Figure]:
    """A learner on loopback as it is by default, and peers that are not admitted."""
    with _run() as run:
        pairs = [("knocking", "stranger"), *((kind, "keyless") for kind in _ANYONE)]
        return [figure for kind, who in pairs for figure in run.measure(kind, who, f"closed, {who}")]


def attacks_admitted() -> list[Figure]:
    """The same learner, and peers that have the run's key."""
    with _run() as run:
        return [figure for kind in _REGISTERED for figure in run.measure(kind, "admitted", "closed, admitted")]


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of training.

    Attributes:
        rate: env steps trained on per second.
        twin_rate: the twin's just before and just after.
    """

    rate: float
    twin_rate: float


@dataclass(frozen=True, slots=True)
class _Compared:
    """Env steps trained on per second, and what they would have been without the attack."""

    rate: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.rate / self.expected


@dataclass(frozen=True, slots=True)
class _Round:
    during: _Compared
    after: _Compared

    @property
    def is_good(self) -> bool:
        return self.during.ratio >= DURING and self.after.ratio >= AFTER


def compared(before: Sequence[Window], window: Window) -> _Compared:
    """A window, and what it would have been if only the machine had changed since those before."""
    share = statistics.mean(each.rate / each.twin_rate for each in before)
    return _Compared(window.rate, share * window.twin_rate)


class _Learner:
    """A learner that trains, with its worker; stopped but in its turns."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, run_dir: Path) -> None:
        self.port = port
        self._process = process
        self._progress = Progress(run_dir / "result.jsonl")

    def wait(self, log: Path) -> None:
        """Wait until it has trained for a while, then stop it."""
        deadline = time.monotonic() + _STARTS_S
        while len(self._progress.rises) < 3:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the learner does not train: {log.read_text()[-2000:]}")
            time.sleep(0.2)
            self._progress.read()
        time.sleep(_SETTLES_S)
        self.stop()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it work as long as the block lasts, and a little before and after."""
        self._signal(signal.SIGCONT)
        time.sleep(_GOES_ON_S)
        yield
        time.sleep(_RESULT_S)
        self.stop()
        if self._process.poll() is not None:
            raise RuntimeError(f"the learner ended with status {self._process.returncode}")
        self._progress.read()

    def stop(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End it for good."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """Processor time of learner and worker, which nothing ends here."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)

    def trained(self, begin: float, end: float) -> float:
        """Env steps trained on between two times of a turn that has ended."""
        at = [row.at for row in self._progress.rows]
        trained = [row.trained for row in self._progress.rows]
        return float(np.diff(np.interp((begin, end), at, trained))[0])

    def _processes(self) -> list[psutil.Process]:
        learner = psutil.Process(self._process.pid)
        return [learner, *learner.children(recursive=True)]

    def _signal(self, number: signal.Signals) -> None:
        """Workers are stopped last and go on first: the learner never sees them stand still."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = self._processes()
            for process in found if number == signal.SIGSTOP else reversed(found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _Run:
    """A learner that is attacked, and its twin."""

    def __init__(self, learner: _Learner, twin: _Learner) -> None:
        self._learner = learner
        self._twin = twin

    def measure(self, kind: str, who: str, label: str) -> list[Figure]:
        """Figures during and after an attack, beside what would have been without."""
        rounds = [self._round(kind, who)]
        while len(rounds) == 2 or (len(rounds) < ROUNDS and not rounds[-1].is_good):
            rounds.append(self._round(kind, who))
        figures = []
        for when, bar in (("during", DURING), ("after", AFTER)):
            median = _middle([getattr(each, when) for each in rounds])
            name = f"attacks/{label}: {kind}, {when}"
            figures.append(Figure(name, median.rate, "env steps/s", median.expected, target_ratio=bar))
        return figures

    def _round(self, kind: str, who: str) -> _Round:
        twins = [self._measured(self._twin)]
        own: list[tuple[float, float]] = []
        said: dict[str, object] = {}
        for number in range(NUM_BEFORE + 1 + NUM_AFTER):
            if number == NUM_BEFORE:
                measured, said = self._attacked(kind, who)
                own.append(measured)
            else:
                own.append(self._measured(self._learner))
            twins.append(self._measured(self._twin))
        windows = [
            Window(rate, (twin[0] + next_twin[0]) / 2)
            for (rate, _), twin, next_twin in zip(own, twins, twins[1:], strict=False)
        ]
        before, during, after = windows[:NUM_BEFORE], windows[NUM_BEFORE], windows[NUM_BEFORE + 1 :]
        found = _Round(compared(before, during), _middle([compared(before, each) for each in after]))
        said |= {"who": who, "rates": [round(rate) for rate, _ in own], "twin": [round(rate) for rate, _ in twins]}
        said |= {"per_cpu_s": [round(per_cpu) for _, per_cpu in own]}
        said |= {"during": round(found.during.ratio, 3), "after": round(found.after.ratio, 3)}
        print(json.dumps(said), flush=True)
        return found

    def _attacked(self, kind: str, who: str) -> tuple[tuple[float, float], dict[str, object]]:
        command = [sys.executable, "-m", "benchmarks.attacker", kind, "--who", who]
        command += ["--port", str(self._learner.port), "--seconds", str(ATTACK_S)]
        with self._learner.turn(), subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it begins
            begin, cpu_s = time.time(), self._learner.cpu_s()
            time.sleep(ATTACK_S)
            end, cpu_s = time.time(), self._learner.cpu_s() - cpu_s
            output, _ = attacker.communicate(timeout=_ENDS_S)
            if attacker.returncode:
                raise RuntimeError(f"the attacker failed: {kind} as {who}")
        steps = self._learner.trained(begin, end)
        return (steps / (end - begin), steps / cpu_s), json.loads(output)

    def _measured(self, learner: _Learner) -> tuple[float, float]:
        """Env steps trained on per second, and per second of processor time."""
        with learner.turn():
            begin, cpu_s = time.time(), learner.cpu_s()
            time.sleep(WINDOW_S)
            end, cpu_s = time.time(), learner.cpu_s() - cpu_s
        steps = learner.trained(begin, end)
        return steps / (end - begin), steps / cpu_s


def _middle(found: Sequence[_Compared]) -> _Compared:
    """The one of the median ratio, of an odd number."""
    return sorted(found, key=lambda each: each.ratio)[len(found) // 2]


@contextlib.contextmanager
def _run(*options: str) -> Iterator[_Run]:
    with _learner(*options) as learner, _learner(*options) as twin:
        yield _Run(learner, twin)


@contextlib.contextmanager
def _learner(*options: str) -> Iterator[_Learner]:
    pair = free_pair()
    port = int(pair[0].getsockname()[1])
    for each in pair:
        each.close()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "learner.txt").open("wb") as log:
        run_dir = Path(folder, "run")
        words = [*_OPTIONS, *options, f"--bind=tcp://127.0.0.1:{port}", f"--run-dir={run_dir}", "--seed=1"]
        words += ["--min-iter-time-s=0.25"]
        process = subprocess.Popen([sys.executable, "-m", "aiorl.learner", *words], stdout=log, stderr=log)
        learner = _Learner(process, port, run_dir)
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
            learner.wait(Path(log.name))
            yield learner
        finally:
            learner.end()
