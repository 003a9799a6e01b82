"""`make chaos` can fail: it notices lost fragments, incomplete resumes, standstills and every
target that is missed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from in_process import LENGTH, NUM_ENVS, FakeAlgorithm, InProcess, with_settings

from aiorl.acting.checkpoint import save_checkpoint
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.core import LearnerCore
from aiorl.run.counters import Counters
from aiorl.run.ingest import BatchAssembler
from aiorl.run.report import results as reports
from aiorl.run.restoring import checkpoint_to_resume
from aiorl.run.training import progress_of
from benchmarks.chaos import progress
from benchmarks.chaos.link import Link, Slow, free_pair
from benchmarks.chaos.progress import Span, standstill
from benchmarks.chaos.report import Bars, Report, Struck
from benchmarks.chaos.resumes import Resumes
from benchmarks.ledger import ledger_gap

BATCH = 64


class Learner:
    """Counters of a learner, saved and resumed by aiorl itself; an update takes 64 env steps."""

    def __init__(self, run_dir: Path, *, forgets: bool = False) -> None:
        directory: Any = SimpleNamespace(checkpoints=run_dir / "checkpoints", is_new=forgets)
        restored = checkpoint_to_resume(directory, lambda text, level: None)
        self.directory = run_dir / "checkpoints"
        self.counters, self.ledger, self.results = Counters(), Ledger(), reports.Results(100, 0.0)
        self.weights = np.random.default_rng().normal(size=1000).astype(np.float32)
        if restored is not None:
            self.counters, self.ledger = (
                restored.run.counters,
                Ledger.from_dict(restored.run.ledger),
            )
            self.results.from_state(restored.run.results, 0.0, self._progress())
            self.weights = restored.checkpoint.tensors["algorithm/default_policy/weights/w"]
        self.ledger.open("a worker")

    def _progress(self) -> reports.Progress:
        return reports.Progress(**dataclasses.asdict(self.counters), ledger=self.ledger.as_dict())

    def train(self) -> dict[str, Any]:
        """Train for one iteration, after which a fragment of 16 steps stays queued."""
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


def resumed(
    run_dir: Path, *, forgets: bool = False, other_weights: bool = False, damage: bool = False
) -> Resumes:
    """Train, save twice, end, and resume."""
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
    if not forgets:  # otherwise it writes a checkpoint with a lower number
        second.save()
    seen.look({1: result})
    return seen


def test_a_resume_from_the_newest_intact_checkpoint_loses_nothing(tmp_path: Path) -> None:
    for damage in (False, True):
        seen = resumed(tmp_path / str(damage), damage=damage)
        assert (seen.missing, seen.compared, seen.weights_compared) == ([], 1, 1)


def test_a_resume_without_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    said = "; ".join(resumed(tmp_path, forgets=True).missing)
    for fact in (
        ("iteration", 0, 2),
        ("updates", 0, 2),
        ("sampled", 0, 160),
        ("trained", 64, 128),
        ("", 0, 32),
    ):
        assert re.search(r"{}: {}\D+{}\b".format(*fact), said)


def test_weights_that_were_not_restored_are_noticed(tmp_path: Path) -> None:
    (said,) = resumed(tmp_path, other_weights=True).missing
    assert "weights" in said


# Fragments


def gaps_of(algorithm: type[FakeAlgorithm]) -> list[str]:
    """Return the gaps found in the results of a run in one process."""

    async def main() -> list[str]:
        both, results = InProcess(algorithm), reports.Results(100, time.monotonic())
        seen = progress.Progress(
            Path("nowhere"), fragment_steps=LENGTH * NUM_ENVS, batch_steps=BATCH
        )
        both.start()
        both.go_on()
        for count in range(2, 60, 2):
            await both.updates_done(count)
            seen.add(
                results.finish_iteration(
                    time.monotonic(), progress_of(both.source), timestamp=time.time()
                )
            )
        await both.close()
        return seen.gaps

    return asyncio.run(main())


@pytest.mark.rest_slow
@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
def test_counters_that_contain_every_fragment_have_no_gap(mode: str) -> None:
    assert gaps_of(with_settings(mode=mode)) == []


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("kind", "method", "every"), [(LearnerCore, "_take_in", 9), (BatchAssembler, "add", 8)]
)
def test_lost_fragments_are_noticed(
    kind: type, method: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, count = getattr(kind, method), iter(range(1, 10**6))
    monkeypatch.setattr(
        kind, method, lambda self, *given: do(self, *given) if next(count) % every else None
    )
    assert gaps_of(with_settings(mode="streaming"))


# Results


def test_a_result_whose_ledger_does_not_balance_is_a_gap() -> None:
    ledger = {"trained": 10, "queued": 10, "in_flight": 20, "discarded": {}, "lost": {}}
    assert ledger_gap({**ledger, "sampled": 40}) == ""
    assert ledger_gap({**ledger, "sampled": 39}).startswith("-1 ")
    assert ledger_gap({**ledger, "sampled": 25, "queued": -5}).startswith("queued")


@pytest.mark.parametrize(
    ("rises", "fault", "seconds"),
    [
        # the standstill begins soon after the fault
        (
            [9.5, 10.2, 10.4, 12.0],
            Span(10.0, 10.0),
            1.6,
        ),
        # this one begins later, so the fault did not cause it
        (
            [9.5, 10.2, 11.1, 17.0],
            Span(10.0, 10.0),
            0.9,
        ),
        ([9.5, 18.0], Span(10.0, 12.0), 8.0),  # no counter rises during it
        ([10.5, 11.0, 11.5, 14.0, 14.5, 15.5], Span(10.0, 14.0), 2.5),  # during the standstill
        ([9.5, 10.5, 11.0], Span(10.0, 10.0), None),  # the last standstill has not ended yet
        ([], Span(10.0, 10.0), None),
    ],
)
def test_the_recovery_time_is_the_longest_standstill_that_begins_with_a_fault(
    rises: list[float], fault: Span, seconds: float | None
) -> None:
    assert standstill(rises, fault) == (None if seconds is None else pytest.approx(seconds))


# The report


def struck(number: int, kind: str, seconds: float | None, **others: Any) -> Struck:
    facts = {
        "algo": "ppo",
        "target": "pid 7",
        "at_s": 3.0,
        "held_s": 1.0,
        "ends_learner": False,
        "beside_death": False,
    }
    return Struck(number=number, kind=kind, recovery_s=seconds, **{**facts, **others})


def failing(report: Report) -> set[str]:
    return {line.name for line in report.lines() if line.ok is False}


def test_each_missed_target_is_named() -> None:
    report = Report(
        seed=1,
        bars=Bars(),
        struck=[struck(1, "a", 6.0), struck(2, "b", 16.0), struck(3, "c", None)],
    )
    report.struck.append(struck(4, "learner-killed", 9.0, ends_learner=True))
    report.deaths_s += [9.0]
    report.standstills_s["impala"] = 15.5
    report.gaps.append("result 5: +1 env steps are nowhere")
    report.forgotten.append("resume 1 of checkpoint 7: iteration: 0 where 9 were saved")
    report.left["lost"] = 0
    report.aborted.append("outside-single.txt: Assertion failed")
    report.orphans.append("pid 9")
    report.complaints.append("of 6 workers not all were back")
    report.memory["ppo, learner"] = (600.0, 620.0)
    report.memory["ppo, other workers"] = (50.0, 60.0)  # reported only: these are other processes
    assert failing(report) == {
        "faults survived",
        "recovery, learner alive, median",
        "recovery, learner alive, worst",
        "recovery, learner dead, median",
        "longest standstill, impala",
        "ledger gaps",
        "resumes compared",
        "forgotten in a resume",
        "env steps lost",
        "aborted processes",
        "orphans",
        "complaints",
        "memory, ppo, learner",
    }
    assert not report.ok
    assert failing(Report(seed=1, bars=Bars())) == {"faults survived"}, (
        "a run without a fault shows no failures"
    )
    report = Report(
        seed=1, bars=Bars(), struck=[struck(1, "garbage", 0.3), struck(2, "blackholed", 9.0)]
    )
    report.deaths_s += [6.0, 9.0, 7.5]
    report.memory["ppo, learner"] = (600.0, 612.0)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True, "every target is met"
    missed = struck(1, "key-withdrawn", 0.1, misses=("it was not cut",))
    assert failing(Report(seed=1, bars=Bars(), struck=[missed])) == {"faults survived"}


# The network


def test_a_link_carries_holds_corrupts_slows_and_resets() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except ConnectionResetError:
            reset.set()
        finally:
            writer.close()

    async def main() -> None:
        sockets = free_pair()
        servers = [await asyncio.start_server(echo, sock=each) for each in sockets]
        link = Link(sockets[0].getsockname()[1])
        link.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)

        async def returned(data: bytes) -> bytes:
            writer.write(data)
            return await reader.readexactly(len(data))

        assert await returned(b"x" * 200_000) == b"x" * 200_000
        link.corrupt_share = 1.0
        # there and back
        assert sum(byte.bit_count() for byte in await returned(bytes(100))) in (
            0,
            2,
        )
        link.corrupt_share, link.slow = 0.0, Slow(delay_s=0.1, bytes_per_s=1e6)
        began = time.monotonic()
        assert await returned(b"x") == b"x"
        assert time.monotonic() - began >= 0.2
        link.slow = None
        link.hold()
        writer.write(b"y")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        assert link.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        await reset.wait()
        writer.close()
        await link.close()
        for server in servers:
            server.close()

    reset = asyncio.Event()
    asyncio.run(asyncio.wait_for(main(), 10))
