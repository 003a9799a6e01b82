from __future__ import annotations

from aiorl.net.protocol.roster import Roster
from aiorl.net.wire.messages import Hello


def hello(name: str) -> Hello:
    return Hello(1, "", f"w-{name}", f"i-{name}")


def test_slots_are_the_hint_the_reserved_or_the_lowest_free_one() -> None:
    roster = Roster(max_workers=4)
    roster.reserved[2] = "w-local"
    assert roster.free_slot(3, "w-a") == 3
    assert roster.free_slot(2, "w-a") == 1, "slot 2 is kept for another"
    assert roster.free_slot(0, "w-local") == 2
    roster.add(1, hello("a"), b"a", None, 0.0)
    assert roster.free_slot(1, "w-b") == 3
    assert roster.free_slot(99, "w-b") == 3
    roster.add(3, hello("b"), b"b", None, 0.0)
    roster.add(4, hello("c"), b"c", None, 0.0)
    assert roster.free_slot(0, "w-d") == 0


def test_a_worker_is_found_by_slot_peer_and_incarnation_until_it_is_buried() -> None:
    roster = Roster(4)
    worker = roster.add(1, hello("a"), b"a", "key", 0.0)
    roster.bind(worker, b"new")
    assert b"a" not in roster.by_peer
    assert roster.by_peer[b"new"] is worker
    roster.bury(worker)
    assert not roster.by_slot
    assert not roster.by_peer
    assert not roster.by_incarnation
    assert roster.is_buried("i-a")


def test_lives_of_a_slot_are_those_that_sampled_there_and_have_ended() -> None:
    roster = Roster(4)
    for number, sampled in enumerate([0, 3, 1]):
        worker = roster.add(2, hello(str(number)), b"p", None, 0.0)
        worker.last_seq = sampled
        roster.bury(worker)
    assert roster.lives == {2: 2}


def test_the_buried_are_remembered_within_bounds() -> None:
    roster = Roster(4)
    for number in range(5000):
        roster.bury(roster.add(1, hello(str(number)), b"p", None, 0.0))
    assert roster.is_buried("i-4999")
    assert not roster.is_buried("i-0")
