"""Cost of attacks: the training rate during and after an attack, compared with the rate without
one.

A learner, started as a user would start it with one local worker, is attacked by a separate process
(`attacker`), one kind after another. During an attack both share the whole machine, and the
learner's rate is compared with the rates just before and just after. An attack that seems to cost
too much is repeated twice, and the median counts.

Lasting harm is smaller than the machine's noise, so it is measured against a twin that is never
attacked. Between attacks both train at the same time, each on its own core, and they swap cores
with each window of time. Neither a machine that slows down nor a slower core distorts the result.
The learner's rate as a share of the twin's, over all quiet windows after an attack, is compared
with that over all quiet windows before it.
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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from aiorl.keys import make_keys
from benchmarks.chaos.link import free_pair
from benchmarks.chaos.progress import Progress
from benchmarks.memory_attacks import memory_of_client_port, memory_of_learner, memory_of_server
from benchmarks.result import Figure

__all__ = [
    "Compared",
    "Window",
    "attacks_admitted",
    "attacks_closed",
    "attacks_memory",
    "attacks_open",
    "compared",
]

DURING, AFTER = 0.7, 0.97
WINDOW_S, ATTACK_S = 2.0, 6.0
TIMES = 3
PAIRS_AT_ENDS, PAIRS_BETWEEN = 30, 3
"""Pairs of quiet windows at the ends (before the first and after the last attack), and between two
attacks.

A pair covers both cores.
"""

_MAX_FILES = 1024
_STARTS_S, _SETTLES_S, _ENDS_S = 90.0, 12.0, 30.0
_MOVES_S = 0.4  # until rates reflect the new cores and their other load
_RESULT_S = 0.6  # until the first result after a window is written
_OPTIONS = (
    "--env=CartPole-v1",
    "--algo=impala",
    "--num-workers=1",
    "--num-envs-per-worker=64",
    "--vectorize=native",
)

_ANYONE = ("knocking", "resets", "descriptors", "silence", "garbage")
_UNREGISTERED = ("large messages", "decompression bombs", "long names", "pings")
_REGISTERED = ("hellos", "coming and going", "failures", "subscriptions", "metrics")


def attacks_open() -> list[Figure]:
    """Attack a learner without keys (``--insecure``), where every peer may register."""
    with _run("--insecure") as run:
        return run.measure(
            [(kind, "anyone") for kind in (*_ANYONE, *_UNREGISTERED, *_REGISTERED)], "open"
        )


def attacks_closed() -> list[Figure]:
    """Attack a learner with keys, by peers that are not admitted."""
    with _run_with_keys() as run:
        return run.measure(
            [("knocking", "stranger"), *((kind, "keyless") for kind in _ANYONE)], "closed"
        )


def attacks_admitted() -> list[Figure]:
    """Attack the same learner, by peers that have a worker's key."""
    with _run_with_keys() as run:
        return run.measure([(kind, "admitted") for kind in _REGISTERED], "closed")


def attacks_memory() -> list[Figure]:
    """Attack the memory of a learner without keys, of a server of policies, and of a run's port for
    clients.
    """
    with _learner("--insecure") as learner:
        figures = memory_of_learner(learner.port, learner.pid)
    return figures + memory_of_server() + memory_of_client_port()


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of training: env steps trained on per second, by the learner and its twin."""

    rate: float
    twin_rate: float


@dataclass(frozen=True, slots=True)
class Compared:
    """Env steps trained on per second, measured and as expected without an attack."""

    rate: float
    expected: float

    @property
    def ratio(self) -> float:
        """Remaining share of the rate."""
        return self.rate / self.expected


def compared(before: Sequence[Window], windows: Sequence[Window]) -> Compared:
    """Compare windows with the rate expected if the twin's share were the same as before; geometric
    means.
    """
    share = _mean([each.rate / each.twin_rate for each in before])
    return Compared(
        _mean([each.rate for each in windows]), share * _mean([each.twin_rate for each in windows])
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


class _Learner:
    """Learner that trains, with its worker."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, run_dir: Path) -> None:
        self.port, self.pid = port, process.pid
        self._process = process
        self._progress = Progress(run_dir / "result.jsonl")

    def wait(self, log: Path) -> None:
        """Wait until it has trained for a while."""
        deadline = time.monotonic() + _STARTS_S
        while len(self._progress.rises) < 3:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the learner does not train: {log.read_text()[-2000:]}")
            time.sleep(0.2)
            self._progress.read()

    def move(self, cores: Collection[int]) -> None:
        """Move all its threads, and its worker's, to the given cores."""
        for process in self._processes():
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop learner and worker for the duration of the block; the learner never sees its worker
        stand still.
        """
        found = self._processes()
        for process in found:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:  # a stopped process can't end, nor notice that its worker has ended
            for process in reversed(found):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _processes(self) -> list[psutil.Process]:
        learner = psutil.Process(self._process.pid)
        return [learner, *learner.children(recursive=True)]

    def trained(self, begin: float, end: float) -> float:
        """Return env steps trained on per second between two times; the later one was `_RESULT_S`
        ago.

        Raises:
            RuntimeError: the learner has ended.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"the learner ended with status {self._process.returncode}")
        self._progress.read()
        at = [row.at for row in self._progress.rows]
        trained = [row.trained for row in self._progress.rows]
        return float(np.diff(np.interp((begin, end), at, trained))[0]) / (end - begin)

    def end(self) -> None:
        """Kill learner and worker."""
        self._process.terminate()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Run:
    """Learner under attack, and its twin."""

    def __init__(self, learner: _Learner, twin: _Learner, keys: str | None) -> None:
        self._learner, self._twin = learner, twin
        self._keys = keys
        self._cores = sorted(os.sched_getaffinity(0))[:2]

    def measure(self, attacks: Sequence[tuple[str, str]], label: str) -> list[Figure]:
        """Return figures during and after each attack (kind, attacker), with the rate expected
        without it.

        If the rate after an attack seems too low, as many quiet windows are measured again for a
        more precise answer.
        """
        during, quiet = [], [self._quiet(PAIRS_AT_ENDS)]
        for kind, who in attacks:
            times = [self._attacked(kind, who)]
            while len(times) == 2 or (len(times) < TIMES and times[-1].ratio < DURING):
                times.append(self._attacked(kind, who))
            during.append(sorted(times, key=lambda each: each.ratio)[len(times) // 2])
            quiet.append(self._quiet(PAIRS_BETWEEN))
        quiet[-1] += self._quiet(PAIRS_AT_ENDS)
        if any(after.ratio < AFTER for after in _after(quiet)):
            quiet[-1] += self._quiet(PAIRS_AT_ENDS)
        figures = []
        for (kind, who), *found in zip(attacks, during, _after(quiet), strict=True):
            for when, one, bar in zip(("during", "after"), found, (DURING, AFTER), strict=True):
                name = f"attacks/{label}, {who}: {kind}, {when}"
                figures.append(
                    Figure(name, one.rate, "env steps/s", one.expected, target_ratio=bar)
                )
        return figures

    def _attacked(self, kind: str, who: str) -> Compared:
        """Return the rate during an attack, and the mean of those before and after it; the learner
        has all cores.
        """
        with self._twin.stopped():
            self._learner.move(self._cores)
            spans = [self._window(WINDOW_S)]
            command = [sys.executable, "-m", "benchmarks.attacker", kind, "--who", who]
            command += ["--port", str(self._learner.port), "--seconds", str(ATTACK_S + _MOVES_S)]
            command += [] if self._keys is None else ["--keys", self._keys]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()  # the attack begins
                spans.append(self._window(ATTACK_S))
                output, _ = attacker.communicate(timeout=_ENDS_S)
                if attacker.returncode:
                    raise RuntimeError(f"the attacker failed: {kind} as {who}")
            spans.append(self._window(WINDOW_S))
            time.sleep(_RESULT_S)
            before, rate, behind = (self._learner.trained(*span) for span in spans)
        said = {
            **json.loads(output),
            "who": who,
            "rates": [round(each) for each in (before, rate, behind)],
        }
        print(json.dumps(said), flush=True)
        return Compared(rate, statistics.mean((before, behind)))

    def _quiet(self, pairs: int) -> list[Window]:
        spans = []
        for _ in range(2 * pairs):
            self._cores.reverse()
            for learner, core in zip((self._learner, self._twin), self._cores, strict=True):
                learner.move([core])
            spans.append(self._window(WINDOW_S))
        time.sleep(_RESULT_S)
        return [Window(self._learner.trained(*span), self._twin.trained(*span)) for span in spans]

    def _window(self, seconds: float) -> tuple[float, float]:
        """Wait for the given time; return when it began and ended."""
        time.sleep(_MOVES_S)
        begin = time.time()
        time.sleep(seconds)
        return begin, time.time()


def _after(quiet: Sequence[Sequence[Window]]) -> list[Compared]:
    """Compare, for each attack, the quiet windows after it with those before it."""
    found = []
    for number in range(1, len(quiet)):
        before, behind = (
            [window for some in part for window in some]
            for part in (quiet[:number], quiet[number:])
        )
        found.append(compared(before, behind))
    return found


@contextlib.contextmanager
def _run(*options: str, keys: str | None = None) -> Iterator[_Run]:
    with _learner(*options) as learner, _learner(*options) as twin:
        time.sleep(_SETTLES_S)
        yield _Run(learner, twin, keys)


@contextlib.contextmanager
def _run_with_keys() -> Iterator[_Run]:
    with tempfile.TemporaryDirectory() as keys:
        make_keys(Path(keys))
        with _run(f"--keys={keys}", keys=keys) as run:
            yield run


@contextlib.contextmanager
def _learner(*options: str) -> Iterator[_Learner]:
    pair = free_pair()
    port = int(pair[0].getsockname()[1])
    for each in pair:
        each.close()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "learner.txt").open("wb") as log:
        run_dir = Path(folder, "run")
        words = [
            *_OPTIONS,
            *options,
            f"--bind=tcp://127.0.0.1:{port}",
            f"--run-dir={run_dir}",
            "--seed=1",
        ]
        words += ["--min-iter-time-s=0.25"]
        process = subprocess.Popen(
            [sys.executable, "-m", "aiorl.learner", *words], stdout=log, stderr=log
        )
        learner = _Learner(process, port, run_dir)
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
            learner.wait(Path(log.name))
            yield learner
        finally:
            learner.end()
