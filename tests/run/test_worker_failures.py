"""What it means for a run that a worker fails."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.errors import WorkerError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.process.children import ChildGaveUp, ChildRestarting
from aiorl.run.local_workers import WorkerFailures

HINT = "--ignore-worker-failures"


class Judged(WorkerFailures):
    """Failures of the workers of a run that is none."""

    def __init__(self, num_workers: int, **options: Any) -> None:
        self.told: list[str] = []
        self.errors: list[BaseException] = []
        self.others: set[int] = set()
        self.sampled = False
        super().__init__(
            CommonConfig.from_mapping({"env": "CartPole-v1", "num_workers": num_workers, **options}),
            lambda slot: Path(f"worker-{slot}.txt"),
            tell=lambda text, level: self.told.append(text),
            source=self,
        )

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def has_others(self, slots: Container[int]) -> bool:
        return any(slot not in slots for slot in self.others)

    def has_sampled(self) -> bool:
        return self.sampled

    def fails(self, slot: int, message: str, kind: str = "env") -> None:
        self.on_failed(WorkerFailed(slot, kind, message, "Traceback"))

    @property
    def error(self) -> str:
        (error,) = self.errors
        assert isinstance(error, WorkerError)
        return str(error)


def test_a_worker_that_is_given_up_is_told_with_what_it_said_itself() -> None:
    judged = Judged(2)
    judged.sampled = True
    judged.fails(1, "the licence is gone")
    judged.fails(2, "out of memory")
    judged.on_child(ChildGaveUp(1, 1, 3))
    assert judged.error == (
        "worker 1: local worker 1 ended with status 1 after 3 restarts and stays down; it last reported: "
        "the licence is gone (log: worker-1.txt); with ignore_worker_failures (--ignore-worker-failures) a run goes on "
        "with its other workers"
    )


def test_failures_that_are_ignored_are_told_and_end_the_run_only_where_no_worker_is_left() -> None:
    judged = Judged(2, ignore_worker_failures=True)
    judged.sampled, judged.others = True, {2}
    judged.fails(1, "boom", "setup")
    judged.on_child(ChildGaveUp(1, 1, 3))
    assert not judged.errors
    assert "boom; training goes on with the others" in judged.told[0]
    judged.others = set()
    judged.on_child(ChildGaveUp(2, -9, 3))
    assert HINT not in judged.error


def test_a_worker_that_cannot_be_set_up_ends_the_run_at_once_with_the_hint() -> None:
    judged = Judged(3)
    judged.fails(7, "a mistake of somebody else's", "setup")
    assert not judged.errors
    judged.fails(1, "no such package", "setup")
    assert judged.error.startswith("worker 1: no such package (log: worker-1.txt)")
    assert HINT in judged.error


def test_an_environment_that_fails_alike_in_every_worker_before_anything_is_sampled_ends_the_run() -> None:
    judged = Judged(3)
    judged.fails(1, "environment 1 of pid 17: boom")
    judged.fails(1, "environment 1 of pid 19: boom")
    judged.fails(2, "environment 1 of pid 23: boom")
    assert not judged.errors
    judged.fails(3, "environment 4 of pid 42: boom")
    assert judged.error == (
        "worker 3: environment 4 of pid 42: boom (each of the 3 workers failed so before anything was sampled; "
        "log: worker-3.txt)"
    )


@pytest.mark.parametrize("change", [{"sampled": True}, {"others": {4}}, {}])
def test_it_does_not_where_one_worker_fails_otherwise_or_anything_was_sampled_or_others_are_there(change: Any) -> None:
    judged = Judged(2)
    vars(judged).update(change)
    judged.fails(1, "boom")
    judged.fails(2, "boom" if change else "bang")
    assert not judged.errors


def test_restarts_of_workers_that_fail_alike_are_told_once_and_all_of_them_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judged = Judged(8)
    with caplog.at_level(logging.INFO):
        for slot in range(1, 9):
            judged.fails(slot, f"boom {slot}" if slot > 1 else "bang")
            judged.on_child(ChildRestarting(slot, 1, 1, 0.2))
        judged.on_child(ChildRestarting(5, -9, 2, 0.5))
    assert [text.partition(";")[0] for text in judged.told] == [
        "local worker 1 ended with status 1",
        "local worker 2 ended with status 1",
        "local worker 5 ended with status -9 (SIGKILL)",
    ]
    assert len(caplog.records) == 6
