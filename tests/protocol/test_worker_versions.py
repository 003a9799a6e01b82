from __future__ import annotations

from aiorl.protocol.worker_versions import VersionWatch


def test_a_snapshot_is_asked_for_when_it_stays_away() -> None:
    watch = VersionWatch(1.0)
    watch.reset(1.0, version=3)
    assert not watch.is_overdue(3, 100.0)
    watch.heard(4)
    asked = []
    for half in range(60):
        now = 100.0 + half / 2
        if watch.is_overdue(-1, now):
            watch.asked(now)
            asked.append(now)
    assert asked == [101.0, 103.0, 107.0, 115.0, 123.0], "ever more rarely, at least every 8 s"
    assert watch.take(4, 1.0)
    assert not watch.is_overdue(4, 200.0)
    assert not watch.is_overdue(5, 200.0), "a lease needs it: it may be on its way"
    assert not watch.is_overdue(5, 200.5)
    assert watch.is_overdue(5, 201.0)


def test_only_newer_snapshots_are_taken() -> None:
    watch = VersionWatch(1.0)
    assert watch.version == -1
    assert watch.take(0, 1.0)
    assert not watch.take(0, 1.0)
    assert watch.take(7, 1.0)
    assert not watch.take(6, 1.0)
    assert watch.version == 7
    watch.reset(1.0)
    assert watch.version == -1
    assert not watch.is_overdue(-1, 0.0)


def test_version_0_is_a_version() -> None:
    watch = VersionWatch(1.0)
    assert not watch.is_overdue(0, 0.0)
    assert watch.is_overdue(0, 1.0)
