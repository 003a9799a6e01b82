"""Cost of a page that is looked at: the rate of one learner while its page is open, in turn with
that while it is not.

Learner, worker and the page's server share the cores; the browser would be on another host, so a
client that only reads stands for it.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from benchmarks.result import Figure

__all__ = ["watch_learner"]

ROUNDS = 12
SECONDS = 5.0
TARGET_RATIO = 0.99


def watch_learner() -> list[Figure]:
    """Measure env steps trained per second of IMPALA on vectorised CartPole, with the page of the
    run open.
    """
    options = {
        "env": "CartPole-v1",
        "algo": "impala",
        "num-workers": 1,
        "num-envs-per-worker": 1024,
        "vectorize": "native",
        "rollout-fragment-length": 32,
        "train-batch-size": 32768,
        "threads": 1,
        "min-iter-time-s": 0.5,
        "web": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [f"--{name}={value}" for name, value in {**options, "run-dir": run_dir}.items()]
        command = [sys.executable, "-m", "aiorl.learner", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
            try:
                assert learner.stdout is not None
                home = next(
                    found[1]
                    for line in learner.stdout
                    if (found := re.search(r"page .*(http:\S+)", line))
                )
                threading.Thread(target=learner.stdout.read, daemon=True).start()
                while not _progress(run_dir)[1]:
                    time.sleep(0.5)
                time.sleep(2 * SECONDS)
                rates = [(_rate(run_dir, home), _rate(run_dir, "")) for _ in range(ROUNDS)]
            finally:
                learner.terminate()
    alone = statistics.median(each for _, each in rates)
    ratio = statistics.median(watched / each for watched, each in rates)
    return [
        Figure(
            "watch/impala with an open page",
            alone * ratio,
            "env steps/s",
            alone,
            target_ratio=TARGET_RATIO,
        )
    ]


def _rate(run_dir: Path, home: str) -> float:
    """Return env steps trained per second in a while, in which a page is open unless its address is
    empty.
    """
    stream = _opened(home) if home else None
    began, steps = _progress(run_dir)
    time.sleep(SECONDS)
    now, more_steps = _progress(run_dir)
    if stream is not None:
        stream.shutdown(socket.SHUT_RDWR)
    return (more_steps - steps) / (now - began)


def _opened(home: str) -> socket.socket:
    """Load what a browser loads, and return the connection by which the page follows the run, which
    a thread reads.
    """
    for name in ("", "page.js", "parts.js", "page.css", "api/runs", "api/run?run=run"):
        urllib.request.urlopen(f"{home}/{name}").read()
    end = json.load(urllib.request.urlopen(f"{home}/api/curves?run=run"))["end"]
    stream = socket.create_connection(("127.0.0.1", int(home.rpartition(":")[2])))
    stream.sendall(
        f"GET /api/events?run=run&from={end} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    )

    def read() -> None:
        while stream.recv(1 << 16):
            pass
        stream.close()

    threading.Thread(target=read, daemon=True).start()
    return stream


def _progress(run_dir: Path) -> tuple[float, int]:
    """Return the training time and the env steps trained of the newest result, zeros if there is
    none.
    """
    try:
        lines = (run_dir / "result.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    last = json.loads(next((line for line in reversed(lines) if line.endswith(b"\n")), b"{}"))
    return float(last.get("time_total_s", 0.0)), int(last.get("env_steps_trained_total", 0))
