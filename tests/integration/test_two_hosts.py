"""A learner on one host and workers on another: keys, strangers, a cut link, and a slow and lossy
link.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from netns import LEARNER_HOST, NEEDS_NAMESPACES, PORT, Network, Process, network
from processes import CARTPOLE, SMALL, check_ledger

from aiorl.keys import make_keys

__all__ = ["network"]

pytestmark = NEEDS_NAMESPACES


class Training:
    """Learner and worker with keys, each in its own network namespace."""

    def __init__(self, net: Network, folder: Path, *options: str) -> None:
        self.net, self.run_dir, self.keys = net, folder / "run", folder / "keys"
        make_keys(self.keys)
        self.learner = net.start_learner(
            CARTPOLE,
            f"--bind=tcp://0.0.0.0:{PORT}",
            f"--keys={self.keys}",
            f"--run-dir={self.run_dir}",
            "--num-workers=0",
            "--min-iter-time-s=0.2",
            "--seed=1",
            *SMALL,
            *options,
        )
        self.worker = self.start_worker(f"--keys={self.keys}")

    def start_worker(self, *options: str) -> Process:
        address = f"tcp://{LEARNER_HOST}:{PORT}"
        return self.net.start(
            self.net.worker, sys.executable, "-m", "aiorl.worker", f"--connect={address}", *options
        )

    def results(self) -> list[dict[str, Any]]:
        path = self.run_dir / "result.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def updates(self) -> int:
        results = self.results()
        return int(results[-1]["updates_total"]) if results else 0

    def wait_for_updates(self, more: int, timeout_s: float = 60.0) -> None:
        wanted = self.updates() + more
        deadline = time.monotonic() + timeout_s
        while self.updates() < wanted:
            assert time.monotonic() < deadline, f"{self.learner.text}\n{self.worker.text}"
            time.sleep(0.1)

    def check_ledgers(self) -> None:
        for result in self.results():
            check_ledger(result)


@pytest.fixture
def train(network: Callable[..., Network], tmp_path: Path) -> Callable[..., Training]:
    def start(*options: str, **link: float) -> Training:
        return Training(network(**link), tmp_path, *options)

    return start


@pytest.mark.slow
def test_workers_with_keys_train_from_another_host_and_strangers_cost_nothing(
    train, tmp_path: Path
) -> None:
    training = train()
    junk = (
        f"import socket; s = socket.create_connection(('{LEARNER_HOST}', {PORT}), 5);"
        " s.sendall(b'x' * 5000);s.settimeout(15)\ntry:\n while s.recv(100): pass\nexcept OSError:"
        " pass\nprint('closed')"
    )
    training.wait_for_updates(3)
    # a handshake can take 10 s
    babbler = training.net.start(training.net.worker, sys.executable, "-c", junk)
    make_keys(tmp_path / "stranger")
    (tmp_path / "stranger" / "learner.key").write_bytes(
        (training.keys / "learner.key").read_bytes()
    )
    make_keys(tmp_path / "lost")  # a key pair of another learner
    stranger, lost = (
        training.start_worker(f"--keys={tmp_path / name}") for name in ("stranger", "lost")
    )
    bare = training.start_worker()
    stranger.wait_for_text(str(tmp_path / "stranger" / "worker.key"))
    lost.wait_for_text(r"learner\.key")
    bare.wait_for_text("--keys", 30.0)
    babbler.wait_for_text("closed", 30.0)
    training.wait_for_updates(5)
    assert training.results()[-1]["num_healthy_workers"] == 1
    assert not training.results()[-1]["ledger"]["lost"]
    training.check_ledgers()


@pytest.mark.parametrize("cut_s", [1.0, pytest.param(20.0, marks=pytest.mark.nightly)])
def test_training_continues_after_the_link_was_cut(train, cut_s: float) -> None:
    training = train()
    training.wait_for_updates(3)
    training.net.cut()
    time.sleep(cut_s)
    before = training.updates()
    training.net.mend()
    training.wait_for_updates(3, 45.0)
    assert training.updates() >= before + 3
    training.check_ledgers()
    if cut_s > 10:
        assert len(re.findall(r" \(\S+, \D+\d+\)$", training.learner.text, re.MULTILINE)) == 2, (
            "it joined twice"
        )


@pytest.mark.slow
def test_training_continues_over_a_slow_and_lossy_link(train) -> None:
    training = train(delay_s=0.05, loss=0.01)
    training.wait_for_updates(4, 90.0)
    training.check_ledgers()
