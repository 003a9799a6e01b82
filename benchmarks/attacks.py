"""What attacks cost: the training rate during one and after it, over that before it in the same run.

A learner as a user would start it, with one worker of its own, is attacked by a process beside it (`attacker`), kind
after kind. A kind that seems to cost too much is measured twice more, and the median counts: on a machine that does
something else too, rates differ by more than the bars allow from one moment to the next. Each round is printed, also
with env steps per second of processor time of learner and worker: where that stays as it was, a lower rate comes from
what else runs.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.chaos.link import free_pair
from benchmarks.chaos.progress import Progress
from benchmarks.result import Figure

__all__ = ["attacks_admitted", "attacks_closed", "attacks_open"]

DURING, AFTER = 0.7, 0.97
WINDOW_S = 8.0
ROUNDS = 3

_MAX_FILES = 1024
_STARTS_S, _SETTLES_S, _ENDS_S = 90.0, 6.0, 30.0
_BETWEEN_S = 1.0
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
class _Rates:
    """Env steps trained on per second."""

    before: float
    during: float
    after: float

    @property
    def is_good(self) -> bool:
        return self.during >= DURING * self.before and self.after >= AFTER * self.before


@dataclass(frozen=True, slots=True)
class _Span:
    """Some time, and what learner and worker computed in it."""

    begin: float
    end: float
    cpu_s: float


class _Run:
    """A learner that trains."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, run_dir: Path) -> None:
        self._process = process
        self._port = port
        self._progress = Progress(run_dir / "result.jsonl")

    def wait(self, log: Path) -> None:
        """Wait until it has trained for a while."""
        deadline = time.monotonic() + _STARTS_S
        while len(self._progress.rises) < 3:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the learner does not train: {log.read_text()[-2000:]}")
            time.sleep(0.2)
            self._progress.read()
        time.sleep(_SETTLES_S)

    def measure(self, kind: str, who: str, label: str) -> list[Figure]:
        """Figures during and after an attack, beside those before it."""
        rounds = [self._round(kind, who)]
        while len(rounds) == 2 or (len(rounds) < ROUNDS and not rounds[-1].is_good):
            rounds.append(self._round(kind, who))
        figures = []
        for when, bar in (("during", DURING), ("after", AFTER)):
            ratios = {getattr(each, when) / each.before: each for each in rounds}
            median = ratios[statistics.median(ratios)]
            value = getattr(median, when)
            name = f"attacks/{label}: {kind}, {when}"
            figures.append(Figure(name, value, "env steps/s", median.before, target_ratio=bar))
        return figures

    def _round(self, kind: str, who: str) -> _Rates:
        spans = [self._let_pass()]
        command = [sys.executable, "-m", "benchmarks.attacker", kind, "--who", who]
        command += ["--port", str(self._port), "--seconds", str(WINDOW_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it begins
            spans.append(self._let_pass())
            output, _ = attacker.communicate(timeout=_ENDS_S)
            if attacker.returncode:
                raise RuntimeError(f"the attacker failed: {kind} as {who}")
        time.sleep(_BETWEEN_S)
        spans.append(self._let_pass())
        time.sleep(2 * _BETWEEN_S)  # until a result that comes after it is there
        if self._process.poll() is not None:
            raise RuntimeError(f"the learner ended with status {self._process.returncode} after {kind} as {who}")
        self._progress.read()
        at = [row.at for row in self._progress.rows]
        trained = [row.trained for row in self._progress.rows]
        steps = [float(np.diff(np.interp((span.begin, span.end), at, trained))[0]) for span in spans]
        rates = [count / (span.end - span.begin) for count, span in zip(steps, spans, strict=True)]
        per_cpu = [round(count / span.cpu_s) for count, span in zip(steps, spans, strict=True)]
        said = {**json.loads(output), "who": who, "rates": [round(rate) for rate in rates], "per_cpu_s": per_cpu}
        print(json.dumps(said), flush=True)
        return _Rates(*rates)

    def _let_pass(self) -> _Span:
        begin, cpu_s = time.time(), self._cpu_s()
        time.sleep(WINDOW_S)
        return _Span(begin, time.time(), self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        """Of the learner and its worker, which nothing ends here."""
        learner = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (learner, *learner.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@contextlib.contextmanager
def _run(*options: str) -> Iterator[_Run]:
    pair = free_pair()
    port = int(pair[0].getsockname()[1])
    for each in pair:
        each.close()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "learner.txt").open("wb") as log:
        run_dir = Path(folder, "run")
        words = [*_OPTIONS, *options, f"--bind=tcp://127.0.0.1:{port}", f"--run-dir={run_dir}", "--seed=1"]
        words += ["--min-iter-time-s=0.5"]
        process = subprocess.Popen([sys.executable, "-m", "aiorl.learner", *words], stdout=log, stderr=log)
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
            run = _Run(process, port, run_dir)
            run.wait(Path(log.name))
            yield run
        finally:
            process.terminate()
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
