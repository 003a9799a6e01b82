"""What `make chaos` makes of a resume that forgets, a damaged checkpoint that is taken, and a lost fragment."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from in_process import LENGTH, NUM_ENVS, FakeAlgorithm, InProcess, with_settings

from aiorl.acting import checkpoint as checkpoints
from aiorl.acting.checkpoint import save_checkpoint
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.flow import Counters, Flow
from aiorl.run.ingest import BatchAssembler
from aiorl.run.report import results as reports
from aiorl.run.restoring import checkpoint_to_resume
from benchmarks.chaos import progress
from benchmarks.chaos.resumes import Resumes

BATCH = 64


class Learner:
    """The books of a learner, which saves and goes on by aiorl's own means; an update takes 64 env steps."""

    def __init__(self, run_dir: Path, *, forgets: bool = False) -> None:
        directory: Any = SimpleNamespace(checkpoints=run_dir / "checkpoints")
        config: Any = SimpleNamespace(resume=None if forgets else str(run_dir))
        restored = checkpoint_to_resume(config, directory, lambda text, level: None)
        self.directory = run_dir / "checkpoints"
        self.counters, self.ledger, self.results = Counters(), Ledger(), reports.Results(100, 0.0)
        self.weights = np.random.default_rng().normal(size=1000).astype(np.float32)
        if restored is not None:
            self.counters, self.ledger = restored.run.counters, Ledger.from_dict(restored.run.ledger)
            self.results.from_state(restored.run.results, 0.0, self._progress())
            self.weights = restored.checkpoint.tensors["algorithm/default_policy/weights/w"]
        self.ledger.open("a worker")

    def _progress(self) -> reports.Progress:
        return reports.Progress(**dataclasses.asdict(self.counters), ledger=self.ledger.as_dict())

    def train(self) -> dict[str, Any]:
        """Train for one iteration, of which a fragment of 16 steps stays queued."""
        self.counters.env_steps_sampled += BATCH + 16
        self.ledger.report("a worker", self.counters.env_steps_sampled)
        self.ledger.receive("a worker", BATCH + 16)
        self.ledger.train(BATCH)
        self.counters.env_steps_trained += BATCH
        self.counters.updates += 1
        self.weights = self.weights * np.float32(1.001)
        return self.results.finish_iteration(1.0, self._progress(), timestamp=time.time())

    def save(self) -> Path:
        """Write a checkpoint."""
        meta = {
            "counters": dataclasses.asdict(self.counters),
            "ledger": self.ledger.as_dict(),
            "results": self.results.to_state(),
            "algorithm": {},
        }
        tensors = {"algorithm/default_policy/weights/w": self.weights}
        return save_checkpoint(self.directory, self.counters.updates, tensors, meta)


def resumed(run_dir: Path, *, forgets: bool = False, other_weights: bool = False, damage: bool = False) -> Resumes:
    """Train, save twice, end, and go on."""
    first = Learner(run_dir, forgets=True)
    for _ in range(2):
        first.train()
        newest = first.save()
    if damage:
        file = newest / "tensors.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 0x10
        file.write_bytes(data)
    seen = Resumes(run_dir)
    seen.expect(1)
    second = Learner(run_dir, forgets=forgets)
    if other_weights:
        second.weights = second.weights[::-1].copy()
    result = second.train()
    seen.look({1: result})
    if not forgets:  # else it writes one of a lower number than was saved
        second.save()
    seen.look({1: result})
    return seen


def test_a_resume_from_the_newest_whole_checkpoint_lacks_nothing(tmp_path: Path) -> None:
    for damage in (False, True):
        seen = resumed(tmp_path / str(damage), damage=damage)
        assert (seen.missing, seen.compared, seen.weights_compared) == ([], 1, 1)


def test_a_resume_from_nothing_is_caught(tmp_path: Path) -> None:
    said = "; ".join(resumed(tmp_path, forgets=True).missing)
    for name in ("iteration: 0 where 2", "updates: 0 where 2", "sampled: 0 where 160", "trained: 64 where 128"):
        assert name in said
    assert "lost with the learner: 0 where 32" in said


def test_a_damaged_checkpoint_that_is_taken_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Skipped(str):
        """A digest that is as any other."""

        def __ne__(self, other: object) -> bool:
            return False

    load = checkpoints.load_checkpoint

    def load_unchecked(path: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            sha256 = SimpleNamespace(sha256=lambda data: SimpleNamespace(hexdigest=lambda: Skipped()))
            patch.setattr(checkpoints, "hashlib", sha256)
            return load(path)

    monkeypatch.setattr(checkpoints, "load_checkpoint", load_unchecked)
    assert any("iteration: 2 where 1 " in text for text in resumed(tmp_path, damage=True).missing)


def test_weights_that_were_not_taken_up_are_caught(tmp_path: Path) -> None:
    (said,) = resumed(tmp_path, other_weights=True).missing
    assert "weights changed by" in said


# Fragments


def gaps_of(algorithm: type[FakeAlgorithm]) -> list[str]:
    """What is found wrong with the results of a run in one process."""

    async def main() -> list[str]:
        both, results = InProcess(algorithm), reports.Results(100, time.monotonic())
        seen = progress.Progress(Path("nowhere"), fragment_steps=LENGTH * NUM_ENVS, batch_steps=BATCH)
        both.start()
        both.service.go_on()
        for count in range(2, 60, 2):
            await both.updates_done(count)
            seen.add(results.finish_iteration(time.monotonic(), both.service.progress(None), timestamp=time.time()))
        await both.close()
        return seen.gaps

    return asyncio.run(main())


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
def test_books_in_which_every_fragment_is_have_no_gap(mode: str) -> None:
    assert gaps_of(with_settings(mode=mode)) == []


def test_a_fragment_that_is_lost_on_its_way_into_the_queue_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take, count = Flow.take, iter(range(10**6))
    monkeypatch.setattr(Flow, "take", lambda self, event: None if next(count) == 9 else take(self, event))
    gaps = gaps_of(with_settings(mode="streaming"))
    assert "-16 env steps arrived" in gaps[0]


def test_fragments_that_are_lost_in_the_queue_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = BatchAssembler.add, iter(range(10**6))
    monkeypatch.setattr(
        BatchAssembler, "add", lambda self, fragment: None if next(count) % 8 == 0 else add(self, fragment)
    )
    assert any("env steps are queued, and at most" in gap for gap in gaps_of(with_settings(mode="streaming")))
