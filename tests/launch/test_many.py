"""Many workers on one learner: what one of them does costs the same however many there are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiorl.keys import make_keys
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.protocol.leases import LeaseBook
from aiorl.net.wire import messages as m
from benchmarks import scale, scale_processes, scale_simulation
from benchmarks.scale_simulation import Crowd

FEW, MANY = 40, 320
PROTOCOL = LearnerSession.__module__.rpartition(".")[0]


class Counted(dict[Any, Any]):
    """Dict that counts the entries that are visited by iteration."""

    visited = 0

    def __iter__(self) -> Any:
        Counted.visited += len(self)
        return super().__iter__()

    def values(self) -> Any:
        Counted.visited += len(self)
        return super().values()

    def items(self) -> Any:
        Counted.visited += len(self)
        return super().items()


def count_visits(*parts: object) -> None:
    """Count the visits of all dicts of the objects, and of the objects of the protocol in them."""
    for part in parts:
        for name, value in vars(part).items():
            if type(value) is dict:
                setattr(part, name, Counted(value))
            elif type(value).__module__.startswith(PROTOCOL) and hasattr(value, "__dict__"):
                count_visits(value)


def operations(act: Callable[[], object]) -> int:
    """Return the number of bytecode instructions and visited entries."""
    count, Counted.visited = 0, 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(former)
    return count + Counted.visited


def of_one_worker(peers: int) -> dict[str, int]:
    crowd = Crowd(peers)
    for number in range(peers - 1):
        crowd.join(number)
    for _ in range(3):
        assert all(crowd.bring(number) for number in range(peers - 1))
    session = crowd.session
    count_visits(session, crowd.core.publisher)
    found = {
        "a worker joins": operations(lambda: crowd.join(peers - 1)),
        "its heartbeat": operations(lambda: crowd.beat(5)),
        "its fragment": operations(lambda: crowd.bring(5)),
        "its connection breaks, and it comes back": operations(lambda: crowd.reconnect(5)),
        "its process ends": operations(lambda: crowd.lose(5)),
        "its successor joins": operations(lambda: crowd.join(5)),
    }
    session.ledger.check()
    return found


def test_what_one_worker_does_costs_the_same_however_many_there_are() -> None:
    of_one_worker(FEW)  # fills caches
    few, many = of_one_worker(FEW), of_one_worker(MANY)
    assert {what: many[what] / few[what] for what in few if many[what] > 1.1 * few[what]} == {}


def test_each_of_many_waiting_workers_is_admitted_at_the_same_cost() -> None:
    def admit(peers: int) -> float:
        session = LearnerSession("run", "life", LearnerSettings(max_workers=peers))
        for number in range(peers):
            session.receive(
                b"%d" % number,
                m.Hello(m.PROTOCOL_VERSION, "", f"w{number}", f"i{number}"),
                0.0,
                None,
                "host",
            )
        assert session.num_waiting == peers
        session.begin({}, {}, 0.0)
        count_visits(session)
        spent = operations(lambda: session.publish(m.Snapshot(0, {}, {}, {}, {}), 0.0))
        assert session.slots == list(range(1, peers + 1))
        return spent / peers

    admit(FEW)
    assert admit(MANY) < 1.1 * admit(FEW)


def test_workers_that_are_late_together_cost_the_same_each() -> None:
    def take(peers: int) -> float:
        book = LeaseBook()
        for slot in range(1, peers + 1):
            book.join(slot)
            lease = book.grant(slot, 2, 0, 0.0).lease
            assert book.use(slot, lease.lease_id, 0, 0.01) == ""
        count_visits(book)
        taken: list[Any] = []
        spent = operations(lambda: taken.extend(book.take_overdue(5.0, 100.0)))
        assert len(taken) == peers - 1, "the last one has no one to be compared with"
        return spent / peers

    take(FEW)
    assert take(MANY) < 1.1 * take(FEW)


def test_the_costs_of_simulated_workers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_simulation, "ROUNDS_OF", 20)
    costs = scale_simulation.costs_of(5)
    assert all(getattr(costs, name) > 0 for name in costs.__slots__)


@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [pytest.param(False, marks=pytest.mark.nightly), True])
async def test_real_workers_are_measured(
    has_keys: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"_MEASURE_S": 0.5, "_SETTLE_S": 0.2, "_TIMES": 1}.items():
        monkeypatch.setattr(scale_processes, name, value)
    # so that this process keeps its cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    if has_keys:
        make_keys(tmp_path)
    found, problem = await scale_processes.MeasuredLearner(
        3, str(tmp_path) if has_keys else None
    ).measure()
    assert not problem
    assert found.keys() >= scale.ROWS.keys()
    assert found["paced_per_s"] == pytest.approx(30, rel=0.5)
    assert found["ended"] == 0


def test_the_page_has_the_measured_figures_and_says_which_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, file = tmp_path / "scale.md", tmp_path / "scale.json"
    page.write_text(scale.PAGE.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(scale, "PAGE", page)
    some = {16: (dict.fromkeys(scale.ROWS, 17.0), ""), 64: ({"join_s": 2.0}, "only 63 are heard")}
    monkeypatch.setattr(scale, "measured", lambda workers, keys: some[workers])
    figures = [*scale.scale_real_016(), *scale.scale_real_064()]
    file.write_text(json.dumps([figure.to_dict() for figure in figures]))
    assert scale.main([str(file)]) == 0
    written = page.read_text("utf-8")
    assert "| Workers | 1 | 16 | 64 | 256 |" in written
    assert "| all join at once (s) | not measured | 17 | 2 | not measured |" in written
    assert (
        "| fragments/s, 10 from each | not measured | 17 | not measured | not measured |" in written
    )
    assert "64 workers, keys: not measured: only 63 are heard" in written
    assert scale.main([str(file)]) == 0
    assert page.read_text("utf-8") == written
