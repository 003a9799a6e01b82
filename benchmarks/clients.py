"""Actions for clients: what `act` of a session takes at a run that learns from it, and at
`aiorl serve` with the same kind of policy.

Threads of this process play CartPole in Gymnasium by one `aiorl.PolicyClient`, in turn at the run
and at the server. All processes share the cores, as on a developer's machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsFloat

import gymnasium

import aiorl
from benchmarks.measure import middle_of, run_command
from benchmarks.result import Figure

__all__ = ["clients_act"]

PLAYERS = 32
ROUNDS = 5
SECONDS = 4.0
TARGET_RATIO = 3.0
_START_S = 180.0
_RUN = """
env: external
algo: impala
client_port: 0
num_workers: 1
env_config:
  observation_space: {kind: Box, shape: [4], low: -inf, high: inf, dtype: float32}
  action_space: {kind: Discrete, n: 2}
"""


def clients_act() -> list[Figure]:
    """Measure the median and the 99th percentile of `act` of 32 players, at a run of IMPALA and at
    a server.
    """
    with tempfile.TemporaryDirectory() as folder, _training(Path(folder)) as training_url:
        run_dir = f"{folder}/served"
        options = ("--env=CartPole-v1", "--algo=impala", "--stop-timesteps=1")
        run_command([sys.executable, "-m", "aiorl.learner", *options, f"--run-dir={run_dir}"])
        serve = ["-m", "aiorl.serve", run_dir, "--port", "0"]
        with (
            _started(serve, r"at (http:\S+)") as serving_url,
            aiorl.PolicyClient(training_url) as training,
            aiorl.PolicyClient(serving_url) as serving,
        ):
            _play(training)  # until the learner has its pace
            rounds = [(_play(training), _play(serving)) for _ in range(ROUNDS)]
    figures = []
    for name, share, target_ratio in (("median", 0.5, TARGET_RATIO), ("p99", 0.99, None)):
        pairs = [(_quantile(at_run, share), _quantile(served, share)) for at_run, served in rounds]
        value, baseline = middle_of(pairs)
        figures.append(
            Figure(
                f"clients/act, {PLAYERS} players, {name}",
                value,
                "ms",
                baseline,
                target_ratio=target_ratio,
                smaller_is_better=True,
            )
        )
    return figures


@contextmanager
def _training(folder: Path) -> Iterator[str]:
    """Run a learner that waits for clients, and yield the address of their port."""
    config = folder / "config.yaml"
    config.write_text(_RUN)
    words = ["-m", "aiorl.learner", "--config", str(config), f"--run-dir={folder}/run"]
    with _started(words, r"play at: (\S+)") as url:
        yield url


@contextmanager
def _started(words: list[str], pattern: str) -> Iterator[str]:
    """Run a program of Python until the end, and yield what the pattern finds in its output."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            matches = (re.search(pattern, line) for line in process.stdout)
            match = next(match for match in matches if match is not None)
            reader = threading.Thread(target=process.stdout.read, daemon=True)
            reader.start()
            yield match[1]
        finally:
            process.terminate()
            process.wait(60)
            reader.join()


def _play(client: aiorl.PolicyClient) -> list[float]:
    """Play for a while; return the seconds that each `act` took."""
    latencies = list[float]()
    is_over = threading.Event()
    has_begun = threading.Barrier(PLAYERS + 1)

    def play() -> None:
        env = gymnasium.make("CartPole-v1")
        with client.session() as game:
            has_begun.wait(_START_S)
            while not is_over.is_set():
                observation, _ = env.reset()
                reward: SupportsFloat = 0.0
                is_episode_over = False
                while not is_episode_over:
                    began = time.perf_counter()
                    action = game.act(observation, reward=reward)
                    latencies.append(time.perf_counter() - began)
                    observation, reward, terminated, truncated, _ = env.step(action)
                    is_episode_over = terminated or truncated or is_over.is_set()
                game.end(observation, reward=reward, truncated=not terminated)

    players = [threading.Thread(target=play) for _ in range(PLAYERS)]
    for player in players:
        player.start()
    has_begun.wait(_START_S)
    time.sleep(SECONDS)
    is_over.set()
    for player in players:
        player.join()
    return latencies


def _quantile(seconds: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return sorted(seconds)[int(share * len(seconds))] * 1e3
